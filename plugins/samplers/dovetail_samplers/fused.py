# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Draws a token for each row on a GPU, with any parameters: logits are read once, without sorting
or synchronizing with the host.

Two kernels. `_survey` goes over tiles of the vocabulary, all at once; `_choose` makes each row's
choice of what that left:

    row is        a tile leaves                        the choice
    greedy        its largest logit                    the tile with the largest is read again, and the token found there
    random        that, and its race's winning time    the tile whose time is the least is read again, and its race run again
    filtered      that, the sum of its weights, and    the groups whose largest may be kept are read again (with top-k k of them, so some
                  the largest of each GROUP of ids     thousand logits); where the row ends is searched there, and the race run there

A filter's end is searched as the largest value whose equals and betters count k (top-k) or weigh p
(top-p): floats are turned to integers in the same order, and each round cuts the range of integers
to a fifth. The largest of groups are searched first, which bounds it from below. Only a filter that
keeps most of a flat distribution reads the whole row in each round.

A race is won by the smallest time, noise / weight; the noise is `noise`'s. Weights are of the
logits less the largest that the program knows, so that they neither overflow nor vanish where it
matters. Twin: `table.draw_plain`.

`_survey` is bound by instructions: some 33 a random row's logit, 20 of them for the noise. So no
tile looks for the id of what it found, which costs more than reading one tile a row again; and
powers and logarithms are of 2, each one instruction. The factor that this leaves in the noise
changes no race.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from dovetail.api.sampler import Lines, RowHistory
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail_samplers import noise

WORDS = tl.constexpr(6)  # of 4 bytes in a row's record: see `table.RECORD`
TEMPERATURE, TOP_K, TOP_P, MIN_P = (tl.constexpr(word) for word in range(4))
SEED_STATE = tl.constexpr(2)  # the third of 8 bytes
NONE = tl.constexpr(1e30)  # from here on: no top-p
LEAST = tl.constexpr(torch.finfo(torch.float32).min)
MOST = tl.constexpr(torch.finfo(torch.float32).max)
MANY = tl.constexpr(1 << 30)  # tokens
HOTTEST = tl.constexpr(1e37)  # a temperature with a normal inverse

MIX_32_0, MIX_32_1, MIX_32_2 = (tl.constexpr(multiplier) for multiplier in noise.MIX_32)
MIX_64_0, MIX_64_1 = (tl.constexpr(multiplier) for multiplier in noise.MIX_64)
GOLDEN = tl.constexpr(noise.GOLDEN)
HALF_STEP = tl.constexpr(2.0**-32)
STEP = tl.constexpr(noise.BELOW_ONE * 2.0**-31)

LOG2_E = tl.constexpr(math.log2(math.e))
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
SMALL = tl.constexpr(1 / 8)  # below it, -log2(1 - u) / u is this polynomial, within 5e-7 of it
SERIES_0, SERIES_1, SERIES_2, SERIES_3 = (
    tl.constexpr(c) for c in (1.4426944, 0.72152215, 0.47403677, 0.44462561)
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes into which the work is split; powers of two. They don't affect results."""

    tile: int = 2048  # ids per program of `_survey`
    rows: int = 4  # maximum rows per such program, which loads the ids' hashes once
    programs: int = 4096  # to fill a GPU evenly: with fewer, each has a single row
    group: int = 64  # ids per group whose largest logit is kept
    chunk: int = 2048  # logits that `_choose` processes at once
    pivots: int = 4  # pivots per round of a search
    survey_warps: int = 2
    choose_warps: int = 8


SIZES = Sizes()
SPARE_BITS = {
    torch.float32: 0,
    torch.float16: 13,
    torch.bfloat16: 16,
}  # of a float32 converted from this dtype: always 0


# ---- noise


@triton.jit
def stream_keys(state, position):
    """`noise.stream_keys` of one row: two uint32."""
    x = state.to(tl.uint64, bitcast=True) + position.to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 30)) * MIX_64_0
    x = (x ^ (x >> 27)) * MIX_64_1
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def noise_bits(first, second, hashes):
    """`noise.noise_bits`: int32 like `hashes`."""
    x = hashes.to(tl.uint32, bitcast=True) ^ first
    x = second + x * MIX_32_0
    x = (x ^ (x >> 11)) * MIX_32_1
    x = ((x ^ (x >> 15)) * MIX_32_2).to(tl.int32, bitcast=True)
    return (x ^ (x >> 14)) & 0x7FFFFFFF


