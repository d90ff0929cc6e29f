"""Steps that check drafts: the tokens stay, whoever drafts; nothing leaks; and drafts that don't
pay aren't checked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, repeat
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from dovetail.api.component import NoOptions
from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.api.executor import Batch, Capacity, HostLogprobs, Result
from dovetail.api.grammar import SPEC_KINDS, GrammarCapabilities
from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Ran, StepDone
from dovetail.end_reason import EndReason
from dovetail.engine.constraint import Constraint
from dovetail.engine.drafter_thread import MOST_WAITING, DrafterThread
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.fake_executor import next_token
from tests.engine.drafters import DRAFTERS, Adversary, Alternating, FakeModel, Oracle
from tests.engine.policies import FCFS
from tests.engine.rules import Rule, RuleBackend, RuleMatcher, compiled
from tests.engine.world import RecordingExecutor, Shape, Spec, World

PROMPT = (1, 2, 3, 4, 5)
# lines cost nothing, so that drafts are checked as long as there is hope
FREE = Shape(seconds_per_token=0.0)
VOCAB = FREE.vocab_size


def drafts_of(world: World) -> list[int]:
    """Return the number of drafts of each batch."""
    return [
        0 if batch.drafts is None else int(batch.drafts.counts.sum())
        for batch in world.executor.sent
    ]


def requests() -> list[Spec]:
    """Return requests that end in all ways."""
    return [
        Spec("long", PROMPT, max_tokens=40),
        Spec("three", (7, 8, 9), max_tokens=17, n=3),
        Spec("stops", (3, 1), max_tokens=40, stop_ids=frozenset(range(0, VOCAB, 9))),
        Spec(
            "at least",
            (3, 1, 2),
            max_tokens=40,
            stop_ids=frozenset(range(0, VOCAB, 5)),
            min_tokens=11,
        ),
        Spec("ruled", (6, 6), max_tokens=23, rule=5),
        Spec("ends by rule", (6, 5), max_tokens=23, rule=4, rule_length=9),
        Spec("one", (5, 5, 5), max_tokens=1),
        Spec("two", (5, 5, 6), max_tokens=2, delay=0.05),
        Spec("late", PROMPT, max_tokens=30, delay=0.1),
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_without_drafts(drafter: str, overlap: bool) -> None:
    world = World(shape=replace(FREE, drafter=drafter, overlap=overlap, max_in_flight=3))
    for spec in requests():
        world.add(spec)
    world.drain(check=True)  # compares all tokens, and why they ended, with the oracle
    assert sum(drafts_of(world)) > 0


@pytest.mark.parametrize("state_pages", [0, 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preempted_requests_go_on_with_the_same_tokens(drafter: str, state_pages: int) -> None:
    world = World(
        shape=replace(FREE, drafter=drafter, num_pages=14, max_num_seqs=6, state_pages=state_pages)
    )
    for index in range(6):
        world.add(
            Spec(f"r{index}", (index, *PROMPT), max_tokens=25, rule=4 if index == 3 else None)
        )
    world.drain(check=True)
    assert sum(request.preemptions for request in world.requests.values()) > 0
    assert sum(drafts_of(world)) > 0


@pytest.mark.parametrize("state_pages", [0, 2])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_block_or_checkpoint_that_a_lookup_finds_holds_a_rejected_draft(
    drafter: str, state_pages: int
) -> None:
    """Of recurrent states, checkpoints are those of prompts: a turn finds what the one before it
    has read."""
    world = World(shape=replace(FREE, drafter=drafter, num_pages=256, state_pages=state_pages))
    read = said = PROMPT
    for turn in range(5):  # each prompt begins with all that was said before
        world.add(Spec(f"turn {turn}", said, max_tokens=14))
        world.drain(check=True)
        request = world.requests[f"turn {turn}"]
        found = len(read) - 1 if state_pages else len(said) - 2
        assert turn == 0 or request.cached_tokens >= found // 4 * 4, (
            "the answer before was found, as far as it was computed"
        )
        read, said = said, (*said, *world.tokens[request.id], turn)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_policy_is_told_the_drafts_of_each_request_and_how_many_were_accepted(
    drafter: str,
) -> None:
    told: list[StepDone] = []

    class Hears(FCFS):
        def on_step(self, done: StepDone) -> None:
            told.append(done)

    world = World(Hears, replace(FREE, drafter=drafter, overlap=False))
    for index in range(3):
        world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=20 + index))
    world.drain()
    assert [sum(ran.drafted for ran in done.ran) for done in told] == drafts_of(world)
    assert sum(drafts_of(world)) > 0
    for ran in (ran for done in told for ran in done.ran):
        assert ran.generated == 1 + ran.accepted <= 1 + ran.drafted


def test_what_a_stop_cuts_off_was_accepted_but_not_generated() -> None:
    told: list[Ran] = []

    class Hears(FCFS):
        def on_step(self, done: StepDone) -> None:
            told.extend(done.ran)

    world = World(Hears, replace(FREE, drafter="oracle", overlap=False))
    world.add(Spec("r", PROMPT, max_tokens=40))
    world.drain()
    (third,) = world.tokens["r"][2:3]
    told.clear()
    world.add(Spec("again", PROMPT, max_tokens=40, stop_ids=frozenset({third})))
    world.drain()
    prompt, drafts = told
    assert (prompt.generated, prompt.drafted, prompt.accepted) == (1, 0, 0)
    assert (drafts.drafted, drafts.accepted, drafts.generated) == (4, 2, 2), (
        "the stop is an accepted draft; the token after it isn't delivered"
    )


def test_an_oracle_saves_steps_and_an_adversary_costs_none() -> None:
    def steps(drafter: str | None) -> int:
        world = World(shape=replace(FREE, drafter=drafter, overlap=False))
        world.add(Spec("r", PROMPT, max_tokens=41))
        world.drain()
        return len(world.executor.sent)

    assert steps(None) == 41
    assert steps("oracle") == 1 + 8  # 5 tokens a step
    assert steps("adversary") == 41


def test_nothing_is_planned_before_the_results_of_drafts() -> None:
    world = World(shape=replace(FREE, drafter="oracle", max_in_flight=4))  # the fake refuses it
    for index in range(4):
        world.add(Spec(f"r{index}", (index,), max_tokens=30))
    while world.core.has_unfinished():
        world.step()
        assert not world.core.is_computing or drafts_of(world)[-1] == 0


def test_drafts_end_where_the_request_ends() -> None:
    world = World(shape=replace(FREE, drafter="adversary", max_drafts=50, max_model_len=32))
    world.add(Spec("r", PROMPT, max_tokens=27))
    world.drain()
    lengths = [len(PROMPT) + 1]
    for batch in world.executor.sent[1:]:
        assert int(batch.num_lines.sum()) <= 32 - lengths[-1]
        lengths.append(lengths[-1] + 1)


def test_drafts_keep_to_the_budget_and_to_the_executors_lines() -> None:
    for shape, most in ((replace(FREE, token_budget=7), 7), (replace(FREE, max_lines=5), 5)):
        world = World(shape=replace(shape, drafter="oracle"))
        for index in range(3):
            world.add(Spec(f"r{index}", (index,), max_tokens=30))
        world.drain()
        sizes = [
            int(batch.num_tokens.sum()) for batch in world.executor.sent if batch.drafts is not None
        ]
        assert max(sizes) == most


def test_a_request_checks_at_most_its_own_number_of_drafts() -> None:
    world = World(shape=replace(FREE, drafter="oracle"))
    world.add(Spec("none", PROMPT, max_tokens=30, max_drafts=0))
    world.add(Spec("two", PROMPT, max_tokens=30, max_drafts=2))
    world.add(Spec("many", PROMPT, max_tokens=30, max_drafts=99))
    world.drain()
    most = np.max(
        [
            batch.drafts.counts
            for batch in world.executor.sent
            if batch.drafts is not None and len(batch.rows) == 3
        ],
        axis=0,
    )
    assert most.tolist() == [0, 2, FREE.max_drafts]


def test_steps_overlap_while_no_request_may_have_drafts_and_drafts_begin_at_once_with_one_that_may() -> (
    None
):
    world = World(shape=replace(FREE, drafter="oracle"))
    world.add(Spec("none", PROMPT, max_tokens=30, max_drafts=0))
    for _ in range(10):
        world.step()
    assert world.core.is_computing
    world.drain()
    for index in range(3):  # the last token of each has no drafts
        world.add(Spec(f"r{index}", PROMPT, max_tokens=31))
        world.drain()
    assert [
        sum(batch.drafts is not None for batch in world.executor.sent[-7 * turn :][:7])
        for turn in (1, 2)
    ] == [6, 6]


def test_drafts_preempt_nobody() -> None:
    def preemptions(drafter: str | None) -> int:
        world = World(shape=replace(FREE, drafter=drafter, num_pages=13, max_drafts=8))
        for index in range(3):
            world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=10))
        world.drain(check=True)
        return world.core.stats.preemptions

    assert preemptions("adversary") == preemptions("oracle") == preemptions(None) == 0


class AbortsInFlight(RecordingExecutor):
    """Lets a client abort while a step with drafts is on the device."""

    world: World

    def collect(self, handle: int) -> Result:
        if (
            "gone" not in self.world.aborted
            and self.sent[-1].drafts is not None
            and len(self.world.tokens["gone"]) > 5
        ):
            self.world.abort("gone")
        return super().collect(handle)


@pytest.mark.parametrize("rule", [None, 5])
def test_a_request_aborted_while_its_drafts_are_in_flight_leaves_nothing(rule: int | None) -> None:
    world = World(shape=replace(FREE, drafter="alternating"), executor=AbortsInFlight)
    assert isinstance(world.executor, AbortsInFlight)
    world.executor.world = world
    world.add(Spec("gone", PROMPT, max_tokens=30, rule=rule))
    world.add(Spec("stays", PROMPT, max_tokens=30, rule=rule))
    world.drain(check=True)
    assert world.aborted == {"gone"}


class Failing(RecordingExecutor):
    """A row with drafts fails."""

    def collect(self, handle: int) -> Result:
        result, batch = super().collect(handle), self.sent[-1]
        if batch.drafts is None or self.batches < 4:
            return result
        return replace(result, failed={0: "logits aren't finite"})


def test_a_row_with_drafts_that_fails_ends_its_request_alone() -> None:
    world = World(shape=replace(FREE, drafter="oracle"), executor=Failing)
    world.add(Spec("bad", PROMPT, max_tokens=30))
    while world.core.has_unfinished():
        world.step()
    assert world.finished["bad"] == Finish(EndReason.ERROR, "logits aren't finite")
    assert world.tokens["bad"] == world.expected("bad")[0][: len(world.tokens["bad"])]
    assert world.kv.counts.held == 0


class LosesItsFirstRow(RecordingExecutor):
    """The first row of a step with drafts fails, and yields nothing; each token has its id as its
    log-probability's."""

    def collect(self, handle: int) -> Result:
        result, batch = super().collect(handle), self.sent[-1]
        token_ids, counts, failed = (
            result.token_ids[result.token_ids >= 0],
            result.counts,
            result.failed,
        )
        if counts is not None and len(batch.rows) == 2:
            token_ids = token_ids[counts[0] :]
            counts, failed = np.array([0, counts[1]], np.int32), {0: "lost"}
        floats = np.zeros((len(token_ids), 1), np.float32)
        logprobs = HostLogprobs(
            token_ids[:, None].astype(np.int32), floats, np.ones(len(token_ids), np.int32)
        )
        return replace(
            result,
            token_ids=result.token_ids if counts is None else token_ids,
            counts=counts,
            failed=failed,
            logprobs=logprobs,
        )


