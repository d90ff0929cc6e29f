"""The observer `perfetto`: the trace keeps to the format, tells each request's life, and never
disturbs the engine."""

from __future__ import annotations

import json
import os
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.kv_cache import CacheGroup, PageCounts
from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    ObserverContext,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import ConfigError
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.workloads.load import WorkloadOptions, load_workload
from dovetail_observers.perfetto import DEVICE, ENGINE, REQUESTS, PerfettoObserver, PerfettoOptions

Event = dict[str, Any]
STARTED = EngineStarted(100.0, "dovetail:fcfs", "dovetail:prefix", "dovetail:local", 10, 16, 2, {})


def observer(path: Path, **options: Any) -> PerfettoObserver:
    """An observer on whose wall clock no time passes."""
    return PerfettoObserver(
        PerfettoOptions(path=str(path), **options),
        ObserverContext(max_num_seqs=8, total_pages=10),
        lambda: 0.0,
    )


def started(path: Path, **options: Any) -> PerfettoObserver:
    made = observer(path, **options)
    made.on_started(STARTED)
    return made


def request(id: str = "r", **fields: Any) -> LiveRequest:
    return LiveRequest(
        id, [1, 2, 3], SamplingParams(), max_tokens=9, **{"arrival_time": 100.0, **fields}
    )


def step(
    index: int,
    started: float,
    ended: float,
    *,
    running: int = 1,
    held_by_group: tuple[int, ...] = (),
    **more: Any,
) -> StepFinished:
    return StepFinished(
        index=index,
        planned=started,
        started=started,
        ended=ended,
        prefill_tokens=3,
        decode_tokens=2,
        generated_tokens=2,
        cached_tokens=1,
        waiting=0,
        running=running,
        preempted=0,
        recomputed_tokens=0,
        pages=PageCounts(empty=5, held=3, cached=2, held_by_group=held_by_group),
        core_s=0.001,
        **more,
    )


def events_of(path: Path) -> list[Event]:
    return json.loads(path.read_text())


def slices(events: list[Event]) -> dict[int, list[tuple[str, int, int, Event]]]:
    """Lane -> its slices of requests and phases: name, begin, end, arguments; the outer one first.
    Asserts that begins and ends match, and that time doesn't run backwards."""
    found: dict[int, list[tuple[str, int, int, Event]]] = defaultdict(list)
    open_ones: dict[int, list[int]] = defaultdict(list)
    last: Counter[int] = Counter()
    for event in events:
        if event["pid"] == REQUESTS and event["ph"] in "BEi":
            lane, at = event["tid"], event["ts"]
            assert at >= last[lane], event
            last[lane] = at
            if event["ph"] == "B":
                open_ones[lane].append(len(found[lane]))
                assert len(open_ones[lane]) <= 2, "a lane holds one request, in one phase"
                found[lane].append((event["name"], at, -1, event["args"]))
            elif event["ph"] == "E":
                name, begin, _, args = found[lane][index := open_ones[lane].pop()]
                found[lane][index] = (name, begin, at, args | event["args"])
    assert not any(open_ones.values()), "each begin has its end"
    return found


