# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Sums and gatherings over several GPUs, each in one kernel: `add_shares` adds a sum to the residual stream and norms it for the next layer,
`sum_parts` and `gather_parts` do the rest.

Each rank has written its part to memory that all ranks can read. A program tells its counterparts on the other ranks that its rank's part is there,
waits until they have said the same, and reads all parts. `runtime.rank_shares` says why the memory may then be overwritten. Twins: an all-reduce with
`dovetail.nn.residual`, an all-reduce, an all-gather.

A dead rank never signals, and a GPU that is full of waiting programs and of those that are to follow can run nothing that would release them. So
programs that wait poll `released`, a number in the host's memory, now and then: once it isn't 0 they stop waiting, and their results are undefined.

Such a look is dear: the host answers reads one after the other. If all threads of all programs look at once, this takes milliseconds, in which no
program sees the signal that has come meanwhile; then the rank is late for the next sum, where the other ranks look, and so on. So one thread of a
program looks, and the programs look in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row

MOST_PROGRAMS = 264  # of a launch: two for each multiprocessor of a Hopper, so that all of them run at once
BLOCK = 4096  # numbers that a program exchanges at once
LOOK = tl.constexpr(4096)  # attempts between two looks of a program at the host's memory: some milliseconds
TURN = tl.constexpr(LOOK.value // MOST_PROGRAMS)  # attempts between the looks of two programs


@triton.jit
def _meet(flags, released, program, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Signal to the counterparts of this program on the other ranks, and wait for their signals. -> 0, or 1 if `released` ended the wait.

    All threads of a program must leave the loop together. An atomic operation is executed by one thread, and its result broadcast; so what one has
    read goes through the flag that nobody sets, this rank's own. BLOCK: at least as many as there are threads."""
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
    released,  # [1] int32, the host's
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
    wait(PDL)
    given_up = _meet(flags, released, program, RANK, RANKS, BLOCK)
    row = tl.where(given_up == 0, program, rows)
    while row < rows:
        at = row.to(tl.int64) * SIZE + i
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(RANKS):  # in the same order on all ranks, so that all have the same sum
            share = tl.multiple_of(tl.load(shares + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
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
    arrived,  # [RANKS] int64: addresses of the ranks' flags, [MOST_PROGRAMS, RANKS] int32: the part is there
    read,  # likewise: all parts have been read
    released,  # [1] int32, the host's
    out,  # [numbers], or [numbers / columns, RANKS, columns]
    numbers,
    columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of numbers at program_id, program_id + programs, …"""
    let_next_begin(PDL)
    program = tl.program_id(0)
    wait(PDL)
    given_up = _meet(arrived, released, program, RANK, RANKS, BLOCK)
    start = tl.where(given_up == 0, program * BLOCK, numbers)
    while start < numbers:
        i = start + tl.arange(0, BLOCK)
        mask = i < numbers
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):  # in the same order on all ranks, so that all have the same sum
            part = tl.multiple_of(tl.load(parts + rank).to(tl.pointer_type(out.dtype.element_ty)), 16)
            values = tl.load(part + i, mask=mask, other=0.0)
            if SUM:
                total += values.to(tl.float32)
            else:
                tl.store(out + (i // columns * RANKS + rank) * columns + i % columns, values, mask=mask)
        if SUM:
            tl.store(out + i, total, mask=mask)
        start += tl.num_programs(0) * BLOCK
    tl.debug_barrier()  # all threads of the program have read
    _meet(read, released, program, RANK, RANKS, BLOCK)


def add_shares(
    x: torch.Tensor, shares: torch.Tensor, flags: torch.Tensor, released: torch.Tensor, rank: int, norm: tuple[torch.Tensor, float] | None
) -> torch.Tensor | None:
    """x [rows, size] += the sum over the ranks of their shares, of x's shape and dtype, added up in float32.

    `shares` and `flags` [ranks] int64 are addresses that this GPU can use: of each rank's share, and of its flags [MOST_PROGRAMS, ranks] int32,
    which are 0 before and after. `released` [1] int32 is pinned memory of the host. `rank` is this one. All ranks must call it with as many rows.
    `norm`: (weight [size], eps) of an RMS norm; then x's norm is returned, like x, and otherwise None.
    """
    rows, size = x.shape
    out, block = None if norm is None else torch.empty_like(x), triton.next_power_of_2(size)
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
    """The addresses that an exchange uses, each [ranks] int64 and usable by this GPU, and whose it is."""

    parts: torch.Tensor  # the ranks' parts
    arrived: torch.Tensor  # their flags [MOST_PROGRAMS, ranks] int32, which are 0 before and after: the part is there
    read: torch.Tensor  # likewise: all parts have been read
    released: torch.Tensor  # [1] int32, pinned memory of the host
    rank: int  # this one


def sum_parts(out: torch.Tensor, exchange: Exchange) -> None:
    """out = the sum over the ranks of their parts, which have out's size and dtype, added up in float32. out is contiguous. All ranks must call it
    with as many numbers; when it has run, all have read all parts."""
    _launch_exchange(out, out.numel(), 1, exchange, sums=True)


def gather_parts(out: torch.Tensor, columns: int, exchange: Exchange) -> None:
    """out [rows, ranks, columns] = the ranks' parts [rows, columns]. The rest is as for `sum_parts`."""
    _launch_exchange(out, out.numel() // len(exchange.parts), columns, exchange, sums=False)


def _launch_exchange(out: torch.Tensor, numbers: int, columns: int, exchange: Exchange, *, sums: bool) -> None:
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
