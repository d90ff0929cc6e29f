"""What adapters add to a layer's outputs: the twin by its definition, and kernels as the twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import DovetailError
from dovetail.nn import adapters
from dovetail.nn.adapters import LayerAdapters, Outputs, StepAdapters
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close, runs_kernels
from tests.support import examples

SIZES = {"q, k and v": (48, (16, 8, 8, 16), (0, 1, 2, 0)), "one": (200, (300,), (0,)), "wide": (1300, (7, 140), (0, 1))}  # in, out and their modules


def bank(inputs: int, sizes: tuple[int, ...], modules: tuple[int, ...], slots: int, rank: int, dtype: torch.dtype) -> LayerAdapters:
    """Slots of random adapters, as parts of memory that a bank has for each slot."""
    count, outputs, at = 1 + max(modules), [], 0
    for size, module in zip(sizes, modules, strict=True):
        outputs.append(Outputs(at, at + size, module))
        at += size
    numbers = count * rank * inputs
    both = torch.randn(slots + 1, numbers + at * rank).mul_(0.2).to(dtype).to(DEVICE)
    both[0] = 0
    pieces = torch.tensor([piece for one in outputs for piece in one.pieces()], dtype=torch.int32, device=DEVICE)
    a, b = both[:, :numbers].view(slots + 1, count * rank, inputs), both[:, numbers:].view(slots + 1, at, rank)
    return LayerAdapters(StepAdapters(), a, b, tuple(outputs), pieces)


def exact(layer: LayerAdapters, y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Token by token, in float64."""
    result, rank = y.double(), layer.b.shape[2]
    for token, slot in enumerate(slots.tolist()):
        for part in layer.outputs:
            a = layer.a[slot, part.module * rank : (part.module + 1) * rank].double()
            result[token, part.start : part.end] += layer.b[slot, part.start : part.end].double() @ (a @ x[token].double())
    return result


def compute(kind: str, count: int, slots: int, rank: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return the outputs before, those computed, and those expected; and the slots of the tokens."""
    torch.manual_seed(seed)
    layer = bank(*SIZES[kind], slots, rank, dtype)
    of_tokens = torch.randint(0, slots + 1, (count,), dtype=torch.int32, device=DEVICE)
    x, y = (torch.randn(count, size).to(dtype).to(DEVICE) for size in (layer.a.shape[2], layer.b.shape[1]))
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
