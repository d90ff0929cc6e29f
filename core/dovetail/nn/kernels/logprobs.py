# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Log-probabilities and ranks of tokens and of the k most likely ones, reading the logits once,
without sorting or copying.

Two kernels. `_survey` processes tiles of the vocabulary in parallel: each computes its largest
logit, the sum of exponentials, the number of logits larger than the token's own, and the largest of
each GROUP of ids. `_choose` merges these, one program per row, and selects the most likely tokens
one by one: the next is in the group with the largest remaining logit, and only this group is read
again. Twin: `dovetail.nn.logprobs`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
# sort keys: of NaN, and after all numbers
HIGHEST = tl.constexpr(2**31 - 1)
NOTHING = tl.constexpr(-(2**31))
TILE = 4096  # ids per program of `_survey`
SURVEY_WARPS = 4
CHOOSE_WARPS = 8
MOST_GROUPS = 4096  # per program of `_choose`


@triton.jit
def _order(x):
    """Map float32 to int32 sort keys: -0 like 0, NaN above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, HIGHEST, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _alternatives(place, rows, asked, asked_stride, most):
    """Return the number of most likely tokens that the row at `place` requests; negative: not even
    its own token's log-probability."""
    wanted = most
    if rows is not None:
        wanted = tl.load(asked + tl.load(rows + place) * asked_stride)
    return wanted


@triton.jit(do_not_specialize=["most", "asked_stride"])
def _survey(
    logits,
    token_ids,  # [n] int64
    rows,  # [n] int64 or None
    asked,  # by row, int32
    asked_stride,
    most,
    tops,  # [n, WIDTH] by tile: largest logit,
    totals,  # sum of exponentials relative to it,
    likelier,  # number of logits larger than the token's
    group_tops,  # [n, groups] int32
    groups,
    vocab,
    stride,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    place = tl.program_id(0)
    tile = tl.program_id(1)
    if _alternatives(place, rows, asked, asked_stride, most) < 0:
        return
    logits += place.to(tl.int64) * stride
    token = tile * TILE + tl.arange(0, TILE)
    exists = token < vocab
    x = tl.load(logits + token, mask=exists, other=float("-inf")).to(tl.float32)
    own = tl.load(logits + tl.load(token_ids + place)).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), LEAST)
    at = place * WIDTH + tile
    tl.store(tops + at, top)
    tl.store(totals + at, tl.sum(tl.exp(x - top), 0))
    tl.store(likelier + at, tl.sum((x > own).to(tl.int32), 0))
    in_groups = tl.reshape(tl.where(exists, _order(x), NOTHING), (TILE // GROUP, GROUP))
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(group_tops + place * groups + group, tl.max(in_groups, 1), mask=group < groups)


@triton.jit(do_not_specialize=["most", "asked_stride", "tiles", "columns"])
def _choose(
    logits,
    token_ids,
    rows,
    asked,
    asked_stride,
    most,
    tops,
    totals,
    likelier,
    group_tops,
    best_ids,  # [n, columns] int64: the token itself, then the most likely
    logprobs,  # [n, columns] float32
    ranks,  # [n] int64
    columns,
    tiles,
    groups,
    vocab,
    stride,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    wait(PDL)
    place = tl.program_id(0).to(tl.int64)
    wanted = _alternatives(place, rows, asked, asked_stride, most)
    if wanted < 0:
        return
    logits = logits + place * stride
    best_ids = best_ids + place * columns
    logprobs = logprobs + place * columns
    tile = tl.arange(0, WIDTH)
    at = place * WIDTH + tile
    exists = tile < tiles
    top_of = tl.load(tops + at, mask=exists, other=LEAST)
    top = tl.max(top_of, 0)
    normalizer = top + tl.log(
        tl.sum(tl.load(totals + at, mask=exists, other=0.0) * tl.exp(top_of - top), 0)
    )
    own = tl.load(token_ids + place)
    tl.store(best_ids, own)
    tl.store(logprobs, tl.load(logits + own).to(tl.float32) - normalizer)
    tl.store(
        ranks + place, 1 + tl.sum(tl.load(likelier + at, mask=exists, other=0), 0).to(tl.int64)
    )

    group = tl.arange(0, GROUPS)
    left_in = tl.load(group_tops + place * groups + group, mask=group < groups, other=NOTHING)
    last = tl.full((), HIGHEST, tl.int32)
    last_token = tl.full((), -1, tl.int32)
    for column in range(1, tl.minimum(wanted, columns - 1) + 1):
        # the first of ties, which has the lowest ids
        _, next_in = tl.max(left_in, 0, return_indices=True)
        token = next_in * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = tl.where(token < vocab, _order(x), NOTHING)
        # exclude those already selected
        key = tl.where((key < last) | ((key == last) & (token > last_token)), key, NOTHING)
        last, at_in = tl.max(key, 0, return_indices=True)
        last_token = next_in * GROUP + at_in
        taken = token == last_token
        tl.store(best_ids + column, last_token.to(tl.int64))
        tl.store(logprobs + column, tl.sum(tl.where(taken, x, 0.0), 0) - normalizer)
        left_in = tl.where(group == next_in, tl.max(tl.where(taken, NOTHING, key), 0), left_in)


def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    most: int,
    rows: torch.Tensor | None = None,
    asked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids [n, 1 + most] int64 and log-probabilities [n, 1 + most] float32 of token_ids
    [n] int64 and of the `most` most likely tokens (at most vocab) under logits [n, vocab]; and
    ranks [n] int64.

    With `rows` [n] int64, the i-th gets only the asked[rows[i]] most likely (asked [any] int32, at
    most `most`), and nothing at all if that is negative; the rest of the outputs is undefined.
    """
    n, vocab = logits.shape
    best_ids = torch.empty((n, 1 + most), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((n, 1 + most), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n == 0:
        return best_ids, logprobs, ranks
    group = max(64, triton.next_power_of_2(triton.cdiv(vocab, MOST_GROUPS)))
    tile = max(TILE, group)
    tiles = triton.cdiv(vocab, tile)
    groups = triton.cdiv(vocab, group)
    width = max(4, triton.next_power_of_2(tiles))  # at least 4, to align each plane
    tops, totals = torch.empty((2, n, width), dtype=torch.float32, device=logits.device)
    likelier = torch.empty((n, width), dtype=torch.int32, device=logits.device)
    group_tops = torch.empty((n, groups), dtype=torch.int32, device=logits.device)
    known = (
        logits,
        token_ids,
        rows,
        asked,
        0 if asked is None else asked.stride(0),
        most,
        tops,
        totals,
        likelier,
        group_tops,
    )
    shape = {"WIDTH": width, "GROUP": group, **pdl_options(logits.device)}
    launch(_survey, (n, tiles))(
        *known, groups, vocab, logits.stride(0), TILE=tile, num_warps=SURVEY_WARPS, **shape
    )
    launch(_choose, (n,))(
        *known,
        best_ids,
        logprobs,
        ranks,
        1 + most,
        tiles,
        groups,
        vocab,
        logits.stride(0),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=CHOOSE_WARPS,
        **shape,
    )
    return best_ids, logprobs, ranks
