"""Step times: the fit that estimates them, the prompt tokens that they allow beside decodes, and
when the next step is planned.

The prefill limit caps the prompt tokens of a step under any policy, so that the inter-token latency
of streamed answers stays bounded. Sarathi-Serve (Agrawal et al., OSDI '24, arXiv:2403.02310) bounds
a step by a fixed number of tokens, profiled for model and device; here the bound follows from the
engine's own running fit to finished steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from dovetail.api.clock import Clock, VirtualClock
from dovetail.api.executor import Capacity
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import EngineStats
from dovetail.request.request import Request
from dovetail.request.sampling_params import OutputKind

FORGETTING = 0.995  # per step, the weight of what is past: about the last 200 steps count
KEPT = 16  # this many steps of each kind are forgotten only as newer ones of the kind come
MIN_SECONDS = 1e-6
SOLVE_EVERY = 16  # solve after this many steps; by then one more changes little
_TERMS = 4
_PAIRS = [(i, j) for i in range(_TERMS) for j in range(i + 1)]
_KINDS = (0, 1)  # kinds of steps: decodes alone, with prefills
LEAST_PROMPT_TOKENS = 256  # tokens: with fewer, most of the time goes into reading the weights
LONGEST_STEP_S = 4.0  # target on a slow device, where the prompts of a step are split
FEWEST_TOKENS = 16  # of prompts in a step, however slow the device is
LATE_SHARE = 0.7  # plan at this share of the running step's estimated time


class StepTimeFit:
    """A least-squares fit of seconds on (1, prefill tokens, decodes, context tokens), with
    non-negative weights, that forgets slowly.

    It minimises the relative error, so that a decode of 10 ms counts as much as a prefill of 1 s,
    and a step that took a hundred times too long (a compilation, a hiccup) hardly at all. The last
    `KEPT` steps with prefills, and as many without, are forgotten only as newer steps of their own
    kind come: otherwise a long run of decodes would leave nothing known of prefills. The fit keeps
    the sums of the normal equations rather than update an inverse: they stay positive whatever
    comes. Terms that no step tells apart share their effect (ridge). It is pure Python, since numpy
    would cost more than it saves at four weights.
    """

    SCALE = (1.0, 1e-3, 1e-2, 1e-5)  # scales the terms to about one
    RIDGE = 1e-6

    def __init__(self) -> None:
        # sums of x[i] x[j] / seconds^2, over `_PAIRS`
        self._products = [[0.0] * len(_PAIRS) for _ in _KINDS]
        self._targets = [[0.0] * _TERMS for _ in _KINDS]  # sums of x[i] / seconds
        self._counts = [0.0] * len(_KINDS)  # number of steps in these sums, decayed
        # sums of (seconds * unit)^2, so that the misfit follows from sums too
        self._squares = [0.0] * len(_KINDS)
        self._mean_s = 0.0
        self._weights = [0.0] * _TERMS
        self._stale_from = 0  # solve for the weights again once this many steps were seen
        self.steps = 0

    def update(
        self, seconds: float, prefill_tokens: int, decodes: int, context_tokens: int
    ) -> None:
        """Learn from a finished step.

        An impossible duration (negative, infinite, not a number) is ignored.
        """
        if not 0.0 <= seconds < math.inf:
            return
        self.steps += 1
        self._mean_s += max(1.0 - FORGETTING, 1.0 / self.steps) * (seconds - self._mean_s)
        # a step that took no time must not outweigh all others
        unit = 1.0 / max(seconds, 0.1 * self._mean_s, MIN_SECONDS)
        x = [value * unit for value in self._terms(prefill_tokens, decodes, context_tokens)]
        relative = seconds * unit
        seen = int(prefill_tokens > 0)
        for kind in _KINDS:
            if kind == seen or self._counts[kind] > KEPT:
                self._counts[kind] *= FORGETTING
                self._squares[kind] *= FORGETTING
                self._products[kind] = [FORGETTING * p for p in self._products[kind]]
                self._targets[kind] = [FORGETTING * t for t in self._targets[kind]]
        self._counts[seen] += 1.0
        self._squares[seen] += relative * relative
        self._products[seen] = [
            p + x[i] * x[j] for p, (i, j) in zip(self._products[seen], _PAIRS, strict=True)
        ]
        self._targets[seen] = [
            t + value * relative for t, value in zip(self._targets[seen], x, strict=True)
        ]

    def estimate_s(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float:
        """Return the seconds that such a step takes, at least `MIN_SECONDS`; 0.0 before the first
        step was seen."""
        if not self.steps:
            return 0.0
        self._refresh()
        terms = self._terms(prefill_tokens, decodes, context_tokens)
        return max(MIN_SECONDS, sum(w * v for w, v in zip(self._weights, terms, strict=True)))

    def error(self) -> float:
        """Return the standard error of the fit, relative to the seconds of each step; infinity
        until there are more steps than terms."""
        freedom = sum(self._counts) - _TERMS
        if freedom <= 0.0:
            return math.inf
        self._refresh()
        w = self._weights
        products = list(map(sum, zip(*self._products, strict=True)))
        explained = sum(
            (1 if i == j else 2) * w[i] * w[j] * p
            for (i, j), p in zip(_PAIRS, products, strict=True)
        )
        crossed = sum(
            weight * sum(of_kinds)
            for weight, of_kinds in zip(w, zip(*self._targets, strict=True), strict=True)
        )
        return math.sqrt(max(0.0, sum(self._squares) - 2.0 * crossed + explained) / freedom)

    def _refresh(self) -> None:
        """Solve for the weights, unless few steps have come since."""
        if self.steps >= self._stale_from:
            self._weights = self._solve()
            self._stale_from = self.steps + min(SOLVE_EVERY, 1 + self.steps // SOLVE_EVERY)

    def _terms(
        self, prefill_tokens: int, decodes: int, context_tokens: int
    ) -> tuple[float, float, float, float]:
        _, a, b, c = self.SCALE
        return (1.0, prefill_tokens * a, decodes * b, context_tokens * c)

    def _solve(self) -> list[float]:
        """Solve for the weights.

        A term whose weight would be negative is left out, the most negative first.
        """
        active = list(range(_TERMS))
        while active:
            weights = self._solve_for(active)
            worst = min(active, key=weights.__getitem__)
            if weights[worst] >= 0.0:
                return weights
            active.remove(worst)
        return [0.0] * _TERMS

    def _solve_for(self, active: list[int]) -> list[float]:
        """Solve the normal equations of the `active` terms by Cholesky decomposition; the others
        weigh 0."""
        matrix = dict(zip(_PAIRS, map(sum, zip(*self._products, strict=True)), strict=True))
        targets = [sum(of_kinds) for of_kinds in zip(*self._targets, strict=True)]
        ridge = self.RIDGE * max(matrix[i, i] for i in active)
        lower: dict[tuple[int, int], float] = {}
        halfway: dict[int, float] = {}
        for row, i in enumerate(active):
            for j in active[:row]:
                lower[i, j] = (
                    matrix[i, j] - sum(lower[i, k] * lower[j, k] for k in active[: active.index(j)])
                ) / lower[j, j]
            lower[i, i] = math.sqrt(
                max(matrix[i, i] + ridge - sum(lower[i, k] ** 2 for k in active[:row]), 0.5 * ridge)
            )
            halfway[i] = (targets[i] - sum(lower[i, k] * halfway[k] for k in active[:row])) / lower[
                i, i
            ]
        weights = [0.0] * _TERMS
        for row in range(len(active) - 1, -1, -1):
            i = active[row]
            weights[i] = (
                halfway[i] - sum(lower[k, i] * weights[k] for k in active[row + 1 :])
            ) / lower[i, i]
        return weights


def prompt_tokens_within(
    prefill_limit: float, decoding: Sequence[Request], fit: StepTimeFit, budget: int
) -> int:
    """Return how many prompt tokens, at most `budget`, make a step last at most `prefill_limit`
    times as long as decoding the requests `decoding` alone.

    At least `LEAST_PROMPT_TOKENS`, so that prompts make progress; no more than that while finished
    steps don't show the cost of a prompt token; and all of `budget` while no request streams, or
    nothing is known of the device yet.
    """
    if budget <= LEAST_PROMPT_TOKENS or all(
        request.params.output_kind is OutputKind.FINAL for request in decoding
    ):
        return budget
    context = sum(request.num_tokens for request in decoding)
    alone_s = fit.estimate_s(0, len(decoding), context)
    token_s = (fit.estimate_s(budget, len(decoding), context + budget) - alone_s) / budget
    if token_s <= 0:
        return budget if alone_s <= 0 else LEAST_PROMPT_TOKENS
    return min(budget, max(LEAST_PROMPT_TOKENS, int((prefill_limit - 1) * alone_s / token_s)))


class PromptLimit:
    """Caps the prompt tokens of a step on a slow device, so that it takes about `LONGEST_STEP_S`:
    requests arrive and are aborted between steps.

    The cap follows from the tokens per second of finished steps. These are proportional to a step's
    size at worst, since part of its time doesn't depend on it, so a step after a small one is
    rather too small than too large. Quick small steps never lower it.
    """

    def __init__(self, rate: float | None) -> None:
        """`rate`: prompt tokens per second, a cautious guess until a step is measured; None: there
        is no cap."""
        self._most = math.inf if rate is None else LONGEST_STEP_S * rate

    def update(self, seconds: float, tokens: int) -> None:
        """Learn from a finished step of `tokens` tokens that computed a prompt."""
        if self._most == math.inf or not 0.0 < seconds < math.inf:
            return
        measured = LONGEST_STEP_S * tokens / seconds
        if measured > self._most or seconds > LONGEST_STEP_S / 2:
            self._most = measured

    def most_tokens(self, decodes: int) -> float:
        """Return the most prompt tokens of a step with this number of decodes; infinity: only its
        budget limits them."""
        return max(FEWEST_TOKENS, self._most - decodes)


WaitUntil = Callable[[float], None]  # sleeps until an instant, or less if something happens


class DraftRoom(Protocol):
    """A planned step, as far as it concerns drafts: see `PlannedStep`."""

    granted: dict[LiveRequest, int]
    prefilled: dict[LiveRequest, int]
    prefill_tokens: int

    @property
    def spare_tokens(self) -> int: ...

    @property
    def is_short(self) -> bool: ...

    def give_room(self, request: LiveRequest, drafts: int) -> int: ...

    def hold(self, request: LiveRequest, tokens: int) -> int: ...


class PlanTiming:
    """Decides when the next step is planned while one runs, and what drafts it checks: none.

    As late as the device allows while requests may arrive, so that an arrival during a step isn't a
    whole step late. `Speculation` extends it.
    """

    def __init__(
        self, clock: Clock, fit: StepTimeFit, capacity: Capacity, max_in_flight: int
    ) -> None:
        """`fit`: of all finished steps. `max_in_flight`: most steps, without drafts."""
        # More requests may come than the core knows of, so that planning late pays
        self.expects_arrivals = False
        # False: plan as soon as another step fits in flight, as other engines do
        self.plans_late = True
        self.virtual_plan_s = 0.0  # seconds that planning takes on a virtual clock
        self.fit = fit
        self.max_in_flight = max_in_flight
        self.last_ended = -math.inf  # when the device ended the newest collected step
        self._prompt_limit = PromptLimit(capacity.prompt_rate)
        self._clock = clock
        self._plan_s = 0.0  # a running mean of the time from planning to the end of submitting
        self._last_durations = (0.0, 0.0)  # seconds on the device of the last two steps
        # when the host had the newest results, later by its sleep since; None: it was idle
        self._busy_since: float | None = None

    # Before a step is planned

    def may_overlap(self, flights: Sequence[InFlightStep]) -> bool:
        """Return True if a step may be submitted before the results of `flights`, at least one."""
        return True

    def idle_until(self, instant: float, wait_until: WaitUntil) -> None:
        """Wait for `instant`, with nothing in flight; not at all if it is infinite."""
        self._busy_since = None
        if instant < math.inf:
            wait_until(instant)

    def wait_until_due(self, flight: InFlightStep, arrival: float, wait_until: WaitUntil) -> None:
        """Wait until the next step should be planned.

        `flight` is the newest step on the device, `arrival` the time of the next known arrival, or
        infinity.
        """
        if not self.plans_late or (arrival == math.inf and not self.expects_arrivals):
            return
        # An estimate that one slow step has spoilt must not keep the device idle.
        duration = min(self._estimate_s(flight), *self._last_durations)
        started = max(self.last_ended, flight.planned)
        plan_s = self.virtual_plan_s if isinstance(self._clock, VirtualClock) else self._plan_s
        due = started + min(LATE_SHARE * duration, duration - 3 * plan_s)
        now = self._clock.now()
        if due <= now or (arrival > due and not self.expects_arrivals):
            return
        wait_until(due)
        if self._busy_since is not None:
            self._busy_since += self._clock.now() - now

    # While it is planned

    def prompt_tokens(
        self, prefill_limit: float | None, decoding: Sequence[Request], budget: int
    ) -> float:
        """Return how many prompt tokens a step may have beside the decodes of requests `decoding`.

        `prefill_limit`: as of `CoreSettings`. `budget`: as many as the step has left.
        """
        longest = self._prompt_limit.most_tokens(len(decoding))
        if prefill_limit is None:
            return longest
        return min(longest, prompt_tokens_within(prefill_limit, decoding, self.fit, budget))

    def flights_end(self, flights: Sequence[InFlightStep]) -> float:
        """Return when `flights`, the steps on the device in order, are expected to end."""
        end = self.last_ended
        for flight in flights:
            end = max(end, flight.planned) + self._estimate_s(flight)
        return end

    def drafts(self, step: DraftRoom) -> Mapping[LiveRequest, Sequence[int]]:
        """Return the drafts that a planned step checks, with blocks for all of them.

        -1: the executor proposes it. Nothing is in flight.
        """
        return {}

    # Once it is planned

    def submitted(self, running: Iterable[LiveRequest], seconds: float) -> None:
        """A step was submitted, `seconds` after its planning began."""
        self._plan_s += 0.1 * (seconds - self._plan_s)
        self._busy_since = None

    def collected(self, flight: InFlightStep) -> None:
        """Learn from a finished step, whose results the host has now, but not delivered yet."""
        seconds = flight.seconds
        self._busy_since = flight.results_at
        self.last_ended = flight.result.ended
        self._last_durations = (self._last_durations[1], seconds)
        self.fit.update(seconds, flight.prefill_tokens, flight.decode_tokens, flight.context_tokens)
        if flight.prefill_tokens:
            self._prompt_limit.update(seconds, flight.prefill_tokens + flight.decode_tokens)

    def settled(self, flight: InFlightStep, stats: EngineStats) -> None:
        """The results of a step are part of the requests' outputs. Add to `stats`."""

    def ended(self, request: LiveRequest) -> None:
        """`request`, which had arrived, has ended."""

    def stop(self) -> None:
        """Nothing is called any more."""

    def _busy_s(self) -> float | None:
        """Return the host's time since the newest results, without sleep; None if it was idle.

        Of several steps submitted since, only the first has such a time.
        """
        return None if self._busy_since is None else self._clock.now() - self._busy_since

    def _estimate_s(self, flight: InFlightStep) -> float:
        return self.fit.estimate_s(
            flight.prefill_tokens, flight.decode_tokens, flight.context_tokens
        )
