"""Tests of `Step`: grants, refusals, undone grants, and calls that it reports as misuse. See
`dovetail.api.scheduler.Step` for the rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping

import pytest

from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Fit, Grant, Refusal, Scheduler, Step
from dovetail.errors import EngineDeadError, PolicyError
from dovetail.request import Request
from tests.engine.policies import always, fcfs, named, scripted
from tests.engine.world import Shape, Spec, World

A, B, C = (1,) * 8, (2,) * 8, (3,) * 8  # two blocks of 4 each, nothing in common
SMALL = Shape(num_pages=6, block_size=4, max_model_len=24)


def run(
    *plans: Callable[[Step], object],
    shape: Shape | None = None,
    prompts: Mapping[str, tuple[int, ...]] | None = None,
    max_tokens: int = 4,
) -> World:
    """Requests a, b, c through these plans and then FCFS."""
    world = World(scripted(*plans), shape)
    for id, prompt in (prompts or {"a": A, "b": B, "c": C}).items():
        world.add(Spec(id, prompt, max_tokens=max_tokens))
    world.drain(check=True)
    return world


def state(step: Step) -> tuple[object, ...]:
    return (
        step.tokens_left,
        step.seqs_left,
        step.free_pages,
        step.waiting,
        step.running,
        [step.cost(r) for r in step.waiting + step.running],
    )


# Refusals


def test_budget_fewer_tokens_left_than_min_tokens() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        assert step.grant(a, min_tokens=9) == Grant(8), "min_tokens is capped by the cost"
        before = state(step)
        assert step.grant(b, min_tokens=5) == Grant(0, Refusal.BUDGET)
        assert state(step) == before
        assert step.grant(b, min_tokens=4) == Grant(4)
        assert step.tokens_left == 0
        assert step.grant(c) == Grant(0, Refusal.BUDGET)

    run(plan, shape=Shape(token_budget=12))


def test_budget_zero_tokens_wanted_is_refused_not_misuse() -> None:
    run(
        lambda step: (
            check_equal(step.grant(step.waiting[0], 0).refused, Refusal.BUDGET),
            fcfs(step),
        )
    )


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 7, 100])
@pytest.mark.parametrize("min_tokens", [1, 5, 100])
def test_what_cannot_be_divided_is_granted_whole_or_refused_for_the_budget(
    max_tokens: int | None, min_tokens: int
) -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        assert step.grant(a, max_tokens, min_tokens=min_tokens) == Grant(8)
        before = state(step)
        assert step.grant(b, max_tokens, min_tokens=min_tokens) == Grant(0, Refusal.BUDGET)
        assert state(step) == before
        assert step.grant(c, max_tokens, min_tokens=min_tokens) == Grant(4), "a smaller one fits"

    world = World(scripted(plan), Shape(token_budget=12))
    for id, prompt in {"a": A, "b": B, "c": C[:4]}.items():
        world.add(Spec(id, prompt, max_tokens=1, indivisible=True))
    world.drain(check=True)


def test_at_most_max_num_seqs_run_in_a_step() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        assert step.grant_each([a, b]) == []
        assert step.seqs_left == 0
        before = state(step)
        assert step.grant(c) == Grant(0, Refusal.SEQS)
        assert state(step) == before

    run(plan, shape=Shape(max_num_seqs=2))


def test_memory_blocks_for_all_tokens_or_none() -> None:
    def plan(step: Step) -> None:
        a, b, _ = step.waiting
        assert step.grant(a)
        before = state(step)
        assert step.grant(b) == Grant(0, Refusal.MEMORY)
        assert state(step) == before
        assert step.grant(b, 4) == Grant(4), "one block is left"

    run(plan, shape=Shape(num_pages=3, max_model_len=12))


def test_not_now_after_a_grant_an_eviction_or_a_rejection_in_this_step() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        step.grant(a, 1)
        step.grant(b)
        step.preempt(b)
        step.reject(c, "no")
        for request in (a, b, c):
            assert step.grant(request) == Grant(0, Refusal.NOT_NOW)

    run(plan)


def test_grant_each_returns_the_refused_in_order() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        assert step.grant_each([c, b, a]) == [b, a]

    run(plan, shape=Shape(max_num_seqs=1))


# Grants


def test_cost_says_what_a_grant_takes() -> None:
    def plan(step: Step) -> None:
        for request in step.waiting:
            cost, free, left = step.cost(request), step.free_pages, step.tokens_left
            assert step.grant(request) == Grant(cost.tokens)
            assert (free - step.free_pages, left - step.tokens_left) == (cost.pages, cost.tokens)

    shared = {
        "a": A,
        "b": (*A, 9),
        "c": A[:5],
    }  # b and c share blocks that a computes in this very step
    world = run(plan, shape=Shape(token_budget=64), prompts=shared)
    assert world.core.stats.cached_tokens == 12


def test_tokens_are_shared_in_whole_blocks_but_for_the_last_and_between_requests_of_one_salt() -> (
    None
):
    prompts = {
        "a": (1,) * 9 + (2,) * 6,
        "b": (1,) * 9 + (3,) * 6,
        "same": (1,) * 9 + (2,) * 6,
        "short": (1,) * 8,
        "other": (4,) * 15,
    }
    shared: dict[str, int] = {}

    def look(step: Step) -> None:
        request = named(step)
        shared.update({id: step.shared_tokens(request["a"], request[id]) for id in prompts})
        assert shared == {id: step.shared_tokens(request[id], request["a"]) for id in prompts}
        fcfs(step)

    run(look, prompts=prompts)
    assert shared == {"a": 12, "b": 8, "same": 12, "short": 4, "other": 0}
    run(look, prompts=prompts, shape=Shape(reuse=False))
    assert set(shared.values()) == {0}
    world = World(scripted(look))
    for id, prompt in prompts.items():
        world.add(Spec(id, prompt, cache_keys=(f"salt:{id in ('a', 'b')}",)))
    world.drain()
    assert shared == {"a": 12, "b": 8, "same": 0, "short": 0, "other": 0}


def test_what_is_shared_is_what_the_cache_finds_once_the_other_is_computed() -> None:
    prompts = {"a": (1,) * 9 + (2,) * 6, "b": (1,) * 9 + (3,) * 6}

    def grant(step: Step) -> None:
        a, b = step.waiting
        shared = step.shared_tokens(a, b)
        assert step.grant(a)
        assert step.cost(b).cached == shared == 8

    run(grant, prompts=prompts)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_step_in_flight_is_expected_to_end_when_it_does(overlap: bool) -> None:
    # step being planned -> now, and when those before it should have ended
    expected: dict[int, tuple[float, float]] = {}
    world = World(
        always(
            lambda step: (
                expected.update({step.index: (step.now, step.in_flight_until)}),
                fcfs(step),
            )
        ),
        Shape(overlap=overlap),
    )
    world.add(Spec("a", A, max_tokens=60))
    for i in range(20):
        world.add(Spec(f"b{i}", B, max_tokens=1, delay=0.02 * i))
    world.drain()
    ended = {
        event.index: event.ended
        for event in world.observer.events
        if isinstance(event, StepFinished)
    }
    known = [index for index in ended if index > 20 and index - 1 in ended]
    assert len(known) > 20
    for index in known:
        now, until = expected[index]
        assert until == pytest.approx(max(now, ended[index - 1]), abs=0.001)
        assert (until > now) == overlap


def test_how_sure_an_estimate_is_can_be_seen() -> None:
    seen: list[Fit] = []
    world = World(always(lambda step: (seen.append(step.fit), fcfs(step))), Shape(overlap=False))
    for i in range(20):
        world.add(Spec(f"r{i}", A[: 1 + i % 8], max_tokens=1 + i % 5, delay=0.02 * i))
    world.drain()
    assert seen[0] == Fit(steps=0, error=math.inf)
    assert [fit.steps for fit in seen] == sorted(fit.steps for fit in seen)
    assert seen[-1].error < 0.1, "the fake device is linear"


def test_who_is_rejected_in_the_plan_that_follows_its_arrival_never_waits() -> None:
    """So a policy needs no other way to turn requests away when they arrive."""
    arrived: list[tuple[str, float]] = []

    class Turns(always(fcfs)):  # type: ignore[misc]
        def on_arrived(self, request: Request) -> None:
            self.newest = request

        def schedule(self, step: Step) -> None:
            if self.newest is not None and self.newest.id != "a":
                arrived.append((self.newest.id, step.now - self.newest.arrival_time))
                step.reject(self.newest, "full")
            self.newest = None
            fcfs(step)

    world = World(Turns)
    world.add(Spec("a", A, max_tokens=20))
    for i in range(3):
        world.add(Spec(f"b{i}", B, delay=0.033 * i + 0.001))
    world.drain()
    assert [id for id, _ in arrived] == ["b0", "b1", "b2"]
    assert all(
        world.finished[id].reason == "rejected" and 0.0 <= waited <= 0.02 for id, waited in arrived
    ), "a step's time at most"


def test_reserve_takes_the_blocks_of_the_whole_prefill() -> None:
    def plan(step: Step) -> None:
        a, b, _ = step.waiting
        assert step.grant(a, 1, reserve=True) == Grant(1)
        assert step.free_pages == 4
        assert step.cost(a).pages == 0
        assert step.grant(b, 1) == Grant(1)
        assert step.free_pages == 3

    run(plan, shape=SMALL)


def test_reserve_is_refused_if_the_whole_prefill_does_not_fit() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        step.grant_each([a, b])
        step.grant(c, 1)
        step.preempt(c)
        assert step.grant(step.waiting[0], 1, reserve=True).refused is Refusal.NOT_NOW

    def next_plan(step: Step) -> None:
        c = named(step)["c"]
        assert step.grant(c, 1, reserve=True).refused is Refusal.MEMORY
        assert step.grant(c, 1)

    run(plan, next_plan, shape=Shape(num_pages=5, max_model_len=20))


def test_taking_back_a_grant_gives_back_budget_sequence_and_blocks() -> None:
    def plan(step: Step) -> None:
        a, b, _ = step.waiting
        step.grant(a)
        before = state(step)[:3]
        assert step.grant(b, 5) == Grant(5)
        step.preempt(b)
        assert state(step)[:3] == before
        assert b.prefill_left == 8
        assert step.grant(named(step)["c"])

    world = run(plan, shape=Shape(max_num_seqs=2, token_budget=16))
    assert world.executor.sent[0].num_tokens.tolist() == [8, 8]


def test_rejecting_a_granted_request_gives_back_budget_and_sequence() -> None:
    def plan(step: Step) -> None:
        a, b, c = step.waiting
        step.grant_each([a, b])
        step.reject(a, "changed my mind")
        step.reject(a, "twice is once")
        assert (step.tokens_left, step.seqs_left) == (8, 1)
        assert step.grant(c)

    world = run(plan, shape=Shape(max_num_seqs=2, token_budget=16))
    assert (world.finished["a"].reason, world.finished["a"].stop_reason) == (
        "rejected",
        "changed my mind",
    )


def test_tuples_are_not_changed_by_later_acts() -> None:
    def plan(step: Step) -> None:
        waiting, running = step.waiting, step.running
        step.grant(waiting[0])
        assert (len(waiting), len(running)) == (3, 0)
        assert (len(step.waiting), len(step.running), len(step.decoding)) == (2, 1, 1)

    run(plan)


def test_the_preempted_stand_at_their_own_arrival() -> None:
    run(
        fcfs,
        lambda step: (
            step.preempt(step.running[1]),
            check_equal([r.id for r in step.waiting], ["b"]),
        ),
        lambda step: fcfs(step),
    )


def test_iterables_may_look_at_the_step_while_they_are_read() -> None:
    def plan(step: Step) -> None:
        refused = step.grant_each(request for request in step.waiting if step.tokens_left >= 8)
        assert (refused, len(step.running), step.tokens_left) == ([], 2, 4)

    run(plan, shape=Shape(token_budget=20))


def test_no_generator_can_overspend() -> None:
    def plan(step: Step) -> None:
        def grants_twice() -> Iterator[Request]:
            for request in step.running + step.waiting:
                step.grant(request)
                yield request

        step.grant_each(grants_twice())

    world = World(always(plan), Shape(token_budget=12, max_num_seqs=2))
    for id, prompt in {"a": A, "b": B, "c": C}.items():
        world.add(Spec(id, prompt))
    world.drain(check=True)
    assert max(int(batch.num_tokens.sum()) for batch in world.executor.sent) <= 12
    assert max(len(batch.rows) for batch in world.executor.sent) <= 2


# Evicting


def test_evict_preempts_in_order_until_it_fits() -> None:
    def plan(step: Step) -> None:
        b, c, a = (named(step)[id] for id in "bca")
        assert step.grant(a, evict=[b, c]) == Grant(8)
        assert (step.waiting, set(step.running)) == ((b,), {a, c})

    run(
        lambda step: step.grant_each([named(step)["b"], named(step)["c"]]),
        plan,
        shape=Shape(num_pages=5, max_model_len=20),
    )


def test_evict_preempts_none_if_all_would_not_suffice() -> None:
    def plan(step: Step) -> None:
        before = state(step)
        assert step.grant(named(step)["big"], evict=[named(step)["a"]]) == Grant(0, Refusal.MEMORY)
        assert state(step) == before

    prompts = {"a": A, "b": B, "big": (4,) * 20}
    run(
        lambda step: step.grant_each([named(step)["a"], named(step)["b"]]),
        plan,
        prompts=prompts,
        shape=SMALL,
    )


def test_evict_is_read_up_to_the_request_itself() -> None:
    def plan(step: Step) -> None:
        a, b = step.running
        assert (
            step.grant(named(step)["c"], evict=[named(step)["c"], a, b]).refused is Refusal.MEMORY
        )
        assert step.running == (a, b)

    run(
        lambda step: step.grant_each(step.waiting[:2]),
        plan,
        shape=Shape(num_pages=4, max_model_len=16),
    )


def test_evict_skips_those_without_blocks() -> None:
    def plan(step: Step) -> None:
        a, b, c, d = (named(step)[id] for id in "abcd")
        assert step.grant(c, evict=[d, d, b, a])
        assert step.running == (a, c)

    prompts = {"a": A, "b": B, "c": C, "d": (4,) * 8}
    run(
        lambda step: step.grant_each(step.waiting[:2]),
        plan,
        prompts=prompts,
        shape=Shape(num_pages=5, max_model_len=20),
    )


def test_evict_is_not_read_when_nothing_lacks_or_another_thing_than_memory_does() -> None:
    def unread() -> Iterator[Request]:
        raise AssertionError("read")
        yield

    def plan(step: Step) -> None:
        a, b, _ = step.waiting
        assert step.grant(a, evict=unread())
        assert step.grant(b, evict=unread()).refused is Refusal.SEQS

    run(plan, shape=Shape(max_num_seqs=1))


def test_evict_leaves_alone_whose_work_of_this_step_the_request_would_share() -> None:
    """b would find in the cache what a computes in this step. With a preempted, it would have to be
    computed by b, which costs more."""

    def plan(step: Step) -> None:
        a, b, c = (named(step)[id] for id in "abc")
        assert step.grant_each([a, c]) == []
        assert step.cost(b).cached == 8
        before = state(step)
        assert step.grant(b, evict=[a]).refused is Refusal.MEMORY
        assert state(step) == before
        assert step.grant(b, evict=[a, c])
        assert step.running == (a, b)

    run(
        plan,
        prompts={"a": A, "b": (*A, *A[:2]), "c": C},
        shape=Shape(num_pages=4, max_model_len=16),
        max_tokens=2,
    )


# Sharing within a step


def test_a_prompt_planned_twice_in_a_step_is_computed_once() -> None:
    world = run(fcfs, prompts={"a": (*A, 7), "b": (*A, 8)})
    assert world.executor.sent[0].num_tokens.tolist() == [9, 1]


@pytest.mark.parametrize("act", ["preempt", "reject"])
def test_with_its_provider_goes_who_shares_what_it_was_to_compute_in_this_step(act: str) -> None:
    def plan(step: Step) -> None:
        provider, sharer, other = (named(step)[id] for id in ("provider", "sharer", "other"))
        step.grant_each([provider, sharer, other])
        assert step.cost(sharer).tokens == 1
        step.preempt(provider) if act == "preempt" else step.reject(provider, "no")
        assert sharer in step.waiting
        assert other in step.running
        step.preempt(sharer)  # the policy may not know: nothing happens
        assert step.tokens_left == 64 - 8

    world = run(plan, prompts={"provider": (*A, 7), "sharer": (*A, 8), "other": B})
    assert world.executor.sent[0].num_tokens.tolist() == [8]
    preempted = [id for call, *rest in world.heard.calls if call == "preempted" for id in rest]
    assert preempted == (["provider", "sharer"] if act == "preempt" else ["sharer"])


def test_what_a_preempted_request_was_to_compute_is_not_found_by_later_grants_of_the_step() -> None:
    def plan(step: Step) -> None:
        provider, late = step.waiting
        step.grant(provider)
        assert step.cost(late).cached == 8
        step.preempt(provider)
        assert step.cost(late).cached == 0
        assert step.grant(late) == Grant(9)

    run(plan, prompts={"provider": (*A, 7), "late": (*A, 8)})


def test_who_found_only_what_was_computed_before_stays() -> None:
    def plan(step: Step) -> None:
        provider, sharer = named(step)["provider"], named(step)["sharer"]
        step.grant_each([provider, sharer])
        step.preempt(provider)
        assert sharer in step.running

    prompts = {"provider": (*A, 7, 7, 7, 7, 7), "sharer": (*A, 8)}
    run(lambda step: step.grant(step.waiting[0], 8), plan, prompts=prompts)


# Rows


def test_more_requests_hold_blocks_than_there_are_rows() -> None:
    """Those that pause lose their row and get one again, with all their tokens."""
    turns = iter(range(1000))

    def plan(step: Step) -> None:
        running = step.running
        turn = next(turns) % len(running) if running else 0
        step.grant_each(step.waiting)
        step.grant_each(running[turn:] + running[:turn])

    world = World(always(plan), Shape(max_num_seqs=2))
    for index in range(6):
        world.add(Spec(f"r{index}", (index,) * 5, max_tokens=6))
    world.drain(check=True)
    assert max(len(call[4]) for call in world.heard.calls if call[0] == "schedule") > 2
    assert sum(len(batch.added) for batch in world.executor.sent) > 6


@pytest.mark.parametrize("each", [True, False])
def test_a_request_that_lost_its_row_with_a_token_in_flight_is_refused_until_it_comes(
    each: bool,
) -> None:
    refused: list[bool] = []

    def only(*ids: str) -> Callable[[Step], None]:
        def grant(step: Step, request: Request) -> bool:
            return (
                bool(step.grant_each([request]))
                if each
                else step.grant(request).refused is Refusal.NOT_NOW
            )

        return lambda step: refused.extend(grant(step, named(step)[id]) for id in ids)

    world = World(
        scripted(only("a"), only("b"), only("a", "b"), only("a")),
        Shape(max_num_seqs=1, max_in_flight=3),
    )
    world.add(Spec("a", A[:6]))  # its next token needs no block
    world.add(Spec("b", B[:6]))
    world.drain(check=True)
    assert refused == [False, False, True, False, False], (
        "a lost its row to b; when its token had come, it ran again"
    )


# Misuse


def check_equal(left: object, right: object) -> None:
    assert left == right


def fails_with(policy: type[Scheduler], *words: str) -> None:
    """The engine ends; every request is delivered with an error that holds these words."""
    world = World(policy)
    for id, prompt in {"a": A, "b": B}.items():
        world.add(Spec(id, prompt, max_tokens=2))
    world.add(Spec("later", C, delay=1e6))
    for _ in range(20):
        if world.core.dead is not None:
            break
        world.step()
    assert isinstance(world.core.dead, PolicyError)
    assert all(word in str(world.core.dead) for word in (policy.__name__, *words)), str(
        world.core.dead
    )
    unanswered = {id: finish for id, finish in world.finished.items() if finish.reason.is_error}
    assert "later" in unanswered
    assert {*world.finished} == {*world.requests}
    assert all(finish.stop_reason == str(world.core.dead) for finish in unanswered.values())
    assert not world.core.has_unfinished()
    with pytest.raises(EngineDeadError):
        world.core.step()
    with pytest.raises(EngineDeadError):
        world.add(Spec("more", A))
    world.core.stop()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda step, r: step.preempt(r), ("'a'", "waiting")),
        (lambda step, r: step.grant(r, -1), ("'a'", "max_tokens=-1")),
        (lambda step, r: step.grant(r, 1.5), ("'a'", "max_tokens=1.5")),
        (lambda step, r: step.grant(r, True), ("'a'", "max_tokens=True")),
        (lambda step, r: step.grant(r, min_tokens=0), ("'a'", "min_tokens=0")),
        (lambda step, r: step.grant(r, min_tokens=None), ("'a'", "min_tokens=None")),
        (lambda step, r: step.grant(copy.copy(r)), ("'a'", "isn't its own")),
        (lambda step, r: step.grant_each([copy.copy(r)]), ("'a'", "isn't its own")),
        (lambda step, r: step.grant("a"), ("expected a Request", "'a'")),
        (lambda step, r: step.grant_each(["a"]), ("expected a Request", "'a'")),
        (
            lambda step, r: step.cost(Request("x", A, r.params, max_tokens=1)),
            ("'x'", "before it arrived"),
        ),
        (lambda step, r: step.note(None, "?"), ("expected a Request",)),
        (lambda step, r: step.wake_at(step.now), ("wake_at", "after now")),
        (lambda step, r: step.wake_at(step.now - 1), ("wake_at",)),
        (lambda step, r: step.wake_at(float("nan")), ("wake_at", "nan")),
        (lambda step, r: step.wake_at(float("inf")), ("wake_at", "inf")),
        (lambda step, r: step.wake_at("soon"), ("wake_at", "soon")),
        (lambda step, r: 1 / 0, ("schedule()", "ZeroDivisionError")),
    ],
)
def test_misuse_names_policy_request_and_rule(
    act: Callable[[Step, Request], object], words: tuple[str, ...]
) -> None:
    fails_with(always(lambda step: act(step, step.waiting[0])), *words)


def test_evict_must_not_act_while_it_is_read() -> None:
    def plan(step: Step) -> None:
        def acts() -> Iterator[Request]:
            for request in step.running:
                step.preempt(request)
                yield request

        fcfs(step)
        for request in step.running + step.waiting:
            step.grant(request, evict=acts())

    world = World(always(plan), Shape(num_pages=3, max_model_len=12))
    for id, prompt in {"a": A, "b": B}.items():
        world.add(Spec(id, prompt, max_tokens=2))
    with pytest.raises(
        PolicyError,
        match=r"'b' was granted with an `evict` that itself grants, preempts or rejects",
    ):
        world.drain()


@pytest.mark.parametrize("method", ["grant", "grant_each", "preempt", "reject", "cost", "note"])
def test_the_finished_must_be_forgotten(method: str) -> None:
    finished: list[Request] = []

    class Remembers(always(fcfs)):  # type: ignore[misc]
        def schedule(self, step: Step) -> None:
            if finished and method == "grant_each":
                step.grant_each(finished)
            elif finished:
                getattr(step, method)(*finished, *(["why"] if method in ("reject", "note") else []))
            fcfs(step)

        def on_finished(self, request: Request) -> None:
            finished[:] = [request]

    world = World(Remembers)
    world.add(Spec("short", A, max_tokens=1))
    world.add(Spec("long", B, max_tokens=9))
    with pytest.raises(
        PolicyError, match=r"Remembers: request 'short' was used after it had finished"
    ):
        world.drain()


@pytest.mark.parametrize(
    "use",
    [
        lambda step: step.waiting,
        lambda step: step.running,
        lambda step: step.decoding,
        lambda step: step.free_pages,
        lambda step: step.tokens_left,
        lambda step: step.seqs_left,
        lambda step: step.estimate_s(),
        lambda step: step.held_back,
        lambda step: step.in_flight_until,
        lambda step: step.fit,
        lambda step: step.grant_each([]),
        lambda step: step.wake_at(1e9),
    ],
)
def test_a_step_is_dead_once_schedule_has_returned(use: Callable[[Step], object]) -> None:
    kept: list[Step] = []

    def plan(step: Step) -> None:
        if kept:
            use(kept[0])
        kept.append(step)
        fcfs(step)

    fails_with(always(plan), "one call only")


def test_a_policy_that_catches_what_it_did_wrong_may_go_on() -> None:
    def plan(step: Step) -> None:
        for request in step.waiting:
            with pytest.raises(PolicyError):
                step.preempt(request)
            with pytest.raises(PolicyError):
                step.grant_each([request, "nobody"])  # type: ignore[list-item]
        fcfs(step)

    run(plan)


# What overlap hides is never misuse


def test_a_request_whose_last_token_is_in_flight_cannot_be_stopped_any_more_and_that_is_no_misuse() -> (
    None
):
    kept: list[Request] = []

    def keep(step: Step) -> None:
        kept.append(named(step)["a"])
        fcfs(step)

    def too_late(step: Step) -> None:
        (request,) = kept
        step.preempt(request)
        step.reject(request, "too late")
        assert step.grant(request).refused is Refusal.NOT_NOW

    world = World(scripted(keep, too_late))
    world.add(Spec("a", A, max_tokens=1))
    world.add(Spec("b", B, max_tokens=3))
    world.drain()
    assert world.finished["a"].reason == "length"
