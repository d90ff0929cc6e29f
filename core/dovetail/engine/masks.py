"""Matchers of a step's requests: its tokens, accepted together, and the masks of a late step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.executor import Masks
from dovetail.api.grammar import GrammarBackend, Matcher
from dovetail.end_reason import EndReason
from dovetail.engine.constraint import Constraint, failure
from dovetail.engine.finish import Finish
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest, Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIKELY = 64  # words in which nearly every mask has a token: only the others are looked through
DEAD_END = Finish(
    EndReason.ERROR, "its grammar allows no token that the model has: nothing can come next"
)


def accept_tokens(flight: InFlightStep) -> None:
    """Let the matchers of a step's requests accept its tokens together, as far as their backend
    can, before each request is given its token. Not for drafts, which may be cut."""
    if flight.result.counts is not None or flight.result.failed:
        return
    constraints: list[Constraint] = []
    matchers: list[Matcher] = []
    tokens: list[int] = []
    ended = Status.FINISHED
    for request, token in zip(flight.requests, flight.result.token_ids.tolist(), strict=True):
        constraint = request.constraint
        if constraint is None or token < 0 or token in request.stop_ids:
            continue
        if request.status is not ended and (matcher := constraint.matcher) is not None:
            constraints.append(constraint)
            matchers.append(matcher)
            tokens.append(token)
    backend = constraints[0].backend if constraints else None
    if backend is None or type(backend).accept_many is GrammarBackend.accept_many:
        return
    try:
        accepted: Iterable[Finish | bool] = backend.accept_many(matchers, tokens)
    except Exception as error:  # which of them have accepted their tokens isn't known
        accepted = repeat(failure(error), len(matchers))
    for constraint, end in zip(constraints, accepted, strict=True):
        constraint.saw(end)


class MaskFill:
    """Masks of a step's constrained lines, being filled. `finish` must be called: until then the
    backend may write to their memory."""

    def __init__(
        self,
        flight: InFlightStep,
        vocab_size: int,
        memory: Callable[[int, int], NDArray[np.uint32]],
    ) -> None:
        """`memory` is called with the number of masks and of words in each."""
        self._flight = flight
        self._vocab_size = vocab_size
        self._at: list[int] = []  # the line of each mask
        self._owners: list[LiveRequest] = []
        self._first: list[int] = []  # of each matcher, the mask of its row's first line
        self._matchers: list[Matcher] = []
        self._forced: dict[int, int] = {}  # line -> the only token that is allowed
        self._backend: GrammarBackend | None = None
        self._find_lines()
        self._words = memory(len(self._at), -(-vocab_size // 32))
        self._wait: Callable[[], None] | None = None

    def _find_lines(self) -> None:
        line = 0
        flight = self._flight
        for request, lines in zip(flight.requests, flight.batch.num_lines.tolist(), strict=True):
            constraint = request.constraint
            if not lines or constraint is None or request.status is Status.FINISHED:
                pass
            elif (matcher := constraint.matcher) is not None:
                self._first.append(len(self._at))
                self._at += range(line, line + lines)
                self._owners += [request] * lines
                self._matchers.append(matcher)
                self._backend = constraint.backend
            elif (token := constraint.forced) is not None:  # it has no drafts
                self._forced[line] = token
            line += lines

    def start(self) -> bool:
        """Let the masks be filled while the engine goes on. Returns False if that isn't
        possible."""
        if self._backend is None or len(self._first) < len(self._at):
            return False
        with suppress(Exception):  # `finish` finds out whose it is
            self._wait = self._backend.start_fill(self._matchers, self._words)
        return self._wait is not None

    def finish(self) -> tuple[Masks, dict[LiveRequest, Finish]]:
        """Return the masks, and the end of each request that can't continue.

        A matcher that fails, or allows no token, ends only its own request; after some drafts, that
        is noted in `flight.cuts`.
        """
        at, words, owners = self._at, self._words, self._owners
        failed: dict[LiveRequest, Finish] = {}
        if self._backend is not None:
            firsts = [owners[place] for place in self._first]
            failed = _fill_first(
                self._backend, self._wait, self._matchers, firsts, words, self._first
            )
        drafts = self._flight.drafts
        for place, matcher in zip(self._first, self._matchers, strict=True) if drafts else ():
            owner = owners[place]
            if drafts.get(owner) and owner not in failed:
                ahead = words[place + 1 : place + 1 + len(drafts[owner])]
                _fill_drafts(self._flight, owner, matcher, ahead, self._vocab_size, failed)
        if failed:
            good = [place for place, owner in enumerate(owners) if owner not in failed]
            at = [at[place] for place in good]
            words = words[good]
        if self._forced:
            at, words = _with_forced(at, words, self._forced)
        return Masks(np.array(at, np.int32), words), failed


def _fill_first(
    backend: GrammarBackend,
    wait: Callable[[], None] | None,
    matchers: Sequence[Matcher],
    owners: Sequence[LiveRequest],
    words: NDArray[np.uint32],
    places: Sequence[int],
) -> dict[LiveRequest, Finish]:
    """Fill the masks of the lines without drafts before them, at `places` of `words`, or `wait` for
    them; return why some requests can't go on."""
    failed: dict[LiveRequest, Finish] = {}
    lines = (
        words if len(places) == len(words) else np.empty((len(places), words.shape[1]), np.uint32)
    )
    try:
        if wait is None:
            backend.fill_many(matchers, lines)
        else:
            wait()
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
