"""n > 1: the samples of one prompt are requests of their own, and their prompt is computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail.api.scheduler import Cost, Grant, Refusal, Step
from dovetail.request import Request
from tests.engine.policies import FCFS, always, fcfs, named, scripted
from tests.engine.world import Shape, Spec, World

PROMPT = tuple(range(1, 12))


def prompt_tokens_computed(world: World) -> int:
    return world.core.stats.prefill_tokens


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 10, 11, 16])
def test_a_prompt_is_computed_once_whatever_the_block_size(
    block_size: int, max_tokens: int, overlap: bool, reuse: bool
) -> None:
    world = World(shape=Shape(block_size=block_size, overlap=overlap, reuse=reuse, max_in_flight=3))
    world.add(Spec("s", PROMPT, n=4, max_tokens=max_tokens))
    world.drain(check=True)
    once_and_the_last_token_of_each = len(PROMPT) + 3
    assert prompt_tokens_computed(world) == once_and_the_last_token_of_each


def test_a_prompt_in_chunks_is_computed_once() -> None:
    world = World(shape=Shape(token_budget=4))
    world.add(Spec("s", PROMPT, n=3))
    world.drain(check=True)
    assert prompt_tokens_computed(world) == len(PROMPT) + 2


def test_samples_are_shown_once_a_sibling_has_planned_their_prompt() -> None:
    shown: list[list[str]] = []
    world = World(
        always(lambda step: (shown.append(sorted(named(step))), fcfs(step))), Shape(token_budget=6)
    )
    world.add(Spec("s", PROMPT, n=3, max_tokens=4))
    world.drain()
    assert shown[:3] == [["s#0"], ["s#0"], ["s#0", "s#1", "s#2"]]


def test_those_held_back_can_be_seen_until_they_are_shown() -> None:
    seen: list[list[str]] = []
    world = World(
        always(lambda step: (seen.append([request.id for request in step.held_back]), fcfs(step))),
        Shape(token_budget=6),
    )
    world.add(Spec("s", PROMPT, n=3, max_tokens=4))
    world.drain()
    assert seen[:3] == [["s#1", "s#2"], ["s#1", "s#2"], []]


def test_who_is_held_back_is_refused_not_now_and_may_be_rejected() -> None:
    class Knows(FCFS):
        def schedule(self, step: Step) -> None:
            for request in self.arrived:
                if request not in named(step).values():
                    assert not step.grant(request)
                    assert step.grant_each([request]) == [request]
            if step.index == 0:
                step.reject(self.arrived.pop(), "one too many")
            super().schedule(step)

        def on_arrived(self, request: Request) -> None:
            self.arrived = [*getattr(self, "arrived", []), request]

        def on_finished(self, request: Request) -> None:
            self.arrived = [other for other in self.arrived if other is not request]

    world = World(Knows)
    world.add(Spec("s", PROMPT, n=3, max_tokens=4))
    world.drain(check=True)
    assert [world.finished[f"s#{index}"].reason for index in range(3)] == [
        "length",
        "length",
        "rejected",
    ]


def test_each_sample_is_a_request_of_its_own() -> None:
    world = World()
    samples = world.add(Spec("s", PROMPT, n=3, max_tokens=10, client="me"))
    world.drain()
    assert {sample.parent for sample in samples} == {"s"}
    assert len({tuple(world.tokens[sample.id]) for sample in samples}) == 3
    assert world.heard.generated == dict.fromkeys(["s#0", "s#1", "s#2"], 10)


def test_a_fork_costs_one_token_and_one_block() -> None:
    def check(step: Step) -> None:
        for id in ("s#1", "s#2"):
            request, free = named(step)[id], step.free_pages
            assert step.cost(request) == Cost(1, 1, len(PROMPT) - 1)
            assert step.grant(request) == Grant(1)
            assert step.free_pages == free - 1

    world = World(scripted(fcfs, check))
    world.add(Spec("s", PROMPT, n=3))
    world.drain(check=True)


def lose_the_leader(how: str) -> Callable[[Step], object]:
    def plan(step: Step) -> None:
        leader = named(step)["s#0"]
        step.grant(leader, 4)
        if how == "rejected in its first step":
            step.reject(leader, "no")
        elif how == "preempted in its first step":
            step.preempt(leader)

    return plan


def lose_it_later(how: str) -> Callable[[Step], object]:
    def plan(step: Step) -> None:
        if how == "rejected amid its prompt":
            step.reject(named(step)["s#0"], "no")
        elif how == "preempted amid its prompt":
            step.preempt(named(step)["s#0"])
        else:
            fcfs(step)

    return plan


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "how",
    [
        "rejected in its first step",
        "preempted in its first step",
        "rejected amid its prompt",
        "preempted amid its prompt",
        "aborted amid its prompt",
    ],
)
def test_the_others_go_on_when_the_first_is_lost_before_the_prompt_is_computed(
    how: str, overlap: bool
) -> None:
    world = World(scripted(lose_the_leader(how), lose_it_later(how)), Shape(overlap=overlap))
    world.add(Spec("s", PROMPT, n=3, max_tokens=3))
    world.step()
    if how.startswith("aborted"):
        world.abort("s#0")
    world.drain(check=True)
    assert {"s#1", "s#2"} <= {*world.finished}
    assert prompt_tokens_computed(world) <= len(PROMPT) + 2 + 4 + 1  # a first chunk may be lost


@pytest.mark.parametrize("overlap", [True, False])
def test_the_first_may_be_aborted_when_its_prompt_has_just_been_planned(overlap: bool) -> None:
    world = World(shape=Shape(overlap=overlap))
    world.add(Spec("s", PROMPT, n=3, max_tokens=3))
    world.step()
    world.abort("s#0")
    assert world.kv.counts.held > 0, "its blocks wait for the others"
    world.drain(check=True)
    assert world.executor.sent[1].num_tokens.tolist() == [1, 1], "the others forked them"


def test_blocks_kept_for_siblings_go_with_the_last_of_them() -> None:
    world = World()
    world.add(Spec("s", PROMPT, n=3, max_tokens=3))
    world.step()
    for id in ("s#0", "s#1", "s#2"):
        world.abort(id)
    assert world.kv.counts.held == 0


def test_a_sibling_that_is_forked_is_not_evicted_for_it() -> None:
    def plan(step: Step) -> None:
        s0, s1 = named(step)["s#0"], named(step)["s#1"]
        assert step.grant(s1, evict=[s0]).refused is Refusal.MEMORY
        assert s0 in step.running
        fcfs(step)

    world = World(scripted(fcfs, plan), Shape(num_pages=2, max_model_len=8))
    world.add(Spec("s", PROMPT[:6], n=2, max_tokens=2))
    world.drain(check=True)


def test_one_block_of_another_request_is_room_enough_for_a_fork() -> None:
    def plan(step: Step) -> None:
        s1, other = named(step)["s#1"], named(step)["other"]
        assert step.free_pages == 0
        assert step.grant(s1).refused is Refusal.MEMORY
        assert step.grant(s1, evict=[other])
        assert other in step.waiting

    world = World(scripted(fcfs, plan), Shape(num_pages=3, max_model_len=8))
    world.add(Spec("s", PROMPT[:6], n=2, max_tokens=2))
    world.add(Spec("other", (99,) * 3, max_tokens=2))
    world.drain(check=True)


def test_no_sample_forks_a_sibling_that_was_admitted_in_the_same_step() -> None:
    """Its own copy is still to come, and copies of a step don't build on each other (the executor
    of these tests checks that)."""

    def only(*ids: str) -> Callable[[Step], object]:
        return lambda step: [step.grant(named(step)[id]) for id in ids]

    world = World(
        scripted(
            only("s#0"),
            only("s#3"),
            lambda step: step.preempt(named(step)["s#0"]),
            only("s#1", "s#2"),
        )
    )
    world.add(Spec("s", PROMPT, n=4, max_tokens=8))
    world.drain(check=True)
    (forks,) = [batch.copies for batch in world.executor.sent if len(batch.copies) == 2]
    assert forks[0].src == forks[1].src


@pytest.mark.parametrize(
    "window", [2, 3, 6]
)  # with a window of 1 nobody needs what others computed
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_blocks_behind_a_window_are_kept_while_a_sample_may_fork_them(
    block_size: int, window: int
) -> None:
    def late(step: Step) -> None:
        for request in step.running + step.waiting:
            if request.id in ("s#0", "s#1") or step.index > 8:
                step.grant(request)

    world = World(always(late), Shape(block_size=block_size, window=window))
    world.add(Spec("s", PROMPT, n=3, max_tokens=20))
    world.drain(check=True)
    assert prompt_tokens_computed(world) == len(PROMPT) + 2


@pytest.mark.parametrize("window", [1, 3, 6])
def test_a_sample_never_forks_a_sibling_whose_blocks_have_gone_behind_a_window(window: int) -> None:
    def plan(step: Step) -> None:
        fcfs(step)
        if step.index == 1:
            step.preempt(named(step)["s#1"])  # before its first token

    def hold_back(step: Step) -> None:
        step.grant_each(request for request in step.running if request.id == "s#0")
        step.wake_at(step.now + 1)

    world = World(
        scripted(plan, plan, *[hold_back] * 15), Shape(block_size=2, window=window, reuse=False)
    )
    world.add(Spec("s", PROMPT, n=2, max_tokens=20))
    world.drain(check=True)


def test_prompt_logprobs_make_each_sample_compute_the_prompt() -> None:
    world = World()
    world.add(Spec("s", PROMPT, n=3, prompt_logprobs=0))
    world.drain()
    assert prompt_tokens_computed(world) == 3 * len(PROMPT)


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    world = World()
    world.add(Spec("s", (1,), n=3))
    world.drain(check=True)
    assert prompt_tokens_computed(world) == 3


def test_aborting_many_samples_compares_none_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,024 of them took 7.6 s, for which everybody waited: each was looked for among those held
    back, again for each that was left."""
    world, compared = World(), 0

    def compare(one: Request, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    samples = world.add(Spec("s", PROMPT, n=40))
    world.core._admit_arrivals(world.clock.now())
    monkeypatch.setattr(Request, "__eq__", compare)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
    for sample in samples:
        world.abort(sample.id)
    assert compared <= len(samples)


def test_a_sample_that_resumes_after_its_prompt_is_not_forked_for_blocks_that_its_hit_left_out() -> (
    None
):
    """Its prefix hit covers its answer, too, and holds only what later tokens see."""

    def policy(step: Step) -> None:
        first = named(step).get("s#0")
        if (
            first in step.running
            and first is not None
            and first.num_tokens == 20
            and not first.preemptions
        ):
            step.preempt(first)
        elif first is not None and (first.num_tokens < 20 or first in step.waiting):
            step.grant(first)
        else:
            fcfs(step)

    world = World(always(policy), Shape(block_size=2, window=3, overlap=False))
    world.add(Spec("s", PROMPT, n=2, max_tokens=14))
    world.drain(check=True)
    assert world.core.stats.preemptions == 1


def test_blocks_kept_for_samples_are_given_up_before_a_request_ends_for_lack_of_memory() -> None:
    def policy(step: Step) -> None:
        first = named(step).get("s#0")
        if first is None:
            fcfs(step)
        else:
            step.grant(first)  # the other sample has to wait until it has ended

    world = World(
        always(policy), Shape(num_pages=8, block_size=2, window=4, token_budget=4, max_model_len=40)
    )
    world.add(Spec("s", PROMPT, n=2, max_tokens=29))
    world.drain(check=True)
    assert [len(world.tokens[f"s#{index}"]) for index in range(2)] == [29, 29]


def test_a_shared_prefix_is_forgotten_when_one_of_its_requests_runs_alone_with_other_blocks() -> (
    None
):
    """Both have run together, and do so again, but by then one of them has another table."""

    def preempt_second(step: Step) -> None:
        step.preempt(step.running[-1])

    def admit_alone(step: Step) -> None:
        world.kv.reset()
        assert step.grant(step.waiting[0])

    world = World(scripted(fcfs, fcfs, fcfs, preempt_second, admit_alone), Shape(overlap=False))
    world.add(Spec("r", tuple(range(12)), n=2, max_tokens=12))
    world.drain(check=True)
    shared = [batch.shared_prefix_blocks for batch in world.executor.sent]
    assert shared[2] == 2, "as they were forked"
    assert set(shared[3:]) == {0}
