"""LoRA adapters and pooling in simulations: what they cost, and who waits."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.traces import TraceRequest, load_trace
from dovetail_lab.workloads import load_workload
from tests.lab.runs import engine, request, trace

COSTS = {
    "adapter_read_s": 0.0,
    "adapter_load_s": 1.0,
    "adapter_step_s": 0.25,
    "adapter_token_s": 0.125,
}
FREE = {"adapter_read_s": 0.0, "adapter_load_s": 0.0, "adapter_step_s": 0.0}
STEP = {"kind": "linear", "base_s": 0.5}


def run(requests: list[TraceRequest], slots: int | None, **executor: Any) -> RunResult:
    adapters = {} if slots is None else {"adapters": {"slots": slots, "slot_wait_s": 1000.0}}
    config = engine(executor={"step_time": STEP, **executor}, **adapters)
    return replay(config, trace(*requests))


def last(result: RunResult) -> list[float]:
    return [record.token_times_s[-1] for record in result]


def test_a_step_takes_longer_by_loads_and_by_tokens_with_adapters() -> None:
    sent = [request(0, prompt=4, output=3, adapter="a"), request(1, prompt=4, output=3)]
    # the first step loads, and computes 4 tokens with an adapter; two decodes follow
    adapted = 1.0 + 0.25 + 4 * 0.125 + 2 * (0.25 + 0.125)
    assert last(run(sent, 2, **COSTS)) == pytest.approx([1.5 + adapted] * 2)
    assert last(run([sent[1]], 2, **COSTS)) == pytest.approx([1.5])


def test_an_adapter_stays_in_its_slot() -> None:
    sent = [request(index, 20.0 * index, output=1, adapter="a") for index in range(3)]
    [note] = [note for note in run(sent, 1, **COSTS).notes if "adapters" in note]
    assert "slots: 1;" in note


def test_a_request_waits_until_another_adapter_leaves_its_slot() -> None:
    sent = [request(0, output=4, adapter="a"), request(1, output=4, adapter="b")]
    assert last(run(sent, 1, **FREE)) == pytest.approx([2.0, 4.0])
    assert last(run(sent, 2, **FREE)) == pytest.approx([2.0, 2.0])


def test_the_first_request_of_an_adapter_waits_until_it_is_read() -> None:
    sent = [request(index, 10.0 * index, output=1, adapter="a") for index in range(2)]
    first, second = run(sent, 1, **{**FREE, "adapter_read_s": 3.0})
    assert first.token_times_s[0] == pytest.approx(3.5, rel=1e-3)  # an idle core looks each ms
    assert second.token_times_s[0] == pytest.approx(10.5)


def test_without_slots_requests_with_adapters_are_rejected() -> None:
    with_adapter, without = run([request(0, adapter="a"), request(1)], None)
    assert with_adapter.finish_reason == "rejected"
    assert "takes no adapters" in str(with_adapter.stop_reason)
    assert without.completed


def test_a_prompt_that_pools_ends_with_its_last_step() -> None:
    sent = [request(0, prompt=100, output=1, pools=True), request(1, output=3)]
    pools, generates = run(sent, None, pooled_s=0.25)
    assert pools.completed
    assert pools.output_tokens == 1
    assert pools.token_times_s[0] == pytest.approx(2 * 0.5 + 0.25)  # 64 tokens a step
    assert generates.output_tokens == 3


def test_workloads_draw_adapters_and_pooling_by_their_shares() -> None:
    text = "requests=400 arrivals=poisson(9) prompt=10 output=5"
    sent = load_workload(f"{text} adapters=zipf(4, 1) pooling_share=0.25")
    names = [one.adapter for one in sent]
    assert set(names) == {f"adapter-{index}" for index in range(4)}
    assert names.count("adapter-0") > 1.5 * names.count("adapter-1")
    assert sum(one.pools for one in sent) == pytest.approx(100, abs=30)
    assert all(one.output_tokens == (1 if one.pools else 5) for one in sent)
    plain = load_workload(text)
    assert [one.arrival_time for one in sent] == [one.arrival_time for one in plain]


def test_a_table_may_name_adapters(tmp_path: Any) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,in,out,lora\n0,10,5,loud\n1,10,5,\n")
    from dovetail_lab.traces import parse_columns

    columns = parse_columns("arrival=at,prompt=in,output=out,adapter=lora")
    assert [one.adapter for one in load_trace(path, columns=columns)] == ["loud", None]


def test_drafts_cost_what_the_engine_is_told() -> None:
    from dovetail import EngineConfig
    from dovetail.api.clock import VirtualClock
    from dovetail.serving import assemble
    from dovetail_lab.simulate import without_model

    config = engine(
        executor={"draft_s": 0.125},
        speculation={"drafter": "simulated", "max_drafts": 2},
    )
    runnable = without_model(EngineConfig.load(config), trace(request(0)))
    assembly = assemble(runnable, {}, clock=VirtualClock())
    assert assembly.capacity.draft_costs == ((1, 0.125), (8, 0.125))
