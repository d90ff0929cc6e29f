"""Budget of a test in `make test`: CPU seconds, those of its child processes included, and seconds
of wall time. Also what a bound of CPU time in a test is judged by: `least_s`.

`tests/conftest.py` registers `Budget` in the quick profile. A test above its budget is listed at
the end of the run, and one that takes more than twice its budget fails. Fixtures of a module or of
the session count for themselves.

Seconds are in units of the reference loop: a machine that needs twice the time for the loop has
twice the budget. Wall time leaves out what the test's thread waited for a processor, and is divided
by the programs that want each processor, so other programs on the machine don't fail a test.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, process_time  # tests replace those of the module `time`
from typing import Any

import pytest

CPU_S = 0.5
WALL_S = 1.5
FAILS_AT = 2.0  # times the budget
LOOP = 400_000
LOOP_S = 0.011  # that `reference_loop` takes on the machine the budget was made for
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TRIES = 3  # of something whose CPU time has a bound
OVER = "over budget"  # name of a report's property
LATELY_S = 0.05
MOST_BYTES = 2**16  # of a file of /proc


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of this process and of its children, and wall seconds in which it ran or waited
    for others."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s)

    @classmethod
    def now(cls) -> Spent:
        return cls.alone() + cls(_living_cpu_s(), 0.0)

    @classmethod
    def alone(cls) -> Spent:
        """Return what is spent without what living children have: to ask for theirs takes as long
        as a short test, since each thread is asked."""
        times = os.times()
        cpu_s = times.user + times.system + times.children_user + times.children_system
        return cls(cpu_s, perf_counter() - queued_s())


class Lately:
    """CPU seconds of this process's living descendants, of up to `LATELY_S` ago."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._cpu_s = 0.0

    def cpu_s(self) -> float:
        if perf_counter() - self._asked > LATELY_S:
            self._cpu_s = _living_cpu_s()
            self._asked = perf_counter()
        return self._cpu_s


def _living_cpu_s() -> float:
    return descendants_cpu_s(os.getpid()) if has_children() else 0.0


def has_children() -> bool:
    """Return True if this process has children that it hasn't waited for."""
    with suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return True
    return False


def descendants_cpu_s(pid: int) -> float:
    """Return the CPU seconds of the living descendants of a process and of the children that they
    have waited for.

    `RUSAGE_CHILDREN` has neither: it counts a child once it has been waited for.
    """
    total = 0.0
    for task in _entries(f"/proc/{pid}/task"):
        for child in _read(f"/proc/{pid}/task/{task}/children").split():
            fields = _read(f"/proc/{child}/stat").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / TICKS_PER_S
            total += descendants_cpu_s(int(child))
    return total


def queued_s() -> float:
    """Return the seconds for which this thread was ready to run and had no processor."""
    fields = _read("/proc/thread-self/schedstat").split()
    return int(fields[1]) / 1e9 if fields else 0.0


def reference_loop() -> float:
    """Return the CPU seconds of a loop in Python, the least of three runs."""
    runs = []
    for _ in range(3):
        begun = process_time()
        total = 0
        for number in range(LOOP):
            total += number
        runs.append(process_time() - begun)
    return min(runs)


def crowding() -> float:
    """Return how many programs want each processor, in the last minute's mean, and at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def slowness() -> float:
    """Return how many times as long as the reference machine this one takes for the reference loop
    now, and at least 1."""
    return max(1.0, reference_loop() / LOOP_S)


def least_s(measure: Callable[[], float], bound_s: float) -> float:
    """Return the least of up to three measurements, in CPU seconds of the reference machine. The
    first within `bound_s` is the last.

    One measurement may include a garbage collection of everything that tests have imported, or a
    first import.
    """
    least = math.inf
    for _ in range(TRIES):
        seconds = measure()
        if seconds > bound_s:
            seconds /= slowness()
        least = min(least, seconds)
        if least <= bound_s:
            break
    return least


def least_cpu_s(act: Callable[[], object], bound_s: float) -> float:
    """Return `least_s` of the CPU time that `act` takes, in all threads of this process."""

    def measure() -> float:
        begun = process_time()
        act()
        return process_time() - begun

    return least_s(measure, bound_s)


def _entries(folder: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _read(path: str) -> str:
    """Return the text of a small file of /proc, in a third of the time that `open` takes."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, MOST_BYTES).decode("ascii", errors="replace")
    except OSError:  # the process has just ended
        return ""
    finally:
        os.close(file)


class Budget:
    """Pytest plugin that measures each test, and fails those far above their budget."""

    def __init__(self, factor: float = 1.0) -> None:
        """`factor`: by how much more time everything takes, where other programs run at the same
        time."""
        self._factor = factor
        self.unit = factor * slowness()
        self._shared = Spent(0.0, 0.0)  # by fixtures of modules and sessions, all together
        self._depth = 0  # of such fixtures that are being set up: one can ask for another
        self._lately = Lately()
        self._begun = Spent(0.0, 0.0)  # before the test, but by living descendants
        self._living = Spent(0.0, 0.0)  # by those
        self._shared_before = Spent(0.0, 0.0)
        self._begun_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        self._depth += 1
        begun = Spent.now()
        try:
            return (yield)
        finally:
            self._shared += Spent.now() - begun
            self._depth -= 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        self._begun_s = perf_counter()
        self._shared_before = self._shared
        self._living = Spent(self._lately.cpu_s(), 0.0)
        self._begun = Spent.alone()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if item.get_closest_marker("gpu") is not None:  # kernels are compiled in it
            return result
        if self._is_small():
            return result
        shared = self._shared - self._shared_before
        spent = Spent.now() - shared - self._begun - self._living
        share = max(spent.cpu_s / CPU_S, spent.wall_s / crowding() / WALL_S) / self.unit
        if share > FAILS_AT:  # the machine may have become slower
            now = max(self.unit, self._factor * slowness())
            share *= self.unit / now
            self.unit = now
        if share > 1:
            took = f"{spent.cpu_s:.2f} CPU s and {spent.wall_s:.2f} s"
            item.user_properties.append((OVER, took))
            if share > FAILS_AT:
                pytest.fail(
                    f"took {took}; a test has {CPU_S * self.unit:.2f} CPU s and "
                    f"{WALL_S * self.unit:.2f} s here. "
                    "Share a fixture, test it at a cheaper level, or mark it slow with a reason.",
                    pytrace=False,
                )
        return result

    def _is_small(self) -> bool:
        """Return True if the test is within its budget even if its children have kept all
        processors busy, and it has set up nothing shared."""
        spent = Spent.alone() - self._begun
        most_of_children_s = (perf_counter() - self._begun_s) * (os.cpu_count() or 1)
        return (
            self._shared is self._shared_before
            and spent.cpu_s + most_of_children_s <= CPU_S * self.unit
            and spent.wall_s <= WALL_S * self.unit
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests above their budget."""
    over = [
        f"{dict(report.user_properties)[OVER]}: {report.nodeid}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and OVER in dict(report.user_properties)
    ]
    if over:
        terminalreporter.section("tests over their budget")
        terminalreporter.write_line("\n".join(sorted(over)))
