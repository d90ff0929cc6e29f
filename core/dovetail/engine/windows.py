"""Windows: a deterministic request decodes as usual, and from time to time one canonical step
computes again what it decoded (`RowSampling.deterministic`).

A canonical step computes up to `Capacity.deterministic_window` consecutive tokens of a row for the
price of one. So the request opens a *window* at its last known token, and decodes in it like any
other request, by a row without the mark. These tokens are *provisional*: to everyone else they are
in flight. Once the window has reached a multiple of its size, or its request could end, a row with
the mark takes the place of the other, from the last known token on, and checks the provisional
tokens as drafts. Noise is a function of seed and position, so nearly all are right; what follows
the first wrong one is decoded again.

      size 8, 11 tokens known    position   8  9  10 11 12 13 14 15 16
      5 provisional tokens                        ^  p  p  p  p  p        from the logits at ^, ...
      the check computes                         [10 11 12 13 14 15]      6 tokens are delivered

Nothing provisional leaves this module. `LiveRequest.output` has final tokens only, so clients,
watchers, penalties of canonical rows, policies and KV-cache managers see no others. K and V of
tokens from `LiveRequest.settled` on are provisional: they are neither published to the prefix
cache or to tiers, nor do they release blocks of a sliding window. The check overwrites them.

Like any drafts, those of a window are checked while no other step is in flight, and a row changes
its mark only while none of its tokens is. The loop therefore awaits the results of a step in which
a window becomes due, or which computes a token canonically (`awaits_results`). If the policy then
passes the request over, or there is no room for drafts, its next token is computed canonically, and
the drafts that it confirms are kept; so they are over a preemption.

Requests with a grammar decode canonically step by step, since its masks need the tokens before; so
do all if the executor offers no windows. A drafter proposes nothing for requests in windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.api.sampler import RowSampling
from dovetail.engine.books import RowAllocator
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import ALL_TOKENS, LiveRequest, Status
from dovetail.engine.step_times import DraftRoom

LEAST_SHARE = 2  # drafts reserve at most one part in so many of a step's tokens


class Window:
    """The provisional tokens of one request: of its open window, or drafts to be checked."""

    __slots__ = ("_base", "awaits_check", "final", "is_open", "provisional", "tokens")

    def __init__(self, sampling: RowSampling) -> None:
        self.final = sampling
        self.provisional = replace(
            sampling, deterministic=False, logprobs=None, prompt_logprobs=None
        )
        self.is_open = False  # its request has a row without the mark
        # The next token is canonical, even if there are no drafts: the first token of the window
        # may have been one that ends the request
        self.awaits_check = False
        self.tokens: list[int] = []  # they follow the first `_base` tokens of the output
        self._base = 0

    def open(self, request: LiveRequest) -> None:
        """Let the request decode provisionally from its last known token on, which the step being
        planned computes. Its row must be replaced."""
        self.is_open = True
        self.tokens.clear()
        self._base = len(request.output)
        request.settled = request.num_computed - request.granted
        request.sampling = self.provisional

    def close(self, request: LiveRequest) -> None:
        """Take back the collected tokens, which are drafts from now on, up to one that ends the
        request or that its row failed to sample (-1). The row must be replaced."""
        self.is_open = False
        self.awaits_check = True
        request.in_flight -= len(self.tokens)
        request.num_computed = min(request.num_computed, request.settled)
        request.settled = ALL_TOKENS
        request.sampling = self.final
        for index, token in enumerate(self.tokens):
            if is_end(request, token):
                del self.tokens[index:]
                break

    def drafts(self, request: LiveRequest) -> Sequence[int]:
        """Return the drafts that may follow the known tokens of `request`."""
        come = request.output[self._base :].tolist()
        if self.tokens[: len(come)] == come:
            del self.tokens[: len(come)]
        else:
            self.tokens.clear()
        if come:
            self.awaits_check = False
        self._base = len(request.output)
        return self.tokens


class Windows(EngineFeature):
    """Opens, checks and closes the windows of an engine. Other requests cost no call."""

    def __init__(self, size: int) -> None:
        """`size`: in tokens, `Capacity.deterministic_window`."""
        self._size = size
        self.asked_by = self._decodes_in_windows
        self._of: dict[LiveRequest, Window] = {}  # of the known requests that decode in windows
        self._open: dict[LiveRequest, None] = {}
        # those that change their row, or check drafts, before they decode on
        self._due: dict[LiveRequest, None] = {}

    def _decodes_in_windows(self, request: LiveRequest) -> bool | None:
        may = self._size > 1 and request.sampling.deterministic
        return True if may and request.constraint is None and request.pooling is None else None

    @property
    def awaits_results(self) -> bool:
        """True if the next step must be planned while none is in flight."""
        return bool(self._due)

    def held_back(self, request: LiveRequest) -> int:
        """Return the number of tokens that the open window of `request` has, 0 without one."""
        window = self._of.get(request)
        return len(window.tokens) if window is not None and window.is_open else 0

    # Planning, with nothing in flight

    def settle(self, rows: RowAllocator, budget: int) -> int:
        """Close the windows that are due, before a step is planned. Returns how many tokens of its
        `budget` their drafts should get."""
        due = self._due
        self._due = {}
        wanted = 0
        for request in due:
            window = self._of[request]
            if window.is_open:
                self._close(request)
                rows.release(request)
            wanted += len(window.drafts(request))
        return min(wanted, budget // LEAST_SHARE)

    def drafts(self, step: DraftRoom, rows: RowAllocator) -> dict[LiveRequest, Sequence[int]]:
        """Return the drafts that a planned step checks, and open the windows of other decodes."""
        chosen: dict[LiveRequest, Sequence[int]] = {}
        if not self._of:
            return chosen
        for request in step.granted:
            window = self._of.get(request)
            if window is None or window.is_open or request in step.prefilled:
                continue
            start = request.num_computed - request.granted
            most = min(self._size - 1 - start % self._size, request.output_left)
            if drafts := window.drafts(request)[:most]:
                room = max(0, min(len(drafts), step.spare_tokens))
                if count := step.give_room(request, room):
                    chosen[request] = drafts[:count]
            elif most > 0 and not window.awaits_check:
                window.open(request)
                self._open[request] = None
                rows.release(request)
        return chosen

    def give_way(self) -> bool:
        """Note that nothing runs, so that windows that lack memory must close, which may release
        some. Returns True if there are any."""
        lacking = [request for request in self._open if request.num_computed >= request.capacity]
        self._due.update(dict.fromkeys(lacking))
        return bool(lacking)

    # A step

    def submitted_step(self, flight: InFlightStep) -> None:
        """Note which tokens of a submitted step are provisional, and which requests await it."""
        if not self._of:
            return
        provisional = set[LiveRequest]()
        for request in flight.requests:
            window = self._of.get(request)
            if window is None:
                continue
            if window.is_open:
                provisional.add(request)
                changes = self._is_full(request)
            else:
                changes = request.in_flight > 0 and request.output_left > 0
            if changes:
                self._due[request] = None
        flight.provisional = provisional
        if len(flight.batch.removed):
            self._due.update((request, None) for request in self._open if request.row < 0)

    def _is_full(self, request: LiveRequest) -> bool:
        """Return True if no further token of an open window gains anything."""
        return (request.num_computed + 1) % self._size == 0 or request.output_left <= 1

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        for request, token in flight.provisional_tokens():
            if request.status is Status.FINISHED:
                continue
            window = self._of[request]
            if not window.is_open:  # it was preempted meanwhile
                request.in_flight -= 1
                continue
            window.tokens.append(token)
            if is_end(request, token):
                self._due[request] = None

    # Requests

    def arrived(self, request: LiveRequest) -> None:
        self._of[request] = Window(request.sampling)
        request.has_window = True

    def left(self, request: LiveRequest) -> None:
        self._due.pop(request, None)
        if self._of[request].is_open:
            self._close(request)

    def removed(self, request: LiveRequest) -> None:
        del self._of[request]

    def _close(self, request: LiveRequest) -> None:
        del self._open[request]
        self._of[request].close(request)


def is_end(request: LiveRequest, token: int) -> bool:
    """Return True if no provisional token may follow this one: it would end the request, or its row
    failed (-1)."""
    return token < 0 or token in request.stop_ids
