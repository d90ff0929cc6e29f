# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Rules and penalties on a GPU: logits are copied to float32 memory, and those with rules, or of
tokens in the history, are changed there.

Two kernels. `_widen` copies, tile by tile. `_change` takes a row a program, and looks at single
logits alone: those of its rules, and of the tokens that it has seen. A row's lines take turns,
since they share its scratch memory. There is no state but the history. A token that was seen
several times must be changed once, by how often it was generated, so tokens are counted in the very
places of their logits:

    every seen token     swaps its logit for MARK: the first one gets the logit, keeps it, and will change it
    every generated one  adds 1
    those that keep one  read the count above MARK, and write the changed logit

That costs a few dozen bytes a token, where attention has just read some thousands. Twins:
`rules.apply` and `penalties`, to the bit: so divisions are exact, and no product is fused with a
sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.api.sampler import Lines, RowHistory
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail_samplers import rules

WORDS = tl.constexpr(12)  # of 4 bytes in a row's record: see `device_changes.RECORD`
ADDRESS = tl.constexpr(0)  # the first of 8 bytes
NUM_BIASES, NUM_ALLOWED, NUM_STOPS, NUM_BAD_WORDS, NUM_PREFIX_TOKENS, MIN_TOKENS = (
    tl.constexpr(word) for word in range(2, 8)
)
REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(word) for word in range(8, 11))
NEVER = tl.constexpr(rules.NEVER)
LEAST = tl.constexpr(rules.LEAST)
MARK = tl.constexpr(0x7FA5A5A5)  # a NaN that no arithmetic produces, even with some millions added

TILE = 4096
CHUNK = 1024
WIDEN_WARPS = 4
CHANGE_WARPS = 8


