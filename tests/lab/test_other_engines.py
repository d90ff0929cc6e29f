"""Policies of other engines that the lab was held against: what they do differently from ours."""

from __future__ import annotations

from bench.lab.vllm_scheduling import VLLMScheduler
from bench.lab.vtc_scheduling import SLoRAScheduler

from dovetail.api.scheduler import Refusal
from dovetail.testing import make_request, plan
from dovetail_schedulers.lightllm import LightLLMOptions


def test_s_lora_sees_a_request_a_step_late_unless_idle() -> None:
    options = LightLLMOptions(every=1)
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
