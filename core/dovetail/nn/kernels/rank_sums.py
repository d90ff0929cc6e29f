# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Adding to the residual stream what several GPUs have computed of it, and norming the stream for the next layer, in one kernel.

Each rank has written its share of the sum to memory that all ranks can read. A program tells its counterparts on the other ranks that its rank's
share is there, waits until they have said the same, reads all shares, and does the rest. Nobody waits at the end: `runtime.rank_shares` says why the
shares may be overwritten all the same. Twin: an all-reduce, and `dovetail.nn.residual`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row

MOST_PROGRAMS = 264  # of a launch: two for each multiprocessor of a Hopper, so that all of them run at once


@triton.jit
def _add_shares(
    shares,  # [RANKS] int64: addresses of the ranks' memory
    flags,  # [RANKS] int64: addresses of the ranks' flags, [MOST_PROGRAMS, RANKS] int32
    x,  # [rows, SIZE]
    weight,  # [SIZE]
    out,  # [rows, SIZE]
    rows,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows at program_id, program_id + programs, …"""
    let_next_begin(PDL)
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    if NORMED:
        weights = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    my_flags = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program * RANKS
    wait(PDL)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
            tl.atomic_xchg(theirs + RANK, 1, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            while tl.atomic_cas(my_flags + rank, 1, 0, sem="acquire", scope="sys") == 0:
                pass
    row = program
    while row < rows:
        at = row.to(tl.int64) * SIZE + i
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(RANKS):  # in the same order on all ranks, so that all have the same sum
            share = tl.load(shares + rank).to(tl.pointer_type(x.dtype.element_ty))
            values += tl.load(share + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=mask)
        if NORMED:
            values = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
            tl.store(out + at, values * scale * weights, mask=mask)
        row += tl.num_programs(0)


def add_shares(x: torch.Tensor, shares: torch.Tensor, flags: torch.Tensor, rank: int, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
    """x [rows, size] += the sum over the ranks of their shares, of x's shape and dtype, added up in float32.

    `shares` and `flags` [ranks] int64 are addresses that this GPU can use: of each rank's share, and of its flags [MOST_PROGRAMS, ranks] int32,
    which are 0 before and after. `rank` is this one. All ranks must call it with as many rows. `norm`: (weight [size], eps) of an RMS norm; then
    x's norm is returned, like x, and otherwise None.
    """
    rows, size = x.shape
    out, block = None if norm is None else torch.empty_like(x), triton.next_power_of_2(size)
    weight, eps = norm or (x, 0.0)
    launch(_add_shares, (min(rows, MOST_PROGRAMS),))(
        shares,
        flags,
        x,
        weight,
        x if out is None else out,
        rows,
        eps,
        RANK=rank,
        RANKS=len(shares),
        SIZE=size,
        BLOCK=block,
        NORMED=norm is not None,
        num_warps=warps_of_row(block),
        **pdl_options(x.device),
    )
    return out
