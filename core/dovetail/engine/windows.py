"""Windows: a deterministic request decodes as usual, and from time to time one canonical step
computes again what it decoded (`RowSampling.deterministic`).

A canonical step computes up to `Capacity.deterministic_window` consecutive tokens of a row for the
price of one. So the request opens a *window* at its last known token, and decodes in it like any
other request, by a row without the mark. These tokens are *provisional*: to everyone else they are
in flight. The row then gets the mark (`Batch.changes`, or another row takes its place), computes
from the last known token up to a multiple of the window's size, and checks the provisional tokens
as drafts. Noise is a function of seed and position, so nearly all are right; what follows the first
wrong one is decoded again.

      size 8, 11 tokens known    position   8  9  10 11 12 13 14 15 16
      5 provisional tokens                        ^  p  p  p  p  p        from the logits at ^, ...
      the check computes                         [10 11 12 13 14 15]      6 tokens are delivered

A step with a check awaits those before it, and is awaited, since drafts are checked while no other
step is in flight; and most of its time doesn't depend on the number of windows. So few steps check
the windows of all. A window is *ready* once its provisional tokens reach a multiple of the size, or
one of them could be the last of its request. A step checks all that are ready

- if no open window gains by waiting, since all are ready: a request alone is checked at once;
- or the first of them has waited as many steps as a window has tokens;
- or a request that ended waits for its check, while another one lacks memory or a slot.

Until then the request decodes on past the multiple. The check ends at it, and if all is right, the
window goes on with the tokens beyond, whose K and V are kept. So no request waits for the windows
of others, in whatever phase they are, and none computes more. The alternatives: to drop the tokens
beyond the multiple, which costs 16 steps of each window; or to let requests pause at the multiple
until they are in phase, which costs 16 steps once, but whenever requests arrive, either these make
others wait, or there are checks for each phase. What waits is a request whose end isn't certain yet:
it has nothing to decode, and drains like one whose last token is in flight. If the check doesn't
come to its end, the rest waits likewise.

Nothing provisional leaves this module. `LiveRequest.output` has final tokens only, so clients,
watchers, penalties of canonical rows, policies and KV-cache managers see no others. K and V of
tokens from `LiveRequest.settled` on are provisional: they are neither published to the prefix
cache or to tiers, nor do they release blocks of a sliding window. The check overwrites them.

A row changes its mark only while none of its tokens is in flight. The loop therefore awaits the
results of a step before a check, and of one which computes a token canonically (`awaits_results`).
If the policy then passes the request over, or there is no room for drafts, its next token is
computed canonically, and the drafts that it confirms are kept; so they are over a preemption.

A check fails as a whole if the numbers of one token break: attention spreads NaN in a slab, also to
tokens before it. How many tokens a request gets before it fails mustn't depend on where its checks
began. So nothing of a failed check counts: the request is preempted, and then goes on without
windows, token by token, up to the one that fails.

Requests with a grammar decode canonically step by step, since its masks need the tokens before; so
do all if the executor offers no windows. A drafter proposes nothing for requests in windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dovetail.api.executor import Batch, RowChanges
from dovetail.api.sampler import RowSampling
from dovetail.engine.books import Books, RowAllocator
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import ALL_TOKENS, LiveRequest, Status
from dovetail.engine.step_times import DraftRoom

LEAST_SHARE = 2  # drafts may reserve one part in so many of a step's tokens


class Window:
    """The provisional tokens of one request: of its open window, or drafts to be checked."""

    __slots__ = (
        "_base",
        "awaits_check",
        "failed",
        "final",
        "full",
        "has_end",
        "is_open",
        "keeps_kv",
        "provisional",
        "tokens",
    )

    def __init__(self, sampling: RowSampling) -> None:
        self.final = sampling
        self.provisional = replace(
            sampling, deterministic=False, logprobs=None, prompt_logprobs=None
        )
        self.is_open = False  # its request has a row without the mark
        self.full = 0  # number of computed tokens at which a check can cover the whole window
        self.has_end = False  # the token after `tokens` could be the last of its request
        # The next token is canonical, even if there are no drafts: it could be the last one, or the
        # row has failed to sample it
        self.awaits_check = False
        self.failed = False  # a check has: it doesn't open again
        self.keeps_kv = False  # the request still has K and V of `tokens`, but of the last one
        self.tokens: list[int] = []  # they follow the first `_base` tokens of the output
        self._base = 0

    @property
    def goes_on(self) -> bool:
        """True if the request can decode on after `tokens`, once a check has come to them."""
        return self.keeps_kv and not self.awaits_check

    def open(self, request: LiveRequest, size: int) -> None:
        """Let the request decode provisionally after its last known token, which the step being
        planned computes; or if there are `tokens` beyond that, after these: `drafts` was called.
        Its row must change."""
        self.is_open = True
        request.settled = request.num_computed - request.granted
        request.num_computed += len(self.tokens)
        request.in_flight += len(self.tokens)
        request.ahead = self.tokens
        request.sampling = self.provisional
        self.full = (request.settled // size + 1) * size - 1

    def close(self, request: LiveRequest) -> None:
        """Take back the collected tokens, which are drafts from now on, up to one that ends the
        request or that its row failed to sample (-1). The row must change."""
        self.is_open = False
        self.awaits_check = True
        self.keeps_kv = True
        request.in_flight -= len(self.tokens)
        request.num_computed = min(request.num_computed, request.settled)
        request.settled = ALL_TOKENS
        request.ahead = ()
        request.sampling = self.final
        self.has_end = len(self.tokens) >= request.output_left - 1
        if min(self.tokens, default=0) >= 0 and request.stop_ids.isdisjoint(self.tokens):
            return
        end = next(index for index, token in enumerate(self.tokens) if is_end(request, token))
        del self.tokens[end:]
        self.has_end = True

    def fail(self, request: LiveRequest) -> None:
        """Take back the step that has checked drafts of `request`, which must be preempted: blocks
        that have left a sliding window since are lost."""
        self.failed = True
        self.has_end = False
        self.tokens.clear()
        request.in_flight -= 1
        request.num_computed -= 1

    def drafts(self, request: LiveRequest) -> Sequence[int]:
        """Return the drafts that may follow the known tokens of `request`."""
        come = request.output[self._base :].tolist()
        if self.tokens[: len(come)] == come:
            del self.tokens[: len(come)]
        else:
            self.tokens.clear()
            self.has_end = False
        if come:
            self.awaits_check = self.has_end
        self._base = len(request.output)
        return self.tokens


class Windows(EngineFeature):
    """Opens, checks and closes the windows of an engine. Other requests cost no call."""

    def __init__(self, size: int, *, changes_rows: bool = False) -> None:
        """`size`: in tokens, `Capacity.deterministic_window`. `changes_rows`: of `Capacity`."""
        self._size = size
        self._changes_rows = changes_rows
        # requests whose row has another mark in the next batch
        self._changed: dict[LiveRequest, None] = {}
        self.asked_by = self._decodes_in_windows
        self._of: dict[LiveRequest, Window] = {}  # of the known requests that decode in windows
        self._open: dict[LiveRequest, None] = {}
        # Of these, the ones that can be checked: the number of steps before they could, ascending
        self._ready: dict[LiveRequest, int] = {}
        self._ended: dict[LiveRequest, None] = {}  # of these, those to drain by the next planning
        # those that change their row, or check drafts, before they decode on
        self._due: dict[LiveRequest, None] = {}
        # those whose check has failed, to be preempted by the next planning
        self.failed: dict[LiveRequest, None] = {}
        self._steps = 0  # submitted ones
        self._is_urgent = False  # those that are ready are checked now

    def _decodes_in_windows(self, request: LiveRequest) -> bool | None:
        may = self._size > 1 and request.sampling.deterministic
        return True if may and request.constraint is None and request.pooling is None else None

    @property
    def awaits_results(self) -> bool:
        """True if the next step must be planned while none is in flight."""
        return bool(self._due) or self._checks_ready(len(self._open))

    def _checks_ready(self, windows: int) -> bool:
        """Return True if the next step checks those that are ready of so many `windows`."""
        ready = self._ready
        return bool(ready) and (
            self._is_urgent
            or len(ready) == windows
            or self._steps - next(iter(ready.values())) >= self._size
        )

    def held_back(self, request: LiveRequest) -> int:
        """Return the number of tokens that the open window of `request` has, 0 without one."""
        window = self._of.get(request)
        return len(window.tokens) if window is not None and window.is_open else 0

    # Planning

    def settle(self, books: Books, budget: int, *, in_flight: bool) -> int:
        """Before a step is planned, let requests drain that have nothing to decode. Unless others
        are `in_flight`, close the windows that it checks. Returns how many tokens of its `budget`
        their drafts should get."""
        for request in self._ended:
            books.drain(request)
        self._ended.clear()
        if in_flight:
            return 0
        for request in self.failed:
            books.wake(request)
        due = [request for request in self._due if not self._of[request].failed]
        self._due.clear()
        to_check = [self._settle(each, books) for each in due if not self._waits(each, books)]
        wanted = sum(to_check)
        if self._checks_ready(len(self._open) + to_check.count(0)):
            for request in [*self._ready]:
                most = most_drafts(budget, books)
                if wanted >= max(1, most):  # one at least, even if a step has a single token
                    break
                wanted += self._settle(request, books)
        self._is_urgent = self._is_urgent and bool(self._ready)
        return min(wanted, most_drafts(budget, books))

    def _waits(self, request: LiveRequest, books: Books) -> bool:
        """Let a request that ended beyond its check wait for that of others, in a window of its
        tokens there. Returns False if it hasn't, or if these must be checked now."""
        window = self._of[request]
        if window.is_open or self._is_urgent:
            return False
        window.drafts(request)
        if not window.has_end or not window.keeps_kv or request.num_computed % self._size:
            return False
        window.open(request, self._size)
        self._open[request] = None
        self._ready[request] = self._steps
        books.drain(request)
        return True

    def _settle(self, request: LiveRequest, books: Books) -> int:
        """Close the request's window, if it is open. Returns the number of drafts to check."""
        window = self._of[request]
        if window.is_open:
            self._close(request)
            self._change_row(request, books.rows)
            books.wake(request)
        return len(self._to_check(window, request, request.num_computed))

    def _to_check(self, window: Window, request: LiveRequest, start: int) -> Sequence[int]:
        """Return the drafts that are checked with the token of number `start`, its last known."""
        drafts = window.drafts(request)
        into = start % self._size
        return () if window.goes_on and not into else drafts[: self._size - 1 - into]

    def drafts(self, step: DraftRoom, rows: RowAllocator) -> dict[LiveRequest, Sequence[int]]:
        """Return the drafts that a planned step checks, with nothing in flight, and open the
        windows of other decodes."""
        chosen: dict[LiveRequest, Sequence[int]] = {}
        if not self._of:
            return chosen
        for request in step.granted:
            window = self._of.get(request)
            if window is None or window.is_open or window.failed or request in step.prefilled:
                continue
            start = request.num_computed - request.granted
            most = min(self._size - 1 - start % self._size, request.output_left)
            if drafts := self._to_check(window, request, start)[:most]:
                room = max(0, min(len(drafts), step.spare_tokens))
                if count := step.give_room(request, room):
                    chosen[request] = drafts[:count]
            elif most > 0 and not window.awaits_check:
                del window.tokens[step.hold(request, len(window.tokens)) :]
                window.open(request, self._size)
                self._open[request] = None
                self._change_row(request, rows)
        return chosen

    def _change_row(self, request: LiveRequest, rows: RowAllocator) -> None:
        """Let the next batch give the request's row its mark, or replace the row."""
        if self._changes_rows:
            self._changed[request] = None
        else:
            rows.release(request)

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        if not self._changed:
            return batch
        others = {*added}
        changed = [each for each in self._changed if each.row >= 0 and each not in others]
        self._changed.clear()
        if not changed:
            return batch
        changes = RowChanges(
            rows=np.array([each.row for each in changed], np.int32),
            known=np.array([each.num_tokens for each in changed], np.int32),
            counts=np.array([len(each.ahead) for each in changed], np.int32),
            token_ids=np.array([token for each in changed for token in each.ahead], np.int32),
            computed=np.array([each.num_computed - each.granted for each in changed], np.int32),
            samplings=tuple([each.sampling for each in changed]),
        )
        return replace(batch, changes=changes)

    def give_way(self) -> bool:
        """Note that nothing runs, so that windows that are ready must be checked, and those that
        lack memory must close, which may release some. Returns True if there are any."""
        lacking = [request for request in self._open if request.num_computed >= request.capacity]
        self._due.update(dict.fromkeys(lacking))
        self._is_urgent = bool(self._ready)
        return bool(lacking or self._ready)

    # A step

    def submitted_step(self, flight: InFlightStep, step: DraftRoom) -> None:
        """Note which tokens of a submitted step are provisional, and which requests await it."""
        if not self._of:
            return
        self._steps += 1
        provisional = set[LiveRequest]()
        for request in flight.requests:
            window = self._of.get(request)
            if window is None:
                continue
            if window.is_open:
                provisional.add(request)
                if request.output_left <= 1:
                    self._end(request)
                elif request.num_computed >= window.full:
                    self._ready.setdefault(request, self._steps)
            elif request.in_flight > 0 and request.output_left > 0:
                self._due[request] = None
        flight.provisional = provisional
        if len(flight.batch.removed):
            lost = [r for r in self._open if r.row < 0 and r.status is Status.RUNNING]
            self._due.update(dict.fromkeys(lost))
        if step.is_short and any(r.status is Status.DRAINING for r in self._ready):
            self._is_urgent = True

    def _end(self, request: LiveRequest) -> None:
        """Note that no further token of its window may be decoded."""
        self._ready.setdefault(request, self._steps)
        self._ended[request] = None

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        for request, token in flight.provisional_tokens():
            if request.status is Status.FINISHED:
                continue
            window = self._of[request]
            if request in flight.drafts:
                window.fail(request)
                self.failed[request] = None
                continue
            if not window.is_open:  # it was preempted meanwhile
                request.in_flight -= 1
                continue
            window.tokens.append(token)
            if is_end(request, token):
                self._end(request)

    # Requests

    def arrived(self, request: LiveRequest) -> None:
        self._of[request] = Window(request.sampling)
        request.has_window = True

    def left(self, request: LiveRequest) -> None:
        self._due.pop(request, None)
        self.failed.pop(request, None)
        window = self._of[request]
        if window.is_open:
            self._close(request)
        window.keeps_kv = False

    def removed(self, request: LiveRequest) -> None:
        del self._of[request]
        self._changed.pop(request, None)

    def _close(self, request: LiveRequest) -> None:
        del self._open[request]
        self._ready.pop(request, None)
        self._ended.pop(request, None)
        self._of[request].close(request)


def most_drafts(budget: int, books: Books) -> int:
    """Return how many tokens of a step's `budget` drafts may reserve: all but one for each running
    request, unless these are very many."""
    return max(budget // LEAST_SHARE, budget - len(books.running))


def is_end(request: LiveRequest, token: int) -> bool:
    """Return True if no provisional token may follow this one: it would end the request, or its row
    failed (-1)."""
    return token < 0 or token in request.stop_ids