def test_logprobs_belong_to_their_tokens_after_a_row_that_yields_none() -> None:
    world = World(shape=replace(FREE, drafter="oracle"), executor=LosesItsFirstRow)
    for name in ("bad", "good"):
        world.add(Spec(name, PROMPT, max_tokens=30, logprobs=0))
    ids = []
    while world.core.has_unfinished():
        ids += [
            int(logprobs.token_ids[index, 0])
            for request, logprobs, index in world.step().logprobs
            if request.id == "good"
        ]
    assert world.finished["bad"] == Finish(EndReason.ERROR, "lost")
    assert ids == world.tokens["good"] == world.expected("good")[0]


@pytest.mark.parametrize("counts", [None, [7, 1], [0, 1], [1], [1, 1, 1]])
def test_results_that_cannot_be_are_refused(counts: list[int] | None) -> None:
    class Wrong(RecordingExecutor):
        def collect(self, handle: int) -> Result:
            result = super().collect(handle)
            if self.sent[-1].drafts is None:
                return result
            given = None if counts is None else np.array(counts, np.int32)
            return replace(
                result, counts=given, token_ids=np.zeros(sum(counts or [1, 1]), np.int64)
            )

    world = World(shape=replace(FREE, drafter="oracle"), executor=Wrong)
    for name in ("a", "b"):
        world.add(Spec(name, PROMPT, max_tokens=30))
    while world.core.has_unfinished():
        world.step()
    assert isinstance(world.core.dead, DovetailError)
    assert {finish.reason.is_error for finish in world.finished.values()} == {True}


