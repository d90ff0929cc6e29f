"""Checks and waivers; and the suites' scenarios are as hard as stated."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dovetail.api.scheduler import Scheduler, SchedulerContext
from dovetail.testing.checks import Absent, Waiver, check, checks_of
from dovetail.testing.suite import Suite
from dovetail.testing.suites import scheduler
from dovetail.testing.suites.scheduler import SchedulerSuite
from dovetail.testing.suites.scheduler_loads import FLOOD, flooded, pressed
from dovetail.testing.suites.scheduler_world import Arrive, Shape, World
from dovetail_schedulers.fcfs import FCFS


def make_fcfs(context: SchedulerContext) -> Scheduler:
    policy: Scheduler = type("OfFCFS", (SchedulerSuite,), {"component": FCFS})().make(context)
    return policy


def with_fixture(self: Any, tmp_path: object) -> None:
    """A check must run without pytest."""


def test_undocumented(self: Any) -> None: ...


test_undocumented.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("id", "method"),
    [("kind.name", with_fixture), ("kind.name", test_undocumented), ("name", lambda self: None)],
)
def test_what_is_no_check_is_refused(id: str, method: Any) -> None:
    with pytest.raises(TypeError, match="must be"):
        check(id, since="1.0")(method)


def test_a_check_tied_to_a_capability_is_absent_without_it() -> None:
    class Needy(Suite):
        kind = "scheduler"
        component = FCFS
        capabilities = FCFS.capabilities

        @check("needy.rejects", since="1.0", capability="rejects")
        def test_rejects(self) -> None:
            """It rejects."""

    assert checks_of(Needy)["needy.rejects"].level == "if rejects"
    with pytest.raises(Absent, match="rejects isn't declared"):
        Needy().test_rejects()


def test_checks_run_under_optimization_too() -> None:
    """Checks don't use `assert`, which `python -O` removes."""
    assert "\n        assert " not in inspect.getsource(scheduler)


@pytest.mark.parametrize(
    ("reason", "url"), [("", "https://example.org"), ("known", ""), ("known", "see the issue")]
)
def test_a_waiver_needs_a_reason_and_a_url(reason: str, url: str) -> None:
    with pytest.raises(ValueError, match="a waiver needs"):
        Waiver(reason, url)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_memory_is_scarce_in_the_pressed_scenario(overlap: bool, reuse: bool) -> None:
    scenario = pressed(overlap, reuse=reuse)
    world = World(make_fcfs, scenario.shape).play(scenario.acts)
    assert world.core.stats.preemptions > 0
    assert len(world.finished) == len(world.requests)


def test_samples_of_a_prompt_have_ids_of_their_own_and_a_request_alone_has_its_users() -> None:
    world = World(make_fcfs, Shape())
    world.play([Arrive((1,)), Arrive((1,), n=2), Arrive((1,), id="own"), Arrive((1,), n=3)])
    assert [request.id for request in world.requests] == [
        "r0",
        "r1.0",
        "r1.1",
        "own",
        "r4.0",
        "r4.1",
        "r4.2",
    ]


def test_more_comes_than_can_be_served_in_the_flood() -> None:
    scenario = flooded(FLOOD, overlap=True)
    world = World(make_fcfs, scenario.shape)
    world.perform(scenario.acts)
    world.run(until=lambda: world.clock.now() > 200)
    assert len(world.core.books.waiting) > 50
