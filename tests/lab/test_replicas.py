"""Data-parallel replicas: each is the engine that it would be alone, and a request goes where the
router says."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PrivateAttr

from dovetail.errors import ConfigError, DovetailError
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import ROUTERS, Arrival, LeastLoaded, ReplicaLoad, RoundRobin, Router
from dovetail_lab.simulate import replay
from dovetail_lab.traces import TraceRequest
from dovetail_schedulers.fcfs import FCFS
from tests.lab.runs import engine, request, trace
from tests.lab.test_simulated import seconds
from tests.support import examples

arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=25
)


def requests(drawn: list[tuple[int, int, int]]) -> list[TraceRequest]:
    return [
        request(index, at / 20, prompt=prompt, output=output)
        for index, (at, prompt, output) in enumerate(sorted(drawn))
    ]


class Noting(RoundRobin):
    """Routes in turn, and keeps what it was shown."""

    _seen: list[Arrival] = PrivateAttr(default_factory=list)
    _loads: list[tuple[tuple[int, int], ...]] = PrivateAttr(default_factory=list)
    _tokens: list[tuple[int, ...]] = PrivateAttr(default_factory=list)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        self._seen.append(request)
        self._loads.append(tuple((one.waiting, one.running) for one in replicas))
        self._tokens.append(tuple(one.all_tokens for one in replicas))
        return super().choose(request, replicas)


@examples(quick=3, full=200)
@given(drawn=arrivals, overlap=st.booleans())
def test_a_replica_is_the_engine_that_it_would_be_alone(
    drawn: list[tuple[int, int, int]], overlap: bool
) -> None:
    sent, config = requests(drawn), engine(overlap=overlap, executor={"plans_late": False})
    together = replay_replicas(config, trace(*sent), 2, RoundRobin()).requests
    for turn in range(2):
        if not (own := sent[turn::2]):
            continue
        for alone, beside in zip(replay(config, trace(*own)), together[turn::2], strict=True):
            np.testing.assert_array_equal(alone.token_times_s, beside.token_times_s)


@examples(quick=3, full=200)
@given(drawn=arrivals, overlap=st.booleans())
def test_equal_replicas_in_step_are_each_the_engine_alone(
    drawn: list[tuple[int, int, int]], overlap: bool
) -> None:
    sent, config = requests(drawn), engine(overlap=overlap, executor={"plans_late": False})
    twins = [replace(one, id=f"{one.id}{twin}") for one in sent for twin in "ab"]
    together = replay_replicas(config, trace(*twins), 2, RoundRobin(), in_step=True).requests
    for index, alone in enumerate(replay(config, trace(*sent))):
        for beside in together[2 * index : 2 * index + 2]:
            np.testing.assert_allclose(alone.token_times_s, beside.token_times_s, rtol=1e-12)


def test_replicas_in_step_begin_together_and_take_as_long_as_the_longest() -> None:
    answer, prompt = replay_replicas(
        engine(),
        trace(request(0, 0.0, prompt=10, output=4), request(1, 0.001, prompt=60, output=2)),
        2,
        RoundRobin(),
        in_step=True,
    )
    first, both, third, last = (
        seconds((10, 0)),
        seconds((60, 0)),
        max(seconds((1, 11)), seconds((1, 60))),
        seconds((1, 12)),
    )
    np.testing.assert_allclose(answer.token_times_s, np.cumsum([first, both, third, last]))
    np.testing.assert_allclose(prompt.token_times_s, np.cumsum([first + both, third]))


def test_the_router_is_told_how_many_wait_and_run_at_that_time() -> None:
    router = Noting()
    sent = [request(index, 0.1 * index, prompt=10, output=200) for index in range(5)]
    replay_replicas(engine(max_num_seqs=1), trace(*sent), 2, router)
    assert router._loads == [
        ((0, 0), (0, 0)),
        ((0, 1), (0, 0)),
        ((0, 1), (0, 1)),
        ((1, 1), (0, 1)),
        ((1, 1), (1, 1)),
    ]
    (before, idle), (busy, still_idle) = router._tokens[:2]
    assert (before, idle, still_idle) == (0, 0, 0)
    assert busy > 10, "the prompt, and the answer so far"


def test_the_router_is_told_no_future() -> None:
    def shown(output: int) -> list[tuple[int, ...]]:
        router = Noting()
        sent = [
            replace(request(index, 0.01 * index, prompt=10, output=output), max_tokens=300)
            for index in range(4)
        ]
        replay_replicas(engine(), trace(*sent), 2, router)
        assert all(one.max_tokens == 300 for one in router._seen)
        return router._tokens

    assert shown(200) == shown(250), (
        "answers that haven't ended yet look the same, whatever their length will be"
    )


@pytest.mark.parametrize("router", ROUTERS.values())
@examples(quick=3, full=100)
@given(drawn=arrivals)
def test_each_request_goes_to_one_replica_and_one_replica_is_the_engine_alone(
    router: type[Router], drawn: list[tuple[int, int, int]]
) -> None:
    sent, config = requests(drawn), engine(executor={"plans_late": False})
    routed = replay_replicas(config, trace(*sent), 3, router())
    assert [one.id for one in routed] == [one.id for one in sent]
    assert {one.replica for one in routed} <= {0, 1, 2}
    assert sum(routed.timeline.generated_tokens) == sum(one.output_tokens for one in sent)
    alone, only = replay(config, trace(*sent)), replay_replicas(config, trace(*sent), 1, router())
    for name in (
        "time_s",
        "device_s",
        "waiting",
        "running",
        "prefill_tokens",
        "kv_free",
        "kv_held",
        "kv_cached",
    ):
        np.testing.assert_array_equal(
            getattr(alone.timeline, name), getattr(only.timeline, name), name
        )
    for one, other in zip(alone, only, strict=True):
        np.testing.assert_array_equal(one.token_times_s, other.token_times_s)


@pytest.mark.parametrize("chosen", [-1, 2, None, 1.0, "1"])
def test_a_choice_that_is_no_replica_is_refused(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundRobin, "choose", lambda *_: chosen)
    with pytest.raises(
        ConfigError, match=f"RoundRobin.choose: expected a replica from 0 to 1, got {chosen!r}"
    ):
        replay_replicas(engine(), trace(request(0)), 2, RoundRobin())


@pytest.mark.parametrize("replicas", [0, -1])
def test_without_replicas_there_is_no_run(replicas: int) -> None:
    with pytest.raises(ConfigError, match=f"replicas: expected at least 1, got {replicas}"):
        replay_replicas(engine(), trace(request(0)), replicas, RoundRobin())


def test_ctrl_c_ends_the_threads_of_all_replicas() -> None:
    class Interrupts(RoundRobin):
        """Has Ctrl-C pressed when the last request comes: no replica meets another after that."""

        def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
            if request.id == "1":
                signal.pthread_kill(main, signal.SIGINT)
            return super().choose(request, replicas)

    main = threading.main_thread().ident or 0
    sent = (request(index, prompt=8, output=100_000) for index in range(2))
    before, handler = (
        threading.active_count(),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            replay_replicas(
                engine(max_model_len=200_000, executor={"num_pages": 100_000}),
                trace(*sent),
                2,
                Interrupts(),
            )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.active_count() == before


def test_two_replicas_share_a_load_that_one_would_queue() -> None:
    sent = [request(index, 0.1 * index, prompt=20, output=30) for index in range(20)]

    def mean_s(replicas: int) -> float:
        return float(
            np.mean(
                [
                    record.finished_s - record.arrival_s
                    for record in replay_replicas(engine(), trace(*sent), replicas, LeastLoaded())
                ]
            )
        )

    assert mean_s(2) < mean_s(1) / 2


def test_what_ends_one_replica_is_raised_and_the_others_do_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: FCFS, step: Any) -> None:
        if step.waiting and step.waiting[0].id == "3":
            raise RuntimeError("made up")
        plain(self, step)

    plain = FCFS.schedule
    monkeypatch.setattr(FCFS, "schedule", fail)
    with pytest.raises(DovetailError, match="made up"):
        replay_replicas(
            engine(), trace(*(request(index, index / 10) for index in range(6))), 3, RoundRobin()
        )


def test_only_simulated_engines_are_replicated() -> None:
    with pytest.raises(DovetailError, match="fake"):
        replay_replicas({"executor": {"name": "fake"}}, trace(request(0)), 2, LeastLoaded())
