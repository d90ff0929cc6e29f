"""Host times: those of a core that is slower than its device, and of a front end."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.host_times import HOSTS, FrontEnd, HostTimes
from dovetail_lab.metrics import tpot_s, ttft_s
from dovetail_lab.records import RunResult
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import RoundRobin
from dovetail_lab.simulate import replay
from dovetail_lab.traces import TraceRequest
from tests.lab.runs import engine, request, trace

FAST = {"kind": "linear", "base_s": 1e-6}
MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def run(requests: list[TraceRequest], host: Any, **executor: Any) -> RunResult:
    step_time = executor.pop("step_time", FAST)
    executor = {"step_time": step_time, "engine": host, **executor}
    config = engine(executor=executor, overlap=True, max_num_seqs=64, max_num_batched_tokens=4096)
    return replay(config, trace(*requests))


def test_a_step_takes_as_long_as_the_host_if_the_device_is_faster() -> None:
    host = {"step_s": 0.01, "row_s": 0.001}
    result = run([request(index, output=50) for index in range(4)], host)
    for record in result:
        assert tpot_s(record) == pytest.approx(0.014, rel=0.05)


def test_a_step_takes_as_long_as_the_device_if_the_host_is_faster() -> None:
    slow = {"kind": "linear", "base_s": 0.05}
    [record] = run([request(0, output=50)], {"step_s": 0.01}, step_time=slow)
    assert tpot_s(record) == pytest.approx(0.05, rel=0.01)


def test_without_steps_in_flight_a_step_takes_the_sum_of_both() -> None:
    slow = {"kind": "linear", "base_s": 0.05}
    host = {"step_s": 0.01, "max_in_flight": 1}
    config = engine(executor={"step_time": slow, "engine": host}, overlap=True)
    [record] = replay(config, trace(request(0, output=50)))
    assert tpot_s(record) == pytest.approx(0.06, rel=0.01)


@pytest.mark.slow("simulates many requests")
def test_a_saturated_front_end_accepts_and_streams_at_its_own_rate() -> None:
    host = {"step_s": 1e-6, "request_s": 0.01, "prompt_token_s": 0.001, "token_s": 0.002}
    result = run([request(index, prompt=5, output=10) for index in range(200)], host)
    last = max(record.token_times_s[-1] for record in result)
    assert 200 / last == pytest.approx(1 / (0.01 + 5 * 0.001 + 10 * 0.002), rel=0.05)


def test_a_request_alone_waits_for_its_acceptance_and_its_token() -> None:
    host = {"step_s": 1e-6, "request_s": 0.01, "prompt_token_s": 0.001, "token_s": 0.002}
    sent = [request(index, arrival_s=10.0 * index, prompt=5) for index in range(3)]
    for record in run(sent, host):
        assert ttft_s(record) == pytest.approx(0.01 + 0.005 + 0.002, rel=0.01)


def test_tokens_do_not_wait_for_requests_that_arrive_after_them() -> None:
    host = {"step_s": 1e-3, "request_s": 0.5, "token_s": 1e-5}
    first, _ = run([request(0, output=20), request(1, arrival_s=5.0)], host)
    assert first.token_times_s[-1] < 1.0


def test_a_follower_arrives_after_the_client_has_the_answer() -> None:
    host = {"step_s": 1e-6, "token_s": 0.5}
    _, second = run([request(0, output=2), request(1, after=("0",), gap_s=1.0)], host)
    assert second.arrival_s == pytest.approx(2.0, rel=0.01)


def test_times_of_a_core_that_step_times_state_are_kept() -> None:
    profile = {"name": "measured", "step_time": FAST, "core_s": 0.02}
    [record] = run([request(0, output=50)], {"step_s": 10.0}, step_time=profile)
    assert tpot_s(record) < 0.021


def test_every_replica_has_a_front_end() -> None:
    host = {"step_s": 1e-6, "request_s": 0.01}
    config = engine(executor={"step_time": FAST, "engine": host})
    sent = trace(*[request(index) for index in range(10)])
    result = replay_replicas(config, sent, 2, RoundRobin())
    assert max(ttft_s(record) for record in result) == pytest.approx(0.05, rel=0.05)


def test_without_an_engine_nothing_changes() -> None:
    sent = [request(index, arrival_s=0.01 * index) for index in range(20)]
    times = [
        [record.token_times_s.tolist() for record in run(sent, host)]
        for host in (None, HostTimes(step_s=0.0).model_dump())
    ]
    assert not FrontEnd().costs
    assert FrontEnd().send(1.0, 5) == 1.0
    assert times[0][0][-1] <= times[1][0][-1]


@pytest.mark.parametrize("name", HOSTS)
def test_known_engines_have_a_source(name: str) -> None:
    assert HOSTS[name].source
    assert len(run([request(0)], name).requests) == 1


def test_unknown_engines_are_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"executor.engine 'vllm': expected one of dovetail"):
        run([request(0)], "vllm")


def roofline(**executor: Any) -> list[str]:
    step_time = {"kind": "roofline", "device": "h200", "model": MODEL}
    result = run([request(0, output=20)], executor.pop("engine", None), step_time=step_time)
    return [note for note in result.notes if "executor.engine" in note]


def test_a_roofline_warns_where_the_host_takes_longer() -> None:
    [note] = roofline()
    assert "less than the host" in note
    assert "vllm-0.25" in note
    assert roofline(engine="vllm-0.25") == []
