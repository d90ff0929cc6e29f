"""Activations of feed-forward layers."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [tokens, 2 * size], whose first half is the gate -> [tokens, size] (SwiGLU, arXiv:2002.05202)."""
    if use_kernels(gate_up):
        from dovetail.nn.kernels import gate as kernels

        with suppress(KernelUnavailable):
            return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
