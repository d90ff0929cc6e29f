"""Weights of each format: what of a checkpoint's tensors a rank keeps, how plain numbers are
rounded, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format import WeightFormat
from dovetail.nn.format.awq import AwqInt4
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.gptq import GptqInt4, GptqInt8
from dovetail.nn.format.packing import unpacked
from dovetail.nn.format.stored import StoredFormat, StoredWeight
from dovetail.nn.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear
from dovetail.nn.parameter import Part
from tests.models.oracle import CPU, FakeGroup, context
from tests.nn.formats import HALF_ULP, SMALLEST_STEP, plain_weight, product
from tests.rounding import assert_rounded
from tests.support import examples

INT4: list[Any] = [
    PackedInt4(128, True),
    PackedInt4(32, False),
    GptqInt4(64, False),
    GptqInt4(128, True),
    AwqInt4(64, False),
]
FORMATS: list[Any] = [
    Float8("computed"),
    Float8("tensor", static=True),
    Float8("channel"),
    Float8("block", (64, 128), "weight_scale_inv"),
    *INT4,
]
seeds = st.integers(0, 2**31)


def checkpoint_of(
    form: StoredFormat, outputs: int, inputs: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tensors such as a checkpoint has for one linear module."""
    torch.manual_seed(seed)
    shapes = form.tensors(Part((outputs, inputs), 0, 0, outputs))
    tensors = {}
    for name, shape in shapes.items():
        size = shape.shapes[-1]
        if name == "g_idx":
            tensors[name] = torch.arange(inputs) // (getattr(form, "group", None) or inputs)
        elif "scale" in name:
            tensors[name] = torch.rand(size) * 0.01 + 0.001
        elif name == "qzeros" and getattr(form, "symmetric", False):
            # 7 in each four bits: 8, less 1
            tensors[name] = torch.full(size, 0x77777777, dtype=torch.int32)
        elif name == "weight" and isinstance(form, Float8):
            tensors[name] = (torch.randn(size) * 100).to(torch.float8_e4m3fn)
        elif name == "weight_shape":
            tensors[name] = torch.tensor([outputs, inputs])
        else:
            tensors[name] = torch.randint(-(2**31), 2**31, size).to(torch.int32)
    return tensors


def fill(weight: Any, shard_id: str | None, tensors: dict[str, torch.Tensor]) -> None:
    pieces = dict(weight.tensors(shard_id))
    assert set(pieces) == set(tensors)
    for piece in pieces.values():
        piece.expected.add(shard_id)
    for name, piece in pieces.items():
        piece.load(tensors[name], shard_id, None)


def with_format(
    layer: Any, form: WeightFormat, tensors: dict[str | None, dict[str, torch.Tensor]]
) -> Any:
    layer.take_format(form, CPU)
    for shard_id, own in tensors.items():
        fill(layer.weight, shard_id, own)
    return layer