# Whether drafts pay


def seconds(
    drafter: str | Callable[[DrafterContext], Drafter] | None,
    *,
    rows: int = 1,
    token_s: float = 0.001,
    max_tokens: int = 100,
) -> float:
    """Return how long the engine takes for `rows` requests."""
    made = None if drafter is None or isinstance(drafter, str) else drafter
    shape = Shape(
        num_pages=512,
        max_num_seqs=16,
        seconds_per_token=token_s,
        drafter=drafter if isinstance(drafter, str) else None,
    )
    world = World(shape=shape, drafter=made)
    for index in range(rows):
        world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=max_tokens))
    world.drain()
    return world.clock.now()


@pytest.mark.parametrize("drafter", ["adversary", "model", "moody"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("token_s", [0.0005, 0.005])
def test_a_bad_drafter_costs_little(drafter: str, rows: int, token_s: float) -> None:
    assert seconds(drafter, rows=rows, token_s=token_s) <= 1.03 * seconds(
        None, rows=rows, token_s=token_s
    )


class Unmeasured(RecordingExecutor):
    def start(self) -> Capacity:
        return replace(super().start(), line_costs=())


@pytest.mark.parametrize(("drafter", "least", "most"), [("oracle", 60, 100), ("adversary", 0, 8)])
def test_the_cost_of_lines_is_learned_if_it_was_not_measured(
    drafter: str, least: int, most: int
) -> None:
    world = World(
        shape=Shape(num_pages=512, drafter=drafter, seconds_per_token=0.005), executor=Unmeasured
    )
    world.add(Spec("r", PROMPT, max_tokens=100))
    world.drain()
    assert least <= sum(drafts_of(world)) <= most
    assert world.clock.now() <= 1.03 * seconds(None, token_s=0.005)


def test_drafts_that_are_as_dear_as_steps_are_not_checked() -> None:
    class Plain(RecordingExecutor):
        def start(self) -> Capacity:
            return replace(super().start(), line_costs=((1, 0.01), (2, 0.03), (64, 1.3)))

    world = World(shape=replace(FREE, drafter="oracle"), executor=Plain)
    world.add(Spec("r", PROMPT, max_tokens=40))
    world.drain()
    assert sum(drafts_of(world)) == 0


@pytest.mark.parametrize(("draft_s", "drafts"), [(0.0001, True), (0.02, False)])
def test_the_time_of_a_draft_model_counts(draft_s: float, drafts: bool) -> None:
    class Drafting(RecordingExecutor):
        def start(self) -> Capacity:
            return replace(
                super().start(),
                line_costs=((1, 0.01), (64, 0.01)),
                draft_costs=((1, draft_s), (8, draft_s)),
            )

    world = World(shape=FREE, drafter=FakeModel, executor=Drafting)
    world.add(Spec("r", PROMPT, max_tokens=40))
    world.drain()
    assert (sum(drafts_of(world)) > 0) == drafts


def test_as_many_drafts_are_checked_as_are_cheap() -> None:
    class Stepped(RecordingExecutor):
        def start(self) -> Capacity:
            return replace(super().start(), line_costs=((1, 0.01), (3, 0.01), (4, 0.03), (64, 0.6)))

    world = World(shape=replace(FREE, drafter="oracle", max_drafts=8), executor=Stepped)
    world.add(Spec("r", PROMPT, max_tokens=40))
    world.drain()
    assert {*drafts_of(world)[1:-2]} == {2}


class Changes(Adversary):
    """Wrong for the first tokens of a request, and right from then on."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        proposed = Oracle.propose(self, requests, most)
        return [
            ids if request.generated > 60 else [self.wrong(token) for token in ids]
            for request, ids in zip(requests, proposed, strict=True)
        ]

    def changed(self, tokens: list[int]) -> Sequence[int]:
        return tokens


def test_a_drafter_that_becomes_good_is_used_and_costs_the_device_nothing_before() -> None:
    world = World(shape=Shape(num_pages=512), drafter=Changes)
    world.add(Spec("r", PROMPT, max_tokens=122))
    world.drain()
    drafts = drafts_of(world)
    assert sum(drafts[12:60]) <= 4, "a bad drafter drafts in the engine's memory only"
    assert sum(drafts[60:]) > 20
    assert isinstance(world.drafter, Changes)
    assert len(world.drafter.asked) < 50


def test_rows_whose_drafts_are_right_get_them() -> None:
    class Partial(Oracle):
        def propose(
            self, requests: Sequence[Request], most: Sequence[int]
        ) -> Sequence[Sequence[int]]:
            proposed = super().propose(requests, most)
            return [
                ids if request.id == "good" else [self.wrong(t) for t in ids]
                for request, ids in zip(requests, proposed, strict=True)
            ]

    world = World(
        shape=Shape(num_pages=512, max_drafts=3, seconds_per_token=0.003), drafter=Partial
    )
    for name in ("good", "bad"):
        world.add(Spec(name, PROMPT, max_tokens=60))
    world.drain()
    last = [
        batch.drafts.counts.tolist()
        for batch in world.executor.sent[-60:]
        if batch.drafts is not None and len(batch.rows) == 2
    ]
    assert sum(counts[0] for counts in last) > 3 * sum(counts[1] for counts in last)


# Drafters that misbehave


class Misbehaves(Oracle):
    """Does something wrong, once the answer has begun."""

    def __init__(self, context: DrafterContext, what: Callable[[list[list[int]]], Any]) -> None:
        super().__init__(context)
        self.what = what

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        proposed = [[*ids] for ids in super().propose(requests, most)]
        answer: Sequence[Sequence[int]] = self.what(proposed)
        return answer


def raises(error: BaseException) -> Callable[[Any], Any]:
    def act(proposed: Any) -> Any:
        raise error

    return act


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


BAD = {
    "raises an error without a text": raises(Mute()),
    "raises": raises(ValueError("a bug")),
    "exits": raises(SystemExit(1)),
    "raises TimeoutError": raises(TimeoutError("its own")),
    "id beyond the vocabulary": lambda proposed: [[VOCAB] for _ in proposed],
    "negative id": lambda proposed: [[-1] for _ in proposed],
    "huge id": lambda proposed: [[2**70] for _ in proposed],
    "no ids": lambda proposed: [["word"] for _ in proposed],
    "too few lists": lambda proposed: proposed[1:],
    "too many lists": lambda proposed: [*proposed, []],
    "too many drafts": lambda proposed: [[*ids, 0] for ids in proposed],
    "endless drafts": lambda proposed: [count() for _ in proposed],
    "endless lists": lambda proposed: repeat([]),
    "floats": lambda proposed: np.zeros((len(proposed), 1)),
    "None": lambda proposed: None,
    "None for a request": lambda proposed: [None for _ in proposed],
}


@pytest.mark.parametrize("what", BAD)
def test_a_drafter_that_fails_is_named_once_and_changes_no_token(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "dovetail"):
        world = World(shape=FREE, drafter=lambda context: Misbehaves(context, BAD[what]))
        for index in range(3):
            world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=40))
        world.drain(check=True)
    assert sum(drafts_of(world)) == 0
    assert [
        record.getMessage().startswith("drafter tests:drafter failed in propose()")
        for record in caplog.records
    ] == [True]


class EndsBadly(Oracle):
    """Fails in each `on_finished`, with an error that has no text."""

    def on_finished(self, request: Request) -> None:
        raise Mute


def test_a_drafter_that_fails_after_each_request_goes_on_drafting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "dovetail"):
        world = World(shape=FREE, drafter=EndsBadly)
        before = 0
        for index in range(3):
            world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=40))
            world.drain(check=True)
            drafted = sum(drafts_of(world))
            assert drafted > before
            before = drafted
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["drafter tests"]


class ChangesItsArguments(Oracle):
    """Empties the lists that it is given, after it has looked at them."""

    def propose(self, requests: Any, most: Any) -> Sequence[Sequence[int]]:
        proposed = [
            [*super(ChangesItsArguments, self).propose([r], [1])[0], 0, 0, 0, 0, 0]
            for r in requests
        ]
        with suppress(AttributeError, TypeError):
            requests.clear()
            most[:] = [100] * len(most)
        return [ids[:1] for ids in proposed]


def test_a_drafter_cannot_change_what_its_drafts_are_checked_against() -> None:
    world = World(shape=FREE, drafter=ChangesItsArguments)
    for index in range(3):
        world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=40))
    world.drain(check=True)
    assert sum(drafts_of(world)) > 0


class HangsAtTheEnd(Drafter):
    """Hangs in `on_finished`, until it is let go."""

    go = threading.Event()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        return [[0] for _ in requests]

    def on_finished(self, request: Request) -> None:
        self.go.wait(60)


def test_requests_that_ended_do_not_pile_up_before_a_drafter_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ended(LiveRequest):
        __slots__ = ("__weakref__",)

    drafter = HangsAtTheEnd(
        NoOptions(), DrafterContext(vocab_size=VOCAB, max_drafts=4, max_model_len=100)
    )
    thread = DrafterThread(drafter, "tests:drafter", VOCAB, timeout_s=0.01)
    kept: WeakSet[Ended] = WeakSet()
    with caplog.at_level(logging.ERROR, "dovetail"):
        for index in range(MOST_WAITING + 10):
            request = Ended(
                f"r{index}", PROMPT, SamplingParams(max_tokens=1), max_tokens=1, arrival_time=0.0
            )
            kept.add(request)
            thread.finished(request)
    del request
    assert len(kept) <= 2  # the one that it hangs with, and the call's own
    assert len(caplog.records) == 1
    assert "isn't called any more" in caplog.text
    assert [
        *thread.propose(
            [LiveRequest("r", PROMPT, SamplingParams(), max_tokens=9, arrival_time=0.0)], [3]
        )[0]
    ] == []
    thread.stop()
    drafter.go.set()


class Hangs(Oracle):
    """Hangs in its third call, until it is let go."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.go, self.returned = threading.Event(), threading.Event()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        proposed = super().propose(requests, most)
        if len(self.asked) == 3:
            self.go.wait(60)
            self.returned.set()
        return proposed


@pytest.mark.slow("waits for a drafter that hangs")
def test_a_drafter_that_hangs_is_left_alone_until_it_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "dovetail"):
        world = World(
            shape=replace(FREE, num_pages=512, max_model_len=600), drafter=Hangs, timeout_s=0.01
        )
        drafter = world.drafter
        assert isinstance(drafter, Hangs)
        world.add(Spec("first", PROMPT, max_tokens=60))
        while world.core.has_unfinished():
            world.step()
        assert len(drafter.asked) == 3
        assert drafter.finished == []
        drafter.go.set()
        assert drafter.returned.wait(60)
        world.add(Spec("second", PROMPT, max_tokens=580))
        world.drain()
    assert len(drafter.asked) > 3
    assert drafter.finished == ["first", "second"]
    assert [record.getMessage() for record in caplog.records] == [
        "drafter tests:drafter took longer than 0.01 s in propose(): steps go on without its "
        "drafts (logged once)"
    ]


class LearnsBadly(Oracle):
    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        raise RuntimeError("can't learn")


def test_an_error_on_finished_is_logged_and_the_drafter_is_still_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "dovetail"):
        world = World(shape=FREE, drafter=LearnsBadly)
        for index in range(3):
            world.add(Spec(f"r{index}", (index,), max_tokens=20))
            world.drain(check=True)
    assert len(caplog.records) == 1
    assert drafts_of(world)[-1] > 0


