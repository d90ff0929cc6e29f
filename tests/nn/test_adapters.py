"""What adapters add to a layer's outputs: the twin by its definition, and kernels as the twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.model import BuildContext
from dovetail.errors import DovetailError
from dovetail.nn import adapters
from dovetail.nn.activation import silu_mul
from dovetail.nn.adapters import LayerAdapters, Outputs, StepAdapters
from dovetail.nn.build import RuntimeContext
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.format import DENSE, WeightFormat
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.mxfp4 import Mxfp4Format
from dovetail.nn.linear import GateUpParallelLinear, LatentUpLinear, RowParallelLinear
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parallel import SINGLE
from dovetail.nn.residual import Residual
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close, runs_kernels
from tests.models.oracle import DenseAttention
from tests.nn.formats import stored
from tests.rounding import assert_rounded
from tests.support import examples

SIZES = {
    "q, k and v": (48, (16, 8, 8, 16), (0, 1, 2, 0)),
    "one": (200, (300,), (0,)),
    "wide": (1300, (7, 140), (0, 1)),
}  # in, out and their modules


def bank(
    inputs: int,
    sizes: tuple[int, ...],
    modules: tuple[int, ...],
    slots: int,
    rank: int,
    dtype: torch.dtype,
) -> LayerAdapters:
    """Slots of random adapters, as parts of memory that a bank has for each slot."""
    count, outputs, at = 1 + max(modules), [], 0
    for size, module in zip(sizes, modules, strict=True):
        outputs.append(Outputs(at, at + size, module))
        at += size
    numbers = count * rank * inputs
    both = torch.randn(slots + 1, numbers + at * rank).mul_(0.2).to(dtype).to(DEVICE)
    both[0] = 0
    pieces = torch.tensor(
        [piece for one in outputs for piece in one.pieces()], dtype=torch.int32, device=DEVICE
    )
    a, b = (
        both[:, :numbers].view(slots + 1, count * rank, inputs),
        both[:, numbers:].view(slots + 1, at, rank),
    )
    return LayerAdapters(StepAdapters(), a, b, tuple(outputs), pieces)


def exact(
    layer: LayerAdapters, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Token by token, in float64."""
    result, rank = y.double(), layer.b.shape[2]
    for token, slot in enumerate(slots.tolist()):
        for part in layer.outputs:
            a = layer.a[slot, part.module * rank : (part.module + 1) * rank].double()
            result[token, part.start : part.end] += layer.b[
                slot, part.start : part.end
            ].double() @ (a @ x[token].double())
    return result


