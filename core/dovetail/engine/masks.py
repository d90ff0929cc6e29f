"""Token masks of a late step, filled by the matchers of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.executor import Masks
from dovetail.api.grammar import GrammarBackend, Matcher
from dovetail.end_reason import EndReason
from dovetail.engine.constraint import failure
from dovetail.engine.finish import Finish
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIKELY = 64  # words in which nearly every mask has a token: only the others are looked through
DEAD_END = Finish(
    EndReason.ERROR, "its grammar allows no token that the model has: nothing can come next"
)


def fill_masks(
    flight: InFlightStep, vocab_size: int, memory: Callable[[int, int], NDArray[np.uint32]]
) -> tuple[Masks, dict[LiveRequest, Finish]]:
    """Return the masks of a step's constrained lines, and the end of each request that can't
    continue. `memory` is called with the number of masks and of words in each. A matcher that
    fails, or allows no token, ends only its own request; after some drafts, that is noted in
    `flight.cuts`."""
    at: list[int] = []  # the line of each mask
    owners: list[LiveRequest] = []
    first: list[int] = []  # of each matcher, the mask of its row's first line
    matchers: list[Matcher] = []
    forced: dict[int, int] = {}  # line -> the only token that is allowed
    line = 0
    backend = None
    for request, lines in zip(flight.requests, flight.batch.num_lines.tolist(), strict=True):
        constraint = request.constraint
        if not lines or constraint is None or request.status is Status.FINISHED:
            pass
        elif (token := constraint.forced) is not None:  # it has no drafts
            forced[line] = token
        elif (matcher := constraint.matcher) is not None:
            first.append(len(at))
            at += range(line, line + lines)
            owners += [request] * lines
            matchers.append(matcher)
            backend = constraint.backend
        line += lines
    words = memory(len(at), -(-vocab_size // 32))
    failed = (
        {}
        if backend is None
        else _fill_first(backend, matchers, [owners[place] for place in first], words, first)
    )
    for place, matcher in zip(first, matchers, strict=True):
        owner = owners[place]
        drafts = flight.drafts.get(owner, ())
        if drafts and owner not in failed:
            ahead = words[place + 1 : place + 1 + len(drafts)]
            _fill_drafts(flight, owner, matcher, ahead, vocab_size, failed)
    if failed:
        good = [place for place, owner in enumerate(owners) if owner not in failed]
        at = [at[place] for place in good]
        words = words[good]
    if forced:
        at, words = _with_forced(at, words, forced)
    return Masks(np.array(at, np.int32), words), failed


def _fill_first(
    backend: GrammarBackend,
    matchers: Sequence[Matcher],
    owners: Sequence[LiveRequest],
    words: NDArray[np.uint32],
    places: Sequence[int],
) -> dict[LiveRequest, Finish]:
    """Fill the masks of the lines without drafts before them, at `places` of `words`; return why
    some requests can't go on."""
    failed: dict[LiveRequest, Finish] = {}
    lines = (
        words if len(places) == len(words) else np.empty((len(places), words.shape[1]), np.uint32)
    )
    try:
        backend.fill_many(matchers, lines)
    except Exception:  # find out whose it is
        for line, (owner, matcher) in enumerate(zip(owners, matchers, strict=True)):
            try:
                matcher.fill(lines[line])
            except Exception as error:
                lines[line] = 0
                failed[owner] = failure(error)
    unlikely = np.flatnonzero(~lines[:, :LIKELY].any(axis=1))
    for line in unlikely[~lines[unlikely].any(axis=1)].tolist():
        failed.setdefault(owners[line], DEAD_END)
    if lines is not words:
        words[places] = lines
    return failed


def _fill_drafts(
    flight: InFlightStep,
    owner: LiveRequest,
    matcher: Matcher,
    words: NDArray[np.uint32],
    vocab_size: int,
    failed: dict[LiveRequest, Finish],
) -> None:
    """Fill the masks of the lines after the drafts of `owner`, and note where it can't go on."""
    try:
        cut = _fill_ahead(matcher, flight.drafts[owner], words, vocab_size)
    except Exception as error:  # it couldn't roll back
        failed[owner] = failure(error)
        return
    if cut is not None:
        flight.cuts[owner] = cut


def _fill_ahead(
    matcher: Matcher, drafts: Sequence[int], words: NDArray[np.uint32], vocab_size: int
) -> tuple[int, Finish] | None:
    """Fill the masks of the lines after each of `drafts`; all ones after one that the grammar
    forbids, or that completes it. If the matcher can't go on after some drafts, return how many
    tokens its row may yield, and why."""
    words.view(np.uint8)[:] = np.packbits(
        np.arange(32 * words.shape[1]) < vocab_size, bitorder="little"
    )
    mask = np.empty(words.shape[1], np.uint32)
    accepted = 0
    cut = None
    for ahead, draft in enumerate(drafts):
        try:
            if not matcher.accept(draft):
                break
        except Exception as error:
            cut = ahead + 1, failure(error)
            break
        accepted += 1
        if matcher.complete:
            break
        try:
            matcher.fill(mask)
        except Exception as error:
            cut = accepted, failure(error)
            break
        if not mask.any():
            cut = accepted, DEAD_END
            break
        words[ahead] = mask
    matcher.rollback(accepted)
    return cut


def _with_forced(
    at: list[int], words: NDArray[np.uint32], forced: dict[int, int]
) -> tuple[list[int], NDArray[np.uint32]]:
    """Return lines `at`, ascending, and their masks `words`, with one for each forced token."""
    lines = np.zeros((len(forced), words.shape[1]), np.uint32)
    tokens = np.fromiter(forced.values(), np.int64)
    lines[np.arange(len(forced)), tokens // 32] = np.uint32(1) << (tokens % 32).astype(np.uint32)
    every = [*at, *forced]
    order = sorted(range(len(every)), key=every.__getitem__)
    return [every[line] for line in order], np.concatenate((words, lines))[order]