def test_a_drafter_hears_of_the_end_of_every_request_that_arrived() -> None:
    world = World(shape=FREE, drafter=Alternating)
    for spec in requests():
        world.add(spec)
    world.add(Spec("never", PROMPT, delay=1e6))
    world.add(Spec("aborted", PROMPT, max_tokens=90))
    for _ in range(5):
        world.step()
    world.abort("aborted")
    world.abort("never")
    world.drain()
    assert isinstance(world.drafter, Alternating)
    assert sorted(world.drafter.finished) == sorted(world.heard.arrived)


# Grammars


class Spelled(RuleMatcher):
    """A grammar of one answer, `SPELLED`; it determines all tokens."""

    def allowed(self) -> Any:
        return np.arange(self.vocab_size) == SPELLED[len(self.tokens)]

    def forced(self) -> Sequence[int]:
        return SPELLED[len(self.tokens) :]

    @property
    def complete(self) -> bool:
        return len(self.tokens) == len(SPELLED)


SPELLED = [int(digit) for digit in "314159265358979323846"]


class Made(Rule):
    def __init__(self, kind: type[RuleMatcher], modulus: int = 5) -> None:
        super().__init__(modulus, 0, VOCAB)
        self.kind = kind

    def begin(self) -> RuleMatcher:
        return self.kind(*self.begin_with)


