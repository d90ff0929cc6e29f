# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Collectives over several GPUs, each in one kernel: `add_shares` adds a sum to the residual stream
and norms it for the next layer; `sum_parts` and `gather_parts` are all-reduce and all-gather.

Each rank has written its part to memory that all ranks can read. A program signals its counterparts
on the other ranks that its rank's part is ready, waits for their signals, and reads all parts.
`runtime.rank_shares` explains when the memory may be overwritten. Twins: an all-reduce with
`dovetail.nn.residual`, an all-reduce, an all-gather.

A dead rank never signals, and a GPU that is full of waiting programs and their successors can't run
a kernel that would release them. So waiting programs occasionally poll `released`, a value in host
memory: once it isn't 0 they stop waiting, and their results are undefined.

Such a poll is expensive: the host answers reads one after the other. If all threads of all programs
poll at once, this takes milliseconds, in which no program sees a signal that has arrived meanwhile;
then the rank is late for the next sum, the other ranks poll, and so on. So only one thread of a
program polls, and programs take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row

MOST_PROGRAMS = 264  # per launch: two per multiprocessor of a Hopper, so that all run at once
BLOCK = 4096  # numbers per program and iteration
# attempts between two polls of host memory by a program: some milliseconds
LOOK = tl.constexpr(4096)
TURN = tl.constexpr(LOOK.value // MOST_PROGRAMS)  # attempts between the polls of two programs


@triton.jit
def _meet(flags, released, program, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Signal the counterparts of this program on the other ranks, and wait for their signals.
    Returns 0, or 1 if `released` ended the wait.

    All threads of a program must leave the loop together. An atomic operation is executed by one
    thread and its result broadcast; so the value that one thread polled passes through the flag
    that no rank sets, this rank's own. BLOCK: at least the number of threads."""
    i = tl.arange(0, BLOCK)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            theirs = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
            tl.atomic_xchg(theirs + RANK, 1, sem="release", scope="sys")
    mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program * RANKS
    given_up = 0
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            signal = tl.atomic_cas(mine + rank, 1, 0, sem="acquire", scope="sys")
            attempts = 0
            while (signal == 0) & (given_up == 0):
                signal = tl.atomic_cas(mine + rank, 1, 0, sem="acquire", scope="sys")
                attempts += 1
                if (attempts + program * TURN) % LOOK == 0:
                    seen = tl.max(tl.load(released + i, mask=i == 0, other=0, volatile=True), 0)
                    given_up = tl.atomic_max(mine + RANK, seen, sem="relaxed", scope="gpu")
    return given_up


@triton.jit
def _add_shares(
    shares,  # [RANKS] int64: addresses of the ranks' memory
    flags,  # [RANKS] int64: addresses of the ranks' flags, [MOST_PROGRAMS, RANKS] int32
    released,  # [1] int32 in host memory
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
    """Process the rows at program_id, program_id + programs, …"""
    let_next_begin(PDL)
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    if NORMED:
        weights = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    given_up = _meet(flags, released, program, RANK, RANKS, BLOCK)
    row = tl.where(given_up == 0, program, rows)
    while row < rows:
        at = row.to(tl.int64) * SIZE + i
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(
            RANKS
        ):  # same order on all ranks, so that all compute the same sum
            share = tl.multiple_of(
                tl.load(shares + rank).to(tl.pointer_type(x.dtype.element_ty)), 16
            )
            values += tl.load(share + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=mask)
        if NORMED:
            values = rounded.to(tl.float32)
            scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
            tl.store(out + at, values * scale * weights, mask=mask)
        row += tl.num_programs(0)


@triton.jit
def _exchange(
    parts,  # [RANKS] int64: addresses of the ranks' memory
    # [RANKS] int64: addresses of the ranks' flags, [MOST_PROGRAMS, RANKS] int32: the part is ready
    arrived,
    read,  # likewise: all parts have been read
    released,  # [1] int32 in host memory
    out,  # [numbers], or [numbers / columns, RANKS, columns]
    numbers,
    columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process the blocks of numbers at program_id, program_id + programs, …"""
    let_next_begin(PDL)
    program = tl.program_id(0)
    wait(PDL)
    given_up = _meet(arrived, released, program, RANK, RANKS, BLOCK)
    start = tl.where(given_up == 0, program * BLOCK, numbers)
    while start < numbers:
        i = start + tl.arange(0, BLOCK)
        mask = i < numbers
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(
            RANKS
        ):  # same order on all ranks, so that all compute the same sum
            part = tl.multiple_of(
                tl.load(parts + rank).to(tl.pointer_type(out.dtype.element_ty)), 16
            )
            values = tl.load(part + i, mask=mask, other=0.0)
            if SUM:
                total += values.to(tl.float32)
            else:
                tl.store(
                    out + (i // columns * RANKS + rank) * columns + i % columns, values, mask=mask
                )
        if SUM:
            tl.store(out + i, total, mask=mask)
        start += tl.num_programs(0) * BLOCK
    tl.debug_barrier()  # all threads of the program have read
    _meet(read, released, program, RANK, RANKS, BLOCK)


def add_shares(
    x: torch.Tensor,
    shares: torch.Tensor,
    flags: torch.Tensor,
    released: torch.Tensor,
    rank: int,
    norm: tuple[torch.Tensor, float] | None,
) -> torch.Tensor | None:
    """Add to x [rows, size], in place, the sum over the ranks of their shares, which have x's shape
    and dtype; accumulates in float32.

    `shares` and `flags` [ranks] int64: addresses, valid on this GPU, of each rank's share and of
    its flags [MOST_PROGRAMS, ranks] int32, which are 0 before and after. `released` [1] int32:
    pinned host memory. `rank`: this rank. All ranks must call it with the same number of rows.
    `norm`: (weight [size], eps) of an RMS norm; then the normed x is returned, otherwise None.
    """
    rows, size = x.shape
    out = None if norm is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    weight, eps = norm or (x, 0.0)
    launch(_add_shares, (min(rows, MOST_PROGRAMS),))(
        shares,
        flags,
        released,
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


@dataclass(frozen=True, slots=True)
class Exchange:
    """Addresses of one collective, each [ranks] int64 and valid on this GPU, and the rank that uses
    them."""

    parts: torch.Tensor  # each rank's part
    # flags [MOST_PROGRAMS, ranks] int32, 0 before and after: the part is ready
    arrived: torch.Tensor
    read: torch.Tensor  # likewise: all parts have been read
    released: torch.Tensor  # [1] int32, pinned host memory
    rank: int  # this rank


def sum_parts(out: torch.Tensor, exchange: Exchange) -> None:
    """Set out, contiguous, to the sum over the ranks of their parts, which have out's size and
    dtype; accumulates in float32. All ranks must call it with the same size; when it has run, all
    ranks have read all parts."""
    _launch_exchange(out, out.numel(), 1, exchange, sums=True)


def gather_parts(out: torch.Tensor, columns: int, exchange: Exchange) -> None:
    """Set out [rows, ranks, columns] to the ranks' parts [rows, columns]; otherwise like
    `sum_parts`."""
    _launch_exchange(out, out.numel() // len(exchange.parts), columns, exchange, sums=False)


def _launch_exchange(
    out: torch.Tensor, numbers: int, columns: int, exchange: Exchange, *, sums: bool
) -> None:
    launch(_exchange, (min(triton.cdiv(numbers, BLOCK), MOST_PROGRAMS),))(
        exchange.parts,
        exchange.arrived,
        exchange.read,
        exchange.released,
        out,
        numbers,
        columns,
        RANK=exchange.rank,
        RANKS=len(exchange.parts),
        BLOCK=BLOCK,
        SUM=sums,
        num_warps=8,
        **pdl_options(out.device),
    )
