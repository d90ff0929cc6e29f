"""The observer `log`: when it writes, and that what it writes is right."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
from pydantic import ValidationError

from dovetail.api.kv_cache import CacheGroup, PageCounts
from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    ObserverContext,
    RequestPreempted,
    StepFinished,
)
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail_observers.log import LogObserver, LogOptions


@dataclass
class Wall:
    """Wall time that changes only when set."""

    time: float = 100.0

    def __call__(self) -> float:
        return self.time


def step(
    index: int, started: float, ended: float, *, prefill: int = 0, decode: int = 0, cached: int = 0
) -> StepFinished:
    return StepFinished(
        index=index,
        planned=started,
        started=started,
        ended=ended,
        prefill_tokens=prefill,
        decode_tokens=decode,
        generated_tokens=decode,
        cached_tokens=cached,
        waiting=2,
        running=3,
        preempted=0,
        recomputed_tokens=0,
        pages=PageCounts(empty=5, held=3, cached=2, held_by_group=(1, 2)),
        core_s=0.0,
    )


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def log(wall: Wall, caplog: pytest.LogCaptureFixture) -> LogObserver:
    caplog.set_level(logging.INFO, logger="dovetail")
    return LogObserver(LogOptions(), ObserverContext(max_num_seqs=8, total_pages=10), wall)


def preempted() -> RequestPreempted:
    return RequestPreempted(0.0, Request("r", [1], SamplingParams(), max_tokens=1))


def test_a_line_comes_only_when_the_wall_time_is_up(
    log: LogObserver, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    for index in range(3):
        log.on_step(step(index, index, index + 1, decode=3))
    assert caplog.messages == []
    wall.time += 5
    log.on_step(step(3, 3, 4, decode=3))
    log.on_step(step(4, 4, 5, decode=3))
    assert len(caplog.messages) == 1


def test_a_simulated_hour_within_a_moment_writes_no_line(
    log: LogObserver, caplog: pytest.LogCaptureFixture
) -> None:
    log.on_step(step(0, 0, 3600, decode=3))
    assert caplog.messages == []


def test_rates_are_by_the_engines_clock_and_counts_begin_anew_with_each_line(
    log: LogObserver, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    log.on_step(step(0, 10.0, 11.0, prefill=300, cached=100))
    log.on_preempted(preempted())
    wall.time += 5
    log.on_step(step(1, 11.0, 12.0, decode=80))
    wall.time += 5
    log.on_step(step(2, 50.0, 50.5, decode=5))  # after an idle time, which doesn't count
    assert caplog.messages == [
        "running 3, waiting 2 | prefill 150 tok/s, decode 40 tok/s | KV 30.0% used, prefix hits "
        "25% | 1 preemptions",
        "running 3, waiting 2 | prefill 0 tok/s, decode 10 tok/s | KV 30.0% used, prefix hits 0% | "
        "0 preemptions",
    ]


def test_a_line_has_the_acceptance_length_if_drafts_were_checked(
    log: LogObserver, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    wall.time += 5
    log.on_step(
        replace(
            step(0, 10.0, 11.0, decode=80),
            draft_rows=4,
            draft_tokens=16,
            accepted_drafts=(4, 0, 1, 1),
        )
    )
    log.on_stopped(EngineStopped(12.0, None))
    assert "decode 80 tok/s, acceptance length 2.50 | KV" in caplog.messages[0]
    assert caplog.messages[1].endswith("0 preemptions, acceptance length 2.50")


def test_at_the_stop_come_the_rest_and_the_sums(
    log: LogObserver, caplog: pytest.LogCaptureFixture
) -> None:
    log.on_step(step(0, 0.0, 1.0, prefill=30, decode=4, cached=10))
    log.on_preempted(preempted())
    log.on_stopped(EngineStopped(2.0, None))
    assert caplog.messages == [
        "running 3, waiting 2 | prefill 30 tok/s, decode 4 tok/s | KV 30.0% used, prefix hits 25% "
        "| 1 preemptions",
        "stopped: 1 steps, 30 prefill and 4 decode tokens, prefix hits 25%, 1 preemptions",
    ]


def test_an_engine_that_stops_before_any_step_and_by_an_error_logs_it(
    log: LogObserver, caplog: pytest.LogCaptureFixture
) -> None:
    log.on_stopped(EngineStopped(2.0, ValueError("no")))
    assert caplog.messages == [
        "stopped by ValueError: no: 0 steps, 0 prefill and 0 decode tokens, prefix hits 0%, 0 "
        "preemptions"
    ]


def test_the_start_names_what_runs(log: LogObserver, caplog: pytest.LogCaptureFixture) -> None:
    log.on_started(
        EngineStarted(
            0.0,
            "dovetail:fcfs",
            "dovetail:prefix",
            "dovetail:local",
            10,
            16,
            1,
            {"device": "cpu", "dtype": "float32"},
        )
    )
    assert caplog.messages == [
        "started: scheduler dovetail:fcfs, kv_cache dovetail:prefix (10 pages, blocks of 16), executor "
        "dovetail:local (device cpu, dtype float32)"
    ]


def test_cache_groups_are_described_at_the_start_and_told_apart_later(
    log: LogObserver, wall: Wall, caplog: pytest.LogCaptureFixture
) -> None:
    groups = (CacheGroup((1,), 16), CacheGroup((0,), 16, 128))
    described = (
        "1 layers, full attention, blocks of 16 tokens in 1 page; 1 layers, window 128, "
        "blocks of 16 tokens in 1 page"
    )
    log.on_started(
        EngineStarted(
            0.0,
            "fcfs",
            "prefix",
            "local",
            10,
            16,
            1,
            {"device": "cpu", "kv_groups": described},
            groups,
        )
    )
    wall.time += 5
    log.on_step(step(0, 0.0, 1.0, decode=4))
    assert caplog.messages == [
        "started: scheduler fcfs, kv_cache prefix (10 pages, blocks of 16), executor local (device cpu)",
        "cache group: 1 layers, full attention, blocks of 16 tokens in 1 page",
        "cache group: 1 layers, window 128, blocks of 16 tokens in 1 page",
        "running 3, waiting 2 | prefill 0 tok/s, decode 4 tok/s | KV 30.0% used (full 10.0%, "
        "window 128 20.0%), prefix hits 0% | 0 preemptions",
    ]


def test_options_are_checked() -> None:
    with pytest.raises(ValidationError):
        LogOptions(every_s=0)
    with pytest.raises(ValidationError):
        LogOptions(every=5)  # type: ignore[call-arg]