def add(world: World, id: str, constraint: Constraint, max_tokens: int = 40) -> LiveRequest:
    request = LiveRequest(
        id,
        PROMPT,
        SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        constraint=constraint,
    )
    world.requests[id], world.seeds[id], world.tokens[id] = request, 0, []
    world.core.add(request)
    return request


@pytest.mark.parametrize("drafter", ["adversary", "model"])
def test_tokens_that_a_grammar_forces_are_drafts(drafter: str) -> None:
    world = World(shape=replace(FREE, drafter=drafter, max_drafts=10))
    add(world, "r", Constraint(compiled(Made(Spelled)), RuleBackend(VOCAB)))
    while world.core.has_unfinished():
        world.step()
    assert world.tokens["r"] == SPELLED
    assert world.finished["r"] == Finish(EndReason.STOP, keeps_token=True)
    assert len(world.executor.sent) == 3, "1 token, then twice 10 and the next"


def test_backends_without_rollback_get_no_drafts() -> None:
    class Forward(RuleBackend):
        capabilities = GrammarCapabilities(kinds=SPEC_KINDS)

    class NoWayBack(Spelled):
        def rollback(self, tokens: int) -> None:
            raise AssertionError("it can't")

    world = World(shape=replace(FREE, drafter="oracle"))
    add(world, "r", Constraint(compiled(Made(NoWayBack)), Forward(VOCAB)))
    while world.core.has_unfinished():
        world.step()
    assert world.tokens["r"] == SPELLED
    assert sum(drafts_of(world)) == 0