def whole_of(
    form: StoredFormat, outputs: int, inputs: int, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    weight: Any = form.allocate(plain_weight((outputs,), inputs, torch.float32, CPU), CPU)
    fill(weight, "0", tensors)
    return form.dequantized(weight)


@pytest.mark.parametrize("form", FORMATS[1:], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_of_a_column_parallel_layer_have_the_outputs_of_the_whole(
    form: Any, size: int
) -> None:
    gate, up = (checkpoint_of(form, 256, 128, seed) for seed in (1, 2))
    # [2, 256, 128]
    whole = torch.stack([whole_of(form, 256, 128, tensors) for tensors in (gate, up)])
    for rank in range(size):
        own = context(FakeGroup(rank, size), weights_later=True)
        layer = with_format(
            GateUpParallelLinear(128, 256, own, bias=False), form, {"gate": gate, "up": up}
        )
        share = whole[:, rank * 256 // size : (rank + 1) * 256 // size].flatten(0, 1)
        assert torch.equal(form.dequantized(layer.weight), share)
        x = torch.randn(3, 128)
        assert_rounded(layer(x), product(x, share, gated=True), 128 + 4)


@pytest.mark.parametrize("form", FORMATS[1:], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_of_a_row_parallel_layer_have_the_inputs_of_the_whole(
    form: Any, size: int
) -> None:
    tensors = checkpoint_of(form, 64, 512)
    whole = whole_of(form, 64, 512, tensors)
    for rank in range(size):
        own = context(FakeGroup(rank, size), weights_later=True)
        layer = with_format(RowParallelLinear(512, 64, own, bias=False), form, {None: tensors})
        assert torch.equal(
            form.dequantized(layer.weight), whole[:, rank * 512 // size : (rank + 1) * 512 // size]
        )


@pytest.mark.parametrize("form", FORMATS[1:], ids=str)
def test_ranks_that_share_a_head_of_k_and_v_have_it_both(form: Any) -> None:
    q, k, v = (checkpoint_of(form, outputs, 128, outputs) for outputs in (256, 64, 64))
    k_and_v = torch.cat([whole_of(form, 64, 128, tensors) for tensors in (k, v)])
    for rank in range(2):
        own = context(FakeGroup(rank, 2), weights_later=True)
        layer = with_format(
            QKVParallelLinear(128, 4, 1, 64, own, bias=False), form, {"q": q, "k": k, "v": v}
        )
        assert torch.equal(form.dequantized(layer.weight)[128:], k_and_v)


def test_blocks_may_begin_and_end_within_a_part() -> None:
    """k and v of 96 outputs each, with a scale for 64: the second block of k has 32, and v begins
    amidst the second block of the layer."""
    form = Float8("block", (64, 128), "weight_scale_inv")
    parts = {
        name: checkpoint_of(form, outputs, 200, outputs)
        for name, outputs in (("q", 192), ("k", 96), ("v", 96))
    }
    layer = with_format(
        QKVParallelLinear(200, 2, 1, 96, context(weights_later=True), bias=False), form, parts
    )
    for name, at, size in (("q", 0, 192), ("k", 192, 96), ("v", 288, 96)):
        scales = (
            parts[name]["weight_scale_inv"]
            .repeat_interleave(64, 0)[:size]
            .repeat_interleave(128, 1)[:, :200]
        )
        assert torch.equal(
            form.dequantized(layer.weight)[at : at + size], parts[name]["weight"].float() * scales
        )


@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        (
            Float8("block", (128, 128), "weight_scale_inv"),
            r"256 inputs is 64, no multiple of the 128 inputs of a block",
        ),
        (PackedInt4(128, True), r"256 inputs is 64, no multiple of the 128 inputs of a group"),
        (AwqInt4(128, False), r"256 inputs is 64, no multiple of the 128 inputs of a group"),
    ],
    ids=str,
)
def test_what_a_rank_would_have_a_piece_of_is_refused_with_the_numbers(
    form: Any, numbers: str
) -> None:
    layer = RowParallelLinear(256, 64, context(FakeGroup(1, 4), weights_later=True), bias=False)
    with pytest.raises(UnsupportedError, match=f"a rank's share of {numbers}: use fewer ranks"):
        layer.take_format(form, CPU)


@given(outputs=st.integers(1, 40), inputs=st.sampled_from([128, 256, 300]), seed=seeds)
@examples(quick=30, full=500)
def test_numbers_are_rounded_to_the_nearest_of_float8(outputs: int, inputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    plain = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    plain[0] = 0.0
    form = Float8("computed")
    weight: Any = form.allocate(plain_weight((outputs,), inputs, torch.float32, CPU), CPU)
    weight.load(plain, "0")
    scales = plain.abs().amax(1, keepdim=True) / 448.0
    bound = torch.maximum(plain.abs() * HALF_ULP, scales * SMALLEST_STEP / 2) * (1 + 1e-5)
    assert ((form.dequantized(weight) - plain).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_a_plain_weight_becomes_the_same_over_however_many_ranks(form: Any, size: int) -> None:
    plain = torch.randn(64, 512)
    wholes = []
    for ranks in (1, size):
        shares = []
        for rank in range(ranks):
            layer = RowParallelLinear(
                512, 64, context(FakeGroup(rank, ranks), weights_later=True), bias=False
            )
            layer.take_format(form, CPU)
            layer.weight.load(plain)
            shares.append(form.dequantized(layer.weight))
        wholes.append(torch.cat(shares, dim=1))
    assert torch.equal(*wholes)


@pytest.mark.parametrize("form", INT4, ids=str)
def test_numbers_are_rounded_to_the_nearest_of_sixteen(form: Any) -> None:
    plain = torch.randn(24, 256)
    weight: Any = form.allocate(plain_weight((24,), 256, torch.float32, CPU), CPU)
    weight.load(plain, "0")
    half_a_step = weight.scales.float().t().repeat_interleave(form.group, 1) / 2
    outside = (
        plain.abs() > 7 * 2 * half_a_step
        if form.symmetric
        else torch.zeros_like(plain, dtype=torch.bool)
    )
    wrong = (form.dequantized(weight) - plain).abs()
    assert (wrong <= half_a_step * (2 if not form.symmetric else 1) + 1e-6)[~outside].all()
    assert (wrong[outside] <= half_a_step[outside] * 1.01).all()


class Counting:
    """A tensor of a checkpoint that notes how much of it is read at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.most = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.most = max(self.most, self.tensor[index].numel())
        return self.tensor[index]


@pytest.mark.parametrize("form", [Float8("computed"), PackedInt4(128, False)], ids=str)
def test_a_plain_weight_is_quantized_an_eighth_at_once(form: Any) -> None:
    """So that what this takes, some 15 bytes a number, is less than the 2 bytes of all numbers."""
    source = Counting(torch.randn(1, dtype=torch.bfloat16).expand(4096, 4096))
    weight: Any = form.allocate(plain_weight((4096,), 4096, torch.bfloat16, CPU), CPU)
    weight.load(source, "0")
    assert source.most <= math.prod(source.get_shape()) // 8


def test_four_bits_are_unpacked_in_order() -> None:
    # the second is 0xFEDCBA98
    packed = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)
    assert unpacked(packed, 1).tolist() == [list(range(16))]
    assert unpacked(packed, 0).tolist() == [[i, i + 8] for i in range(8)]
    assert unpacked(packed, 1, (0, 2, 4, 6, 1, 3, 5, 7))[0, :8].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_scale_of_any_float_is_kept_as_it_is() -> None:
    form = PackedInt4(128, True)
    for scale in (torch.tensor(1e-6).bfloat16(), torch.tensor(0.0123)):
        tensors = checkpoint_of(form, 8, 128)
        tensors["weight_scale"] = scale.expand(8, 1)
        numbers = whole_of(form, 8, 128, tensors)
        assert torch.equal(
            numbers, (unpacked(tensors["weight_packed"], 1).float() - 8) * scale.float()
        )


def test_a_stored_weight_counts_its_numbers() -> None:
    weight = PackedInt4(128, True).allocate(plain_weight((8,), 256, torch.float32, CPU), CPU)
    assert isinstance(weight, StoredWeight)
    assert weight.numbers == 8 * 256


@pytest.mark.parametrize("form", [GptqInt4(64, False), GptqInt8(64, False), GptqInt4(None, False)])
def test_groups_of_inputs_that_are_not_neighbours_are_refused(form: Any) -> None:
    tensors = checkpoint_of(form, 16, 128)
    form.unpack(tensors)
    form.unpack({name: tensor for name, tensor in tensors.items() if name != "g_idx"})
    other = tensors | {"g_idx": 1 - tensors["g_idx"]}
    with pytest.raises(ModelLoadError, match=r"g_idx: .*non-contiguous inputs \(desc_act\)"):
        form.unpack(other)