@triton.jit
def exponentials(first, second, hashes):
    """`noise.exponentials` divided by ln 2, -log2(1 - u), relative error below 2e-6: float32 like
    `hashes`.

    The logarithm's error, and that of 1 - u, are absolute: small u, which decide most races, go
    without.
    """
    u = HALF_STEP + STEP * noise_bits(first, second, hashes).to(tl.float32)
    small = (((SERIES_3 * u + SERIES_2) * u + SERIES_1) * u + SERIES_0) * u
    return tl.where(u < SMALL, small, -_log2(1.0 - u))


@triton.jit
def _log2(x):
    """Return log2 of positive x within 2^-22, in one instruction, where `tl.log2`, which gets the
    last bits right, takes 25."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def _keys_of(row, ahead, longs, num_tokens, prompt_lens):
    position = tl.load(num_tokens + row) + ahead - tl.load(prompt_lens + row)
    return stream_keys(tl.load(longs + row * (WORDS // 2) + SEED_STATE), position)


# ---- all rows: one pass over the logits


@triton.jit(do_not_specialize=["each", "n", "max_rows"])
def _survey(
    logits,
    rows,  # [n] int64
    ahead,  # [n] int32
    floats,  # the records of all rows, three views of the same bytes
    ints,
    longs,
    num_tokens,
    prompt_lens,
    hashes,
    tops,  # [n, width]: each tile's largest logit
    # [n, width]: its race's winning time, or the sum of its weights, where the weight of its
    # largest logit is 1
    found,
    group_tops,  # [n, groups]
    each,  # rows of a program
    n,
    max_rows,
    vocab,
    stride,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,  # of what the tiles leave, in memory
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    start = tl.program_id(0) * each
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    exists = token < vocab
    for i in range(each):
        place = start + i
        row = tl.load(rows + place, mask=place < n, other=max_rows)
        if row < max_rows:
            x = tl.load(
                logits + place.to(tl.int64) * stride + token, mask=exists, other=float("-inf")
            ).to(tl.float32)
            temperature = tl.load(floats + row * WORDS + TEMPERATURE)
            top = tl.max(x, 0)
            at = place * WIDTH + tile
            tl.store(tops + at, top)
            if temperature > 0:
                top = _finite(top)
                sharpness = _sharpness(temperature)
                if _is_filtered(row, floats, ints, vocab):
                    tl.store(found + at, tl.sum(_weights(x, top, sharpness), 0))
                    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
                    count = (vocab + GROUP - 1) // GROUP
                    in_group = tl.reshape(x, (TILE // GROUP, GROUP))
                    tl.store(
                        group_tops + place * count + groups,
                        tl.max(in_group, 1),
                        mask=groups < count,
                    )
                else:
                    key_1, key_2 = _keys_of(
                        row, tl.load(ahead + place), longs, num_tokens, prompt_lens
                    )
                    times = _times(
                        x,
                        top,
                        sharpness,
                        key_1,
                        key_2,
                        tl.load(hashes + token, mask=exists, other=0),
                    )
                    tl.store(found + at, tl.min(times, 0))


@triton.jit
def _times(x, top, sharpness, key_1, key_2, hashes):
    """Each logit's time in the race, multiplied by the weight that `top` has; infinite for a logit
    of -inf, 0 for one of +inf. `top` is finite."""
    return exponentials(key_1, key_2, hashes) * tl.exp2((top - x) * sharpness)


@triton.jit
def _weights(x, top, sharpness):
    """Each logit's weight, relative to that of `top`, which is the largest or, if that is infinite,
    `_finite`."""
    return tl.exp2(tl.minimum((x - top) * sharpness, 0.0))


@triton.jit
def _finite(top):
    """Return the largest logit, or the finite number next to it: a difference of infinities would
    be NaN, which wins no race on a GPU."""
    return tl.minimum(tl.maximum(top, LEAST), MOST)


@triton.jit
def _sharpness(temperature):
    """Return the factor that turns a logit into the base-2 logarithm of its weight."""
    return LOG2_E / tl.minimum(temperature, HOTTEST)


@triton.jit
def _is_filtered(row, floats, ints, vocab):
    record = floats + row * WORDS
    return (
        (tl.load(ints + row * WORDS + TOP_K) < vocab)
        | (tl.load(record + TOP_P) < NONE)
        | (tl.load(record + MIN_P) > 0)
    )


# ---- each row: drawing


@triton.jit(do_not_specialize=["max_rows", "tiles"])
def _choose(
    logits,
    rows,
    ahead,
    floats,
    ints,
    longs,
    num_tokens,
    prompt_lens,
    hashes,
    tops,
    found,
    group_tops,
    hits,  # [n, groups] int32: groups to read again
    token_ids,  # [n] int64
    max_rows,
    vocab,
    stride,
    tiles,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if row >= max_rows:
        tl.store(token_ids + place, 0)
        return
    logits += place * stride
    tile = tl.arange(0, WIDTH)
    at = place * WIDTH + tile
    exists = tile < tiles
    top_of = tl.load(tops + at, mask=exists, other=float("-inf"))
    top, chosen = tl.max(top_of, 0, return_indices=True)
    top = _finite(top)
    temperature = tl.load(floats + row * WORDS + TEMPERATURE)
    sharpness = _sharpness(temperature)
    found_in = tl.load(found + at, mask=exists, other=0.0)
    if (temperature > 0) & _is_filtered(row, floats, ints, vocab):
        total = tl.sum(found_in * _weights(top_of, top, sharpness), 0)
        groups = (vocab + GROUP - 1) // GROUP
        token = _choose_filtered(
            logits, row, tl.load(ahead + place), floats, ints, longs, num_tokens, prompt_lens, hashes,
            group_tops + place * groups, hits + place * groups, top, total, sharpness, groups, vocab, GROUP, CHUNK, PIVOTS, SPARE,
        )  # fmt: skip
    else:
        if temperature > 0:
            chosen = tl.argmin(
                tl.where(exists, found_in * tl.exp2((top - top_of) * sharpness), float("inf")), 0
            )
        token = chosen * TILE + tl.arange(0, TILE)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        times = -x
        if temperature > 0:
            key_1, key_2 = _keys_of(row, tl.load(ahead + place), longs, num_tokens, prompt_lens)
            times = _times(
                x,
                top,
                sharpness,
                key_1,
                key_2,
                tl.load(hashes + token, mask=token < vocab, other=0),
            )
        token = chosen * TILE + tl.argmin(times, 0)
    # NaN may win at an invalid index
    tl.store(token_ids + place, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def _choose_filtered(
    logits,  # of this line, like the following
    row,
    ahead,
    floats,
    ints,
    longs,
    num_tokens,
    prompt_lens,
    hashes,
    group_tops,
    hits,
    top,  # the largest logit, finite
    total,  # weight of all tokens
    sharpness,
    groups,
    vocab,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Return the token of a row with a filter."""
    top_k = tl.load(ints + row * WORDS + TOP_K)
    top_p = tl.load(floats + row * WORDS + TOP_P)
    min_p = tl.load(floats + row * WORDS + MIN_P)
    has_k = top_k < vocab
    has_p = top_p < NONE
    lowest = _order(tl.full((), float("-inf"), tl.float32), SPARE)
    highest = _order(top, SPARE)
    k = top_k.to(tl.float32)  # exact up to 2^24 tokens

    # Groups that may hold a kept token
    bound = lowest.to(tl.int64)
    if has_k:
        bound = _reaching(
            group_tops,
            hits,
            groups,
            groups,
            k,
            bound,
            highest,
            top,
            sharpness,
            False,
            0,
            CHUNK,
            PIVOTS,
            SPARE,
        )
    elif has_p:
        bound = _reaching(
            group_tops,
            hits,
            groups,
            groups,
            top_p * total,
            bound,
            highest,
            top,
            sharpness,
            True,
            0,
            CHUNK,
            PIVOTS,
            SPARE,
        )
    least = tl.where(has_k | has_p, 0.0, min_p)
    count = _list_hits(group_tops, hits, groups, bound, least, top, sharpness, CHUNK, SPARE)
    tl.debug_barrier()  # the list is read by other threads than those that wrote it

    # The cut: all above `end` are kept, and `room` of its ties
    end = bound
    room = tl.full((), MANY, tl.int32)
    if has_k:
        end = _reaching(
            logits,
            hits,
            count,
            vocab,
            k,
            bound,
            highest,
            top,
            sharpness,
            False,
            GROUP,
            CHUNK,
            PIVOTS,
            SPARE,
        )
        above, mass, weight = _above(
            logits, hits, count, vocab, end, top, sharpness, GROUP, CHUNK, SPARE
        )
        room = top_k - above
        total = mass + room.to(tl.float32) * weight
    if has_p:
        target = top_p * total
        before = end
        end = _reaching(
            logits,
            hits,
            count,
            vocab,
            target,
            end,
            highest,
            top,
            sharpness,
            True,
            GROUP,
            CHUNK,
            PIVOTS,
            SPARE,
        )
        above, mass, weight = _above(
            logits, hits, count, vocab, end, top, sharpness, GROUP, CHUNK, SPARE
        )
        needed = tl.where(weight > 0, tl.ceil((target - mass) / weight), MANY)
        needed = tl.minimum(tl.maximum(needed, 1.0), MANY).to(tl.int32)
        room = tl.where(end == before, tl.minimum(room, needed), needed)

    end_key = end.to(tl.int32)
    key_1, key_2 = _keys_of(row, ahead, longs, num_tokens, prompt_lens)
    best = tl.full((), float("inf"), tl.float32)
    winner = tl.full((), 0, tl.int32)
    tied_before = tl.full((), 0, tl.int32)
    for start in range(0, count * GROUP, CHUNK):
        token, x, key, inside = _read(logits, hits, start, count, vocab, GROUP, CHUNK, SPARE)
        tied = (inside & (key == end_key)).to(tl.int32)
        rank = tied_before + tl.cumsum(tied, 0) - tied  # chunks, and the ids within, ascend
        tied_before += tl.sum(tied, 0)
        kept = (
            inside
            & ((key > end_key) | ((key == end_key) & (rank < room)))
            & (_weights(x, top, sharpness) >= min_p)
        )
        times = _times(x, top, sharpness, key_1, key_2, tl.load(hashes + token, mask=kept, other=0))
        least, first = tl.min(tl.where(kept, times, float("inf")), 0, return_indices=True)
        here = tl.sum(tl.where(tl.arange(0, CHUNK) == first, token, 0), 0)
        winner = tl.where(least < best, here, winner)
        best = tl.minimum(least, best)
    return winner


