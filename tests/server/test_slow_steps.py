"""A step that is slow isn't stuck: what gets on isn't timed out, on a server and among ranks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.process_watch import PULSE, Pulse
from dovetail.errors import DovetailError
from dovetail_executors import ranks as of_ranks
from dovetail_executors.ranks import Ranks
from dovetail_server.host import EngineHost
from dovetail_server.step_watch import StepWatch


class Time:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(time, "monotonic", found)
    monkeypatch.setattr(PULSE, "last", 0.0)
    return found


def pass_time(watch: StepWatch, clock: Time, seconds: int) -> float:
    """Ask twice a second, as the process of an engine does."""
    for _ in range(2 * seconds):
        clock.now += 0.5
        watch.busy_s()
    return watch.busy_s()


def test_a_step_is_timed_from_its_latest_progress(clock: Time) -> None:
    host = SimpleNamespace(busy_since=clock.now)
    watch = StepWatch(cast(EngineHost, host))
    assert pass_time(watch, clock, 50) == pytest.approx(50, abs=1)
    PULSE.beat("a module", "its arguments")
    assert pass_time(watch, clock, 50) == pytest.approx(50, abs=1), (
        "not the 100 since the step began"
    )
    host.busy_since = clock.now
    assert pass_time(watch, clock, 5) == pytest.approx(5, abs=1), "a new step"
    host.busy_since = None
    assert watch.busy_s() == 0, "none"


def test_each_layer_of_a_step_on_a_cpu_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[object] = []
    monkeypatch.setattr(Pulse, "beat", lambda self, *args: beats.append(args))
    with LLMEngine.from_config("demo", max_model_len=64) as engine:
        assert engine.capacity.prompt_rate is not None
        beats.clear()
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=1))
        engine.step()
        assert len(beats) > 2 * engine.core.books.layout.groups[0].layers[-1], "two in each"


class Progress:
    """A pulse that beats whenever it is read, until it is stopped."""

    def __init__(self) -> None:
        self.stopped: float | None = None  # when

    @property
    def last(self) -> float:
        return time.monotonic() if self.stopped is None else self.stopped


def test_a_limit_of_ranks_begins_anew_while_the_first_one_gets_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are no others here: nothing else can fail."""
    progress = Progress()
    monkeypatch.setattr(of_ranks, "PULSE", progress)
    ended = threading.Event()
    ranks = Ranks([])
    ranks.on_failure = ended.set
    ranks.start()
    try:
        ranks.limit(0.1, lambda: "too slow")
        assert not ended.wait(0.3)
        progress.stopped = time.monotonic()
        assert ended.wait(60)
        with pytest.raises(DovetailError, match="too slow"):
            ranks.check()
    finally:
        ranks.stop()
