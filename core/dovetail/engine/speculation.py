"""Speculation: which requests check drafts in a step, and how many. See `dovetail.api.drafter`.

A step with drafts isn't overlapped: it is planned when nothing is in flight, so that the tokens before the drafts are known, and its results are
collected before another is planned. So drafts must gain more tokens than lost overlap, drafting and further lines cost:

      overlapping   rows / max(device(rows), host)
      speculating   (rows + accepted drafts) / (device(rows + drafts) + host + drafting)                both in tokens per second

Accepted drafts are expected from how those before them did, of the same request as far as there were some. While steps overlap, a drafter's
proposals for some requests are compared with the tokens sampled later; a bad drafter costs the device nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.clock import Clock
from dovetail.api.drafter import Drafter, ModelDrafter
from dovetail.api.executor import Capacity
from dovetail.engine.drafter_thread import DrafterThread
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.step import PlannedStep
from dovetail.engine.step_times import StepTimeFit

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_ODDS = (
    0.6  # probability that a draft is accepted, before any was checked; counts as one check
)
PRIOR_CHECKS = 4.0  # the weight of the odds of all requests in those of one
FORGETTING = 0.9  # for each proposal, the weight of a request's earlier ones
FORGETTING_ALL = 0.99  # the same for those of all requests
FORGETTING_UNTESTED = 0.99  # for each step in which a request could have checked drafts, but didn't
FORCED_ODDS = 0.999  # of tokens that a grammar forces
MARGIN = 0.03  # overlapping ends if speculating is expected to be faster by this share
SHADOWED = 32  # requests whose tokens are compared with proposals while steps overlap
FIRST_WAIT, LONGEST_WAIT = (
    4,
    32,
)  # steps from one comparison to the next; doubles while speculating doesn't pay
PROBE_WAIT, PROBED = (
    256,
    8,
)  # without host proposals: steps without drafts until a trial, and the rows that check a draft in it


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Settings of speculative decoding: the drafter and its limits."""

    drafter: Drafter
    name: str  # of the drafter, in errors
    max_drafts: int  # most that a request checks in a step
    timeout_s: float  # limit of `Drafter.propose`


class _Record:
    """How the drafts of a request did: sums over its proposals, of which old ones weigh less."""

    __slots__ = ("accepted", "checked", "length")

    def __init__(self, length: float) -> None:
        self.accepted = self.checked = 0.0
        self.length = length  # drafts of a proposal, a running mean