@triton.jit
def _order(x, SPARE: tl.constexpr):
    """float32 -> int32 in the same order, without the bits that are the same in all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE


@triton.jit
def _read(
    values, hits, start, count, limit, GROUP: tl.constexpr, CHUNK: tl.constexpr, SPARE: tl.constexpr
):
    """Places start, … of what lies in the first `count` groups of the list `hits` (GROUP 0: of
    `values` themselves): index, value, the value's place in the order, and whether it exists. An
    index is below `limit`."""
    place = start + tl.arange(0, CHUNK)
    if GROUP == 0:
        index = place
        inside = place < limit
    else:
        inside = place < count * GROUP
        index = tl.load(hits + place // GROUP, mask=inside, other=0) * GROUP + place % GROUP
        inside &= index < limit
    x = tl.load(values + index, mask=inside, other=float("-inf")).to(tl.float32)
    return index, x, _order(x, SPARE), inside


@triton.jit
def _reaching(
    values,
    hits,
    count,
    limit,
    target,
    low,
    highest,
    top,
    sharpness,
    WEIGHED: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The largest place in the order, above `low`, such that those at it or above it reach
    `target`: their number does, or (WEIGHED) their weight. `low` if there is none. What is
    searched: see `_read`."""
    width = highest.to(tl.int64) - low + 1
    while width > 1:
        step = (width + PIVOTS) // (PIVOTS + 1)
        pivots = low + step * (1 + tl.arange(0, PIVOTS))
        clipped = tl.minimum(pivots, highest).to(tl.int32)
        sums = tl.zeros((PIVOTS,), tl.float32)
        for start in range(0, count * (GROUP if GROUP > 0 else 1), CHUNK):
            _, x, key, inside = _read(values, hits, start, count, limit, GROUP, CHUNK, SPARE)
            amount = _weights(x, top, sharpness) if WEIGHED else inside.to(tl.float32)
            sums += tl.sum(tl.where(key[:, None] >= clipped[None, :], amount[:, None], 0.0), 0)
        # the lowest so many
        passed = tl.sum(((sums >= target) & (pivots <= highest)).to(tl.int64), 0)
        low += passed * step
        width = tl.minimum(step, width - passed * step)
    return low


