"""A short convolution with and without its activation, over prompts, chunks, single tokens and
drafts, against torch's convolution of the whole sequence."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dovetail.api.model import BuildContext
from dovetail.api.state import StateSpec, StateTensor
from dovetail.errors import DovetailError
from dovetail.nn.parallel import SINGLE
from dovetail.nn.state import ShortConv, accept, conv, short_conv
from dovetail.nn.state.conv import ConvActivation
from dovetail.testing.memory import BoundStates, bind_states
from tests.kernels import DEVICE, take_kernels

CHANNELS, KERNEL = 6, 4
ACTIVATIONS: list[ConvActivation | None] = [None, "silu"]
SPEC = StateSpec(
    index=0,
    tensors=(StateTensor(rows=CHANNELS, row_size=KERNEL - 1, keeps_inputs=True),),
    drafts=True,
)

with_activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, accept, conv)


def expected(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: ConvActivation | None
) -> torch.Tensor:
    padded = F.pad(x.T, (KERNEL - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=CHANNELS).T
    return y if activation is None else F.silu(y)


def bound(max_lines: int = 0) -> BoundStates:
    return bind_states([SPEC], 1, torch.float32, device=DEVICE, max_lines=max_lines)


@with_activations
def test_steps_compute_what_torch_does_of_the_whole(activation: ConvActivation | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, CHANNELS, device=DEVICE)
    weight = torch.randn(CHANNELS, KERNEL, device=DEVICE)
    bias = torch.randn(CHANNELS, device=DEVICE)
    states = bound()
    compute = partial(
        short_conv,
        weight=weight,
        bias=bias,
        state=states.layers[0],
        tensor=0,
        activation=activation,
    )
    found = []
    done = 0
    for length in (5, 1, 4, 1, 1):
        states.plan([0], [length], [done])
        found.append(compute(x[done : done + length]))
        done += length
    torch.testing.assert_close(torch.cat(found), expected(x, weight, bias, activation))


@with_activations
def test_drafts_are_computed_as_single_tokens(activation: ConvActivation | None) -> None:
    torch.manual_seed(1)
    x = torch.randn(8, CHANNELS, device=DEVICE)
    weight = torch.randn(CHANNELS, KERNEL, device=DEVICE)
    bias = torch.randn(CHANNELS, device=DEVICE)
    states = bound(max_lines=4)
    compute = partial(
        short_conv,
        weight=weight,
        bias=bias,
        state=states.layers[0],
        tensor=0,
        activation=activation,
    )
    whole = expected(x, weight, bias, activation)
    states.plan([0], [4], [0])
    compute(x[:4])
    # a known token and two drafts, of which the second is wrong
    checked = states.plan_drafts([0], [3], [4], [2])
    wrong = torch.cat([x[4:6], -x[6:7]])
    torch.testing.assert_close(compute(wrong)[:2], whole[4:6])
    states.accept(checked, [7])
    states.plan([0], [2], [6])
    torch.testing.assert_close(compute(x[6:]), whole[6:])


def test_the_module_passes_its_activation_on() -> None:
    torch.manual_seed(2)
    states = bound()
    context = BuildContext(
        parallel=SINGLE,
        dtype=torch.float32,
        device=DEVICE,
        make_attention=pytest.fail,
        make_state=lambda spec: states.layers[0],
    )
    module = ShortConv({"x": CHANNELS}, KERNEL, context, bias=True, activation=None)
    assert module.bias is not None
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    x = torch.randn(5, CHANNELS, device=DEVICE)
    states.plan([0], [5], [0])
    with torch.no_grad():
        found = module(x, states.layers[0], 0)
    torch.testing.assert_close(found, expected(x, module.weight[:, 0], module.bias, None))


def test_a_layer_can_not_declare_drafts_whose_changes_can_not_be_applied_later() -> None:
    tensor = StateTensor(rows=8, row_size=4)
    assert not StateSpec(index=3, tensors=(tensor,)).drafts
    with pytest.raises(DovetailError, match="state layer 3 declares drafts, but has a tensor"):
        StateSpec(index=3, tensors=(tensor,), drafts=True)