class FailsToFill(RuleMatcher):
    def fill(self, words: Any) -> None:
        if len(self.tokens) == 12:
            raise ValueError("a lexer gave up")
        super().fill(words)


class FailsToAccept(RuleMatcher):
    def accept(self, token: int) -> bool:
        if len(self.tokens) == 12:
            raise ValueError("a lexer gave up")
        return super().accept(token)


class DeadEnd(RuleMatcher):
    def allowed(self) -> Any:
        return super().allowed() & (len(self.tokens) < 12)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FailsToFill, "a lexer gave up"),
        (FailsToAccept, "a lexer gave up"),
        (DeadEnd, "allows no token"),
    ],
)
def test_a_matcher_that_fails_among_drafts_ends_its_request_alone_at_the_same_token(
    kind: type[RuleMatcher], why: str
) -> None:
    def tokens(drafter: str | None) -> list[int]:
        world = World(shape=replace(FREE, drafter=drafter))
        world.rules["bad"] = 5, 0  # what the oracle goes by
        add(world, "bad", Constraint(compiled(Made(kind)), RuleBackend(VOCAB)))
        world.add(Spec("good", PROMPT, max_tokens=30, rule=5))
        world.add(Spec("free", PROMPT, max_tokens=30))
        while world.core.has_unfinished():
            world.step()
        assert world.finished["bad"].reason.is_error
        assert why in str(world.finished["bad"].stop_reason)
        for name in ("good", "free"):
            assert world.tokens[name] == world.expected(name)[0]
        assert world.kv.counts.held == 0
        assert drafter is None or sum(drafts_of(world)) > 0
        return world.tokens["bad"]

    plain = tokens(None)
    assert tokens("oracle") == tokens("moody") == plain


