# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803, N806 (constants are upper case)
"""Loading part of `triton_prefill_hopper`: separate warps load K and V into a ring of stages, from
which others compute.

One warp loads 16-bit K and V directly into the ring, and a barrier signals their arrival. FP8 is
loaded to a separate buffer, one step at a time, from which four warps copy it to the ring as
float16, in pieces that need few registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import debug_barrier  # see triton_prefill_hopper

PANEL = gl.constexpr(64)  # numbers of a head: the 128 bytes that matrix units read at once
WIDENED_ROWS = gl.constexpr(32)  # at once: 16 numbers a thread


@gluon.jit
def load(
    k_cache,
    v_cache,
    ring,
    table_row,
    kv_head,
    first_step,
    end,
    PAGE_ROWS: gl.constexpr,  # rows of K from one page to the next
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    k, v, k_there, v_there, k_free, v_free = ring
    head = kv_head * BLOCK_SIZE
    last = (end - 1) // BLOCK_SIZE
    for step in range(gl.cdiv(end, N) - first_step):
        stage = step % STAGES
        again = (step // STAGES & 1) ^ 1
        token = (first_step + step) * N
        mbarrier.wait(k_free.index(stage), again)
        _load_keys(
            k_cache,
            k,
            k_there.index(stage),
            stage,
            table_row,
            token,
            last,
            head,
            PAGE_ROWS,
            D,
            N,
            BLOCK_SIZE,
        )
        mbarrier.wait(v_free.index(stage), again)
        _load_keys(
            v_cache,
            v,
            v_there.index(stage),
            stage,
            table_row,
            token,
            last,
            head,
            PAGE_ROWS,
            D,
            N,
            BLOCK_SIZE,
        )


@gluon.jit
def load_small(
    # descriptors of K and V, where they come to, [K's and V's panels, N, PANEL] of FP8, and what
    # says that they are there
    loads,
    ring,
    table_row,
    kv_head,
    first_step,
    end,
    PAGE_ROWS: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Like `load`, through `small`: while a step is widened, the next one's K and V are being
    loaded."""
    k_cache, v_cache, small, small_there = loads
    k, v, k_there, v_there, k_free, v_free = ring
    head = kv_head * BLOCK_SIZE
    last = (end - 1) // BLOCK_SIZE
    steps = gl.cdiv(end, N) - first_step
    first = first_step * N
    _load_keys(
        k_cache,
        small,
        small_there.index(0),
        0,
        table_row,
        first,
        last,
        head,
        PAGE_ROWS,
        D,
        N,
        BLOCK_SIZE,
    )
    _load_keys(
        v_cache,
        small,
        small_there.index(1),
        1,
        table_row,
        first,
        last,
        head,
        PAGE_ROWS,
        D,
        N,
        BLOCK_SIZE,
    )
    for step in range(steps):
        stage = step % STAGES
        again = (step // STAGES & 1) ^ 1
        following = first + (step + 1) * N
        mbarrier.wait(small_there.index(0), step & 1)
        mbarrier.wait(k_free.index(stage), again)
        _widen(small, 0, k, stage, D, N)
        if step + 1 < steps:
            _load_keys(
                k_cache,
                small,
                small_there.index(0),
                0,
                table_row,
                following,
                last,
                head,
                PAGE_ROWS,
                D,
                N,
                BLOCK_SIZE,
            )
        mbarrier.arrive(k_there.index(stage), count=1)
        mbarrier.wait(small_there.index(1), step & 1)
        mbarrier.wait(v_free.index(stage), again)
        _widen(small, 1, v, stage, D, N)
        if step + 1 < steps:
            _load_keys(
                v_cache,
                small,
                small_there.index(1),
                1,
                table_row,
                following,
                last,
                head,
                PAGE_ROWS,
                D,
                N,
                BLOCK_SIZE,
            )
        mbarrier.arrive(v_there.index(stage), count=1)


@gluon.jit
def _widen(small, which: gl.constexpr, keys, stage, D: gl.constexpr, N: gl.constexpr):
    """Copy N tokens to a float16 stage of the ring. On return, all threads are done, and matrix
    units may read it."""
    PANELS: gl.constexpr = (D + PANEL - 1) // PANEL
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    for panel in gl.static_range(PANELS):
        for i in gl.static_range(N // WIDENED_ROWS):
            numbers = (
                small.index(which * PANELS + panel)
                .slice(i * WIDENED_ROWS, WIDENED_ROWS)
                .load(layout)
            )
            keys.index(stage * PANELS + panel).slice(i * WIDENED_ROWS, WIDENED_ROWS).store(
                numbers.to(keys.dtype)
            )
    fence_async_shared()
    debug_barrier()


@gluon.jit
def _load_keys(
    cache_of, keys, there, stage, table_row, first, last, head, PAGE_ROWS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, BLOCK_SIZE: gl.constexpr
):  # fmt: skip
    """Load N tokens from `first` on; past the row's last block, that block is repeated."""
    PANELS: gl.constexpr = (D + PANEL - 1) // PANEL
    AT_ONCE: gl.constexpr = min(BLOCK_SIZE, N)
    mbarrier.expect(there, PANELS * N * PANEL * (keys.dtype.primitive_bitwidth // 8))
    for i in gl.static_range(N // AT_ONCE):
        token = first + i * AT_ONCE
        row = (
            gl.load(table_row + gl.minimum(token // BLOCK_SIZE, last)) * PAGE_ROWS
            + head
            + token % BLOCK_SIZE
        )
        for panel in gl.static_range(PANELS):
            piece = keys.index(stage * PANELS + panel).slice(i * AT_ONCE, AT_ONCE)
            tma.async_copy_global_to_shared(cache_of, [row, panel * PANEL], there, piece)
