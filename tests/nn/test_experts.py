"""Mixtures of experts: the plain twin computes what the definition says, and the kernels what the
twin does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dovetail.errors import UnsupportedError
from dovetail.nn import moe
from dovetail.nn.activation import ClampedSwiGLU, activate
from dovetail.nn.format import DENSE, base
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.mxfp4 import Mxfp4Format
from dovetail.nn.kernels import expert_sorting, float8_products, launch
from dovetail.nn.kernels import experts as kernels
from dovetail.nn.kernels.expert_sorting import sort
from dovetail.nn.kernels.experts import Few, Many, Tiling
from dovetail.nn.kernels.fp4_as_float8 import as_float8
from dovetail.nn.moe import Experts, Router, Stacked, choose
from dovetail.nn.residual import Residual
from tests.kernels import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ON_GPU,
    assert_close,
    runs_kernels,
    take_kernels,
)
from tests.models.oracle import context
from tests.nn.formats import plain_weight, stored
from tests.support import examples

some = examples(quick=16 if ON_GPU else 6, full=400 if ON_GPU else 100)
seeds = st.integers(0, 2**31)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, moe, base)
    # a kernel that fails does so here, and its twin doesn't stand in for it
    monkeypatch.setattr(launch, "_why_unavailable", lambda *asked: None)
    if INTERPRETED:  # which takes milliseconds for a program: let them have more outputs
        monkeypatch.setattr(
            kernels, "choice_for", lambda *asked: with_outputs(choice_for(*asked), 16)
        )


choice_for = kernels.choice_for


def with_outputs(choice: Few | Many, outputs: int) -> Few | Many:
    return (
        Few(*(replace(tiling, outputs=outputs) for tiling in choice))
        if isinstance(choice, Few)
        else choice
    )


def some_experts(
    hidden: int, inner: int, count: int, dtype: torch.dtype, seed: int, **fields: Any
) -> Experts:
    made = Experts(hidden, inner, count, replace(context(), dtype=dtype, device=DEVICE), **fields)
    torch.manual_seed(seed)
    for weight in (*made.gate_up, *made.down):
        weight.data.copy_(torch.randn(weight.shape) / weight.shape[1] ** 0.5)
    for bias in (made.gate_up_bias, made.down_bias):
        if bias is not None:
            bias.data.copy_(torch.randn(bias.shape))
    return made


def by_definition(
    layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute in float64, token by token, except for rounding between the two layers."""
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            both = layer.gate_up[expert].double() @ x[token].double()
            if layer.gate_up_bias is not None:
                both += layer.gate_up_bias[expert]
            y = (
                layer.down[expert].double()
                @ activate(both[None], layer.activation)[0].to(x.dtype).double()
            )
            if layer.down_bias is not None:
                y += layer.down_bias[expert]
            result[token] += weights[token, slot].double() * y
    return result