@pytest.mark.parametrize("drafter", ["oracle", "moody"])
def test_a_grammar_that_begins_among_drafts_masks_each_token_after_its_beginning(
    drafter: str,
) -> None:
    free = [*PROMPT]
    for _ in range(30):
        free.append(next_token(free, 0, VOCAB))
    begins = free[len(PROMPT) + 11]  # this token's text is the beginning
    first = free.index(begins, len(PROMPT)) - len(PROMPT)
    backend = RuleBackend(
        VOCAB, [b"</think>" if token == begins else b"t" for token in range(VOCAB)]
    )

    def tokens(drafter: str | None) -> list[int]:
        world = World(shape=replace(FREE, drafter=drafter))
        if isinstance(world.drafter, Oracle):
            world.drafter.answers = lambda id: free[len(PROMPT) :]
        add(
            world, "r", Constraint(compiled(Made(RuleMatcher)), backend, b"</think>"), max_tokens=25
        )
        while world.core.has_unfinished():
            world.step()
        assert drafter is None or sum(drafts_of(world)) > 0
        return world.tokens["r"]

    plain = tokens(None)
    assert plain[: first + 1] == free[len(PROMPT) : len(PROMPT) + first + 1]
    assert plain != free[len(PROMPT) :][:25]
    assert tokens(drafter) == plain


