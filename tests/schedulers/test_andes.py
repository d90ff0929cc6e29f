"""Answers at the speed of their readers."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from dovetail.api.component import NoOptions
from dovetail.api.scheduler import Ran, Scheduler, SchedulerContext, StepDone
from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail_schedulers.andes import Andes, AndesOptions
from tests.engine.policies import FCFS
from tests.engine.world import Shape, Spec, World

OPTIONS = AndesOptions(tokens_per_s=1.0, ahead_s=2.0, ttft_s=1.0)


def ahead(id: str, seconds: int, policy: Andes) -> Request:
    """A request that decodes, whose reader has `seconds` of text in hand at 1.0."""
    request = make_request(id, generated=9)
    policy.on_step(StepDone(0, 0.9, 1.0, (Ran(request=request, computed=1, generated=seconds),)))
    return request


def behind(id: str) -> Request:
    return make_request(id, generated=2, arrival_time=-9.0)


def policy(**options: float) -> Andes:
    return Andes(OPTIONS.model_copy(update=options), SchedulerContext(256, 16, 64, 4, 0))


def test_a_request_ahead_of_its_reader_runs_while_none_waits() -> None:
    andes = policy()
    assert plan(andes, running=[ahead("ahead", 5, andes)]).granted == {"ahead": 1}


def test_who_is_ahead_pauses_while_another_waits_but_keeps_its_blocks_until_that_is_urgent() -> (
    None
):
    andes = policy(ttft_s=9.0)
    done = plan(
        andes,
        running=[ahead("ahead", 5, andes), behind("behind")],
        waiting=[make_request("calm", 40, arrival_time=1.0)],
        free_pages=2,
    )
    assert done.granted == {"behind": 1}
    assert not done.preempted


def test_the_furthest_ahead_makes_room_for_who_is_urgent() -> None:
    andes = policy()
    running = [ahead("far", 9, andes), ahead("near", 1, andes), ahead("ahead", 4, andes)]
    done = plan(andes, running=running, waiting=[make_request("urgent", 8)], free_pages=0)
    assert done.preempted == ("far",)
    assert done.granted["urgent"] == 8


def test_who_was_preempted_as_often_as_allowed_never_pauses() -> None:
    andes = policy(max_preemptions=0)
    done = plan(
        andes,
        running=[ahead("ahead", 9, andes)],
        waiting=[make_request("urgent", 40)],
        free_pages=2,
    )
    assert done.granted["ahead"] == 1


def test_no_request_pauses_for_one_that_still_can_not_be_admitted() -> None:
    andes = policy(ttft_s=9.0)
    done = plan(
        andes,
        running=[ahead("ahead", 5, andes)],
        waiting=[make_request("calm", 40, arrival_time=1.0)],
        free_pages=2,
    )
    assert done.granted["ahead"] == 1


def test_a_reader_who_stalled_begins_again_with_the_next_token() -> None:
    andes = policy()
    request = make_request("r", generated=2)
    for time in (0.0, 10.0):
        andes.on_step(StepDone(0, time, time, (Ran(request=request, computed=1, generated=2),)))
    assert andes._due(request) == 12.0


@pytest.mark.parametrize("overlap", [True, False])
def test_in_scarce_memory_more_readers_get_their_first_token_in_time_than_in_order_of_arrival(
    overlap: bool,
) -> None:
    def first_tokens(scheduler: type[Scheduler], options: BaseModel) -> list[float]:
        world = World(
            scheduler,
            Shape(
                num_pages=16, max_model_len=64, overlap=overlap, reuse=False, seconds_per_step=0.1
            ),
            options,
        )
        for i in range(12):
            world.add(Spec(f"r{i}", tuple(range(8)), max_tokens=24, delay=i * 0.3))
        world.drain()
        return [
            request.first_token_time - request.arrival_time
            for request in world.requests.values()
            if request.first_token_time is not None
        ]

    patience = 4.0
    in_time = [
        sum(time <= patience for time in first_tokens(*case))
        for case in ((Andes, policy(tokens_per_s=2.0).options), (FCFS, NoOptions()))
    ]
    assert in_time[0] > in_time[1], in_time