@triton.jit
def _list_hits(
    group_tops, hits, groups, bound, least, top, sharpness, CHUNK: tl.constexpr, SPARE: tl.constexpr
):
    """Write the groups whose largest is at least at `bound`, with a weight of at least `least`, to
    `hits`, in ascending order; return their number."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, groups, CHUNK):
        group, x, key, inside = _read(group_tops, hits, start, groups, groups, 0, CHUNK, SPARE)
        hit = (inside & (key >= bound.to(tl.int32)) & (_weights(x, top, sharpness) >= least)).to(
            tl.int32
        )
        tl.store(hits + count + tl.cumsum(hit, 0) - hit, group, mask=hit > 0)
        count += tl.sum(hit, 0)
    return count


@triton.jit
def _above(
    values,
    hits,
    count,
    limit,
    end,
    top,
    sharpness,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Return how many tokens are above `end` in the order, their total weight, and the weight of
    one token at `end`."""
    number = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    for start in range(0, count * GROUP, CHUNK):
        _, x, key, inside = _read(values, hits, start, count, limit, GROUP, CHUNK, SPARE)
        weights = _weights(x, top, sharpness)
        above = inside & (key > end.to(tl.int32))
        number += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, weights, 0.0), 0)
        weight = tl.maximum(
            weight, tl.max(tl.where(inside & (key == end.to(tl.int32)), weights, 0.0), 0)
        )
    return number, mass, weight