# Figures


def test_figures_count_drafts_and_accepted_ones_by_position() -> None:
    world = World(shape=replace(FREE, max_drafts=3), drafter=Alternating)
    for name in ("a", "b"):
        world.add(Spec(name, PROMPT, max_tokens=40))
    world.drain()
    stats = world.core.update_stats()
    batches = [batch for batch in world.executor.sent if batch.drafts is not None]
    assert stats.draft_rows == sum(
        int((batch.drafts.counts > 0).sum()) for batch in batches if batch.drafts
    )
    assert stats.draft_tokens == sum(drafts_of(world))
    events = [event for event in world.observer.events if isinstance(event, StepFinished)]
    assert sum(event.draft_rows for event in events) == stats.draft_rows
    assert sum(event.draft_tokens for event in events) == stats.draft_tokens
    accepted = [count for event in events for count in event.accepted_drafts]
    assert stats.accepted_drafts == [
        sum(count > position for count in accepted) for position in range(3)
    ]
    assert stats.accepted_drafts[0] > stats.accepted_drafts[2] > 0


def test_the_executors_own_drafts_are_checked() -> None:
    world = World(shape=FREE, drafter=FakeModel)
    world.add(Spec("r", PROMPT, max_tokens=60))
    world.drain(check=True)
    batches: list[Batch] = [batch for batch in world.executor.sent if batch.drafts is not None]
    assert len(world.executor.sent) < 30
    assert all(
        batch.drafts is not None and {*batch.drafts.token_ids.tolist()} == {-1} for batch in batches
    )