@triton.jit
def _widen(
    logits,
    changed,  # [any, vocab] float32
    rows,  # [n] int64
    ints,  # the records of all rows
    finite,  # [n, WIDTH] int32: number of a tile's logits that aren't -inf
    max_rows,
    vocab,
    stride,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a tile; rows with allowed tokens are left to `_change`."""
    let_next_begin(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(rows + place)
    if row >= max_rows:
        return
    token = tile * TILE + tl.arange(0, TILE)
    exists = token < vocab
    x = tl.load(logits + place * stride + token, mask=exists, other=NEVER).to(tl.float32)
    tl.store(finite + place * WIDTH + tile, tl.sum((x != NEVER).to(tl.int32), 0))
    all_allowed = tl.load(ints + row * WORDS + NUM_ALLOWED) < 0
    tl.store(changed + place * vocab + token, tl.where(all_allowed, x, NEVER), mask=exists)


@triton.jit
def _change(
    logits,
    changed,
    rows,
    ahead,  # [n] int32
    ints,  # the records of all rows, three views of the same bytes
    floats,
    longs,
    token_ids,  # [max_rows + 1, width] int32
    num_tokens,
    prompt_lens,
    kept,  # like token_ids: the logits kept by tokens
    finite,
    max_rows,
    vocab,
    stride,
    width,
    tiles,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    row = tl.load(rows + place)
    # another program takes all lines of the row
    others = tl.load(rows + place - 1, mask=place > 0, other=-1) == row
    if (row >= max_rows) | others:
        return
    record = ints + row * WORDS
    seen = token_ids + row * width
    prompt_len = tl.load(prompt_lens + row)
    packed = tl.load(longs + row * (WORDS // 2) + ADDRESS)
    repetition = tl.load(floats + row * WORDS + REPETITION)
    presence = tl.load(floats + row * WORDS + PRESENCE)
    frequency = tl.load(floats + row * WORDS + FREQUENCY)
    next_row = row
    while next_row == row:
        known = tl.load(num_tokens + row) + tl.load(ahead + place)
        own = changed + place * vocab
        if packed != 0:
            tile = tl.arange(0, WIDTH)
            num_finite = tl.sum(
                tl.load(finite + place * WIDTH + tile, mask=tile < tiles, other=0), 0
            )
            rules = packed.to(tl.pointer_type(tl.int32))
            _apply_rules(
                logits + place * stride,
                own,
                record,
                rules,
                seen,
                known,
                known - prompt_len,
                num_finite,
                CHUNK,
            )
        if (repetition != 1) | (presence != 0) | (frequency != 0):
            tl.debug_barrier()
            _penalise(
                own,
                seen,
                known,
                prompt_len,
                kept + row * width,
                vocab,
                repetition,
                presence,
                frequency,
                CHUNK,
            )
        tl.debug_barrier()  # the next line reuses the scratch memory
        place += 1
        next_row = tl.load(rows + place, mask=place < n, other=-1)


@triton.jit
def _apply_rules(
    logits, changed, record, packed, seen, known, generated, num_finite, CHUNK: tl.constexpr
):
    """`packed`: see `rules.RowRules`."""
    num_biases = tl.load(record + NUM_BIASES)
    num_allowed = tl.load(record + NUM_ALLOWED)
    num_stops = tl.load(record + NUM_STOPS)
    num_words = tl.load(record + NUM_BAD_WORDS)
    allowed = packed + 2 * num_biases
    banned = allowed + tl.maximum(num_allowed, 0)
    before = banned + num_stops + num_words
    missed = before + num_stops + num_words

    for start in range(0, num_allowed, CHUNK):
        i = start + tl.arange(0, CHUNK)
        token = tl.load(allowed + i, mask=i < num_allowed, other=0)
        x = tl.load(logits + token, mask=i < num_allowed, other=0.0).to(tl.float32)
        tl.store(changed + token, tl.where(x < LEAST, LEAST, x), mask=i < num_allowed)
    if num_allowed >= 0:
        num_finite = num_allowed
    tl.debug_barrier()  # logits are read by other threads than those that wrote them
    for start in range(0, num_biases, CHUNK):
        i = start + tl.arange(0, CHUNK)
        token = tl.load(packed + i, mask=i < num_biases, other=0)
        old = tl.load(changed + token, mask=i < num_biases, other=NEVER)
        new = tl.load(logits + token, mask=i < num_biases, other=NEVER).to(tl.float32)
        new += tl.load(packed + num_biases + i, mask=i < num_biases, other=0).to(
            tl.float32, bitcast=True
        )
        if num_allowed >= 0:
            new = tl.where(old == NEVER, NEVER, tl.where(new < LEAST, LEAST, new))
        num_finite += tl.sum((new != NEVER).to(tl.int32) - (old != NEVER).to(tl.int32), 0)
        tl.store(changed + token, new, mask=i < num_biases)
    if num_stops + num_words > 0:
        tl.debug_barrier()
        _note_misses(record, missed, missed + num_words, seen, known, num_words, CHUNK)
        _ban(
            record,
            changed,
            banned,
            before,
            missed,
            num_stops,
            num_stops + num_words,
            generated,
            num_finite,
            CHUNK,
        )


@triton.jit
def _note_misses(record, missed, tokens, seen, known, num_words, CHUNK: tl.constexpr):
    """Mark the bad words whose prefixes differ from the end of the row."""
    for start in range(0, num_words, CHUNK):
        i = start + tl.arange(0, CHUNK)
        tl.store(missed + i, 0, mask=i < num_words)
    tl.debug_barrier()
    count = tl.load(record + NUM_PREFIX_TOKENS)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        inside = i < count
        position = known - tl.load(tokens + 2 * count + i, mask=inside, other=0)
        differs = tl.load(seen + position, mask=inside & (position >= 0), other=-1) != tl.load(
            tokens + i, mask=inside, other=-1
        )
        tl.store(
            missed + tl.load(tokens + count + i, mask=inside, other=0), 1, mask=inside & differs
        )
    tl.debug_barrier()


@triton.jit
def _ban(
    record,
    changed,
    banned,
    before,
    missed,
    num_stops,
    count,
    generated,
    num_finite,
    CHUNK: tl.constexpr,
):
    """Apply the bans, and lift them all if they leave none of the `num_finite` tokens."""
    too_few = generated < tl.load(record + MIN_TOKENS)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        old = tl.load(
            changed + tl.load(banned + i, mask=i < count, other=0), mask=i < count, other=0.0
        )
        tl.store(before + i, old.to(tl.int32, bitcast=True), mask=i < count)
    tl.debug_barrier()
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        inside = i < count
        is_word = inside & (i >= num_stops)
        holds = tl.where(
            is_word, tl.load(missed + i - num_stops, mask=is_word, other=1) == 0, inside & too_few
        )
        # NaN stays
        new = tl.load(before + i, mask=inside, other=0).to(tl.float32, bitcast=True) + NEVER
        place = changed.to(tl.pointer_type(tl.int32), bitcast=True) + tl.load(
            banned + i, mask=inside, other=0
        )
        old = tl.atomic_xchg(place, new.to(tl.int32, bitcast=True), mask=holds).to(
            tl.float32, bitcast=True
        )
        # a token may be banned twice
        num_finite -= tl.sum((holds & (new == NEVER) & (old != NEVER)).to(tl.int32), 0)
    tl.debug_barrier()
    if num_finite == 0:
        for start in range(0, count, CHUNK):
            i = start + tl.arange(0, CHUNK)
            old = tl.load(before + i, mask=i < count, other=0).to(tl.float32, bitcast=True)
            tl.store(changed + tl.load(banned + i, mask=i < count, other=0), old, mask=i < count)


@triton.jit
def _penalise(
    changed,
    seen,
    known,
    prompt_len,
    kept,
    vocab,
    repetition,
    presence,
    frequency,
    CHUNK: tl.constexpr,
):
    counters = changed.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(0, known, CHUNK):
        i = start + tl.arange(0, CHUNK)
        token = tl.load(seen + i, mask=i < known, other=0)
        tl.store(
            kept + i,
            tl.atomic_xchg(counters + token, MARK, mask=(i < known) & (token < vocab)),
            mask=i < known,
        )
    tl.debug_barrier()
    for start in range(prompt_len, known, CHUNK):
        i = start + tl.arange(0, CHUNK)
        token = tl.load(seen + i, mask=i < known, other=0)
        tl.atomic_add(counters + token, 1, mask=(i < known) & (token < vocab))
    tl.debug_barrier()
    for start in range(0, known, CHUNK):
        i = start + tl.arange(0, CHUNK)
        token = tl.load(seen + i, mask=i < known, other=0)
        old = tl.load(kept + i, mask=i < known, other=MARK)
        keeps = (i < known) & (token < vocab) & (old != MARK)
        count = (tl.load(counters + token, mask=keeps, other=MARK, cache_modifier=".cg") - MARK).to(
            tl.float32
        )
        x = old.to(tl.float32, bitcast=True)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x -= count * frequency + tl.minimum(count, 1.0) * presence
        tl.store(changed + token, x, mask=keeps)


def change(
    logits: torch.Tensor,
    lines: Lines,
    records: torch.Tensor,
    history: RowHistory,
    changed: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """logits [n, vocab] of any float dtype, and lines [n], of rows of `records` [max_rows + 1, 12]
    int32 (`device_changes`) and of the history -> the same with rules and penalties, the first n
    rows of `changed` [n or more, vocab] float32. `kept` [max_rows + 1, width] int32, as wide as the
    history, is overwritten. The last record's row is padding: what it gets is undefined. Only
    enqueues work."""
    n, vocab = logits.shape
    if n == 0:
        return changed[:0]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tiles = triton.cdiv(vocab, TILE)
    width = max(4, triton.next_power_of_2(tiles))
    finite = torch.empty((n, width), dtype=torch.int32, device=logits.device)
    shape = len(records) - 1, vocab, logits.stride(0)
    cut = {"WIDTH": width, **pdl_options(logits.device)}
    launch(_widen, (n, tiles))(
        logits,
        changed,
        lines.rows,
        records,
        finite,
        *shape,
        TILE=TILE,
        num_warps=WIDEN_WARPS,
        **cut,
    )
    launch(_change, (n,))(
        logits,
        changed,
        lines.rows,
        lines.ahead,
        records,
        records.view(torch.float32),
        records.view(torch.int64),
        history.token_ids,
        history.num_tokens,
        history.prompt_lens,
        kept,
        finite,
        *shape,
        history.token_ids.shape[1],
        tiles,
        CHUNK=CHUNK,
        num_warps=CHANGE_WARPS,
        enable_fp_fusion=False,
        **cut,
    )
    return changed[:n]
