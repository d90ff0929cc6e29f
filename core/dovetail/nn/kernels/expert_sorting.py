# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Sorting of pairs, of a token and one of its chosen experts, by expert; see the top of `experts`,
whose kernels read weights once per block.

Few pairs are sorted by one kernel, each of whose programs looks through all of them for those of
one expert. More take three kernels, which count the pairs of chunks, add up the counts, and write
the pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

# pairs that each program of one kernel looks through; more are sorted by three kernels
SORTED_AT_ONCE = 4096
SORTED_TOGETHER = 256  # pairs of a chunk then


@triton.jit
def _write_blocks(
    places, experts, expert, first, count, pairs, blocks, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Assign blocks to an expert with `count` pairs, from block `first` on, and fill its places
    without a pair; after the last expert, mark all further blocks as not needed."""
    own = (count + BLOCK - 1) // BLOCK
    j = tl.arange(0, BLOCK)
    tl.store(places + first * BLOCK + count + j, pairs, mask=count + j < own * BLOCK)
    for block in range(own):
        tl.store(experts + first + block, expert)
    if expert == COUNT - 1:
        for block in range(first + own, blocks):
            tl.store(experts + block, -1)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _sort(
    ids,  # [pairs]
    places,  # [blocks, BLOCK]: pairs, or `pairs` where there is none
    experts,  # [blocks]: expert of a block; -1: not needed
    pairs,
    blocks,
    COUNT: tl.constexpr,  # experts
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the pairs of one expert, in order."""
    expert = tl.program_id(0)
    e = tl.arange(0, PADDED)
    i = tl.arange(0, CHUNK)
    let_next_begin(PDL)
    wait(PDL)
    counts = tl.zeros([PADDED], tl.int32)
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(ids + at + i, mask=at + i < pairs, other=0)
        counts += tl.histogram(chosen, PADDED, mask=at + i < pairs)
    needed = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(e < expert, needed, 0), 0)
    count = tl.sum(tl.where(e == expert, counts, 0), 0)
    _write_blocks(places, experts, expert, first, count, pairs, blocks, COUNT, BLOCK)
    start = first * BLOCK
    for at in range(0, pairs, CHUNK):
        chosen = tl.load(ids + at + i, mask=at + i < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(places + start + tl.cumsum(mine, 0) - 1, at + i, mask=mine > 0)
        start += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["pairs"])
def _count(ids, counts, pairs, PADDED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Count each expert's pairs in one chunk: counts [chunks, PADDED]."""
    chunk = tl.program_id(0)
    let_next_begin(PDL)
    wait(PDL)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    found = tl.histogram(tl.load(ids + at, mask=at < pairs, other=0), PADDED, mask=at < pairs)
    tl.store(counts + chunk * PADDED + tl.arange(0, PADDED), found)


@triton.jit(do_not_specialize=["chunks"])
def _add_up(
    counts,  # [chunks, PADDED]: counts; replaced by those of earlier chunks together
    totals,  # [PADDED]
    chunks,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # chunks
    PDL: tl.constexpr,
):
    """Add up the counts of some experts over the chunks."""
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    c = tl.arange(0, AT_ONCE)
    let_next_begin(PDL)
    wait(PDL)
    total = tl.zeros([EXPERTS], tl.int32)
    for at in range(0, chunks, AT_ONCE):
        place = counts + (at + c)[:, None] * PADDED + e[None, :]
        own = tl.load(place, mask=(at + c < chunks)[:, None], other=0)
        before = total[None, :] + tl.cumsum(own, 0) - own
        tl.debug_barrier()  # nothing is replaced that another thread still reads
        tl.store(place, before, mask=(at + c < chunks)[:, None])
        total += tl.sum(own, 0)
    tl.store(totals + e, total)


@triton.jit(do_not_specialize=["pairs", "blocks", "chunks"])
def _place(
    ids,
    before,  # [chunks, PADDED]: an expert's pairs in earlier chunks
    totals,  # [PADDED]
    places,
    experts,
    pairs,
    blocks,
    chunks,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # earlier pairs of the chunk that each is compared with
    PDL: tl.constexpr,
):
    """Write the places of one chunk's pairs; or, further programs, one expert's blocks, and its
    places without a pair."""
    program = tl.program_id(0)
    e = tl.arange(0, PADDED)
    let_next_begin(PDL)
    wait(PDL)
    needed = (tl.load(totals + e) + BLOCK - 1) // BLOCK
    if program < chunks:
        i = tl.arange(0, CHUNK)
        at = program * CHUNK + i
        chosen = tl.load(ids + at, mask=at < pairs, other=-1)
        rank = tl.zeros([CHUNK], tl.int32)
        for earlier in range(0, CHUNK, AT_ONCE):
            j = earlier + tl.arange(0, AT_ONCE)
            others = tl.load(ids + program * CHUNK + j, mask=program * CHUNK + j < pairs, other=-2)
            rank += tl.sum(
                ((chosen[:, None] == others[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1
            )
        begin = tl.gather(tl.cumsum(needed, 0) - needed, tl.maximum(chosen, 0), 0)
        rank += tl.load(before + program * PADDED + chosen, mask=at < pairs, other=0)
        tl.store(places + begin * BLOCK + rank, at, mask=at < pairs)
    else:
        expert = program - chunks
        first = tl.sum(tl.where(e < expert, needed, 0), 0)
        _write_blocks(
            places, experts, expert, first, tl.load(totals + expert), pairs, blocks, COUNT, BLOCK
        )


def sort(ids: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places [blocks, block] int32 of the pairs of ids [tokens, k] int32, sorted by
    expert, of which there are `count`, and the expert [blocks] int32 of each block."""
    pairs = ids.numel()
    blocks = min(pairs, (pairs + count * (block - 1)) // block)
    places = torch.empty((blocks, block), dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    padded = triton.next_power_of_2(max(count, 2))
    sizes = {"PADDED": padded, **pdl_options(ids.device)}
    if pairs > SORTED_AT_ONCE:
        chunks = triton.cdiv(pairs, SORTED_TOGETHER)
        counts = torch.empty((chunks, padded), dtype=torch.int32, device=ids.device)
        totals = torch.empty(padded, dtype=torch.int32, device=ids.device)
        launch(_count, (chunks,))(ids, counts, pairs, CHUNK=SORTED_TOGETHER, num_warps=4, **sizes)
        at_once = min(padded, 16)  # experts
        launch(_add_up, (padded // at_once,))(
            counts, totals, chunks, EXPERTS=at_once, AT_ONCE=64, num_warps=4, **sizes
        )
        launch(_place, (chunks + count,))(
            *(ids, counts, totals, places, experts, pairs, blocks, chunks),
            COUNT=count,
            BLOCK=block,
            CHUNK=SORTED_TOGETHER,
            AT_ONCE=32,
            num_warps=8,
            **sizes,
        )
        return places, experts
    chunk = triton.next_power_of_2(pairs)
    launch(_sort, (count,))(
        ids,
        places,
        experts,
        pairs,
        blocks,
        COUNT=count,
        BLOCK=block,
        CHUNK=chunk,
        num_warps=8 if chunk > 1024 else 4,
        **sizes,
    )
    return places, experts
