"""The process watch: a process that is stopped for long is found, unless watcher and watched were
suspended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dovetail.api.process_watch import LONGEST_TURN_S, STOPPED_S, ProcessWatch, how_ended


class Time:
    """Current reading of `time.monotonic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_in_turns(self, seconds: float, watch: ProcessWatch, pid: int) -> bool:
        """Let time pass in turns of a quarter second, and return the last answer."""
        stopped = False
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            watch.turn()
            stopped = watch.is_stopped(pid)
        return stopped


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def go_on(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)


def test_a_process_counts_as_stopped_once_it_has_been_for_long(
    process: subprocess.Popen[bytes], clock: Time
) -> None:
    watch = ProcessWatch()
    assert not clock.pass_in_turns(
        2 * STOPPED_S, watch, process.pid
    )  # it waits for input, which is no fault
    stop(process)
    assert not clock.pass_in_turns(STOPPED_S, watch, process.pid)
    assert clock.pass_in_turns(1, watch, process.pid)


def test_a_process_that_continues_in_time_starts_over(
    process: subprocess.Popen[bytes], clock: Time
) -> None:
    watch = ProcessWatch()
    for _ in range(3):
        stop(process)
        assert not clock.pass_in_turns(STOPPED_S, watch, process.pid)
        go_on(process)
        assert not clock.pass_in_turns(1, watch, process.pid)


def test_time_in_which_the_watcher_was_held_up_counts_for_nothing(
    process: subprocess.Popen[bytes], clock: Time
) -> None:
    watch = ProcessWatch()
    stop(process)
    clock.pass_in_turns(1, watch, process.pid)
    before = watch.now
    clock.now += 3600
    assert watch.turn() - before == pytest.approx(LONGEST_TURN_S)
    assert not watch.is_stopped(process.pid)
    assert clock.pass_in_turns(STOPPED_S, watch, process.pid)


def test_a_process_that_is_gone_is_not_stopped(
    process: subprocess.Popen[bytes], clock: Time
) -> None:
    process.kill()
    process.wait()
    assert not clock.pass_in_turns(2 * STOPPED_S, ProcessWatch(), process.pid)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-35, "was killed by signal 35"),
    ],
)
def test_the_end_of_a_process_is_reported_also_for_signals_without_a_name(
    code: int, said: str
) -> None:
    assert how_ended(code) == said