def lives(
    events: list[Event],
) -> dict[str, tuple[tuple[str, int, int, Event], list[tuple[str, int, int, Event]]]]:
    """Request -> its slice, and those of its phases."""
    found: dict[str, Any] = {}
    for of_lane in slices(events).values():
        for one in of_lane:
            if one[0].startswith("request "):
                phases: list[Any] = []
                found[one[0].removeprefix("request ")] = (one, phases)
            else:
                phases.append(one)
    return found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, list[Event]]:
    """A simulated run with overlap in which memory is short, and its trace."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    config = {
        "max_model_len": 256,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "executor": {
            "name": "simulated",
            "num_pages": 24,
            "step_time": {"kind": "linear", "base_s": 0.01},
        },
        "observers": [{"name": "perfetto", "path": str(path)}],
    }
    spec = "requests=40 arrivals=poisson(20) prompt=uniform(5, 120) output=uniform(1, 80)"
    return replay(config, load_workload(spec, WorkloadOptions(seed=3))), events_of(path)


def test_every_request_is_drawn_from_arrival_to_end_and_its_phases_fill_its_life(
    simulated: tuple[RunResult, list[Event]],
) -> None:
    run, events = simulated
    drawn = lives(events)
    assert len(drawn) == len(run)
    for record in run:
        (_, begin, end, args), phases = drawn[record.id]
        assert (begin, end) == (round(1e6 * record.arrival_s), round(1e6 * record.finished_s))
        assert (args["generated"], args["preemptions"], args["finish"]) == (
            record.output_tokens,
            record.preemptions,
            record.finish_reason,
        )
        assert [until for _, _, until, _ in phases] == [at for _, at, _, _ in phases[1:]] + [end]
        assert phases[0][:2] == ("queued", begin)


def test_phases_of_preempted_requests_are_told_in_their_order(
    simulated: tuple[RunResult, list[Event]],
) -> None:
    run, events = simulated
    drawn = lives(events)
    assert sum(record.preemptions for record in run) > 5
    allowed = {
        ("queued", "prefill"),
        ("prefill", "decode"),
        ("prefill", "preempted"),
        ("decode", "preempted"),
        ("preempted", "prefill"),
    }
    for record in run:
        names = [name for name, *_ in drawn[record.id][1]]
        assert set(pairwise(names)) <= allowed
        assert names.count("preempted") == record.preemptions
        assert names.count("prefill") == 1 + record.preemptions
        decodes = [at for name, at, _, _ in drawn[record.id][1] if name == "decode"]
        tokens = [round(1e6 * at) for at in record.token_times_s]
        assert set(decodes) <= set(tokens)
        if (
            record.output_tokens > 1 and not record.preemptions
        ):  # else the first may have been in flight when it was preempted
            assert decodes == tokens[:1]


def test_steps_and_counters_are_those_of_the_run(simulated: tuple[RunResult, list[Event]]) -> None:
    run, events = simulated
    steps = [event for event in events if event["ph"] == "X"]
    assert all((event["pid"], event["tid"]) == (ENGINE, DEVICE) for event in steps)
    assert [
        event["args"]["prefill_tokens"] for event in steps
    ] == run.timeline.prefill_tokens.tolist()
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(steps))
    assert sum(event["args"]["preempted"] for event in steps) == sum(
        record.preemptions for record in run
    )
    counted = [
        event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"
    ]
    assert [args["waiting"] for args in counted] == run.timeline.waiting.tolist()
    assert [args["running"] for args in counted] == run.timeline.running.tolist()
    assert {sum(event["args"].values()) for event in events if event.get("name") == "KV pages"} == {
        24
    }


def test_marks_are_set_for_preemptions_and_ends(simulated: tuple[RunResult, list[Event]]) -> None:
    run, events = simulated
    marks = Counter(
        event["name"] for event in events if event["ph"] == "i" and event["pid"] == REQUESTS
    )
    assert marks.pop("preempted") == sum(record.preemptions for record in run)
    assert marks == Counter(record.finish_reason for record in run)


def test_times_are_microseconds_since_the_start_and_a_second_prefill_ends_with_the_next_token(
    tmp_path: Path,
) -> None:
    trace, one = started(tmp_path / "t.json"), request()
    trace.on_arrived(RequestArrived(100.5, one))
    trace.on_admitted(RequestAdmitted(101.0, one, 2))
    trace.on_step(step(0, 101.0, 102.0))  # a chunk of the prompt: no token
    one.output.append(5)
    trace.on_step(step(1, 102.0, 103.0))
    trace.on_preempted(RequestPreempted(104.0, one))
    one.preemptions = 1
    trace.on_admitted(RequestAdmitted(105.0, one, 0))
    trace.on_step(step(2, 105.0, 106.0))
    one.output.append(6)
    trace.on_step(step(3, 106.0, 107.0))
    trace.on_finished(RequestFinished(108.0, one, "stop", 6))
    trace.on_stopped(EngineStopped(109.0, None))
    whole, phases = lives(events_of(tmp_path / "t.json"))["r"]
    assert whole[1:3] == (0, 8_000_000)
    assert (whole[3]["finish"], whole[3]["why"], whole[3]["generated"]) == ("stop", "6", 2)
    seconds = [(name, begin / 1e6, end / 1e6) for name, begin, end, _ in phases]
    assert seconds == [
        ("queued", 0, 1),
        ("prefill", 1, 3),
        ("decode", 3, 4),
        ("preempted", 4, 5),
        ("prefill", 5, 7),
        ("decode", 7, 8),
    ]
    assert phases[1][3] == {"cached_tokens": 2}


def test_a_request_may_end_without_having_run_and_its_reason_is_told(tmp_path: Path) -> None:
    trace, one = started(tmp_path / "t.json"), request(client="someone")
    trace.on_arrived(RequestArrived(100.0, one))
    trace.on_finished(RequestFinished(101.0, one, "rejected", "too many"))
    trace.on_stopped(EngineStopped(102.0, ValueError("no")))
    events = events_of(tmp_path / "t.json")
    [(whole, phases)] = lives(events).values()
    assert [name for name, *_ in phases] == ["queued"]
    assert (whole[3]["client"], whole[3]["finish"], whole[3]["why"]) == (
        "someone",
        "rejected",
        "too many",
    )
    assert [(event["name"], event["args"]) for event in events if event["ph"] == "i"] == [
        ("rejected", {"why": "too many"}),
        ("stopped by ValueError: no", {}),
    ]


def test_a_lane_holds_one_request_at_a_time_and_is_used_again(tmp_path: Path) -> None:
    trace = started(tmp_path / "t.json")
    for index in range(5):
        one, other, late = (
            request(f"a{index}", arrival_time=101.0 + index),
            request(f"b{index}", arrival_time=101.0 + index),
            request(f"c{index}"),
        )
        # before the first one's end, which is reported before this arrival
        late.arrival_time = 101.5 + index
        trace.on_arrived(RequestArrived(101.0 + index, one))
        trace.on_arrived(RequestArrived(101.0 + index, other))
        trace.on_finished(RequestFinished(101.6 + index, one, "abort", None))
        trace.on_arrived(RequestArrived(101.6 + index, late))
        trace.on_finished(RequestFinished(101.9 + index, other, "abort", None))
        trace.on_finished(RequestFinished(101.9 + index, late, "abort", None))
    trace.on_stopped(EngineStopped(110.0, None))
    drawn = slices(events_of(tmp_path / "t.json"))
    assert [len(of_lane) for of_lane in drawn.values()] == [10, 10, 10]


def test_requests_that_a_stopped_engine_leaves_are_ended(tmp_path: Path) -> None:
    trace, one, other = started(tmp_path / "t.json"), request("a"), request("b")
    for each in (one, other):
        trace.on_arrived(RequestArrived(100.0, each))
    trace.on_admitted(RequestAdmitted(101.0, one, 0))
    trace.on_stopped(EngineStopped(103.0, None))
    assert {
        name: whole[2] for name, (whole, _) in lives(events_of(tmp_path / "t.json")).items()
    } == {"a": 3_000_000, "b": 3_000_000}


def test_steps_whose_measured_times_overlap_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    trace = started(tmp_path / "t.json")
    for index, (begin, end) in enumerate([(101.0, 102.0), (101.9, 103.0), (102.5, 102.6)]):
        trace.on_step(step(index, begin, end))
    trace.on_stopped(EngineStopped(104.0, None))
    assert [(e["ts"], e["dur"]) for e in events_of(tmp_path / "t.json") if e["ph"] == "X"] == [
        (1_000_000, 1_000_000),
        (2_000_000, 1_000_000),
        (3_000_000, 0),
    ]


def test_pages_are_counted_by_cache_group_if_there_are_several(tmp_path: Path) -> None:
    trace = observer(tmp_path / "t.json")
    groups = (CacheGroup((1,), 16), CacheGroup((0,), 16, 128))
    trace.on_started(EngineStarted(0.0, "fcfs", "prefix", "local", 10, 16, 1, {}, groups))
    trace.on_step(step(0, 1.0, 2.0, held_by_group=(1, 2)))
    trace.on_stopped(EngineStopped(2.0, None))
    assert [
        e["args"]
        for e in events_of(tmp_path / "t.json")
        if e.get("name") == "KV pages held by group"
    ] == [{"full": 1, "window 128": 2}]


def test_graphs_are_named_and_copies_counted_while_there_are_any(tmp_path: Path) -> None:
    trace = started(tmp_path / "t.json")
    drafting = ("draft_first", "draft_next", "draft_next", "decode")
    trace.on_step(step(0, 101.0, 102.0))
    trace.on_step(step(1, 102.0, 103.0, graphs=drafting, page_copies=3, adapter_loads=1))
    trace.on_step(step(2, 103.0, 104.0, graphs=("mixed", "sampling"), checkpoints=2))
    trace.on_step(step(3, 104.0, 105.0))
    trace.on_step(step(4, 105.0, 106.0))
    trace.on_stopped(EngineStopped(106.0, None))
    events = events_of(tmp_path / "t.json")
    told = [event["args"]["graphs"] for event in events if event["ph"] == "X"]
    assert told == ["none", "draft_first, draft_next x2, decode", "mixed, sampling", "none", "none"]
    copies = [(event["ts"], event["args"]) for event in events if event.get("name") == "copies"]
    assert copies == [
        (2_000_000, {"pages": 3, "checkpoints": 0, "adapters": 1}),
        (3_000_000, {"pages": 0, "checkpoints": 2, "adapters": 0}),
        (4_000_000, {"pages": 0, "checkpoints": 0, "adapters": 0}),
    ]


def test_an_engine_tells_of_the_pages_that_samples_of_a_prompt_copy(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with LLMEngine.from_config(
        {
            "model": "demo",
            "max_model_len": 64,
            "observers": [{"name": "perfetto", "path": str(path)}],
        }
    ) as engine:
        params = SamplingParams(n=3, max_tokens=4, ignore_eos=True, detokenize=False)
        engine.add_request("r", {"prompt_token_ids": list(range(1, 20))}, params)
        while engine.has_unfinished_requests():
            engine.step()
    counted = [event["args"]["pages"] for event in events_of(path) if event.get("name") == "copies"]
    assert sum(counted) == 2, "the prompt's last page, for two of three samples"
    assert counted[-1] == 0


def test_any_id_and_client_can_be_read_and_long_ones_are_cut(tmp_path: Path) -> None:
    trace = started(tmp_path / "t.json")
    for id in ('"\n\0', "\ud800", "x" * 10_000):
        one = request(id, client=id)
        trace.on_arrived(RequestArrived(100.0, one))
        trace.on_finished(RequestFinished(100.0, one, "error", id))
    trace.on_stopped(EngineStopped(100.0, None))
    names = [
        event["name"]
        for event in events_of(tmp_path / "t.json")
        if event.get("name", "").startswith("request ")
    ]
    assert names == ['request "\n\0', "request ?", f"request {'x' * 197}..."]
    assert (tmp_path / "t.json").stat().st_size < 5_000


def test_events_are_written_whole_and_at_the_latest_when_the_engine_is_idle(tmp_path: Path) -> None:
    """So that what a killed engine leaves lacks only the closing bracket."""
    path = tmp_path / "t.json"
    trace = started(path)
    sizes = set()
    for index in range(1_000):
        trace.on_step(step(index, 101.0 + index, 102.0 + index))
        sizes.add(path.stat().st_size)
    assert 3 < len(sizes) < 20, "several events share a write"
    assert 0 < len(json.loads(path.read_text() + "]")) < 4_000
    trace.on_step(step(1_000, 1101.0, 1102.0, running=0))
    assert [
        event["args"]["step"] for event in json.loads(path.read_text() + "]") if event["ph"] == "X"
    ] == list(range(1_001))
    trace.on_stopped(EngineStopped(1102.0, None))


def test_a_second_after_the_last_write_the_next_event_is_written(tmp_path: Path) -> None:
    now = [0.0]
    trace = PerfettoObserver(
        PerfettoOptions(path=str(tmp_path / "t.json")), ObserverContext(1, 1), lambda: now[0]
    )
    trace.on_started(STARTED)
    for index in range(3):
        now[0] += 0.4
        trace.on_step(step(index, 101.0 + index, 102.0 + index))
    assert (
        sum(event["ph"] == "X" for event in json.loads((tmp_path / "t.json").read_text() + "]"))
        == 3
    )
    trace.on_stopped(EngineStopped(102.0, None))


def test_a_full_file_is_whole_and_not_larger_than_it_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    trace, kept = started(path, max_mb=1), [request(f"r{index}") for index in range(50)]
    for one in kept:
        trace.on_arrived(RequestArrived(100.0, one))
    for index in range(2_000):
        trace.on_step(step(index, 101.0 + index, 102.0 + index))
    trace.on_finished(RequestFinished(3000.0, kept[0], "stop", None))
    trace.on_arrived(RequestArrived(3000.0, request("late")))
    trace.on_stopped(EngineStopped(3001.0, None))
    assert 0.98 * 2**20 < path.stat().st_size <= 2**20
    events = events_of(path)
    assert len(lives(events)) == 50
    assert any(
        event["name"] == "the trace ends here: max_mb is reached"
        for event in events
        if event["ph"] == "i"
    )
    assert (
        [message for message in caplog.messages if "max_mb: 1" in message] == caplog.messages != []
    )


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond `size` fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_the_trace_with_a_warning_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    trace, one = started(path), request()
    trace.on_arrived(RequestArrived(100.0, one))
    with largest_file(100_000):
        for index in range(1_000):
            trace.on_step(step(index, 101.0 + index, 102.0 + index))
        trace.on_admitted(RequestAdmitted(1102.0, one, 0))
        trace.on_finished(RequestFinished(1102.0, one, "stop", None))
        trace.on_stopped(EngineStopped(1103.0, None))
    steps = [event["args"]["step"] for event in events_of(path) if event["ph"] == "X"]
    assert steps == list(range(len(steps)))
    assert 50 < len(steps) < 300
    assert len(caplog.messages) == 1
    assert "the trace ends here" in caplog.text


def test_a_file_closed_by_somebody_else_ends_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    config = {
        "max_model_len": 64,
        "executor": {"name": "simulated", "num_pages": 20},
        "observers": [{"name": "perfetto", "path": str(path)}],
    }
    with LLMEngine.from_config(config) as engine:
        [descriptor] = [
            int(one.name)
            for one in Path("/proc/self/fd").iterdir()
            if os.path.realpath(one) == str(path.resolve())
        ]
        os.close(descriptor)
        engine.add_request(
            "r", [5] * 10, SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)
        )
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert "can't be written any more" in caplog.text
    assert "raised" not in caplog.text
    assert json.loads(path.read_text() + "]")


def test_two_engines_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    first, second = started(path), observer(path)
    with pytest.raises(
        ConfigError,
        match=r"observer perfetto: path: .* is being written by another engine or observer",
    ):
        second.on_started(STARTED)
    first.on_stopped(EngineStopped(101.0, None))
    assert events_of(path)
    second.on_started(STARTED)
    second.on_stopped(EngineStopped(101.0, None))
    assert events_of(path), "overwritten by the next run"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere/t.json", "No such file or directory"),
        (".", "not a regular file"),
        ("fifo", "not a regular file"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "embedded null byte"),
    ],
)
def test_a_file_that_cannot_be_written_keeps_the_engine_from_starting(
    path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    config = {
        "max_model_len": 64,
        "executor": {"name": "simulated", "num_pages": 20},
        "observers": [{"name": "perfetto", "path": path}],
    }
    with pytest.raises(ConfigError, match=rf"observer perfetto: path: .* can't be written: {why}"):
        LLMEngine.from_config(config)
