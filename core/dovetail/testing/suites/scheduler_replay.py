"""A policy's plans as text, computed in this process or in another one with a different string hash
seed and other clocks."""

from __future__ import annotations

import datetime
import itertools
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from dovetail.api.scheduler import Scheduler, SchedulerContext
from dovetail.testing.binding import Binding
from dovetail.testing.blocking import heard_blocking_calls
from dovetail.testing.processes import run_python
from dovetail.testing.suites.scheduler_loads import crowd, drafted, pressed
from dovetail.testing.suites.scheduler_world import World

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_ELSEWHERE = "from dovetail.testing.suites.scheduler_replay import _answer; _answer()"


def plans(make: Callable[[SchedulerContext], Scheduler]) -> list[str]:
    """Return every step's plan, with and without overlap and a prefix cache."""
    scenarios = [
        pressed(overlap, reuse=reuse) for overlap in (True, False) for reuse in (True, False)
    ]
    scenarios += [*(crowd(scarce=scarce) for scarce in (True, False)), drafted()]
    return [
        repr(step)
        for scenario in scenarios
        for step in World(make, scenario.shape).play(scenario.acts).watch.planned
    ]


def plans_elsewhere(*suites: Binding, hash_seed: str) -> list[list[str]]:
    """Return the plans of each suite's policy from a new process with this `PYTHONHASHSEED`.
    Raises `CheckFailed` if it fails."""
    policies = [
        (
            suite.component if isinstance(suite.component, str) else suite.component_class,
            dict(suite.options),
        )
        for suite in suites
    ]
    with tempfile.TemporaryDirectory(prefix="dovetail-replay-") as folder:
        answer = Path(folder, "plans")
        run_python(
            _ELSEWHERE,
            pickle.dumps((policies, str(answer))),
            "another process can't plan",
            PYTHONHASHSEED=hash_seed,
        )
        found: list[list[str]] = json.loads(answer.read_text())
        return found


def blocking_calls(make: Callable[[SchedulerContext], Scheduler]) -> list[str]:
    """Return the names of the blocking calls that this thread makes while a crowd is served."""
    scenario = crowd(scarce=True)
    with heard_blocking_calls() as heard:
        World(make, scenario.shape).play(scenario.acts)
    return sorted(set(heard))


class _JumpingDate(datetime.datetime):
    """A `datetime` whose current time is an hour later at each call."""

    _readings = itertools.count(1)

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls(2000, 1, 1, tzinfo=tz) + datetime.timedelta(hours=next(cls._readings))

    @classmethod
    def utcnow(cls) -> Self:
        return cls.now()

    @classmethod
    def today(cls) -> Self:
        return cls.now()


def _jumping() -> Callable[[], int]:
    """Return a clock that is an hour later at each reading, in seconds or nanoseconds, so that a
    policy that reads it plans otherwise."""
    readings = itertools.count(0, 3600 * 10**9)
    return lambda: next(readings)


def _answer() -> None:
    for name in CLOCKS:
        setattr(time, name, _jumping())
    datetime.datetime = _JumpingDate  # type: ignore[misc]
    policies, answer = pickle.load(sys.stdin.buffer)
    bound = [
        type(
            "Bound", (Binding,), {"kind": "scheduler", "component": component, "options": options}
        )()
        for component, options in policies
    ]
    Path(answer).write_text(json.dumps([plans(one.make) for one in bound]))
