"""A policy's plans as text, computed in this process or in another one with a different string hash
seed and other clocks."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.api.scheduler import Scheduler, SchedulerContext
from dovetail.testing.binding import Binding
from dovetail.testing.processes import run_python
from dovetail.testing.suites.scheduler_loads import crowd, pressed
from dovetail.testing.suites.scheduler_world import World

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_ELSEWHERE = "from dovetail.testing.suites.scheduler_replay import _answer; _answer()"


def plans(make: Callable[[SchedulerContext], Scheduler]) -> list[str]:
    """Return every step's plan, with and without overlap and a prefix cache."""
    scenarios = [
        pressed(overlap, reuse=reuse) for overlap in (True, False) for reuse in (True, False)
    ]
    scenarios += [crowd(scarce=scarce) for scarce in (True, False)]
    return [
        repr(step)
        for scenario in scenarios
        for step in World(make, scenario.shape).play(scenario.acts).watch.planned
    ]


def plans_elsewhere(*suites: Binding) -> list[list[str]]:
    """Return the plans of each suite's policy from a new process with another `PYTHONHASHSEED`.
    Raises `CheckFailed` if it fails."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
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


def _jumping() -> Callable[[], int]:
    """Return a clock that is an hour later at each reading, in seconds or nanoseconds, so that a
    policy that reads it plans otherwise."""
    readings = itertools.count(0, 3600 * 10**9)
    return lambda: next(readings)


def _answer() -> None:
    for name in CLOCKS:
        setattr(time, name, _jumping())
    policies, answer = pickle.load(sys.stdin.buffer)
    bound = [
        type(
            "Bound", (Binding,), {"kind": "scheduler", "component": component, "options": options}
        )()
        for component, options in policies
    ]
    Path(answer).write_text(json.dumps([plans(one.make) for one in bound]))
