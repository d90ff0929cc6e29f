"""Speculation: which requests check drafts in a step, and how many. See `dovetail.api.drafter`.

A step with drafts isn't overlapped: it is planned when nothing is in flight, so that the tokens
before the drafts are known, and its results are collected before another is planned. So drafts must
gain more tokens than lost overlap, drafting and further lines cost. In tokens per second:

      overlapping   rows / max(device(rows), host)
      speculating   (rows + accepted drafts) / (device(rows + drafts) + host + drafting)

Accepted drafts are expected from how those before them did, of the same request as far as there
were some. While steps overlap, a drafter's proposals for some requests are compared with the tokens
sampled later; a bad drafter costs the device nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import eq

import numpy as np

from dovetail.api.clock import Clock
from dovetail.api.drafter import Drafter, ModelDrafter
from dovetail.api.executor import Capacity
from dovetail.engine.drafter_thread import DrafterThread
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.stats import EngineStats
from dovetail.engine.step_times import DraftRoom, PlanTiming, StepTimeFit

FIRST_ODDS = 0.6  # probability that a draft is accepted before any was checked; one check
PRIOR_CHECKS = 4.0  # the weight of the odds of all requests in those of one
FORGETTING = 0.9  # for each proposal, the weight of a request's earlier ones
FORGETTING_ALL = 0.99  # the same for those of all requests
FORGETTING_UNTESTED = 0.99  # for each step in which a request could have checked drafts, but didn't
FORCED_ODDS = 0.999  # of tokens that a grammar forces
MARGIN = 0.03  # overlapping ends if speculating is expected to be faster by this share
SHADOWED = 32  # requests whose tokens are compared with proposals while steps overlap
# Steps from one comparison to the next: the first wait doubles while speculating doesn't pay.
FIRST_WAIT = 4
LONGEST_WAIT = 32
# Without proposals of the host: steps without drafts until a trial, and the rows that check one.
PROBE_WAIT = 256
PROBED = 8


@dataclass(slots=True)
class _Record:
    """How the drafts of a request did: sums over its proposals, of which old ones weigh less."""

    length: float  # drafts of a proposal, a running mean
    accepted: float = 0.0
    checked: float = 0.0

    def learn(self, weight: float, accepted: float, checked: float) -> None:
        self.accepted = weight * self.accepted + accepted
        self.checked = weight * self.checked + checked


class Speculation(PlanTiming):
    """Asks the drafter, and keeps account of its success. The executor can check drafts."""

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        max_drafts: int,
        timeout_s: float,
        clock: Clock,
        fit: StepTimeFit,
        capacity: Capacity,
        max_in_flight: int,
    ) -> None:
        """`name`: of the drafter, in errors. `max_drafts`: most that a request checks in a step.

        `timeout_s`: limit of `Drafter.propose`.
        """
        super().__init__(clock, fit, capacity, max_in_flight)
        # While active, a step awaits the results of the one before, and checks drafts. Without
        # measured costs, steps without drafts come first, to show how long they take.
        self._is_active = self._is_measured = bool(capacity.line_costs)
        self._most = max_drafts
        self._max_lines = capacity.max_lines
        # [max_lines + 1] seconds of a step by its lines; of a draft of each row, by rows
        self._line_s = _by_number(capacity.line_costs, capacity.max_lines)
        # the least that a further line takes, from a number of lines on
        steps = [after - before for before, after in pairwise(self._line_s)]
        self._another_s = [*accumulate(reversed(steps), min)][::-1]
        self._row_s = _by_number(capacity.draft_costs, capacity.max_lines)
        self._thread: DrafterThread | None = None
        if not isinstance(drafter, ModelDrafter):
            self._thread = DrafterThread(drafter, name, capacity.vocab_size, timeout_s)
        self._records = defaultdict[LiveRequest, _Record](lambda: _Record(max_drafts))
        self._all = _Record(max_drafts)  # of all requests
        # proposals that aren't compared yet, and where they begin in the output
        self._pending: dict[LiveRequest, tuple[int, Sequence[int]]] = {}
        self._drafted_s = 0.0  # the same since the last step was submitted
        # running means
        self._drafting_s = 0.0  # spent in the drafter since the engine started
        self._host_s = 0.0  # from the results of a step until the next is submitted
        self._context_s = 0.0  # on the device for a token of context, beyond the cost of lines
        self._draft_s = 0.0  # of drafting for a request
        # submitted steps without another look: now, and after the next failure
        self._wait = self._next_wait = FIRST_WAIT
        self._probe_wait = PROBE_WAIT if self._is_measured else FIRST_WAIT
        self._is_probing = False

    # The strategy

    def may_overlap(self, flights: Sequence[InFlightStep]) -> bool:
        """Return False if the step in flight has drafts, or the next one is to have some."""
        awaits = self._is_active and any(one.batch.yields_token.any() for one in flights)
        return not (awaits or flights[-1].drafts)

    def drafts(self, step: DraftRoom) -> Mapping[LiveRequest, Sequence[int]]:
        """Return the drafts that pay; overlap again if none do."""
        if not self._is_active:
            return {}
        requests = [r for r in step.granted if r not in step.prefilled]
        num_lines = len(step.granted) - sum([not r.yields_token for r in step.prefilled])
        room = min(self._max_lines - num_lines, step.spare_tokens)
        if not requests or not self._may_draft(step, requests, room):
            return {}
        proposed, odds = self._proposals(requests)
        counts = self._best(requests, odds, [len(ids) for ids in proposed], room, num_lines)
        if self._is_probing:
            self._is_probing = False
            tried = min(PROBED, room)
            counts = [int(bool(ids) and row < tried) for row, ids in enumerate(proposed)]
        chosen: dict[LiveRequest, Sequence[int]] = {}
        for request, ids, wanted in zip(requests, proposed, counts, strict=True):
            if wanted and (count := step.give_room(request, wanted)):
                chosen[request] = ids[:count]
            else:
                self._records[request].learn(FORGETTING_UNTESTED, 0, 0)
        self._decide(bool(chosen))
        return chosen

    def _may_draft(self, step: DraftRoom, requests: Sequence[LiveRequest], room: int) -> bool:
        """Return False if only a later step can tell whether drafts pay."""
        if self._thread is None and step.prefill_tokens and room < 1:
            return False  # prompts took the budget: a model's next trial may be far away
        # If these have no room for drafts before their end, others may in the next step.
        limits = any(map(self._limit_of, requests))
        return room < 1 or not limits or any(map(self._most_of, requests))

    def submitted(self, running: Iterable[LiveRequest], seconds: float) -> None:
        """While steps overlap, look from time to time whether drafts would pay."""
        if (host_s := self._busy_s()) is not None:
            self._host_s = _moved(self._host_s, host_s - self._drafted_s, 1e-3)
        super().submitted(running, seconds)
        if not self._is_active:
            self._wait -= 1
            self._probe_wait -= 1
            if self._wait <= 0:
                self._consider(running)
        self._drafted_s = 0.0

    def _consider(self, running: Iterable[LiveRequest]) -> None:
        """Become active if drafts of `running` requests are expected to pay; the device is busy."""
        requests = [r for r in running if r.num_computed >= r.prefill_end and self._most_of(r)]
        if not requests:
            return
        least_known = sorted(requests, key=lambda r: self._records[r].checked)[:SHADOWED]
        self._propose([r for r in least_known if r not in self._pending])
        odds = [self._odds_of(request) for request in requests]
        lengths = [min(self._most_of(r), round(self._records[r].length)) for r in requests]
        room = self._max_lines - len(requests)
        pays = any(self._best(requests, odds, lengths, room, len(requests)))
        self._is_probing = self._thread is None and not pays and self._probe_wait <= 0
        self._decide(pays or self._is_probing)

    def _decide(self, is_active: bool) -> None:
        """Become active or not; look again ever later while drafts don't pay."""
        self._is_active = is_active
        if is_active:
            self._next_wait = FIRST_WAIT
            self._probe_wait = PROBE_WAIT
        else:
            self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, LONGEST_WAIT)

    def collected(self, flight: InFlightStep) -> None:
        """Learn also what a token of context costs, from a step without prompts."""
        super().collected(flight)
        if not self._is_measured or flight.prefill_tokens or not flight.context_tokens:
            return
        beyond_s = flight.seconds
        if counts := [len(ids) for ids in flight.drafts.values() if ids[0] < 0]:
            beyond_s -= max(counts) * self._row_s[len(counts)]
        lines = min(flight.decode_tokens, self._max_lines)
        beyond_s = max(0.0, beyond_s - self._line_s[lines])
        self._context_s = _moved(self._context_s, beyond_s / flight.context_tokens, 1e-6)

    def settled(self, flight: InFlightStep, stats: EngineStats) -> None:
        """Compare proposals with the tokens that have come."""
        stats.drafting_s = self._drafting_s
        for request, ids in flight.drafts.items():
            if request.status is not Status.FINISHED and ids[0] < 0:
                accepted = flight.accepted[request]
                self._learn(request, accepted, accepted < len(ids))
        for request, (start, ids) in [*self._pending.items()]:
            come = request.output[start : start + len(ids)]
            same = len(come)
            if come != ids[:same]:
                same = sum(takewhile(bool, map(eq, come, ids)))
            if same < len(come) or len(come) == len(ids):
                del self._pending[request]
                self._learn(request, same, same < len(come))
                if not self._is_active and same == len(ids):
                    self._wait = 0

    def ended(self, request: LiveRequest) -> None:
        self._records.pop(request, None)
        self._pending.pop(request, None)
        if self._thread is not None:
            self._thread.finished(request)

    def stop(self) -> None:
        """End the drafter's thread; the next call starts another."""
        if self._thread is not None:
            self._thread.stop()

    # Proposals

    def _most_of(self, request: LiveRequest) -> int:
        """Return how many drafts `request` may check at most: none beyond its last allowed
        token."""
        return max(0, min(self._limit_of(request), request.output_left))

    def _limit_of(self, request: LiveRequest) -> int:
        if request.has_window:  # its drafts are those of its window
            return 0
        asked = request.params.max_drafts
        return self._most if asked is None else min(self._most, asked)

    def _proposals(
        self, requests: Sequence[LiveRequest]
    ) -> tuple[list[Sequence[int]], list[float]]:
        """Return proposals for `requests`, cut to what can be checked, and the odds of each
        draft."""
        drafts: list[Sequence[int]] = [()] * len(requests)
        odds = [self._odds_of(request) for request in requests]
        asked: list[int] = []
        for index, request in enumerate(requests):
            limit = self._most_of(request)
            constraint = request.constraint
            if not limit:
                continue
            if constraint is not None and (forced := constraint.forced_drafts(limit)):
                drafts[index], odds[index] = forced, FORCED_ODDS
            elif self._thread is not None:
                asked.append(index)
            elif constraint is None:
                drafts[index] = [-1] * limit
        proposed = self._propose([requests[index] for index in asked])
        for index, ids in zip(asked, proposed, strict=True):
            constraint = requests[index].constraint
            drafts[index] = ids if constraint is None else ids[: constraint.checkable(ids)]
        return drafts, odds

    def _propose(self, requests: Sequence[LiveRequest]) -> Sequence[Sequence[int]]:
        """Ask the drafter, and keep its proposals to compare them with the tokens sampled later."""
        if self._thread is None or not requests:
            return []
        began = self._clock.now()
        proposed = self._thread.propose(requests, [self._most_of(request) for request in requests])
        took_s = self._clock.now() - began
        self._drafting_s += took_s
        self._drafted_s += took_s
        self._draft_s += 0.1 * (took_s / len(requests) - self._draft_s)
        for request, ids in zip(requests, proposed, strict=True):
            record = self._records[request]
            known = len(request.output)
            record.length += 0.2 * (len(ids) - record.length)
            start, _ = self._pending.pop(request, (known, ()))
            if known > start:
                self._learn(request, known - start, False)
            if ids:
                self._pending[request] = known, ids
        return proposed

    # Odds

    def _odds_of(self, request: LiveRequest) -> float:
        """Return the probability that a draft is accepted if those before it are."""
        prior = (self._all.accepted + FIRST_ODDS) / (self._all.checked + 1.0)
        record = self._records[request]
        return (record.accepted + PRIOR_CHECKS * prior) / (record.checked + PRIOR_CHECKS)

    def _learn(self, request: LiveRequest, accepted: int, rejected: bool) -> None:
        """Learn from a proposal: its first `accepted` drafts were right; whether the next
        wasn't."""
        self._records[request].learn(FORGETTING, accepted, accepted + rejected)
        self._all.learn(FORGETTING_ALL, accepted, accepted + rejected)

    # Costs

    def _best(
        self,
        requests: Sequence[LiveRequest],
        odds: Sequence[float],
        lengths: Sequence[int],
        room: int,
        num_lines: int,
    ) -> list[int]:
        """Return how many drafts each of `requests` checks for the most tokens per second.

        At most its `lengths`, and `room` in all; none if a step without drafts yields as many.
        Prompts in the step don't count: they make it longer, and a draft no cheaper.
        """
        room = min(room, sum(lengths))
        counts = [0] * len(requests)
        if room < 1:
            return counts
        context = sum([request.num_computed for request in requests])
        if self._is_measured:  # the running fit may not have seen plain steps for long
            line_s = self._line_s
            plain_s = line_s[num_lines] + self._context_s * context
            another_s = self._another_s[num_lines]
        else:
            plain_s = self.fit.estimate_s(0, len(requests), context)
            another_s = max(0.0, self.fit.estimate_s(0, len(requests) + 1, context) - plain_s)
            line_s = [another_s * lines for lines in range(num_lines + room + 1)]
        if plain_s <= 0.0:
            return counts
        best = 0
        best_rate = num_lines / (
            max(plain_s, self._host_s) if self.max_in_flight > 1 else plain_s + self._host_s
        )
        best_rate *= 1.0 if self._is_active else 1.0 + MARGIN
        # The last draft of the best choice gains more than tokens of that rate in its time.
        least = best_rate * another_s
        gains = []  # of each draft, with its place and its request: its probability, negative
        for index, (right, length) in enumerate(zip(odds, lengths, strict=True)):
            gain = 1.0
            for place in range(1, length + 1):
                gain *= right
                if gain <= least:
                    break
                gains.append((-gain, place, index))
        gains.sort()
        seconds = plain_s - line_s[num_lines] + self._host_s + self._draft_s * len(requests)
        tokens = float(num_lines)
        drafting = deepest = 0
        for count, (gain, place, _) in enumerate(gains[:room], 1):
            tokens -= gain
            drafting += place == 1
            deepest = max(deepest, place)
            # a draft model drafts one after the other
            rate = tokens / (seconds + line_s[num_lines + count] + deepest * self._row_s[drafting])
            if rate > best_rate:
                best, best_rate = count, rate
        for _, _, index in gains[:best]:
            counts[index] += 1
        return counts


def _moved(mean: float, value: float, least: float) -> float:
    """Return a running mean after `value`, of which an outlier counts 4 times the mean."""
    return mean + 0.1 * (min(value, 4 * mean + least) - mean)


def _by_number(costs: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Return the seconds of work on 0 to `most` lines or rows, [most + 1].

    They are interpolated between those measured, `costs`, and extrapolated beyond; more never take
    less. 0 if there are none.
    """
    if not costs:
        return [0.0] * (most + 1)
    numbers = np.arange(1.0 + most)
    known, seconds = np.array(costs, np.float64).T
    slope = (seconds[-1] - seconds[0]) / max(1.0, known[-1] - known[0])
    beyond = slope * np.maximum(0.0, numbers - known[-1])
    by_number: list[float] = (np.interp(numbers, known, seconds) + beyond).tolist()
    return [*accumulate(by_number, max)]
