"""The decision log: it keeps to the trace event format, draws each request's whole life, and says
why it waited."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.api.observer import Act, Decision, ObserverContext
from dovetail.errors import ConfigError
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail_lab.decision_log import REQUESTS, DecisionLog, DecisionLogOptions, Lanes, _fates
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.workloads.load import WorkloadOptions, load_workload
from tests.support import examples

Event = dict[str, Any]

KEYS = {  # of each kind of event, what the format asks for; and what may come with it
    "X": ({"name", "ph", "pid", "tid", "ts", "dur"}, {"args"}),
    "i": ({"name", "ph", "pid", "tid", "ts", "s"}, {"args"}),
    "C": ({"name", "ph", "pid", "ts", "args"}, set()),
    "M": ({"name", "ph", "pid", "tid", "args"}, set()),
}


@dataclass
class Logged:
    run: RunResult
    path: Path

    @property
    def events(self) -> list[Event]:
        return json.loads(self.path.read_text())

    def slices(self) -> dict[tuple[int, int], list[Event]]:
        """By lane, as they stand in the file."""
        lanes = defaultdict(list)
        for event in self.events:
            if event["ph"] == "X":
                lanes[event["pid"], event["tid"]].append(event)
        return lanes

    def lives(self) -> dict[str, tuple[Event, list[Event]]]:
        """Request -> its slice, and those of its phases."""
        found: dict[str, tuple[Event, list[Event]]] = {}
        for (pid, _), slices in self.slices().items():
            for event in slices if pid == REQUESTS else ():
                if event["name"].startswith("request "):
                    phases: list[Event] = []
                    found[event["name"].split()[1]] = (event, phases)
                else:
                    phases.append(event)
        return found


def logged(
    folder: Path,
    scheduler: str = "fcfs",
    blocks: int = 24,
    *,
    seed: int = 0,
    requests: int = 25,
    options: Any = None,
) -> Logged:
    """A simulation in which memory is short."""
    path = folder / "decisions.json"
    spec = (
        f"requests={requests} arrivals=poisson(20) prompt=uniform(5, 120) output=uniform(1, 80) "
        f"clients=3"
    )
    config = {
        "scheduler": scheduler,
        "max_model_len": 256,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "executor": {
            "name": "simulated",
            "num_pages": blocks,
            "step_time": {"kind": "linear", "base_s": 0.01},
        },
        "observers": [{"name": "decision_log", "path": str(path), **(options or {})}],
    }
    return Logged(replay(config, load_workload(spec, WorkloadOptions(seed=seed))), path)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    return logged(tmp_path_factory.mktemp("log"))


def test_every_event_keeps_to_the_format(log: Logged) -> None:
    for event in log.events:
        needed, allowed = KEYS[event["ph"]]
        assert needed <= event.keys() <= needed | allowed, event
        assert isinstance(event["name"], str)
        assert all(
            type(event[key]) is int and event[key] >= 0
            for key in ("pid", "tid", "ts", "dur")
            if key in event
        ), event
        if event["ph"] == "C":
            assert event["args"]
            assert all(type(value) is int for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] == "t"
    assert {event["name"] for event in log.events if event["ph"] == "M"} == {
        "process_name",
        "process_labels",
        "thread_name",
        "thread_sort_index",
    }


def test_pages_are_counted_by_cache_group_if_there_are_several(log: Logged, tmp_path: Path) -> None:
    model = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 9,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    }
    path = tmp_path / "windowed.json"
    config = {
        "max_model_len": 256,
        "executor": {
            "name": "simulated",
            "num_pages": 200,
            "step_time": {"kind": "linear", "base_s": 0.01},
            "model": model,
        },
        "observers": [{"name": "decision_log", "path": str(path)}],
    }
    windowed = Logged(
        replay(config, load_workload("requests=4 arrivals=poisson(50) prompt=100 output=40")), path
    )
    by_group = [
        event["args"] for event in windowed.events if event["name"] == "KV pages held by group"
    ]
    held = [event["args"]["held"] for event in windowed.events if event["name"] == "KV pages"]
    assert [sum(groups.values()) for groups in by_group] == held
    assert by_group[-2].keys() == {"full", "window 16"}
    assert by_group[-2]["full"] > by_group[-2]["window 16"] > 0
    assert not any(event["name"] == "KV pages held by group" for event in log.events)


def assert_nested(slices: list[Event]) -> None:
    """In order of their beginnings, with outer ones first, each ends within those that are open."""
    open_until: list[int] = []
    for event in sorted(slices, key=lambda event: event["ts"]):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
        open_until.append(event["ts"] + event["dur"])


@pytest.mark.slow("reads a log of many requests")
@examples(quick=6, full=60)
@given(
    scheduler=st.sampled_from(["fcfs", "vtc", "priority"]),
    blocks=st.integers(17, 60),
    seed=st.integers(0, 1_000),
)
def test_slices_nest_and_phases_fill_a_life(
    tmp_path_factory: pytest.TempPathFactory, scheduler: str, blocks: int, seed: int
) -> None:
    made = logged(tmp_path_factory.mktemp("log"), scheduler, blocks, seed=seed)
    for slices in made.slices().values():
        assert_nested(slices)
    lives = made.lives()
    assert len(lives) == len(made.run)
    for record in made.run:
        life, phases = lives[record.id]
        assert life["ts"] == round(record.arrival_s * 1e6)
        assert life["ts"] + life["dur"] == round(record.finished_s * 1e6)
        assert sum(phase["dur"] for phase in phases) == life["dur"]
        assert life["args"]["generated"] == record.output_tokens
        assert life["args"]["finish"].startswith(record.finish_reason)


def test_preemptions_are_marked_on_the_lane_and_counted(log: Logged) -> None:
    marks = [event for event in log.events if event["ph"] == "i" and event["name"] == "preempted"]
    assert len(marks) == sum(record.preemptions for record in log.run) > 0


def test_the_log_names_requests_that_wait_for_memory(log: Logged) -> None:
    reasons = {
        phase["args"].get("why")
        for _, phases in log.lives().values()
        for phase in phases
        if phase["name"].startswith(("waiting", "preempted"))
    }
    assert "not enough free pages, even if all offered requests were evicted" in reasons


def test_who_is_prefilled_decodes_afterwards(log: Logged) -> None:
    for record in log.run:
        names = [phase["name"] for phase in log.lives()[record.id][1]]
        assert "prefill" in names
        assert record.output_tokens == 1 or "decode" in names


def test_counters_are_those_of_the_run(log: Logged) -> None:
    counted = [
        event["args"] for event in log.events if event["ph"] == "C" and event["name"] == "requests"
    ]
    assert [args["waiting"] for args in counted] == log.run.timeline.waiting.tolist()
    assert [args["running"] for args in counted] == log.run.timeline.running.tolist()


def test_steps_name_what_was_refused_and_at_most_as_many_as_asked(tmp_path: Path) -> None:
    made = logged(tmp_path, options={"listed": 1})
    steps = [
        event["args"] for event in made.events if event["ph"] == "X" and event["pid"] != REQUESTS
    ]
    refused = [step["refused"] for step in steps if "refused" in step]
    assert refused
    assert all(len(listed) <= 2 for listed in refused)
    assert sum(step["prefill_tokens"] for step in steps) == made.run.timeline.prefill_tokens.sum()


def test_the_same_run_gives_the_same_bytes(log: Logged, tmp_path: Path) -> None:
    assert logged(tmp_path).path.read_bytes() == log.path.read_bytes()


def test_a_killed_engine_leaves_whole_events(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    config = {
        "max_model_len": 64,
        "executor": {"name": "simulated", "num_pages": 20},
        "observers": [{"name": "decision_log", "path": str(path)}],
    }
    with LLMEngine.from_config(config) as engine:
        engine.add_request(
            "r", [5] * 10, SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)
        )
        for _ in range(3):
            engine.step()
        left = path.read_text()
    assert Counter(event["ph"] for event in json.loads(left + "]"))["C"] >= 3
    assert any(event["name"] == "request r" for event in json.loads(path.read_text()))


def test_it_logs_a_real_engine_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo model computes with torch")
    path = tmp_path / "decisions.json"
    with LLMEngine.from_config(
        {"model": "demo", "observers": [{"name": "decision_log", "path": str(path)}]}
    ) as engine:
        engine.add_request("r", "The lab", SamplingParams(max_tokens=4, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
    events = json.loads(path.read_text())
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == REQUESTS][
        -2:
    ] == ["prefill", "decode"]


def test_who_ends_while_nothing_runs_is_drawn_at_once(tmp_path: Path) -> None:
    """Of a thousand requests the policy lets one in, and nothing runs any more: the others take
    neither memory nor a lane each."""
    path = tmp_path / "decisions.json"
    config = {
        "scheduler": {"name": "rpm", "limit": 1, "window_s": 1e6},
        "executor": {"name": "simulated", "num_pages": 20},
        "observers": [{"name": "decision_log", "path": str(path)}],
    }
    reasons = []
    with LLMEngine.from_config({"max_model_len": 64, **config}, clock=VirtualClock()) as engine:
        [(_, log)] = engine.core.observers._observers
        assert isinstance(log, DecisionLog)
        for index in range(1_000):
            engine.add_request(
                f"r{index}", [5] * 10, SamplingParams(max_tokens=2, detokenize=False)
            )
            while engine.has_unfinished_requests():
                reasons += [
                    output.outputs[0].finish_reason for output in engine.step() if output.finished
                ]
            assert not log._over, f"after request {index}"
    assert reasons == ["length"] + ["rejected"] * 999
    lives = Logged(None, path).lives()  # type: ignore[arg-type]
    assert len(lives) == 1_000
    assert {life["tid"] for life, _ in lives.values()} == {1}


@pytest.mark.parametrize("path", ["nowhere/decisions.json", ".", "x" * 5000])
def test_a_place_that_cannot_hold_it_is_refused_at_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="decision_log: path"):
        DecisionLog(DecisionLogOptions(path=path), ObserverContext(max_num_seqs=1, total_pages=1))


@pytest.mark.parametrize(
    ("others", "why"),
    [(0, "Too many levels of symbolic links"), (1, "Too many"), (1, "embedded null byte")],
)
def test_a_file_that_cannot_be_opened_keeps_the_engine_from_starting(
    tmp_path: Path, others: int, why: str
) -> None:
    """Root may open files without permission, but not a link to itself, or a name with a zero
    byte."""
    path, other = tmp_path / "link", tmp_path / "decisions.json"
    path.symlink_to(path)
    observers = [
        {"name": "decision_log", "path": str(one)}
        for one in [other] * others + [path if why.startswith("Too") else f"{path}\0"]
    ]
    with pytest.raises(
        ConfigError, match=rf"observer decision_log: path: '.* can't be written: {why}"
    ):
        LLMEngine.from_config(
            {
                "max_model_len": 64,
                "executor": {"name": "simulated", "num_pages": 20},
                "observers": observers,
            }
        )
    assert not others or json.loads(other.read_text()), "that of the one that had started is whole"


@examples(quick=20, full=500)
@given(
    request_id=st.text(st.characters(), min_size=1, max_size=5),
    client=st.none() | st.text(st.characters(), max_size=5),
    arrival=st.floats(-1e9, 1e9),
)
def test_it_survives_any_id_any_client_and_any_time(
    tmp_path_factory: pytest.TempPathFactory, request_id: str, client: str | None, arrival: float
) -> None:
    path = tmp_path_factory.mktemp("log") / "decisions.json"
    config = {
        "max_model_len": 64,
        "executor": {"name": "simulated", "num_pages": 20},
        "observers": [{"name": "decision_log", "path": str(path)}],
    }
    with LLMEngine.from_config(config) as engine:
        fields = {"arrival_time": arrival, "client": client, "deadline": -arrival}
        engine.add_request(
            request_id, [5] * 10, SamplingParams(max_tokens=2, detokenize=False), **fields
        )  # type: ignore[arg-type]
        engine.add_request(
            "after " + request_id, [5] * 10, SamplingParams(max_tokens=2, detokenize=False)
        )
        while engine.has_unfinished_requests():
            engine.step()
    events = json.loads(path.read_bytes().decode())
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == REQUESTS]
    shown_id, shown_client = (
        (text or "").encode(errors="replace").decode() for text in (request_id, client)
    )
    assert f"request {shown_id}" + (f" ({shown_client})" if client is not None else "") in names
    assert f"request after {shown_id}" in names
    assert all(
        0 <= event[key] <= 2**53 for event in events for key in ("ts", "dur") if key in event
    )


def test_a_time_beyond_all_bounds_is_the_latest_there_is(tmp_path: Path) -> None:
    made = DecisionLog(
        DecisionLogOptions(path=str(tmp_path / "decisions.json")),
        ObserverContext(max_num_seqs=1, total_pages=1),
    )
    assert (made._us(1e308), made._us(-1e308), made._us(1.5)) == (2**53, 0, 1_500_000)


def test_making_it_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    DecisionLog(DecisionLogOptions(), ObserverContext(max_num_seqs=1, total_pages=1))
    assert not list(tmp_path.iterdir())


def test_a_lane_is_taken_again_only_after_its_request_has_ended() -> None:
    lanes = Lanes()
    assert (lanes.take(0), lanes.take(5)) == (0, 1)
    lanes.release(0, 20)
    assert lanes.take(15) == 2
    assert lanes.take(20) == 0


@pytest.mark.parametrize(
    ("acts", "fate"),
    [
        ([Act.REFUSED, Act.GRANTED], Act.GRANTED),
        ([Act.GRANTED, Act.REFUSED], Act.GRANTED),
        ([Act.GRANTED, Act.PREEMPTED, Act.REFUSED], Act.PREEMPTED),
        ([Act.REFUSED, Act.REFUSED], Act.REFUSED),
        ([Act.GRANTED, Act.NOTED], Act.GRANTED),
    ],
)
def test_what_was_done_outweighs_what_was_refused(acts: list[Act], fate: Act) -> None:
    request = Request("r", [1], SamplingParams(), max_tokens=1)
    assert _fates([Decision(request, act) for act in acts])[request].act is fate
