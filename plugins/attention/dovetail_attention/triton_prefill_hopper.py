# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, N806 (constants are upper case)
"""Prefill on Hopper with the tiles of `triton_prefill`: one warp loads, two groups of four warps
compute half of the tile's queries each.

As in FlashAttention-3 (Shah et al., arXiv:2407.08608, section 3): the tensor memory accelerator
brings K and V into a ring of stages, barriers say what is there and what is free again, and a group
works out a step's softmax while the matrix units add the step before to its output:

    matrix units    q k0         q k1   p0 v0         q k2   p1 v1         …
    group                  p0                  p1                   p2

Numbers of a head lie in panels of 64, the 128 bytes that the matrix units read at once; what a
panel has too many is zero.

K and V in FP8 are brought as they are, and widened on the way to the ring by four warps that load
(`triton_loads_hopper`): computing is the same, in float16. Matrix units could multiply FP8 itself,
but keep fewer bits of a sum then, and would need queries and weights in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import (
    debug_barrier,
)  # barrier of a program; Gluon's own is renamed in Triton 3.7

from dovetail.api.attention import KVScales
from dovetail.errors import DovetailError
from dovetail.nn.kernels.described import in_tiles
from dovetail.nn.kernels.launch import launch
from dovetail_attention.scaled import as_bytes
from dovetail_attention.triton_loads_hopper import PANEL, load, load_small
from dovetail_attention.triton_schedule import TILE_NUMBERS, Split, StepRows, prefill_tiles
from dovetail_attention.triton_step import LayerKind, Limits, TileParts
from dovetail_attention.triton_tuning import PrefillTiling

CLOSE = 2e-2  # of numbers of about 1/5
HALF = gl.constexpr(64)
ATOM = gl.constexpr(8)  # rows of a panel after which its layout in shared memory repeats
HIDDEN = gl.constexpr(-1.0e30)  # score of a key that a query doesn't attend to
COMPUTING_REGISTERS = gl.constexpr(240)  # of a thread
LOADING_REGISTERS = gl.constexpr(24)
COMPUTING_BESIDE_WIDENING = gl.constexpr(232)
WIDENING_REGISTERS = gl.constexpr(40)
LOG2_E = gl.constexpr(math.log2(math.e))
LARGEST = gl.constexpr(65504.0)  # of float16


@gluon.jit
def prefill_hopper(
    q,
    out,
    # descriptor of [pages * PAGE_ROWS, D], of which a page's first rows are [kv_heads, BLOCK_SIZE],
    # in pieces of [BLOCK_SIZE or N, PANEL]
    k_cache,
    v_cache,  # likewise
    table,  # [rows, TABLE_STRIDE] int32
    tiles,  # [tiles, RECORD] int32, of `triton_schedule.prefill_tiles`; some may have no queries
    partial,  # [slots, kv heads, 2 * HALF, D] float32: of each part of a tile that comes in parts
    partial_lse,  # [slots, kv heads, 2 * HALF] float32, base 2
    # [slots, kv heads, 2] int32: parts of each half that are done, at the tile's first slot; 0
    # before and after
    arrived,
    k_scale,  # [] float32
    v_scale,
    sinks,  # [HEADS]
    scale,
    Q_TOKEN_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    RECORD: gl.constexpr,
    SCALED: gl.constexpr,  # K and V are FP8
    SINKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = gl.float16 if SCALED else q.dtype.element_ty
    PANELS: gl.constexpr = (D + PANEL - 1) // PANEL
    kv_head = gl.program_id(0)
    record = tiles + gl.program_id(1) * RECORD
    queries = gl.load(record + 2)
    if (
        queries == 0
    ):  # always looked at: without it would be another kernel, which takes seconds to compile
        return
    table_row = table + gl.load(record).to(gl.int64) * TABLE_STRIDE
    first_token = gl.load(record + 1)
    kv_len = gl.load(record + 3)
    flat = gl.load(record + 4)
    first_step = gl.load(record + 5) // N
    end = gl.load(record + 6)

    keys_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PANEL], dtype)
    q_tile = gl.allocate_shared_memory(
        dtype, [2 * PANELS, HALF, PANEL], gl.NVMMASharedLayout.get_default_for([HALF, PANEL], dtype)
    )
    k = gl.allocate_shared_memory(dtype, [STAGES * PANELS, N, PANEL], keys_layout)
    v = gl.allocate_shared_memory(dtype, [STAGES * PANELS, N, PANEL], keys_layout)
    k_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_there.index(i), count=1)
        mbarrier.init(v_there.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)  # both halves have read it
        mbarrier.init(v_free.index(i), count=2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    d = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout)), 0)
    for half in gl.static_range(2):
        at = flat + half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        place = (first_token + at // GROUP) * Q_TOKEN_STRIDE + (kv_head * GROUP + at % GROUP) * D
        real = gl.expand_dims(at // GROUP < queries, 1)
        for panel in gl.static_range(PANELS):
            values = gl.load(
                q + gl.expand_dims(place, 1) + panel * PANEL + d,
                mask=real & (panel * PANEL + d < D),
                other=0.0,
            )
            if SCALED:
                values = gl.minimum(gl.maximum(values.to(gl.float32), -LARGEST), LARGEST)
            q_tile.index(half * PANELS + panel).store(values.to(dtype))
    factor = 1.0
    if SCALED:
        small_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, PANEL], gl.float8e4nv)
        small = gl.allocate_shared_memory(gl.float8e4nv, [2 * PANELS, N, PANEL], small_layout)
        small_there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(small_there.index(i), count=1)
        scale *= gl.load(k_scale)
        factor = gl.load(v_scale)
    fence_async_shared()
    debug_barrier()
    ring = (k, v, k_there, v_there, k_free, v_free)
    row = (first_token, queries, kv_len, gl.load(record + 10))
    parts = (
        gl.load(record + 7),
        gl.load(record + 8),
        gl.load(record + 9),
        partial,
        partial_lse,
        arrived,
    )
    scales = (scale, factor)
    if SCALED:
        loads = (k_cache, v_cache, small, small_there)
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        0,
                        q_tile,
                        out,
                        ring,
                        row,
                        parts,
                        kv_head,
                        flat,
                        first_step,
                        end,
                        scales,
                        sinks,
                        SINKS,
                        HEADS,
                        GROUP,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
                (
                    _compute,
                    (
                        1,
                        q_tile,
                        out,
                        ring,
                        row,
                        parts,
                        kv_head,
                        flat + HALF,
                        first_step,
                        end,
                        scales,
                        sinks,
                        SINKS,
                        HEADS,
                        GROUP,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
                (
                    load_small,
                    (
                        loads,
                        ring,
                        table_row,
                        kv_head,
                        first_step,
                        end,
                        PAGE_ROWS,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
            ],
            [4, 4],
            [COMPUTING_BESIDE_WIDENING, WIDENING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        0,
                        q_tile,
                        out,
                        ring,
                        row,
                        parts,
                        kv_head,
                        flat,
                        first_step,
                        end,
                        scales,
                        sinks,
                        SINKS,
                        HEADS,
                        GROUP,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
                (
                    _compute,
                    (
                        1,
                        q_tile,
                        out,
                        ring,
                        row,
                        parts,
                        kv_head,
                        flat + HALF,
                        first_step,
                        end,
                        scales,
                        sinks,
                        SINKS,
                        HEADS,
                        GROUP,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
                (
                    load,
                    (
                        k_cache,
                        v_cache,
                        ring,
                        table_row,
                        kv_head,
                        first_step,
                        end,
                        PAGE_ROWS,
                        D,
                        N,
                        STAGES,
                        BLOCK_SIZE,
                    ),
                ),
            ],
            [4, 1],
            [COMPUTING_REGISTERS, LOADING_REGISTERS],
        )


@gluon.jit
def _compute(
    half: gl.constexpr,
    q_tile,
    out,
    ring,
    row,
    parts,
    kv_head,
    flat,  # the first of the half
    first_step,
    end,
    scales,  # that of scores, log2(e) and K's in it, and V's
    sinks,
    SINKS: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Compute half a tile, over some or all of its keys."""
    scale, v_factor = scales
    part, count, first_slot, partial, partial_lse, arrived = parts
    first_token, queries, kv_len, of_all = row
    k, v, k_there, v_there, k_free, v_free = ring
    dtype: gl.constexpr = k.dtype
    PANELS: gl.constexpr = (D + PANEL - 1) // PANEL
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PANEL, 16]
    )
    of_query: gl.constexpr = gl.SliceLayout(1, scores_layout)
    position = kv_len - queries + (flat + gl.arange(0, HALF, layout=of_query)) // GROUP
    last_seen = gl.maximum(position, of_all)
    key = gl.arange(0, N, layout=gl.SliceLayout(0, scores_layout))
    first_key = first_step * N
    steps = gl.cdiv(end, N) - first_step
    # steps whose keys every query sees
    all_seen = (gl.maximum(kv_len - queries + flat // GROUP, of_all) + 1) // N - first_step
    top = gl.full([HALF], float("-inf"), gl.float32, layout=of_query)
    total = gl.zeros([HALF], gl.float32, layout=of_query)
    if SINKS:  # the first part counts them
        counted = ((flat + gl.arange(0, HALF, layout=of_query)) // GROUP < queries) & (part == 0)
        head = kv_head * GROUP + (flat + gl.arange(0, HALF, layout=of_query)) % GROUP
        sink = gl.load(sinks + head, mask=counted, other=0.0).to(gl.float32) * LOG2_E
        top = gl.maximum(gl.where(counted, sink, top), HIDDEN)
        total = gl.where(counted, 1.0, total)
    left = gl.zeros([HALF, PANEL], gl.float32, layout=out_layout)
    right = gl.zeros([HALF, PANEL], gl.float32, layout=out_layout)

    mbarrier.wait(k_there.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_scores(q_tile, k, half, 0, scores_layout, PANELS, N)])
    mbarrier.arrive(k_free.index(0), count=1)
    if all_seen <= 0:
        scores = gl.where(
            gl.expand_dims(first_key + key, 0) <= gl.expand_dims(last_seen, 1), scores, HIDDEN
        )
    weights, top, total, shrink = _softmax(scores, top, total, scale)
    p = gl.convert_layout(
        weights.to(dtype), gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    )
    for step in range(1, steps):
        stage = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(k_there.index(stage), step // STAGES & 1)
        scores = _scores(q_tile, k, half, stage, scores_layout, PANELS, N)
        mbarrier.wait(v_there.index(before), (step - 1) // STAGES & 1)
        left, right = _add(p, v, before, left, right, PANELS)
        scores = warpgroup_mma_wait(PANELS, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        if step >= all_seen:
            scores = gl.where(
                gl.expand_dims(first_key + step * N + key, 0) <= gl.expand_dims(last_seen, 1),
                scores,
                HIDDEN,
            )
        weights, top, total, shrink = _softmax(scores, top, total, scale)
        rounded = weights.to(dtype)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(v_free.index(before), count=1)
        p = gl.convert_layout(
            rounded, gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
        )
        factor = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, out_layout)), 1)
        left *= factor
        right *= factor
    stage = (steps - 1) % STAGES
    mbarrier.wait(v_there.index(stage), (steps - 1) // STAGES & 1)
    if kv_len % BLOCK_SIZE > 0:
        _clear(v, stage, kv_len - first_key - (steps - 1) * N, PANELS, N)
    left, right = _add(p, v, stage, left, right, PANELS)
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    share = gl.expand_dims(gl.convert_layout(v_factor / total, gl.SliceLayout(1, out_layout)), 1)
    left *= share
    right *= share
    ends_last = count == 1
    if count > 1:
        apart: gl.constexpr = HEADS // GROUP * 2  # slots of halves, from one part to the next
        first = first_slot * apart + kv_head * 2 + half
        _store_part(
            partial, partial_lse, first + part * apart, left, right, top + gl.log2(total), D, PANELS
        )
        debug_barrier()  # all threads must have stored before one signals
        ends_last = gl.atomic_add(arrived + first, 1, sem="acq_rel") == count - 1
        if ends_last:
            gl.store(arrived + first, 0)
            left, right = _merge(partial, partial_lse, first, apart, count, out_layout, D, PANELS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = flat + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    d = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout)), 0)
    place = gl.expand_dims(
        ((first_token + at // GROUP) * HEADS + kv_head * GROUP + at % GROUP) * D, 1
    )
    real = gl.expand_dims((at // GROUP < queries) & ends_last, 1)
    gl.store(
        out + place + d,
        gl.convert_layout(left.to(out.dtype.element_ty), layout),
        mask=real & (d < D),
    )
    if PANELS == 2:
        gl.store(
            out + place + PANEL + d,
            gl.convert_layout(right.to(out.dtype.element_ty), layout),
            mask=real & (PANEL + d < D),
        )


@gluon.jit
def _scores(
    q_tile,
    k,
    half: gl.constexpr,
    stage,
    layout: gl.constexpr,
    PANELS: gl.constexpr,
    N: gl.constexpr,
):
    """Start q k [HALF, N]."""
    scores = gl.zeros([HALF, N], gl.float32, layout=layout)
    for panel in gl.static_range(PANELS):
        keys = k.index(stage * PANELS + panel).permute((1, 0))
        scores = warpgroup_mma(
            q_tile.index(half * PANELS + panel), keys, scores, use_acc=panel > 0, is_async=True
        )
    return scores


@gluon.jit
def _add(p, v, stage, left, right, PANELS: gl.constexpr):
    """Start adding p v to the panels of the output."""
    left = warpgroup_mma(p, v.index(stage * PANELS), left, is_async=True)
    if PANELS == 2:
        right = warpgroup_mma(p, v.index(stage * PANELS + 1), right, is_async=True)
    return left, right


@gluon.jit
def _softmax(scores, top, total, scale):
    """Return the weights of a step's keys, the running maximum and sum, and the factor for earlier
    sums."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(new_top, 1))
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _clear(v, stage, first, PANELS: gl.constexpr, N: gl.constexpr):
    """Zero V from row `first` on, which is unwritten: its weight is 0, but 0 times its content may
    be NaN. Both groups write the same."""
    atom_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ATOM, PANEL], v.dtype)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    atoms = v._reinterpret(v.dtype, [v.shape[0] * (N // ATOM), ATOM, PANEL], atom_layout)
    row = gl.expand_dims(gl.arange(0, ATOM, layout=gl.SliceLayout(1, layout)), 1)
    for i in range(first // ATOM, N // ATOM):
        for panel in gl.static_range(PANELS):
            atom = atoms.index((stage * PANELS + panel) * (N // ATOM) + i)
            values = atom.load(layout)
            atom.store(gl.where(i * ATOM + row < first, values, gl.zeros_like(values)))
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _store_part(
    partial, partial_lse, slot, left, right, lse, D: gl.constexpr, PANELS: gl.constexpr
):
    layout: gl.constexpr = left.type.layout
    gl.store(partial_lse + slot * HALF + gl.arange(0, HALF, layout=lse.type.layout), lse)
    query = slot * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    d = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout)), 0)
    at = partial + gl.expand_dims(query * D, 1) + d
    gl.store(at, left, mask=d < D)
    if PANELS == 2:
        gl.store(at + PANEL, right, mask=PANEL + d < D)


@gluon.jit
def _merge(
    partial,
    partial_lse,
    first,
    apart: gl.constexpr,
    count,
    layout: gl.constexpr,
    D: gl.constexpr,
    PANELS: gl.constexpr,
):
    """Merge the parts of a half tile."""
    d = gl.expand_dims(gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout)), 0)
    top = gl.full([HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, layout))
    total = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, layout))
    left = gl.zeros([HALF, PANEL], gl.float32, layout=layout)
    right = gl.zeros([HALF, PANEL], gl.float32, layout=layout)
    for part in range(count):
        query = (first + part * apart) * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        lse = gl.load(partial_lse + query)
        new_top = gl.maximum(top, lse)
        shrink = gl.exp2(top - new_top)
        weight = gl.exp2(lse - new_top)
        top = new_top
        total = total * shrink + weight
        at = partial + gl.expand_dims(query * D, 1) + d
        left = left * gl.expand_dims(shrink, 1) + gl.load(
            at, mask=d < D, other=0.0
        ) * gl.expand_dims(weight, 1)
        if PANELS == 2:
            right = right * gl.expand_dims(shrink, 1) + gl.load(
                at + PANEL, mask=PANEL + d < D, other=0.0
            ) * gl.expand_dims(weight, 1)
    return left / gl.expand_dims(total, 1), right / gl.expand_dims(total, 1)


def describe(pages: torch.Tensor, block_size: int, keys: int) -> TensorDescriptor:
    """Describe K or V of a layer, [pages, kv_heads, block_size, head_size] of which each page is
    contiguous, and whole rows of `head_size` numbers from the next, for steps of `keys` keys."""
    size = pages.shape[-1]
    rows = pages.as_strided((len(pages) * pages.stride(0) // size, size), (size, 1))
    return in_tiles(rows, min(block_size, keys), PANEL.value)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    described: Sequence[TensorDescriptor],
    table: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: int,
    parts: TileParts,
    scale: float,
    scales: KVScales | None = None,
    sinks: torch.Tensor | None = None,
    *,
    kind: LayerKind,
    tiling: PrefillTiling,
) -> None:
    """q [tokens, heads, head_size], each token's heads in one piece, and `out`, contiguous; K and V
    `describe`d; with `scales` they are FP8; sinks [heads]; the rest as for `prefill_hopper`."""
    _, heads, size = q.shape
    kv_heads = kind.shape.kv_heads
    launch(prefill_hopper, (kv_heads, num_tiles))(
        q,
        out,
        *described,
        table,
        tiles,
        parts.values,
        parts.lse,
        parts.arrived,
        *((table, table) if scales is None else (scales.k, scales.v)),  # unused without scales
        table if sinks is None else sinks,
        scale,
        Q_TOKEN_STRIDE=q.stride(0),
        TABLE_STRIDE=table.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        D=size,
        N=tiling.keys,
        STAGES=tiling.stages,
        BLOCK_SIZE=kind.block_size,
        PAGE_ROWS=kind.page_rows,
        RECORD=TILE_NUMBERS,
        SCALED=scales is not None,
        SINKS=sinks is not None,
        num_warps=tiling.warps,
    )


def check(kind: LayerKind, limits: Limits, tiling: PrefillTiling) -> None:
    """Raise unless it computes correct values here: Gluon may change between versions of Triton.
    Launched like layers of that kind, so that the compiled kernel is reused."""
    shape, block_size, page_rows = kind
    device = limits.device
    size = shape.head_size
    heads = shape.heads
    kv_heads = shape.kv_heads
    columns = limits.blocks(block_size)
    kv_len = min(1250, columns * block_size - 1)
    queries = min(70, kv_len)
    blocks = kv_len // block_size + 1
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (queries, heads + 2 * kv_heads, size),
        (blocks, page_rows, size),
        (blocks, page_rows, size),
    )
    qkv, k, v = (
        torch.randn(sizes, generator=generator).to(device, limits.dtype) for sizes in shapes
    )
    q = qkv[:, :heads]
    table = torch.zeros((1, columns), dtype=torch.int32, device=device)
    used = table[0, :blocks] = torch.randperm(blocks, generator=generator).to(table)
    scales = (
        None
        if limits.cache_dtype == limits.dtype
        else KVScales(*(torch.tensor(number, device=device) for number in (0.5, 0.25)))
    )
    k_factor, v_factor = (1.0, 1.0) if scales is None else (0.5, 0.25)
    k, v = (
        of_pages.to(limits.cache_dtype)[:, : kv_heads * block_size].view(
            blocks, kv_heads, block_size, size
        )
        for of_pages in (k, v)
    )
    for cache_of in (k, v):
        # unwritten
        as_bytes(cache_of)[used[-1], :, kv_len % block_size :] = as_bytes(
            cache_of.new_tensor(torch.nan)
        )
    rows = StepRows.of(np.array([queries], np.int32), np.array([kv_len], np.int32))
    split = Split(tiling.keys, most=5)
    tiles = prefill_tiles(rows, shape.group, tiling.queries, split)
    parts = TileParts.room(split.most, kv_heads, tiling.queries, size, device)
    sinks = torch.linspace(-1, 3, heads).to(device, limits.dtype) if shape.sinks else None
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    scale = size**-0.5
    described = [describe(cache_of, block_size, tiling.keys) for cache_of in (k, v)]
    on_device = torch.from_numpy(tiles).to(device)
    log2_scale = scale * math.log2(math.e)
    attend(
        q,
        out,
        described,
        table,
        on_device,
        len(tiles),
        parts,
        log2_scale,
        scales,
        sinks,
        kind=kind,
        tiling=tiling,
    )
    # [keys, kv_heads, size]
    wide_k, wide_v = (
        cache_of.float()[used].transpose(1, 2).flatten(0, 1)[:kv_len] * factor
        for cache_of, factor in ((k, k_factor), (v, v_factor))
    )
    seen = torch.ones(queries, kv_len, dtype=torch.bool, device=device).tril(kv_len - queries)
    scores = (
        torch.einsum("qhgd,khd->hgqk", q.float().view(queries, kv_heads, shape.group, size), wide_k)
        * scale
    )
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.float().view(kv_heads, shape.group, 1, 1).expand(-1, -1, queries, -1)],
            -1,
        )
    expected = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1)[..., :kv_len], wide_v).flatten(
        1, 2
    )
    if not torch.allclose(out.float(), expected, atol=CLOSE):
        raise DovetailError("it computes wrong numbers")