def routed(tokens: int, count: int, per_token: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return choose(torch.randn(tokens, count, device=DEVICE), per_token, normalize=True)


ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2", ClampedSwiGLU(1.702, 0.5)]


@pytest.mark.parametrize("tokens", [1, 5, 40])
@given(
    sizes=st.sampled_from([(16, 16), (72, 40), (128, 96)]),
    count=st.sampled_from([1, 3, 8, 32]),
    per_token=st.integers(1, 3),
    activation=st.sampled_from(ACTIVATIONS),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)
@examples(quick=6 if ON_GPU else 2, full=60)
@pytest.mark.usefixtures("with_kernels")
def test_the_stream_gets_what_the_chosen_experts_make_of_each_token(
    tokens: int,
    sizes: tuple[int, int],
    count: int,
    per_token: int,
    activation: Any,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    layer = some_experts(
        *sizes,
        count,
        dtype,
        seed,
        activation=activation,
        bias=biased,
        stacked=Stacked() if biased else None,
    )
    x, before = (
        torch.randn(tokens, sizes[0]).to(dtype).to(DEVICE),
        torch.randn(tokens, sizes[0]).to(dtype).to(DEVICE),
    )
    ids, weights = routed(tokens, count, min(per_token, count), seed)
    stream = Residual(before.clone())
    layer.add_to(stream, x, ids, weights)
    assert_close(stream.summed(), before.double() + by_definition(layer, x, ids, weights))


IN_BLOCKS = Float8("block", (128, 128))
FORMATS = [
    Float8("computed"),
    Float8("block", (32, 32)),
    IN_BLOCKS,
    PackedInt4(32, True),
    PackedInt4(64, False),
    PackedInt4(None, True),
    Mxfp4Format(),
]


@pytest.mark.parametrize("form", FORMATS, ids=repr)
@pytest.mark.parametrize("tokens", [1, 3, *([8, 40] if ON_GPU else [])])
@given(activation=st.sampled_from(["silu", "relu2", ClampedSwiGLU(1.702, 0.5)]), seed=seeds)
@examples(quick=4 if ON_GPU else 1, full=30)
@pytest.mark.usefixtures("with_kernels")
def test_experts_in_a_format_compute_what_their_dequantized_weights_do(
    tokens: int, form: Any, activation: Any, seed: int
) -> None:
    # of other sizes the twin computes
    whole_chunks = isinstance(form, PackedInt4) and form.group is not None
    sizes = (
        (128, 128)
        if whole_chunks
        else (256, 128)
        if form == IN_BLOCKS
        else [(160, 32), (128, 64)][seed % 2]
    )
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    count, biased = 10, isinstance(activation, ClampedSwiGLU)
    of_device = replace(context(), dtype=dtype, device=DEVICE, weights_later=True)
    layer = Experts(
        *sizes,
        count,
        of_device,
        activation=activation,
        bias=biased,
        stacked=Stacked() if biased else None,
    )
    layer.take_format(form, DEVICE)
    torch.manual_seed(seed)
    for weight in (*layer.gate_up, *layer.down):
        for shard_id, part in weight.parts.items():
            weight.load(
                part.whole(torch.randn(part.source_shape) / part.source_shape[1] ** 0.5), shard_id
            )
    for bias in (layer.gate_up_bias, layer.down_bias):
        if bias is not None:
            bias.data.copy_(torch.randn(bias.shape))
    x = torch.randn(tokens, sizes[0]).to(dtype).to(DEVICE)
    ids, weights = routed(tokens, count, 2, seed)
    stream = Residual(torch.zeros_like(x))
    layer.add_to(stream, x, ids, weights)
    gate_up, down = (
        [form.dequantized(weight) for weight in each] for each in (layer.gate_up, layer.down)
    )
    plain = SimpleNamespace(
        gate_up=gate_up,
        down=down,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        activation=layer.activation,
    )
    assert_close(stream.summed(), by_definition(plain, x, ids, weights))


@pytest.mark.parametrize(
    "form", [Float8("computed"), Float8("block", (32, 32)), Float8("block", (16, 64))], ids=repr
)
@given(
    gated=st.booleans(),
    biased=st.booleans(),
    activation=st.sampled_from(["silu", "relu2"]),
    rows=st.sampled_from([(16, 16), (128, 128), (128, 64)]),
    seed=seeds,
)
@examples(quick=4 if ON_GPU else 2, full=30)
@runs_kernels
def test_products_of_float8_inputs_are_those_of_inputs_rounded_before(
    form: Any, gated: bool, biased: bool, activation: Any, rows: tuple[int, int], seed: int
) -> None:
    """`rows`: of a block, and of a program."""
    inputs, outputs, count, tokens = 96, 32, 3, 21 if rows[0] == 16 else 100
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    stored_outputs = 2 * outputs if gated and activation == "silu" else outputs
    weights = [
        stored(form, (stored_outputs,), inputs, dtype, DEVICE, seed + index)
        for index in range(count)
    ]
    layer = form.for_kernels(
        form.allocate_experts(
            [plain_weight((stored_outputs,), inputs, dtype, DEVICE)] * count, DEVICE
        )
    )
    for index, weight in enumerate(weights):
        layer.values[index], layer.scales[index] = weight.data, weight.scales
    ids, shares = routed(tokens, count, 2, seed)
    x = torch.randn(tokens if gated else 2 * tokens, inputs).to(dtype).to(DEVICE)
    bias = torch.randn(count, stored_outputs).to(dtype).to(DEVICE) if biased else None
    out = torch.empty(
        *((2 * tokens,) if gated else (2, tokens)), outputs, dtype=dtype, device=DEVICE
    )
    tiling = Tiling(rows[1], 32, 128, 2, 4)
    around = kernels.gating(activation) if gated else {}
    kernels.float8_layer(x, layer, bias, shares, *sort(ids, count, rows[0]), out, tiling, around)
    narrow, scales = float8_products.twin_of_narrowed(x, layer.group)
    wide = (
        narrow.double()
        * (
            scales.repeat_interleave(layer.group, 1)[:, :inputs] if layer.group else scales[:, None]
        ).double()
    )
    for pair, expert in enumerate(ids.flatten().tolist()):
        exact = wide[pair // 2 if gated else pair] @ form.dequantized(weights[expert]).double().T
        exact += 0 if bias is None else bias[expert].double()
        exact = (
            activate(exact[None], activation)[0]
            if gated
            else exact * shares.flatten()[pair].double()
        )
        assert_close(out[pair] if gated else out[pair % 2, pair // 2], exact)


@pytest.mark.parametrize(
    "form",
    [Float8("computed"), Float8("block", (32, 32)), Float8("block", (16, 64)), IN_BLOCKS],
    ids=repr,
)
@given(
    gated=st.booleans(),
    biased=st.booleans(),
    activation=st.sampled_from(["silu", "relu2"]),
    seed=seeds,
)
@examples(quick=4 if ON_GPU else 1, full=30)
@runs_kernels
def test_products_of_inputs_split_in_two_round_no_input(
    form: Any, gated: bool, biased: bool, activation: Any, seed: int
) -> None:
    inputs, outputs, count, tokens = (128, 128, 2, 9) if form == IN_BLOCKS else (96, 32, 3, 21)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    stored_outputs = 2 * outputs if gated and activation == "silu" else outputs
    weights = [
        stored(form, (stored_outputs,), inputs, dtype, DEVICE, seed + index)
        for index in range(count)
    ]
    layer = form.for_kernels(
        form.allocate_experts(
            [plain_weight((stored_outputs,), inputs, dtype, DEVICE)] * count, DEVICE
        )
    )
    for index, weight in enumerate(weights):
        layer.values[index], layer.scales[index] = weight.data, weight.scales
    ids, shares = routed(tokens, count, 2, seed)
    x = torch.randn(tokens if gated else 2 * tokens, inputs).bfloat16().to(DEVICE)
    bias = torch.randn(count, stored_outputs).to(dtype).to(DEVICE) if biased else None
    out = torch.empty(
        *((2 * tokens,) if gated else (2, tokens)), outputs, dtype=dtype, device=DEVICE
    )
    tiling = Tiling(16, 32, 128, 2, 4)
    around = kernels.gating(activation) if gated else {}
    kernels.split_layer(x, layer, bias, shares, *sort(ids, count, tiling.rows), out, tiling, around)
    for pair, expert in enumerate(ids.flatten().tolist()):
        exact = x[pair // 2 if gated else pair].double() @ (
            form.dequantized(weights[expert]).double().T
        )
        exact += 0 if bias is None else bias[expert].double()
        exact = (
            activate(exact[None], activation)[0]
            if gated
            else exact * shares.flatten()[pair].double()
        )
        assert_close(out[pair] if gated else out[pair % 2, pair // 2], exact)


@given(inputs=st.sampled_from([32, 160, 224]), spread=st.sampled_from([1, 8]), seed=seeds)
@some
@runs_kernels
def test_fp4_is_float8_with_a_scale_for_each_output(inputs: int, spread: int, seed: int) -> None:
    form = Mxfp4Format()
    of_each = ((40,), inputs, torch.bfloat16, DEVICE)
    weights = [stored(form, *of_each, seed + index) for index in range(2)]
    for weight in weights:  # codes of scales that differ by less than 2 * spread
        more = torch.randint(0, spread, (*weight.scales.shape, 4), dtype=torch.uint8)
        weight.scales += more.to(DEVICE).view(torch.int32)[..., 0]
    layer = form.for_kernels(form.allocate_experts([plain_weight(*of_each)] * 2, DEVICE))
    for index, weight in enumerate(weights):
        layer.values[index], layer.scales[index] = weight.data, weight.scales
    converted = as_float8(layer)
    for index, weight in enumerate(weights):
        wide = converted.values[index].float() * converted.scales[index][:, None]
        exact = form.dequantized(weight)
        assert torch.equal(wide, exact)


@given(seed=seeds, exponents=st.sampled_from([1, 8, 30]))
@some
@runs_kernels
def test_two_float8_are_a_bfloat16(seed: int, exponents: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(5, 96) * torch.exp2(torch.randint(-exponents, exponents, (5, 96)))
    x = x.bfloat16().to(DEVICE)
    x[3] = 0
    (numbers, scales), twin = float8_products.split(x, 64), float8_products.twin_of_split(x, 64)
    assert torch.equal(numbers.float(), twin[0].float())
    assert torch.equal(scales, twin[1])
    spread = scales.repeat_interleave(64, 2)[:, :, :96].double()
    whole = (numbers.double() * spread).sum(0)
    largest = torch.stack([part.abs().amax(1) for part in x.double().split(64, 1)], 1)
    largest = largest.repeat_interleave(64, 1)[:, :96]
    assert ((whole - x.double()).abs() <= largest * 2.0**-22).all()
    exact = x.double().abs() >= largest * 2.0**-13
    assert torch.equal(whole[exact], x.double()[exact])


@given(
    ids=st.lists(st.integers(0, 6), min_size=1, max_size=70),
    block=st.sampled_from([2, 4, 16]),
    at_once=st.sampled_from([4096, 8]),
)
@some
@runs_kernels
def test_places_hold_each_pair_once_in_blocks_of_its_expert(
    ids: list[int], block: int, at_once: int
) -> None:
    with (
        patch.object(expert_sorting, "SORTED_AT_ONCE", at_once),
        patch.object(expert_sorting, "SORTED_TOGETHER", 32),
    ):
        assert_sorted(ids, block)


@runs_kernels
def test_many_pairs_are_sorted_alike() -> None:
    torch.manual_seed(0)
    assert_sorted(torch.randint(0, 7, (5000,)).tolist(), 64)


def assert_sorted(ids: list[int], block: int) -> None:
    places, blocks = sort(torch.tensor(ids, dtype=torch.int32, device=DEVICE)[:, None], 7, block)
    used = [expert for expert in blocks.tolist() if expert >= 0]
    assert used == sorted(used)
    assert blocks.tolist()[len(used) :] == [-1] * (len(blocks) - len(used))
    found: list[int] = []
    for expert, block_places in zip(used, places.tolist(), strict=False):
        pairs = [pair for pair in block_places if pair < len(ids)]
        assert block_places == pairs + [len(ids)] * (block - len(pairs))
        assert all(ids[pair] == expert for pair in pairs)
        found += pairs
    assert found == sorted(range(len(ids)), key=lambda pair: (ids[pair], pair))


@given(
    tokens=st.integers(1, 5),
    count=st.sampled_from([1, 2, 5, 128]),
    k=st.integers(1, 8),
    normalize=st.booleans(),
    seed=seeds,
)
@some
@pytest.mark.usefixtures("with_kernels")
def test_the_largest_logits_are_chosen_and_of_equal_ones_the_first(
    tokens: int, count: int, k: int, normalize: bool, seed: int
) -> None:
    k = min(k, count)
    torch.manual_seed(seed)
    logits = torch.randint(-3, 4, (tokens, count), device=DEVICE).float()  # so that many are equal
    ids, weights = choose(logits, k, normalize=normalize)
    for token in range(tokens):
        row = logits[token].tolist()
        assert (
            ids[token].tolist()
            == sorted(range(count), key=lambda expert: (-row[expert], expert))[:k]
        )
        shares = logits[token].double().softmax(0)[ids[token].long()]
        assert_close(weights[token], shares / shares.sum() if normalize else shares)


@given(tokens=st.integers(1, 5), normalize=st.booleans(), seed=seeds)
@some
@pytest.mark.usefixtures("with_kernels")
def test_a_shared_expert_is_chosen_by_every_token_besides(
    tokens: int, normalize: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(tokens, 6, device=DEVICE)
    ids, weights = choose(logits, 2, normalize=normalize, shared=True)
    alone, shares = choose(logits[:, :5].contiguous(), 2, normalize=normalize)
    assert torch.equal(ids, torch.cat((alone, torch.full_like(alone[:, :1], 5)), dim=1))
    assert_close(weights, torch.cat((shares, logits[:, 5:].sigmoid()), dim=1).double())
    with pytest.raises(UnsupportedError, match="6 experts per token are more than all 5"):
        choose(logits, 6, normalize=normalize, shared=True)


@pytest.mark.parametrize("form", [DENSE, Float8("computed")], ids=str)
@pytest.mark.parametrize("of_shared", [None, DENSE, Float8("computed")], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_shared_expert_may_have_a_format_of_its_own(
    form: Any, of_shared: Any, activation: str
) -> None:
    count, sizes, tokens = 3, (32, 16), 5
    layer = Experts(*sizes, count, context(weights_later=True), activation=activation, shared=True)
    layer.take_format(form, torch.device("cpu"), of_shared)
    torch.manual_seed(0)
    for weight in (*layer.gate_up, *layer.down):
        for shard_id, part in weight.parts.items():
            weight.load(torch.randn(part.source_shape) / part.source_shape[1] ** 0.5, shard_id)
    x, logits = torch.randn(tokens, sizes[0]), torch.randn(tokens, count + 1)
    ids, weights = choose(logits, 2, normalize=True, shared=True)
    stream = Residual(torch.zeros_like(x))
    layer.add_to(stream, x, ids, weights)
    forms = [form] * count + [of_shared or form]
    gate_up, down = (
        [one.dequantized(weight) for one, weight in zip(forms, each, strict=True)]
        for each in (layer.gate_up, layer.down)
    )
    plain = SimpleNamespace(
        gate_up=gate_up, down=down, gate_up_bias=None, down_bias=None, activation=activation
    )
    assert_close(stream.summed(), by_definition(plain, x, ids, weights))


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
def test_ids_are_those_of_experts_even_of_logits_that_are_no_numbers() -> None:
    logits = torch.full((3, 5), torch.nan, device=DEVICE)
    logits[1, 3], logits[2] = 1.0, -torch.inf
    assert choose(logits, 2, normalize=True)[0].tolist() == [[0, 1], [3, 0], [0, 1]]


@given(
    tokens=st.sampled_from([1, 3, 20]),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)
@some
@pytest.mark.usefixtures("with_kernels")
def test_routers_round_no_product(tokens: int, biased: bool, dtype: torch.dtype, seed: int) -> None:
    router = Router(64, 8, replace(context(), dtype=dtype, device=DEVICE), bias=biased)
    torch.manual_seed(seed)
    for parameter in router.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    x = torch.randn(tokens, 64).to(dtype).to(DEVICE)
    exact = x.double() @ router.weight.double().T + (
        0 if router.bias is None else router.bias.double()
    )
    logits = router(x)
    assert logits.dtype == torch.float32
    assert_close(logits, exact)


def test_what_experts_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="biases of experts"):
        Experts(8, 8, 2, context(), bias=True)
    with pytest.raises(UnsupportedError, match="5 experts per token are more than all 4"):
        choose(torch.zeros(1, 4), 5, normalize=True)
