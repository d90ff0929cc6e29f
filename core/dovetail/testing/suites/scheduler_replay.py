"""A policy's plans for given requests, as text to be compared: in this process, or in another one, where strings hash differently."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dovetail.api.scheduler import Scheduler, SchedulerContext
from dovetail.testing.binding import Binding
from dovetail.testing.processes import run_python
from dovetail.testing.suites.scheduler_loads import pressed
from dovetail.testing.suites.scheduler_world import World

_ELSEWHERE = "from dovetail.testing.suites.scheduler_replay import _answer; _answer()"


def plans(make: Callable[[SchedulerContext], Scheduler]) -> list[str]:
    """Return every step's plan, with and without overlap and a prefix cache."""
    scenarios = [pressed(overlap, reuse=reuse) for overlap in (True, False) for reuse in (True, False)]
    return [repr(step) for scenario in scenarios for step in World(make, scenario.shape).play(scenario.acts).watch.planned]


def plans_elsewhere(suite: Binding) -> list[str]:
    """Return the same plans from a new process with another `PYTHONHASHSEED`. Raises `CheckFailed` if it fails."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    component = suite.component if isinstance(suite.component, str) else suite.component_class
    with tempfile.TemporaryDirectory(prefix="dovetail-replay-") as folder:
        answer = Path(folder, "plans")
        stdin = pickle.dumps((component, dict(suite.options), str(answer)))
        run_python(_ELSEWHERE, stdin, "another process can't plan", PYTHONHASHSEED=hash_seed)
        return answer.read_text().splitlines()


def _answer() -> None:
    component, options, answer = pickle.load(sys.stdin.buffer)

    class Bound(Binding):
        kind = "scheduler"

    Bound.component, Bound.options = component, options
    Path(answer).write_text("\n".join(plans(Bound().make)))