class Speculation:
    """Decides between overlap and drafts, asks the drafter, and keeps account of its success."""

    def __init__(
        self,
        settings: SpeculationSettings,
        capacity: Capacity,
        fit: StepTimeFit,
        clock: Clock,
        *,
        overlaps: bool,
    ) -> None:
        """`overlaps`: whether steps without drafts overlap. The executor must be able to check drafts."""
        # While active, a step waits for the results of the previous one, and checks drafts. Without measured costs, steps without drafts come first,
        # to show how long they take.
        self.is_active = self._is_measured = bool(capacity.line_costs)
        self.drafting_s = 0.0  # spent in the drafter since the engine started
        self._most = settings.max_drafts
        self._fit, self._clock = fit, clock
        self._overlaps, self._max_lines = overlaps, capacity.max_lines
        self._costs = np.array(
            capacity.line_costs or [(0, 0.0)], np.float64
        ).T  # [2, n] lines and seconds
        self._draft_costs = np.array(
            capacity.draft_costs or [(0, 0.0)], np.float64
        ).T  # [2, n] rows, and seconds of a draft of each
        is_model = isinstance(settings.drafter, ModelDrafter)
        self._thread = (
            None
            if is_model
            else DrafterThread(
                settings.drafter, settings.name, capacity.vocab_size, settings.timeout_s
            )
        )
        self._records: dict[LiveRequest, _Record] = {}
        self._accepted = self._checked = 0.0  # of all requests
        self._pending: dict[
            LiveRequest, tuple[int, Sequence[int]]
        ] = {}  # proposals that aren't compared yet, and where they begin in the output
        self._host_s = 0.0  # from the results of a step until the next is submitted, a running mean
        self._context_s = 0.0  # device time for a token of context, beyond the measured cost of lines; a running mean
        self._draft_s = 0.0  # of drafting for a request, a running mean
        self._wait, self._next_wait = (
            FIRST_WAIT,
            FIRST_WAIT,
        )  # calls of `consider` that do nothing: now, and after the next failure
        self._probe_wait, self._is_probing = PROBE_WAIT if self._is_measured else FIRST_WAIT, False

    # For the core to call

    def consider(self, running: Sequence[LiveRequest]) -> None:
        """While not active, become active if drafts are expected to pay. Called after each step is submitted, as the device is busy."""
        self._wait -= 1
        self._probe_wait -= 1
        requests = (
            [r for r in running if r.num_computed >= r.prefill_end and self._most_of(r)]
            if self._wait <= 0
            else []
        )
        if not requests:
            return
        self._propose(
            [r for r in sorted(requests, key=self._checks_of)[:SHADOWED] if r not in self._pending]
        )
        odds = [self._odds_of(request) for request in requests]
        lengths = [
            min(self._most_of(request), round(self._length_of(request))) for request in requests
        ]
        self.is_active = (
            self._best(requests, odds, lengths, self._max_lines - len(requests), len(requests))
            is not None
        )
        if self._thread is None and not self.is_active and self._probe_wait <= 0:
            self.is_active = self._is_probing = True
        self._wait_for_next()

    def draft(self, step: PlannedStep, num_lines: int) -> dict[LiveRequest, Sequence[int]]:
        """Return the drafts that requests of a planned step check in it, with blocks for all of them; -1: the executor proposes it. Stop being active
        if they don't pay. `num_lines`: the step's without drafts. Nothing is in flight."""
        requests = [r for r in step.granted if r not in step.prefilled]
        room = min(self._max_lines - num_lines, step.spare_tokens)
        if not requests or (
            room > 0
            and not any(map(self._most_of, requests))
            and any(map(self._limit_of, requests))
        ):
            return {}  # others may have drafts in the next step
        if self._thread is None and step.prefill_tokens and room < 1:
            return {}  # prompts took the budget: the next trial of a model's drafts may be far away
        drafts, odds = self._proposals(requests)
        counts = self._best(requests, odds, [len(ids) for ids in drafts], room, num_lines)
        if self._is_probing:
            self._is_probing = False
            counts = [
                int(bool(ids) and index < min(PROBED, room)) for index, ids in enumerate(drafts)
            ]
        chosen: dict[LiveRequest, Sequence[int]] = {}
        for request, ids, wanted in zip(
            requests, drafts, counts or [0] * len(requests), strict=True
        ):
            if wanted and (count := step.give_blocks(request, wanted)):
                chosen[request] = ids[:count]
            elif (record := self._records.get(request)) is not None:
                record.accepted *= FORGETTING_UNTESTED
                record.checked *= FORGETTING_UNTESTED
        self.is_active = bool(chosen)
        self._wait_for_next()
        return chosen

    def collected(
        self, drafts: Mapping[LiveRequest, Sequence[int]], accepted: Mapping[LiveRequest, int]
    ) -> None:
        """Learn from a step's results, which are part of the requests' outputs now. `drafts` are those that it checked, with how many of each request
        were `accepted`."""
        for request, ids in drafts.items():
            if request.status is not Status.FINISHED and ids[0] < 0:
                self._learn(request, accepted[request], accepted[request] < len(ids))
        for request, (start, ids) in [*self._pending.items()]:
            come = request.output_token_ids[start : start + len(ids)]
            same = (
                len(come) if come == ids[: len(come)] else _common(come, ids)
            )  # the first is ten times as fast
            if same < len(come) or len(come) == len(ids):
                del self._pending[request]
                self._learn(request, same, same < len(come))
                if not self.is_active and same == len(ids):
                    self._wait = 0

    def host_took(self, seconds: float) -> None:
        """Note the host's time from the results of a step to the next one, without drafting and sleep."""
        self._host_s += 0.1 * (min(seconds, 4 * self._host_s + 1e-3) - self._host_s)

    def device_took(
        self,
        seconds: float,
        num_lines: int,
        context_tokens: int,
        drafts: Mapping[LiveRequest, Sequence[int]],
    ) -> None:
        """Note the device's time of a step without prompts, which checked `drafts`."""
        if self._is_measured and context_tokens:
            if counts := [
                len(ids) for ids in drafts.values() if ids[0] < 0
            ]:  # drafted within the step
                seconds -= max(counts) * float(_cost(self._draft_costs, len(counts)))
            beyond_s = seconds - float(_cost(self._costs, num_lines))
            self._context_s += 0.1 * (
                min(max(0.0, beyond_s) / context_tokens, 4 * self._context_s + 1e-6)
                - self._context_s
            )

    def ended(self, request: LiveRequest) -> None:
        """Forget a request that has arrived and ended."""
        self._records.pop(request, None)
        self._pending.pop(request, None)
        if self._thread is not None:
            self._thread.finished(request)

    def stop(self) -> None:
        """End the drafter's thread."""
        if self._thread is not None:
            self._thread.stop()

    def _wait_for_next(self) -> None:
        """Set when inactive steps consider speculating again: ever later while it doesn't pay."""
        if self.is_active:
            self._next_wait, self._probe_wait = FIRST_WAIT, PROBE_WAIT
        else:
            self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, LONGEST_WAIT)

    # Proposals

    def _most_of(self, request: LiveRequest) -> int:
        """Return how many drafts `request` may check at most: none beyond its last allowed token."""
        return max(0, min(self._limit_of(request), request.output_left))

    def _limit_of(self, request: LiveRequest) -> int:
        asked = request.params.max_drafts
        return self._most if asked is None else min(self._most, asked)

    def _proposals(
        self, requests: Sequence[LiveRequest]
    ) -> tuple[list[Sequence[int]], list[float]]:
        """Return proposals for `requests`, cut to what can be checked, and the odds of each draft."""
        drafts: list[Sequence[int]] = [()] * len(requests)
        odds = [self._odds_of(request) for request in requests]
        asked: list[int] = []
        for index, request in enumerate(requests):
            limit = self._most_of(request)
            if (
                limit
                and request.constraint is not None
                and (forced := request.constraint.forced_drafts(limit))
            ):
                drafts[index], odds[index] = forced, FORCED_ODDS
            elif limit and self._thread is not None:
                asked.append(index)
            elif limit and request.constraint is None:
                drafts[index] = [-1] * limit
        if asked:
            for index, ids in zip(
                asked, self._propose([requests[index] for index in asked]), strict=True
            ):
                constraint = requests[index].constraint
                drafts[index] = ids if constraint is None else ids[: constraint.checkable(ids)]
        return drafts, odds

    def _propose(self, requests: Sequence[LiveRequest]) -> list[Sequence[int]]:
        """Ask the drafter, and keep its proposals to compare them with the tokens sampled later."""
        if self._thread is None or not requests:
            return []
        began = self._clock.now()
        proposed = self._thread.propose(requests, [self._most_of(request) for request in requests])
        took_s = self._clock.now() - began
        self.drafting_s += took_s
        self._draft_s += 0.1 * (took_s / len(requests) - self._draft_s)
        for request, ids in zip(requests, proposed, strict=True):
            record = self._record_of(request)
            record.length += 0.2 * (len(ids) - record.length)
            if (earlier := self._pending.pop(request, None)) is not None and (
                so_far := len(request.output_token_ids) - earlier[0]
            ):
                self._learn(request, so_far, False)
            if ids:
                self._pending[request] = len(request.output_token_ids), ids
        return [*proposed]

    # Odds

    def _odds_of(self, request: LiveRequest) -> float:
        """Return the probability that a draft is accepted if those before it are."""
        prior = (self._accepted + FIRST_ODDS) / (self._checked + 1.0)
        record = self._records.get(request)
        return (
            prior
            if record is None
            else (record.accepted + PRIOR_CHECKS * prior) / (record.checked + PRIOR_CHECKS)
        )

    def _record_of(self, request: LiveRequest) -> _Record:
        if (record := self._records.get(request)) is None:
            record = self._records[request] = _Record(self._most)
        return record

    def _checks_of(self, request: LiveRequest) -> float:
        return 0.0 if (record := self._records.get(request)) is None else record.checked

    def _length_of(self, request: LiveRequest) -> float:
        return self._most if (record := self._records.get(request)) is None else record.length

    def _learn(self, request: LiveRequest, accepted: int, rejected: bool) -> None:
        """Note that the first `accepted` of the drafts of a proposal were right, and whether the next was wrong."""
        record = self._record_of(request)
        record.accepted = FORGETTING * record.accepted + accepted
        record.checked = FORGETTING * record.checked + accepted + rejected
        self._accepted = FORGETTING_ALL * self._accepted + accepted
        self._checked = FORGETTING_ALL * self._checked + accepted + rejected

    # Costs

    def _best(
        self,
        requests: Sequence[LiveRequest],
        odds: Sequence[float],
        lengths: Sequence[int],
        room: int,
        num_lines: int,
    ) -> list[int] | None:
        """Return how many drafts each of `requests` checks for the most tokens per second: at most its `lengths`, and `room` in all. None if a step
        without drafts yields as many. Prompts in the step don't count: they make it longer, and a draft no cheaper."""
        room, context = min(room, sum(lengths)), sum([request.num_computed for request in requests])
        if self._is_measured:  # the running fit may not have seen plain steps for long
            plain_s = float(_cost(self._costs, num_lines)) + self._context_s * context
        else:
            plain_s = self._fit.estimate_s(0, len(requests), context)
        if room < 1 or plain_s <= 0.0:
            return None
        ahead = np.arange(1, max(lengths) + 1)
        gains = np.where(
            ahead <= np.array(lengths)[:, None], np.array(odds)[:, None] ** ahead, 0.0
        ).reshape(-1)
        order = np.argsort(-gains, kind="stable")[:room]  # of a request, earlier drafts gain more
        if self._is_measured:
            costs = _cost(self._costs, np.arange(num_lines, num_lines + room + 1))
            more_s = costs[1:] - costs[0]
        else:
            more_s = np.arange(1, room + 1) * (
                self._fit.estimate_s(0, len(requests) + 1, context) - plain_s
            )
        nth = order % len(ahead)  # of its request
        more_s = more_s + (1 + np.maximum.accumulate(nth)) * _cost(
            self._draft_costs, np.cumsum(nth == 0)
        )  # by a draft model, one after the other
        rates = (num_lines + np.cumsum(gains[order])) / (
            plain_s + more_s + self._host_s + self._draft_s * len(requests)
        )
        best = int(rates.argmax())
        plain = num_lines / (
            max(plain_s, self._host_s) if self._overlaps else plain_s + self._host_s
        )
        if rates[best] <= plain * (1.0 if self.is_active else 1.0 + MARGIN):
            return None
        counts: list[int] = np.bincount(
            order[: best + 1] // len(ahead), minlength=len(requests)
        ).tolist()
        return counts


def _cost(measured: NDArray[np.float64], counts: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """Return the seconds of work on `counts` lines or rows, in the shape of `counts`. They are interpolated between those `measured`, [2, n] numbers
    and seconds, and extrapolated beyond."""
    known, seconds = measured
    beyond = (
        np.maximum(0, counts - known[-1])
        * (seconds[-1] - seconds[0])
        / max(1.0, known[-1] - known[0])
    )
    return np.asarray(np.interp(counts, known, seconds) + beyond, np.float64)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens both have in common."""
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
