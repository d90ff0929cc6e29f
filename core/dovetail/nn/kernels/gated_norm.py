# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""RMS norm of groups of channels, with a gate. Twin: `dovetail.nn.state.norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row
from dovetail.nn.kernels.states import by_rows, sigmoid

AT_ONCE = 2048  # numbers of a program, or one group


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(
    x,  # [rows, GROUP]: tokens and their groups
    z,
    weight,
    out,
    rows,
    z_stride,
    eps,
    GROUPS: tl.constexpr,  # of a token
    WEIGHTS: tl.constexpr,  # groups that have weights of their own
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,  # the norm comes before the gate
    PDL: tl.constexpr,
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    real = (r < rows) & (i < GROUP)
    group = r % GROUPS
    let_next_begin(PDL)
    weights = tl.load(weight + group % WEIGHTS * GROUP + i, mask=real, other=0.0).to(tl.float32)
    wait(PDL)
    gate = tl.load(
        z + (r // GROUPS).to(tl.int64) * z_stride + group * GROUP + i, mask=real, other=0.0
    ).to(tl.float32)
    values = tl.load(x + r.to(tl.int64) * GROUP + i, mask=real, other=0.0).to(tl.float32)
    gate *= sigmoid(gate)
    if not FIRST:
        values *= gate
    values *= tl.rsqrt(tl.sum(values * values, 1) / GROUP + eps)[:, None] * weights
    if FIRST:
        values *= gate
    tl.store(out + r.to(tl.int64) * GROUP + i, values.to(out.dtype.element_ty), mask=real)


def gated_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group: int,
    *,
    norm_before_gate: bool,
) -> torch.Tensor:
    """See `dovetail.nn.state.gated_norm`; x and weight are contiguous."""
    out = torch.empty_like(x)
    z = by_rows(z)
    block = triton.next_power_of_2(group)
    at_once = max(1, AT_ONCE // block)
    if rows := x.numel() // group:
        launch(_gated_norm, (triton.cdiv(rows, at_once),))(
            x,
            z,
            weight,
            out,
            rows,
            z.stride(0),
            eps,
            GROUPS=x.shape[1] // group,
            WEIGHTS=len(weight) // group,
            GROUP=group,
            BLOCK=block,
            ROWS=at_once,
            FIRST=norm_before_gate,
            num_warps=warps_of_row(block * at_once),
            **pdl_options(x.device),
        )
    return out