def compute(
    kind: str, count: int, slots: int, rank: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return the outputs before, those computed, and those expected; and the slots of the
    tokens."""
    torch.manual_seed(seed)
    layer = bank(*SIZES[kind], slots, rank, dtype)
    of_tokens = torch.randint(0, slots + 1, (count,), dtype=torch.int32, device=DEVICE)
    x, y = (
        torch.randn(count, size).to(dtype).to(DEVICE)
        for size in (layer.a.shape[2], layer.b.shape[1])
    )
    with layer.step.of_tokens(of_tokens):
        got = layer.added_to(y.clone(), x)
    return y, got, exact(layer, y, x, of_tokens), of_tokens


def assert_right(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]) -> None:
    before, got, expected, slots = case
    assert_close(got, expected)
    assert torch.equal(got[slots == 0], before[slots == 0])


cases = {
    "kind": st.sampled_from(list(SIZES)),
    "count": st.sampled_from([1, 2, 17, 70]),
    "slots": st.integers(1, 9),
    "rank": st.sampled_from([16, 48, 64]),
    "seed": st.integers(0, 1 << 30),
}


@pytest.mark.skipif(ON_GPU, reason="computed by kernels")
@examples(quick=40, full=300)
@given(dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), **cases)
def test_the_twin_computes_what_the_definition_says(dtype: torch.dtype, **case: Any) -> None:
    assert_right(compute(dtype=dtype, **case))


@runs_kernels
@examples(quick=100 if ON_GPU else 20, full=1000 if ON_GPU else 100)
@given(dtype=st.sampled_from(DTYPES), **cases)
def test_the_kernels_compute_what_the_definition_says(dtype: torch.dtype, **case: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "use_kernels", lambda *tensors: True)
        assert_right(compute(dtype=dtype, **case))


@runs_kernels
def test_many_tokens_are_computed_in_larger_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "use_kernels", lambda *tensors: True)
        assert_right(compute("q, k and v", 600, 3, 16, torch.float32, 0))


def test_a_layer_computes_all_tokens_of_the_step_or_those_wanted() -> None:
    step, slots = StepAdapters(), torch.tensor([0, 2, 1, 2], dtype=torch.int32)
    assert not step.active
    with step.of_tokens(slots, wanted=torch.tensor([3, 0])):
        assert step.active
        assert step.of(4).slots.tolist() == [0, 2, 1, 2]
        assert step.of(2).slots.tolist() == [2, 0]
        with pytest.raises(DovetailError, match="3 tokens in a step of 4 or 2"):
            step.of(3)
    assert not step.active


FORMATS: dict[str, WeightFormat] = {
    "plain": DENSE,
    "fp8": Float8("computed"),
    "int4": PackedInt4(32, True),
    "mxfp4": Mxfp4Format(),
}


@pytest.mark.skipif(ON_GPU, reason="compares float32")
@pytest.mark.parametrize("name", FORMATS)
def test_adapters_add_to_the_products_of_any_format_before_the_gate(name: str) -> None:
    form, inputs, inner = FORMATS[name], 128, 128
    context = RuntimeContext(
        parallel=SINGLE,
        dtype=torch.float32,
        device=DEVICE,
        make_attention=DenseAttention,
        weights_later=True,
    )
    gate_up, down = (
        GateUpParallelLinear(inputs, inner, context, bias=False),
        RowParallelLinear(inner, inputs, context, bias=False),
    )
    torch.manual_seed(0)
    gate_up.format = down.format = form
    gate_up.weight, down.weight = (
        stored(form, (inner, inner), inputs, torch.float32, DEVICE),
        stored(form, (inputs,), inner, torch.float32, DEVICE),
    )
    norm = RMSNorm(inputs, 1e-5, replace(context, weights_later=False))
    norm.weight.data.uniform_(0.5, 1.5)
    x, slots = (
        torch.randn(5, inputs, device=DEVICE),
        torch.tensor([0, 1, 2, 1, 0], dtype=torch.int32, device=DEVICE),
    )
    plain = Residual(x.clone())
    down.add_to(plain, gate_up(plain, norm))
    layers = [
        bank(inputs, (inner, inner), (0, 1), 2, 16, torch.float32),
        bank(inner, (inputs,), (0,), 2, 16, torch.float32),
    ]
    gate_up.adapters, down.adapters = layers[0], replace(layers[1], step=layers[0].step)
    stream = Residual(x.clone())
    with layers[0].step.of_tokens(slots):
        down.add_to(stream, gate_up(stream, norm))
    inner_of = exact(
        layers[0], norm(x) @ form.dequantized(gate_up.weight).t(), norm(x), slots
    ).float()
    hidden = silu_mul(inner_of)
    expected = x.double() + exact(
        layers[1], hidden @ form.dequantized(down.weight).t(), hidden, slots
    )
    got = stream.summed()
    assert_rounded(got, expected, 2 * (inputs + inner))
    assert not torch.allclose(got[1], plain.summed()[1], atol=1e-2)
    assert_rounded(got[slots == 0], plain.summed()[slots == 0], 2 * (inputs + inner))


@pytest.mark.skipif(ON_GPU, reason="compares float32")
def test_adapters_of_a_matrix_with_two_sides_are_those_of_its_sum() -> None:
    """Latent attention multiplies queries by K's matrix and sums of latents by V's, with W + B A
    for each token."""
    latent, heads, key, value = 12, 3, 4, 6
    layer = LatentUpLinear(
        latent,
        heads,
        key,
        value,
        BuildContext(
            parallel=SINGLE, dtype=torch.float32, device=DEVICE, make_attention=DenseAttention
        ),
    )
    torch.manual_seed(0)
    layer.weight.data.normal_()
    layer.adapters = bank(latent, (heads * (key + value),), (0,), 2, 16, torch.float32)
    slots = torch.tensor([2, 0, 1, 2], dtype=torch.int32, device=DEVICE)
    q, sums = (
        torch.randn(4, heads, key, device=DEVICE),
        torch.randn(4, heads, latent, device=DEVICE),
    )
    with layer.adapters.step.of_tokens(slots):
        found, values = layer(q), layer.values(sums)
    for token, slot in enumerate(slots.tolist()):
        whole = (layer.weight + layer.adapters.b[slot] @ layer.adapters.a[slot]).view(
            heads, key + value, latent
        )
        torch.testing.assert_close(
            found[token], torch.einsum("hk,hkl->hl", q[token], whole[:, :key]), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(
            values[token],
            torch.einsum("hl,hvl->hv", sums[token], whole[:, key:]),
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.skipif(ON_GPU, reason="compares float32")
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_add_to_logits_and_not_to_embeddings(tied: bool) -> None:
    context = BuildContext(
        parallel=SINGLE, dtype=torch.float32, device=DEVICE, make_attention=DenseAttention
    )
    embedding = VocabParallelEmbedding(11, 8, context)
    embedding.weight.data.normal_()
    head = LMHead(11, 8, context, tied=embedding if tied else None)
    head.weight.data.normal_()
    head.adapters = bank(8, (11,), (0,), 2, 16, torch.float32)
    hidden, slots = (
        torch.randn(3, 8, device=DEVICE),
        torch.tensor([1, 0, 2], dtype=torch.int32, device=DEVICE),
    )
    plain, ids = head(hidden), torch.arange(3, device=DEVICE)
    before = embedding(ids).clone()
    with head.adapters.step.of_tokens(slots):
        torch.testing.assert_close(
            head(hidden).double(), exact(head.adapters, plain, hidden, slots), atol=1e-4, rtol=1e-4
        )
        assert torch.equal(embedding(ids), before)
    assert torch.equal(head(hidden), plain)
