"""Activations of feed-forward layers: activation(gate) * up, or without a gate activation(up)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = (
    MappingProxyType(  # by `hidden_act` of Hugging Face configs
        {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
    )
)


RELU2 = "relu2"  # relu(up)², without a gate


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), with gate clamped to at most `limit`, and up to
    +-`limit`. Used by gpt-oss."""

    alpha: float
    limit: float


# a key of `ACTIVATIONS`, multiplied by up; another function of both; or `RELU2` of up alone
Activation = str | ClampedSwiGLU


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply the activation to gate_up [tokens, 2 * size], gate first -> [tokens, size]. For `RELU2`
    it is up alone, [tokens, size]."""
    if activation == RELU2:
        return F.relu(gate_up).square()
    if isinstance(activation, str):
        return act_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)


def act_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [tokens, size] for gate_up [tokens, 2 * size]. `activation`: a
    key of `ACTIVATIONS`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) for x and gate [tokens, size]; may overwrite x."""
    if use_kernels(x, gate[:1]) and gate.stride(1) == 1:
        from dovetail.nn.kernels import gate as kernels

        with suppress(KernelUnavailable):
            kernels.sigmoid_mul(x, gate)
            return x
    return x * gate.sigmoid()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [tokens, size] for gate_up [tokens, 2 * size] (SwiGLU,
    arXiv:2002.05202): `act_mul` with a kernel."""
    if use_kernels(gate_up):
        from dovetail.nn.kernels import gate as kernels

        with suppress(KernelUnavailable):
            return kernels.silu_mul(gate_up)
    return act_mul(gate_up, "silu")
