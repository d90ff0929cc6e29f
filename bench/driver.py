"""Runs an engine under open-loop load: requests arrive at their own times, and each token is
timestamped when the engine delivers it.

What is noted lies in arrays: elsewhere clients are processes of their own, and here the garbage
collector would go through their lists while a step waits.
"""

from __future__ import annotations

import gc
import heapq
import random
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np

from dovetail import LLMEngine, SamplingParams

# a request is handed to the engine so long before it arrives, so that handing it over delays nobody
AHEAD_S = 0.05
QUANTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


@dataclass(slots=True)
class Timeline:
    """One request. Times are seconds on the engine's clock; the arrival is the intended one,
    however busy the engine was."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    arrival: float
    stamps: array[float] = field(default_factory=lambda: array("d"))  # of each token

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.stamps[-1] - self.stamps[0]) / (len(self.stamps) - 1)

    def gaps(self, since: float = -np.inf, until: float = np.inf) -> list[float]:
        """Return inter-token latencies whose second token arrived in [since, until)."""
        return [
            later - earlier for earlier, later in pairwise(self.stamps) if since <= later < until
        ]


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step, with its computed tokens and a breakdown of its time."""

    ended: float  # on the engine's clock: when its tokens were handed over
    since_last_s: float  # the tokens of the step before
    device_s: float
    core_s: float
    thread_s: float  # of this thread, on a processor: as long as nobody else took it away
    collector_s: float  # of it, in Python's garbage collector
    prefill_tokens: int
    decode_tokens: int


class CollectorTime:
    """Sums the garbage collector's time from its creation on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._begun


COLLECTOR = CollectorTime()


@dataclass(order=True, slots=True)
class Due:
    arrival: float
    order: int
    kind: str = field(compare=False)
    prompt: Sequence[int] = field(compare=False)
    output_tokens: int = field(compare=False)
    then: Callable[[float], None] | None = field(compare=False)


class Driver:
    """Runs an engine's steps, as `AsyncLLMEngine`'s thread does, without threads between a token
    and its stamp."""

    def __init__(self, engine: LLMEngine, temperature: float = 0.6) -> None:
        self.engine = engine
        engine.core.plan_timing.expects_arrivals = True  # as in a server: planning late pays
        self.timelines: list[Timeline] = []
        self.decodes = array("q")  # rows that decoded, of each step
        self._steps = array("d")  # of each the fields of StepTime
        self._before, self._stepped, self._spent = engine.stats(), engine.now(), self._own_times()
        self._temperature = temperature
        self._due: list[Due] = []
        self._running: dict[str, tuple[Timeline, Callable[[float], None] | None]] = {}
        self._count = 0

    def schedule(
        self,
        kind: str,
        arrival: float,
        prompt: Sequence[int],
        output_tokens: int,
        then: Callable[[float], None] | None = None,
    ) -> None:
        """Add a request. `then` is called with the time at which it finished."""
        heapq.heappush(self._due, Due(arrival, self._count, kind, prompt, output_tokens, then))
        self._count += 1

    def run(self, until: float = np.inf) -> None:
        """Run until everything has finished or the clock reaches `until`; running requests continue
        in the next call."""
        while (self._due or self._running) and self.engine.now() < until:
            self._hand_over()
            if self._running:
                self._step()
            else:
                time.sleep(max(0.0, self._due[0].arrival - AHEAD_S - self.engine.now()))

    def of(self, kind: str) -> list[Timeline]:
        return [timeline for timeline in self.timelines if timeline.kind == kind]

    @property
    def steps(self) -> list[StepTime]:
        """Return the times of all steps so far."""
        rows = np.frombuffer(self._steps.tobytes()).reshape(-1, len(fields(StepTime)))
        return [StepTime(*row[:-2], *map(int, row[-2:])) for row in rows.tolist()]

    def longest(self, count: int, since: float, until: float) -> list[StepTime]:
        """Return the steps in [since, until) with the longest waits of streaming requests."""
        steps = [step for step in self.steps if since <= step.ended < until and step.decode_tokens]
        return heapq.nlargest(count, steps, key=lambda step: step.since_last_s)

    def _hand_over(self) -> None:
        while self._due and self._due[0].arrival <= self.engine.now() + AHEAD_S:
            due = heapq.heappop(self._due)
            timeline = Timeline(due.kind, len(due.prompt), due.output_tokens, due.arrival)
            params = SamplingParams(
                temperature=self._temperature,
                ignore_eos=True,
                max_tokens=due.output_tokens,
                output_kind="delta",
            )
            name = str(due.order)
            self.engine.add_request(name, due.prompt, params, arrival_time=due.arrival)
            self.timelines.append(timeline)
            self._running[name] = (timeline, due.then)

    def _step(self) -> None:
        outputs = self.engine.step()
        now = self.engine.now()
        decodes = 0
        for output in outputs:
            timeline, then = self._running[output.request_id]
            decodes += bool(timeline.stamps)
            timeline.stamps.extend([now] * len(output.outputs[0].token_ids))
            if output.finished:
                del self._running[output.request_id]
                if len(timeline.stamps) != timeline.output_tokens:
                    raise RuntimeError(
                        f"{output.outputs[0].finish_reason}: {len(timeline.stamps)} of "
                        f"{timeline.output_tokens} tokens"
                    )
                if then is not None:
                    then(now)
        if decodes:
            self.decodes.append(decodes)
        self._note(now)

    def _note(self, now: float) -> None:
        """Record the times of the step that was just submitted, if any."""
        before = self._before
        stats = self.engine.stats()
        last = self._stepped
        if stats.steps > before.steps:
            self._before = stats
            self._stepped = now
            spent, (thread_s, collector_s) = self._spent, self._own_times()
            self._spent = thread_s, collector_s
            times = (
                now - last,
                stats.device_s - before.device_s,
                stats.core_s - before.core_s,
                thread_s - spent[0],
                collector_s - spent[1],
            )
            tokens = (
                stats.prefill_tokens - before.prefill_tokens,
                stats.decode_tokens - before.decode_tokens,
            )
            self._steps.extend(astuple(StepTime(now, *times, *tokens)))

    @staticmethod
    def _own_times() -> tuple[float, float]:
        return time.thread_time(), COLLECTOR.seconds


def quantiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return the quantiles in milliseconds."""
    values = 1e3 * np.fromiter(seconds, float)
    return (
        {name: float(np.percentile(values, share)) for name, share in QUANTILES.items()}
        if len(values)
        else {}
    )


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Return Poisson arrival times in [0, seconds), with `rate` per second on average."""
    rng = random.Random(seed)
    times = []
    at = 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        times.append(at)
    return times
