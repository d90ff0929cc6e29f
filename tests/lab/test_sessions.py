"""Closed loops: requests that wait for the ends of others, in front of one engine or of several;
and predictions that are renewed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.api.component import API_VERSIONS, ComponentSpec
from dovetail.api.scheduler import Scheduler
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry
from dovetail_lab.compare import compare
from dovetail_lab.metrics import measure, session_s
from dovetail_lab.predictors import parse_predictor, predict
from dovetail_lab.records import RunResult
from dovetail_lab.replicas import TICK_S, replay_replicas
from dovetail_lab.routers import Arrival, Completion, ReplicaLoad, RoundRobin, Router, parse_router
from dovetail_lab.sessions import Followers
from dovetail_lab.simulate import replay
from dovetail_lab.traces import Trace, TraceError, load_trace, scale_rate, slice_trace
from dovetail_lab.workloads import WorkloadOptions, load_workload
from tests.lab.commands import lab, write_engine
from tests.lab.runs import engine, request, trace

AGENTS = (
    "arrivals=poisson(1) requests=6 turns=uniform(2,4) prompt=20 output=uniform(3,9) "
    "tool=uniform(0.1,0.5) closed_loop=true"
)


def chain(count: int, gap_s: float = 1.0, **fields: Any) -> Trace:
    """One session of so many turns."""
    turns = (
        request(
            i, session="s", after=(str(i - 1),) if i else (), gap_s=gap_s if i else 0.0, **fields
        )
        for i in range(count)
    )
    return trace(*turns)


def ends(run: RunResult) -> list[float]:
    return [float(record.token_times_s[-1]) for record in run.requests]


def test_a_turn_arrives_its_gap_after_the_answer_before() -> None:
    run = replay(engine(), chain(3))
    arrivals = [record.arrival_s for record in run.requests]
    assert arrivals[1:] == pytest.approx([end + 1.0 for end in ends(run)[:2]])
    assert [record.waited for record in run.requests] == [False, True, True]


def test_a_slow_engine_gets_the_next_turn_later() -> None:
    fast, slow = (
        replay(engine(executor={"step_time_factor": factor}), chain(2)).requests[1].arrival_s
        for factor in (1.0, 3.0)
    )
    assert slow - 1.0 == pytest.approx(3 * (fast - 1.0))


def test_a_request_waits_for_the_last_of_several() -> None:
    sent = trace(
        request(0, output=2), request(1, output=20), request(2, after=("0", "1"), gap_s=0.5)
    )
    run = replay(engine(), sent)
    assert run.requests[2].arrival_s == pytest.approx(max(ends(run)[:2]) + 0.5)


def test_deadlines_keep_their_distance_from_the_arrival() -> None:
    sent = trace(request(0), request(1, after=("0",), gap_s=2.0, deadline=9.0))
    late = replay(engine(), sent).requests[1]
    assert late.deadline_s is not None
    assert late.deadline_s - late.arrival_s == pytest.approx(9.0)


def test_followers_arrive_among_open_requests_in_time() -> None:
    """The engine has a request that arrives at 50 s already when the follower gets its time, which
    is before."""
    sent = trace(request(0), request(1, after=("0",), gap_s=2.0), request(2, 50.0))
    run = replay(engine(), sent)
    assert run.requests[1].first_scheduled_s == pytest.approx(run.requests[1].arrival_s)
    assert run.requests[1].arrival_s < 3.0


@pytest.mark.parametrize("replicas", [None, 2])
def test_what_follows_a_request_that_fails_is_refused_with_the_reason(replicas: int | None) -> None:
    sent = trace(
        request(0, prompt=5000), request(1, after=("0",)), request(2, after=("1",)), request(3)
    )
    run = (
        replay(engine(), sent)
        if replicas is None
        else replay_replicas(engine(), sent, replicas, RoundRobin())
    )
    assert [record.finish_reason for record in run.requests] == ["rejected"] * 3 + ["length"]
    assert run.requests[1].stop_reason == "it was to follow 0, which didn't complete"
    assert run.requests[2].stop_reason == "it was to follow 1, which didn't complete"


def test_waiting_for_a_later_request_is_refused_and_for_an_absent_one_is_not() -> None:
    with pytest.raises(TraceError, match="request 0 waits for 1, which doesn't come before it"):
        Followers(trace(request(0, after=("1",)), request(1)))
    assert len(Followers(trace(request(0, after=("gone",))))) == 0
    cut = slice_trace(chain(4), "2:4")
    assert len(replay(engine(), cut)) == 2


def test_a_closed_workload_waits_and_an_open_one_has_fixed_times() -> None:
    closed = load_workload(AGENTS)
    opened = load_workload(AGENTS.replace("closed_loop=true", "closed_loop=false"))
    assert [one.after == () for one in opened] == [True] * len(opened)
    turns = [one for one in closed if one.session == "0"]
    assert [one.after for one in turns] == [(), *((one.id,) for one in turns[:-1])]
    assert all(0.1 <= one.gap_s <= 0.5 for one in turns[1:])
    assert any(note.startswith("closed loop: ") for note in closed.notes)
    assert [(one.id, one.arrival_time, one.prompt_tokens) for one in closed] == [
        (one.id, one.arrival_time, one.prompt_tokens) for one in opened
    ]


def test_tools_run_after_their_share_of_the_answers() -> None:
    spec = (
        "arrivals=poisson(1) requests=50 turns=5 prompt=9 output=9 think=30 tool=1 "
        "tool_share=0.75 closed_loop=true"
    )
    gaps = [one.gap_s for one in load_workload(spec) if one.after]
    assert set(gaps) == {1.0, 30.0}
    assert 0.6 < gaps.count(1.0) / len(gaps) < 0.9


def test_another_rate_and_other_arrivals_move_the_beginnings_of_sessions() -> None:
    sent = load_workload(AGENTS, WorkloadOptions(arrivals="constant(0.1)"))
    beginnings = [one.arrival_time for one in sent if not one.after]
    assert beginnings == pytest.approx([10.0 * i for i in range(len(beginnings))], abs=10.1)
    assert [one.gap_s for one in scale_rate(sent, 2.0)] == [one.gap_s for one in sent]


def test_sessions_are_measured_from_first_arrival_to_last_token() -> None:
    run = replay(engine(), chain(3))
    assert session_s(run.requests) == {"s": pytest.approx(ends(run)[-1])}
    assert (measure(run).sessions.count, measure(run).all_sessions) == (1, 1)
    failed = replay(engine(), trace(request(0, session="s"), request(1, session="s", prompt=5000)))
    assert np.isnan(session_s(failed.requests)["s"])


def test_policies_are_compared_on_requests_that_arrive_when_each_lets_them(tmp_path: Path) -> None:
    slow = {"executor": {"step_time_factor": 2.0}}
    runs = {
        "A": [replay(engine(), load_workload(AGENTS), name="A")],
        "B": [replay(engine(**slow), load_workload(AGENTS), name="B")],
    }
    assert compare(runs, resamples=100).versus[0].line("e2e", "mean").change.relative > 1
    runs["A"][0].save(tmp_path / "run.json")
    assert (
        RunResult.load(tmp_path / "run.json").requests[3].session
        == runs["A"][0].requests[3].session
    )


class Watching(Router):
    """Sends all to the second replica, and keeps what it was told."""

    sees_cache = True

    def model_post_init(self, context: Any) -> None:
        self._told: list[Any] = []

    def choose(self, request: Arrival, replicas: Any) -> int:
        self._told.append(
            (request.id, request.session, replicas[0].cached_tokens, replicas[1].cached_tokens)
        )
        return 1

    def ended(self, completion: Completion) -> None:
        self._told.append(completion)


def test_a_router_sees_sessions_completions_and_what_is_cached() -> None:
    router = Watching()
    sent = load_workload(
        "arrivals=poisson(1) requests=1 turns=2 prompt=40 output=8 tool=1 closed_loop=true"
    )
    config = engine(kv_cache={"name": "prefix"}, block_size=4)
    run = replay_replicas(config, sent, 2, router)
    first, done, second = router._told  # noqa: SLF001 its own class
    assert first == ("0/0", "0", 0, 0)
    assert done == Completion("0/0", "0", 1, run.requests[0].finished_s, 40, 8, True)
    assert second[:3] == ("0/1", "0", 0)
    assert 40 <= second[3] < 48
    assert run.requests[1].cached_tokens == second[3]


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.3])
def test_followers_of_replicas_arrive_at_most_a_tick_late(gap_s: float) -> None:
    run = replay_replicas(engine(), chain(4, gap_s), 3, RoundRobin())
    lags = [
        after.arrival_s - end - gap_s
        for end, after in zip(ends(run), run.requests[1:], strict=False)
    ]
    assert all(-1e-9 <= lag <= TICK_S + 1e-9 for lag in lags)
    if gap_s >= TICK_S:
        assert lags == pytest.approx([0.0] * 3)


@pytest.mark.parametrize("router", ["sticky", "cache_aware", "vllm", "round_robin"])
def test_closed_loops_over_replicas_are_the_same_in_every_run(router: str) -> None:
    first, second = (
        replay_replicas(engine(), load_workload(AGENTS), 3, parse_router(router)) for _ in range(2)
    )
    assert [(one.replica, one.finished_s) for one in first.requests] == [
        (one.replica, one.finished_s) for one in second.requests
    ]
    assert all(one.completed for one in first.requests)


def arrival(session: str | None, time_s: float = 0.0) -> Arrival:
    return Arrival("0", None, 0, time_s, np.arange(1, 11, dtype=np.int32), 1, session)


def test_sticky_sends_a_session_home_until_that_is_too_full_or_long_ago() -> None:
    router = parse_router("sticky(2, 100)")
    even = [ReplicaLoad(0, 0, 5), ReplicaLoad(0, 0, 0)]
    assert router.choose(arrival("a"), even) == 1
    assert router.choose(arrival("a"), [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 1, 20)]) == 1
    assert router.choose(arrival(None), [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 1, 20)]) == 0
    assert router.choose(arrival("a"), [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 1, 21)]) == 0
    router.ended(Completion("0", "a", 0, 10.0, 10, 1, True))
    assert router.choose(arrival("a", 111.0), [ReplicaLoad(0, 1, 15), ReplicaLoad(0, 0, 14)]) == 1


def test_cache_aware_weighs_what_is_cached_against_the_load() -> None:
    loads = [ReplicaLoad(0, 1, 8), ReplicaLoad(0, 0, 0, cached_tokens=0)]
    loads[0].cached_tokens = 9
    assert parse_router("cache_aware").choose(arrival("a"), loads) == 0
    assert parse_router("cache_aware(0)").choose(arrival("a"), loads) == 1


def rows(*values: dict[str, Any]) -> str:
    return "".join(
        json.dumps({"input_length": 600, "output_length": 5, **one}) + "\n" for one in values
    )


def test_mooncake_rows_of_a_session_wait_for_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        rows(
            {"session_id": "a", "timestamp": 0},
            {"session_id": "b", "timestamp": 500, "hash_ids": [1, 2]},
            {"session_id": "a", "delay": 2000, "tool_wait_ms": 500, "input_length": 700},
        )
    )
    first, other, second = sorted(load_trace(tmp_path / "t.jsonl"), key=lambda one: one.id)
    assert (second.after, second.gap_s, second.session, second.arrival_time) == (
        ("0",),
        2.5,
        "a",
        2.5,
    )
    assert first.spans[0].stream == second.spans[0].stream != other.spans[0].stream
    assert other.after == ()


def test_mooncake_rows_wait_for_those_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        rows(
            {"request_id": "x", "hash_ids": [1, 2], "timestamp": 0},
            {"request_id": "y", "hash_ids": [1, 2], "timestamp": 0},
            {"request_id": "z", "hash_ids": [1, 3], "wait_for": ["x", "y"], "delay": 100},
        )
    )
    assert load_trace(tmp_path / "t.jsonl").requests[2].after == ("x", "y")


def test_mooncake_rows_without_a_name_have_ids_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        rows(
            {"request_id": "1", "session_id": "a", "timestamp": 0},
            {"session_id": "b", "timestamp": 0},
            {"session_id": "b", "delay": 7},
            {"request_id": "_1", "session_id": "c", "wait_for": ["1"]},
        )
    )
    first, unnamed, second, last = sorted(
        load_trace(tmp_path / "t.jsonl"), key=lambda one: (one.session, one.gap_s)
    )
    assert (first.id, last.id, last.after) == ("1", "_1", ("1",))
    assert len({one.id for one in (first, unnamed, second, last)}) == 4
    assert second.after == (unnamed.id,)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"hash_ids": [1, 2], "wait_for": ["later"]},
            "2: column wait_for: expected request_ids of rows above, got 'later'",
        ),
        (
            {"hash_ids": [1, 2], "wait_for": "x"},
            "2: column wait_for: expected a list of request_ids, got 'x'",
        ),
        ({"session_id": "new"}, "2: column timestamp: expected this field"),
        (
            {"session_id": "new", "delay": 1},
            "2: column delay: needs wait_for, or a row above in its session and no timestamp",
        ),
        (
            {"session_id": "a", "timestamp": 9, "tool_wait_ms": 1},
            "2: column tool_wait_ms: needs wait_for, or a row above",
        ),
        (
            {"hash_ids": [1, 2], "wait_for": ["x"], "timestamp": 9},
            "2: column timestamp: a row with wait_for arrives once those have ended",
        ),
        (
            {"hash_ids": [1, 2], "wait_for": ["0"]},
            "2: column wait_for: expected request_ids of rows above, got '0'",
        ),
        ({"session_id": "a", "delay": -1}, "2: column delay: expected a time in ms >= 0"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "t.jsonl").write_text(rows({"session_id": "a", "timestamp": 0}, row))
    with pytest.raises(TraceError, match=message.replace("(", r"\(")):
        load_trace(tmp_path / "t.jsonl")


class Seeing(Scheduler):
    """First come, first served; keeps the predictions that it sees."""

    seen: ClassVar[list[tuple[int, int | None]]] = []

    def schedule(self, step: Any) -> None:
        for one in (*step.running, *step.waiting):
            self.seen.append((one.generated, one.predicted_tokens))
            step.grant(one)


@pytest.mark.parametrize("replicas", [None, 2])
def test_renewed_predictions_reach_the_policy_and_get_better(
    replicas: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seeing, "seen", [])
    sent = predict(trace(request(0, output=120)), parse_predictor("refined(1.5, 8)"), seed=3)
    spec = ComponentSpec(
        kind="scheduler", name="seeing", target=f"{__name__}:Seeing", api=API_VERSIONS["scheduler"]
    )
    registry = Registry(
        [
            *Registry.discover().plugins,
            LoadedPlugin(PluginOrigin("dovetail-seeing", "seeing", "1.0"), (spec,)),
        ]
    )
    if replicas is None:
        replay(engine(scheduler="seeing"), sent, registry=registry)
    else:
        replay_replicas(engine(scheduler="seeing"), sent, replicas, RoundRobin(), registry=registry)
    seen = dict(Seeing.seen)
    errors = [abs(seen[generated] - 120) for generated in sorted(seen)]  # type: ignore[operator]
    assert len(set(seen.values())) > 5
    assert all(seen[generated] > generated for generated in range(8, 120, 8))  # type: ignore[operator]
    assert np.mean(errors[-20:]) < 0.3 * np.mean(errors[:20])


def test_agents_from_the_command_line(tmp_path: Path) -> None:
    engine_file = write_engine(tmp_path / "e.yaml", "srpt")
    said = lab(
        "run", engine_file, "--trace", AGENTS, "--predictor", "refined(0.5, 4)", "--max-tokens", 64
    )
    assert "6 of 6 sessions completed; they lasted" in said
    said = lab("run", engine_file, "--trace", AGENTS, "--replicas", 2, "--router", "sticky")
    assert "2 replicas, routed by sticky" in said
