"""`dovetail.testing.plan`, as the author of a policy uses it: one step of a policy, and what it
did."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerContext, Step
from dovetail.errors import DovetailError, PolicyError
from dovetail.request import Request
from dovetail.testing import make_request, plan


class ShortestFirst(Scheduler):
    """The policy under test: requests with the least remaining work go first, and late ones don't
    run at all."""

    def schedule(self, step: Step) -> None:
        step.grant_each(step.running)
        for request in sorted(step.waiting, key=lambda request: step.cost(request).tokens):
            if request.deadline is not None and request.deadline < step.now:
                step.reject(request, "late")
            elif not step.grant(request):
                step.note(request, "next time")
                step.wake_at(step.now + 1)


def test_who_is_granted_what_in_which_order() -> None:
    done = plan(ShortestFirst, waiting=[make_request("long", 30), make_request("short", 5)])
    assert done.granted == {"short": 5, "long": 30}
    assert list(done.granted) == ["short", "long"]


def test_memory_is_as_scarce_as_the_test_says() -> None:
    done = plan(
        ShortestFirst,
        waiting=[make_request("long", 30), make_request("short", 5)],
        free_pages=3,
        block_size=4,
    )
    assert done.granted == {"short": 5}
    assert done.refused == {"long": Refusal.MEMORY}
    assert done.free_pages == 1
    assert done.notes == (("long", "next time"),)
    assert done.wake_at == 2.0


def test_so_are_token_budget_and_sequences() -> None:
    requests = [make_request("a", 8), make_request("b", 9), make_request("c", 10)]
    done = plan(ShortestFirst, waiting=requests, token_budget=12, max_num_seqs=2)
    assert done.granted == {"a": 8, "b": 4}
    assert done.refused == {"c": Refusal.BUDGET}


def test_running_requests_decode_unless_they_have_computed_less() -> None:
    running = [
        make_request("decoding", 8, generated=3),
        make_request("amid its prefill", 20, computed=12),
    ]
    done = plan(ShortestFirst, running=running)
    assert done.granted == {"decoding": 1, "amid its prefill": 8}


def test_a_preempted_request_that_prefills_again_is_running_too() -> None:
    shown: list[tuple[Request, ...]] = []

    class Looks(Scheduler):
        def schedule(self, step: Step) -> None:
            shown.extend([step.running, step.decoding])
            step.grant_each(step.running)

    done = plan(
        Looks,
        running=[
            make_request("again", 8, generated=6, computed=4),
            make_request("decodes", 8, generated=6),
        ],
    )
    assert done.granted == {"again": 10, "decodes": 1}
    assert [[request.id for request in requests] for requests in shown] == [
        ["again", "decodes"],
        ["decodes"],
    ]


def test_cached_tokens_are_whatever_the_test_says() -> None:
    done = plan(
        ShortestFirst, waiting=[make_request("a", 30), make_request("b", 20)], cached={"a": 28}
    )
    assert done.granted == {"a": 2, "b": 20}


def test_the_clock_stands_where_the_test_says() -> None:
    done = plan(
        ShortestFirst,
        waiting=[make_request("late", deadline=4.0), make_request("fine", deadline=6.0)],
        now=5.0,
    )
    assert done.rejected == {"late": "late"}
    assert list(done.granted) == ["fine"]


def test_evictions_are_seen_and_told_of() -> None:
    class Newest(Scheduler):
        def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
            super().__init__(options, context)
            self.heard: list[tuple[str, str]] = []

        def schedule(self, step: Step) -> None:
            for request in step.waiting:
                step.grant(request, evict=step.running)

        def on_arrived(self, request: Request) -> None:
            self.heard.append(("arrival", request.id))

        def on_preempted(self, request: Request) -> None:
            self.heard.append(("preempted", request.id))

    done = plan(
        Newest,
        waiting=[make_request("new", 8)],
        running=[make_request("old", 8, generated=1)],
        free_pages=0,
    )
    assert (done.preempted, done.granted) == (("old",), {"new": 8})
    assert isinstance(done.policy, Newest)
    assert done.policy.heard == [("arrival", "old"), ("arrival", "new"), ("preempted", "old")]


def test_options_and_state_are_the_policys_own() -> None:
    class AtMost(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        tokens: int = 3

    class Chunks(Scheduler):
        options: AtMost
        steps = 0

        def schedule(self, step: Step) -> None:
            self.steps += 1
            for request in step.waiting:
                step.grant(request, self.options.tokens)

    first = plan(Chunks, waiting=[make_request("a", 8)], options=AtMost(tokens=2))
    second = plan(first.policy, waiting=[make_request("b", 8)])
    assert (first.granted, second.granted) == ({"a": 2}, {"b": 2})
    assert second.policy is first.policy
    assert isinstance(second.policy, Chunks)
    assert second.policy.steps == 2


def test_misuse_is_named_as_in_the_engine() -> None:
    class Clumsy(Scheduler):
        def schedule(self, step: Step) -> None:
            step.preempt(step.waiting[0])

    with pytest.raises(PolicyError, match=r"Clumsy.*'a'.*waiting"):
        plan(Clumsy, waiting=[make_request("a")])


def test_what_a_policy_raises_comes_through() -> None:
    class Raises(Scheduler):
        def schedule(self, step: Step) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        plan(Raises, waiting=[make_request("a")])


def test_requests_that_make_no_sense_are_refused_with_the_reason() -> None:
    used = make_request("used")
    plan(ShortestFirst, waiting=[used])
    with pytest.raises(DovetailError, match="'used' was planned before"):
        plan(ShortestFirst, waiting=[used])
    with pytest.raises(DovetailError, match="ids"):
        plan(ShortestFirst, waiting=[make_request("twin"), make_request("twin")])
    with pytest.raises(DovetailError, match="'done' has generated all"):
        plan(ShortestFirst, running=[make_request("done", max_tokens=3, generated=3)])
    with pytest.raises(DovetailError, match="'odd' can't be cached: whole blocks of 4"):
        plan(ShortestFirst, waiting=[make_request("odd", 8)], cached={"odd": 3})
    with pytest.raises(DovetailError, match="'whole' can't be cached"):
        plan(ShortestFirst, waiting=[make_request("whole", 8)], cached={"whole": 8})
    with pytest.raises(DovetailError, match="'ahead' has computed 9 of 8"):
        plan(ShortestFirst, running=[make_request("ahead", 8, computed=9)])
