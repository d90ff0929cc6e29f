"""Policies of other engines that the lab was held against: what they do differently from ours."""

from __future__ import annotations

import pytest
from bench.lab.klpm_scheduling import KLPM, KLPMOptions
from bench.lab.vllm_scheduling import VLLMScheduler
from bench.lab.vtc_pool import TokenPool
from bench.lab.vtc_scheduling import ArtifactCounters, SLoRAScheduler, SLoRASchedulerOptions
from bench.lab.vtc_scheduling import registry as s_lora_registry

from dovetail.api.scheduler import Ran, Refusal, StepDone
from dovetail.testing import make_request, plan
from dovetail_lab.simulate import replay
from dovetail_lab.workloads import load_workload
from dovetail_schedulers.counters import CounterOptions


def test_s_lora_sees_a_request_a_step_late_unless_idle() -> None:
    options = SLoRASchedulerOptions(every=1)
    first = plan(SLoRAScheduler, options=options, waiting=[make_request("alone", 4)])
    assert list(first.granted) == ["alone"]
    granted = []
    for _ in range(3):
        running, waiting = [make_request("answer", generated=2)], [make_request("late", 4)]
        granted.append(list(plan(first.policy, running=running, waiting=waiting).granted))
    assert granted == [["answer"], ["late"], ["answer"]]


def test_vllm_admits_a_prompt_only_if_all_of_it_fits_though_a_chunk_would() -> None:
    def done(free_pages: int) -> object:
        return plan(
            VLLMScheduler,
            waiting=[make_request("long", 100)],
            token_budget=32,
            free_pages=free_pages,
            block_size=16,
        )

    assert done(7).granted == {"long": 32}
    assert done(6).refused == {"long": Refusal.MEMORY}


def test_vllm_preempts_the_last_and_then_admits_none_in_that_step() -> None:
    running = [
        make_request(name, 16, generated=1, arrival_time=at)
        for at, name in enumerate(("old", "young"))
    ]
    done = plan(
        VLLMScheduler,
        running=running,
        waiting=[make_request("new", 1)],
        free_pages=0,
        block_size=16,
    )
    assert done.granted == {"old": 1}
    assert done.preempted == ("young",)
    assert "new" not in done.refused


def test_vllm_preempts_the_last_also_for_itself() -> None:
    alone = [make_request("young", 16, generated=1)]
    assert plan(VLLMScheduler, running=alone, free_pages=0, block_size=16).preempted == ("young",)


def test_decodes_are_scattered_as_soon_as_no_run_of_free_slots_is_as_long_as_the_batch() -> None:
    pool = TokenPool(10)
    for row in range(3):
        pool.prefill(row, 2)
    pool.release(1)  # free: 2, 3, 6 to 9
    assert pool.decode([0, 2])  # takes 2 and 3
    assert pool.decode([0, 2, 3])
    assert not pool.decode([0, 2])  # one slot is left
    pool.release(0)
    assert not pool.decode([2, 3, 4, 5])  # 0, 1, 2 and 6, that is


def a_step(*rows: tuple[str, int]) -> StepDone:
    return StepDone(
        index=0,
        started=0.0,
        ended=1.0,
        ran=tuple(
            Ran(request=make_request(name, 8, client=name), computed=computed, generated=1)
            for name, computed in rows
        ),
    )


def test_the_artifact_charges_decodes_only_and_in_its_later_version_again_when_a_request_ends() -> (
    None
):
    for twice, expected in ((False, 2.0), (True, 4.0)):
        counters = ArtifactCounters(CounterOptions(), lift=True, twice=twice)
        counters.generated(a_step(("new", 8)))
        counters.generated(a_step(("a", 1), ("b", 1)))
        for _ in range(2):  # two requests end in the same step
            counters.finished(make_request("a", 8, client="a"))
        assert counters.served == {"a": expected, "b": expected}


def test_a_client_joins_at_the_counter_of_those_that_wait_and_at_its_own_if_nobody_does() -> None:
    counters = ArtifactCounters(CounterOptions(), lift=True, twice=False)
    counters.arrived(make_request("first", 8, client="busy"))
    counters.admitted(make_request("first", 8, client="busy"))
    counters.still_wait([])
    counters.arrived(make_request("second", 8, client="idle"))
    assert counters.served["idle"] == 0.0
    counters.arrived(make_request("third", 8, client="busy"))
    assert counters.served["busy"] == 8.0


@pytest.mark.slow("simulates two runs")
def test_scattered_decodes_take_longer_by_what_the_option_says() -> None:
    def took(scattered_s: float) -> float:
        result = replay(
            {
                "scheduler": {"name": "s-lora"},
                "executor": {
                    "name": "s-lora",
                    "num_pages": 64,
                    "step_time": {"kind": "linear", "base_s": 0.01},
                    "scattered_s": scattered_s,
                },
                "overlap": False,
                "block_size": 1,
                "max_model_len": 64,
                "max_num_batched_tokens": 64,
            },
            load_workload(
                "arrivals=constant(200) requests=40 prompt=uniform(3, 9) output=uniform(3, 12)"
            ),
            registry=s_lora_registry(),
        )
        return max(float(one.token_times_s[-1]) for one in result.requests)

    assert took(0.005) > took(0.0)


def test_k_lpm_takes_turns_between_the_oldest_request_and_the_longest_cached_prefix() -> None:
    waiting = [
        make_request(name, 32, arrival_time=at) for at, name in enumerate(("old", "b", "cached"))
    ]
    order = list(
        plan(
            KLPM,
            options=KLPMOptions(k=2),
            waiting=waiting,
            cached={"cached": 16},
        ).granted
    )
    assert order == ["old", "cached", "b"]
