"""Requests with a grammar in a simulation: which have one, when it is ready, and the cost of its
masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.api.scheduler import Step
from dovetail.errors import ConfigError
from dovetail_lab.metrics import measure
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.traces import TraceError, set_grammar_share
from dovetail_lab.workloads import WorkloadOptions, load_workload
from dovetail_schedulers.fcfs import FCFS
from tests.lab.commands import lab, write_engine
from tests.lab.runs import engine, request, trace

SPEC = "requests=200 arrivals=at_once prompt=10 output=5"
STEP_S = 0.01
FREE: dict[str, Any] = {"compile_s": 0, "mask_row_s": 0, "accept_s": 0, "late_sampling_s": 0}


def ran(*requests: Any, overlap: bool = True, **executor: Any) -> RunResult:
    """Each step takes `STEP_S`, regardless of its contents; only grammars add the given costs."""
    options = {
        "step_time": {"kind": "linear", "base_s": STEP_S},
        "plans_late": False,
        **FREE,
        **executor,
    }
    return replay(engine(executor=options, overlap=overlap), trace(*requests))


def total_s(result: RunResult) -> float:
    return max(record.finished_s for record in result)


# Who has one


def test_a_larger_share_keeps_those_of_a_smaller_one() -> None:
    shares = (0.0, 0.3, 0.6, 1.0)
    chosen = [
        {
            request.id
            for request in load_workload(SPEC, WorkloadOptions(grammar_share=share))
            if request.grammar
        }
        for share in shares
    ]
    assert chosen[0] < chosen[1] < chosen[2] < chosen[3]
    assert [len(ids) for ids in chosen] == pytest.approx([200 * share for share in shares], abs=25)


def test_each_stream_of_a_workload_has_a_share_of_its_own() -> None:
    made = load_workload(f"chat: {SPEC}; forms: {SPEC} grammar_share=1")
    assert {(request.client, request.grammar) for request in made} == {
        ("chat", False),
        ("forms", True),
    }


def test_a_share_beyond_0_to_1_is_refused() -> None:
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(TraceError, match="from 0 to 1"):
            set_grammar_share(trace(request(0)), share)
    with pytest.raises(TraceError, match="grammar_share"):
        load_workload(f"{SPEC} grammar_share=2")


def test_a_request_with_an_unnamed_grammar_can_only_be_simulated() -> None:
    with pytest.raises(ConfigError, match="can only be simulated"):
        replay({"model": "demo"}, trace(request(0, grammar=True)))


# What it costs


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_that_take_no_longer_than_the_model_cost_nothing(overlap: bool) -> None:
    with_grammar = ran(request(0, grammar=True), overlap=overlap, mask_row_s=STEP_S * 0.9)
    without = ran(request(0), overlap=overlap)
    assert total_s(with_grammar) == pytest.approx(total_s(without))
    assert with_grammar.timeline.masks_s.sum() == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "cost",
    [
        {"mask_row_s": 0.013},
        {"late_sampling_s": 0.013},
        {"mask_row_s": 0.008, "late_sampling_s": 0.005},
    ],
)
def test_what_masks_take_beyond_the_model_is_lost(overlap: bool, cost: dict[str, float]) -> None:
    result = ran(request(0, output=8, grammar=True), overlap=overlap, **cost)
    assert total_s(result) == pytest.approx(8 * 0.013)
    np.testing.assert_allclose(result.timeline.masks_s, 0.013 - STEP_S)
    assert measure(result).masks_s == pytest.approx(8 * 0.003)


def test_several_cores_fill_masks_at_the_same_time() -> None:
    rows = [request(index, prompt=5, grammar=True) for index in range(8)]
    lost = {
        cores: ran(*rows, mask_row_s=0.004, mask_cores=cores).timeline.masks_s[-1]
        for cores in (1, 3, 8)
    }
    assert lost == pytest.approx({1: 8 * 0.004 - STEP_S, 3: 3 * 0.004 - STEP_S, 8: 0.0})


@pytest.mark.parametrize(("overlap", "hidden_s"), [(True, STEP_S), (False, 0.0)])
def test_seeing_tokens_is_hidden_where_the_model_runs_meanwhile(
    overlap: bool, hidden_s: float
) -> None:
    """Without overlap the next step isn't submitted before its grammars have seen the last one's
    tokens."""
    slow, quick = (
        ran(request(0, output=9, grammar=True), overlap=overlap, accept_s=accept_s)
        for accept_s in (0.012, 0.0)
    )
    assert total_s(slow) - total_s(quick) == pytest.approx(8 * (0.012 - hidden_s))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("step_time", [{"kind": "linear", "base_s": 0.004}, "h200-qwen3-0.6b"])
def test_what_is_said_to_be_lost_is_what_the_run_takes_longer(
    overlap: bool, step_time: Any
) -> None:
    costs = {
        "mask_row_s": 0.0015,
        "mask_cores": 2,
        "accept_s": 0.0003,
        "late_sampling_s": 0.0004,
        "core_s": 0.001,
    }
    free, bound = (
        ran(
            *(request(i, prompt=5, output=30, grammar=grammar) for i in range(8)),
            overlap=overlap,
            step_time=step_time,
            **costs,
        )
        for grammar in (False, True)
    )
    assert bound.timeline.masks_s.sum() == pytest.approx(total_s(bound) - total_s(free), rel=1e-6)
    assert bound.timeline.masks_s.sum() > 0.01


def test_only_rows_with_a_grammar_count_and_all_rows_of_their_steps_wait() -> None:
    long, short = request(0, output=20), request(1, output=5, grammar=True)
    result = ran(long, short, mask_row_s=0.013, mask_cores=1)
    np.testing.assert_allclose(result.timeline.masks_s, [0.003] * 5 + [0.0] * 15, atol=1e-12)
    assert total_s(result) == pytest.approx(20 * STEP_S + 5 * 0.003)


def test_tokens_and_lengths_are_those_of_the_trace() -> None:
    def of_all(grammar: bool) -> RunResult:
        requests = (
            request(
                i,
                i * 0.013,
                prompt=30 + i * 7 % 60,
                output=9 + i * 11 % 40,
                max_tokens=50,
                grammar=grammar,
            )
            for i in range(30)
        )
        return ran(*requests, num_pages=130, mask_row_s=0.001)

    free, bound = of_all(False), of_all(True)
    assert (
        [record.output_tokens for record in bound]
        == [record.output_tokens for record in free]
        == [record.true_tokens for record in bound]
    )
    assert sum(record.preemptions for record in bound) > 0


# When it is ready


def test_a_policy_sees_a_request_once_its_grammar_is_ready_with_its_own_arrival(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[str, float, bool]] = []
    schedule: Callable[[FCFS, Step], None] = FCFS.schedule

    def listen(self: FCFS, step: Step) -> None:
        told = {name for name, *_ in heard}
        heard.extend(
            (one.id, one.arrival_time, one.params.structured is not None)
            for one in step.waiting
            if one.id not in told
        )
        schedule(self, step)

    monkeypatch.setattr(FCFS, "schedule", listen)
    result = ran(request(0, 0.5, grammar=True), request(1, 0.51), compile_s=0.2, compile_sigma=0)
    assert heard == [("1", 0.51, False), ("0", 0.5, True)]
    first, other = result
    assert first.arrival_s == 0.5
    assert 0.7 <= first.first_scheduled_s <= 0.7 + 0.002  # type: ignore[operator]  # an idle engine looks each millisecond
    assert other.first_scheduled_s == pytest.approx(0.51)


def test_compiling_takes_a_time_of_its_own_for_each_request() -> None:
    requests = [request(index, 10.0 * index, grammar=True) for index in range(40)]
    result = ran(*requests, compile_s=0.05, compile_sigma=0.3)
    delays = [record.first_scheduled_s - record.arrival_s for record in result]  # type: ignore[operator]
    assert len(set(delays)) > 30
    assert np.median(delays) == pytest.approx(0.05, rel=0.2)
    assert delays == [
        record.first_scheduled_s - record.arrival_s
        for record in ran(*requests, compile_s=0.05, compile_sigma=0.3)
    ]  # type: ignore[operator]


# What is told of it


def test_a_run_says_who_had_a_grammar_and_what_masks_cost(tmp_path: Path) -> None:
    path = write_engine(tmp_path / "engine.yaml")
    said = lab(
        "run",
        path,
        "--trace",
        SPEC,
        "--grammar-share",
        0.5,
        "--set",
        "executor.mask_row_s=0.1",
        "--out",
        tmp_path / "out",
    )
    told = RunResult.load(tmp_path / "out" / "run.json")
    count = sum(record.grammar for record in told)
    assert 60 < count < 140
    assert f"{count} of 200 requests had a grammar; their masks delayed steps by" in said
    assert "were given a grammar" in said
