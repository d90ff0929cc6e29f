"""RMS norm with a gate, of a recurrent layer's output."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable


def gated_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    *,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Return the RMS norms of groups of `group` channels of x [tokens, channels], times weight
    [channels], or [group] for each group, and silu(z), z [tokens, channels]: norm(x) * weight *
    silu(z) if `norm_before_gate`, otherwise norm(x * silu(z)) * weight. Computed in float32, in x's
    dtype."""
    if use_kernels(x, weight):
        from dovetail.nn.kernels import gated_norm as kernels

        with suppress(KernelUnavailable):
            return kernels.gated_norm(x, z, weight, eps, group, norm_before_gate=norm_before_gate)
    gate = F.silu(z.float())
    y = x.float() if norm_before_gate else x.float() * gate
    y = F.rms_norm(y.view(*y.shape[:-1], -1, group), (group,), None, eps) * weight.float().view(
        -1, group
    )
    y = y.flatten(-2)
    return (y * gate if norm_before_gate else y).to(x.dtype)