def draw(
    logits: torch.Tensor,
    lines: Lines,
    records: torch.Tensor,
    history: RowHistory,
    hashes: torch.Tensor,
    sizes: Sizes = SIZES,
) -> torch.Tensor:
    """logits [n, vocab] float32, float16 or bfloat16; lines [n], with rows of `records` [max_rows +
    1, 6] int32 (`table`) and of the history -> token ids [n] int64. The last record's row is
    padding: its token is 0. Only enqueues work; the scratch memory is torch's."""
    n, vocab = logits.shape
    token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return token_ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tiles = triton.cdiv(vocab, sizes.tile)
    groups = triton.cdiv(vocab, sizes.group)
    width = max(4, triton.next_power_of_2(tiles))  # at least 4, to align each plane
    tops, found = torch.empty((2, n, width), dtype=torch.float32, device=logits.device)
    group_tops = torch.empty((n, groups), dtype=torch.float32, device=logits.device)
    hits = torch.empty((n, groups), dtype=torch.int32, device=logits.device)
    floats = records.view(torch.float32)
    longs = records.view(torch.int64)
    known: tuple[Any, ...] = (
        logits,
        lines.rows,
        lines.ahead,
        floats,
        records,
        longs,
        history.num_tokens,
        history.prompt_lens,
        hashes,
        tops,
        found,
        group_tops,
    )
    shape = (len(records) - 1, vocab, logits.stride(0))
    each = max(1, min(sizes.rows, n * tiles // sizes.programs))
    cut = {"TILE": sizes.tile, "WIDTH": width, "GROUP": sizes.group, **pdl_options(logits.device)}
    launch(_survey, (triton.cdiv(n, each), tiles))(
        *known, each, n, *shape, num_warps=sizes.survey_warps, **cut
    )
    launch(_choose, (n,))(
        *known,
        hits,
        token_ids,
        *shape,
        tiles,
        CHUNK=sizes.chunk,
        PIVOTS=sizes.pivots,
        SPARE=SPARE_BITS[logits.dtype],
        num_warps=sizes.choose_warps,
        **cut,
    )
    return token_ids
