"""Steps that the engine plans in place of a policy that would wait forever."""

from __future__ import annotations

from typing import Any, cast

from dovetail.api.scheduler import Scheduler, Step
from dovetail.engine.stand_in import plan_by_arrival
from dovetail.engine.step import PlannedStep
from dovetail.testing import make_request, plan


class ByArrival(Scheduler):
    def schedule(self, step: Step) -> None:
        plan_by_arrival(cast(PlannedStep, step))


def answering(*names: str) -> list[Any]:
    return [make_request(name, 7, generated=2) for name in names]  # each in two full pages


def test_all_running_requests_go_on_before_any_waiting_one() -> None:
    done = plan(ByArrival, running=answering("a", "b"), waiting=[make_request("c")])
    assert done.granted == {"a": 1, "b": 1}


def test_an_older_running_request_evicts_the_youngest() -> None:
    done = plan(ByArrival, running=answering("a", "b", "c"), free_pages=0)
    assert done.granted == {"a": 1, "b": 1}
    assert done.preempted == ("c",)


def test_without_running_requests_the_oldest_waiting_one_begins() -> None:
    done = plan(ByArrival, waiting=[make_request("a"), make_request("b")])
    assert done.granted == {"a": 8}


def test_the_oldest_request_is_rejected_with_the_reason_if_it_can_never_run() -> None:
    done = plan(ByArrival, waiting=[make_request("long", 40), make_request("b")], free_pages=2)
    assert (done.granted, [*done.rejected]) == ({}, ["long"])
    assert "nothing else running: not enough free pages" in done.rejected["long"]


def test_without_requests_nothing_is_planned() -> None:
    done = plan(ByArrival)
    assert (done.granted, done.rejected) == ({}, {})
