"""Requests with a grammar: late batches, preparations that policies don't see, and matchers that
fail."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.api.grammar import Grammar
from dovetail.end_reason import EndReason
from dovetail.engine.constraint import Constraint
from dovetail.engine.finish import Finish
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import RequestError
from dovetail.request.sampling_params import SamplingParams
from tests.engine.rules import Rule, RuleBackend, RuleMatcher, compiled, expected_by_rule
from tests.engine.world import Shape, Spec, World

PROMPT = (5, 6, 7, 8, 9)
VOCAB = 97
IN_FLIGHT = pytest.mark.parametrize("max_in_flight", [1, 2, 3])


def add(
    world: World, name: str, constraint: Constraint, *, max_tokens: int = 6, delay: float = 0.0
) -> LiveRequest:
    request = LiveRequest(
        name,
        PROMPT,
        SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        constraint=constraint,
        arrival_time=world.clock.now() + delay,
    )
    world.requests[name], world.seeds[name], world.tokens[name] = request, 0, []
    world.core.add(request)
    return request


@IN_FLIGHT
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_follow_the_rule_whatever_is_in_flight(max_in_flight: int, overlap: bool) -> None:
    world = World(shape=Shape(max_in_flight=max_in_flight, overlap=overlap))
    world.add(Spec("ruled", PROMPT, max_tokens=12, rule=5))
    world.add(Spec("free", PROMPT, max_tokens=9))
    world.add(Spec("ends", PROMPT, max_tokens=12, rule=3, rule_length=4))
    world.drain(check=True)  # which compares all tokens, and why they ended, with the oracle
    assert world.finished["ends"] == Finish(EndReason.STOP, keeps_token=True)
    assert world.finished["ruled"] == Finish(EndReason.LENGTH)


def test_batches_are_late_just_while_a_request_with_a_grammar_samples() -> None:
    world = World(shape=Shape(token_budget=4))
    world.add(Spec("free", (1, 2), max_tokens=20))
    world.drain()
    assert not any(batch.late for batch in world.executor.sent)
    before = len(world.executor.sent)
    world.add(Spec("ruled", PROMPT, max_tokens=3, rule=5))
    world.drain()
    late = [batch.late for batch in world.executor.sent[before:]]
    assert late[0] is False, "a chunk of the prompt yields nothing"
    assert late[1:4] == [True, True, True]


def test_a_late_step_overlaps_with_the_results_of_the_step_before() -> None:
    world = World(shape=Shape(max_in_flight=2))
    world.add(Spec("ruled", PROMPT, max_tokens=8, rule=5))
    most, step = 0, world.core.step
    submit = world.executor.submit

    def counting(batch: Any) -> int:
        nonlocal most
        handle = submit(batch)
        most = max(most, len(world.executor._pending))
        return handle

    world.executor.submit = counting  # type: ignore[method-assign]
    while world.core.has_unfinished():
        step()
    assert most == 2, "the model of the next step is enqueued before the results of the last are in"


def test_preempted_requests_go_on_where_their_grammar_is() -> None:
    world = World(shape=Shape(num_pages=9, block_size=2, max_model_len=16))
    for index in range(4):
        world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=9, rule=4))
    world.drain(check=True)
    assert sum(request.preemptions for request in world.requests.values()) > 0


# Preparations


class Pending:
    """A constraint whose grammar comes later."""

    def __init__(self) -> None:
        self.future: Future[Grammar] = Future()
        self.constraint = Constraint(self.future, RuleBackend(VOCAB))

    def done(self) -> None:
        self.future.set_result(Rule(5, 0, VOCAB))


def test_policies_hear_of_a_request_when_its_grammar_is_ready_and_its_arrival_time_stays() -> None:
    world, pending = World(), Pending()
    request = add(world, "slow", pending.constraint)
    came = request.arrival_time
    world.add(Spec("quick", PROMPT, max_tokens=5))
    while "quick" not in world.finished:
        world.step()
        assert "slow" not in world.heard.arrived
    pending.done()
    while world.core.has_unfinished():
        world.step()
    assert world.heard.arrived["slow"][0] == request.arrival_time == came
    assert world.tokens["slow"] == expected_by_rule(PROMPT, 6, 0, VOCAB, 5)[0]


def test_an_engine_that_only_waits_for_a_grammar_is_not_stalled() -> None:
    world, pending = World(), Pending()
    add(world, "slow", pending.constraint)
    for _ in range(3):
        world.step()
    pending.done()
    while world.core.has_unfinished():
        world.step()
    assert world.finished["slow"].reason == "length"


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    world, pending = World(), Pending()
    add(world, "wrong", pending.constraint)
    world.add(Spec("other", PROMPT, max_tokens=4))
    pending.future.set_exception(RequestError("json_schema: 'contains' can't be followed"))
    while world.core.has_unfinished():
        world.step()
    assert world.finished["wrong"] == Finish(
        EndReason.GRAMMAR, "json_schema: 'contains' can't be followed"
    )
    assert "wrong" not in world.heard.arrived
    assert "wrong" not in world.heard.finished
    assert world.tokens["other"] == world.expected("other")[0]
    assert world.kv.counts.held == 0


def test_a_request_that_waits_for_its_grammar_can_be_aborted() -> None:
    world, pending = World(), Pending()
    add(world, "gone", pending.constraint)
    world.step()
    world.abort("gone")
    pending.done()
    world.add(Spec("other", PROMPT, max_tokens=4))
    while world.core.has_unfinished():
        world.step()
    assert world.tokens["gone"] == []
    assert "gone" not in world.heard.arrived


# Failures


class Failing(RuleMatcher):
    """Fails at its third mask."""

    def fill(self, words: NDArray[np.uint32]) -> None:
        if len(self.tokens) == 2:
            raise ValueError("a lexer gave up")
        super().fill(words)


class FailingToAccept(RuleMatcher):
    """Fails at its third token."""

    def accept(self, token: int) -> bool:
        if len(self.tokens) == 2:
            raise ValueError("a lexer gave up")
        return super().accept(token)


class DeadEnd(RuleMatcher):
    """Allows nothing after two tokens."""

    def allowed(self) -> NDArray[np.bool_]:
        return super().allowed() & (len(self.tokens) < 2)


class Made(Rule):
    def __init__(self, kind: type[RuleMatcher]) -> None:
        super().__init__(5, 0, VOCAB)
        self.kind = kind

    def begin(self) -> RuleMatcher:
        return self.kind(*self.begin_with)


@IN_FLIGHT
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Failing, "a lexer gave up"),
        (FailingToAccept, "a lexer gave up"),
        (DeadEnd, "allows no token"),
    ],
)
def test_a_matcher_that_fails_ends_its_request_alone(
    kind: type[RuleMatcher], why: str, max_in_flight: int
) -> None:
    world = World(shape=Shape(max_in_flight=max_in_flight))
    add(world, "bad", Constraint(compiled(Made(kind)), RuleBackend(VOCAB)))
    world.add(Spec("good", PROMPT, max_tokens=8, rule=5))
    world.add(Spec("free", PROMPT, max_tokens=8))
    while world.core.has_unfinished():
        world.step()
    assert world.finished["bad"].reason.is_error
    assert why in str(world.finished["bad"].stop_reason)
    assert world.tokens["bad"][:2] == expected_by_rule(PROMPT, 2, 0, VOCAB, 5)[0]
    for name in ("good", "free"):
        assert world.tokens[name] == world.expected(name)[0]
    assert world.kv.counts.held == 0


def test_a_token_against_the_rule_is_an_error_that_names_it() -> None:
    constraint = Constraint(compiled(Rule(5, 0, VOCAB)), RuleBackend(VOCAB))
    finish = constraint.see(3)
    assert finish is not None
    assert finish.reason.is_error
    assert "token 3" in str(finish.stop_reason)


# A beginning behind other text


@pytest.mark.parametrize(
    "cuts",
    [[b"a</", b"thi", b"nk>"], [b"</think>"], [b"x<", b"</think", b">\n"], [b"</thi</think>"]],
)
def test_the_grammar_begins_behind_the_mark_however_it_is_cut(cuts: list[bytes]) -> None:
    backend = RuleBackend(VOCAB, [*cuts, *(b"t",) * (VOCAB - len(cuts))])
    constraint = Constraint(compiled(Rule(5, 0, VOCAB)), backend, b"</think>")
    for token in range(len(cuts)):
        assert constraint.matcher is None, "any token may come before it"
        assert constraint.see(token) is None
    assert constraint.matcher is not None


@IN_FLIGHT
@pytest.mark.parametrize("rule", [None, 5])
@pytest.mark.parametrize("most", [1, 2, 5, 30])
def test_what_comes_before_the_mark_ends_after_its_most_tokens(
    most: int, rule: int | None, max_in_flight: int
) -> None:
    world = World(shape=Shape(max_in_flight=max_in_flight))
    compiling = None if rule is None else compiled(Rule(rule, 0, VOCAB))
    add(
        world,
        "bounded",
        Constraint(compiling, RuleBackend(VOCAB), b"7 8 ", most=most, closing=(7, 8)),
        max_tokens=12,
    )
    world.add(Spec("free", PROMPT, max_tokens=9))
    while world.core.has_unfinished():
        world.step()
    expected = expected_by_rule(PROMPT, 12, 0, VOCAB, 1)[0][:most]  # any token
    expected += [7, 8][: 12 - len(expected)]
    expected += expected_by_rule((*PROMPT, *expected), 12 - len(expected), 0, VOCAB, rule or 1)[0]
    assert world.tokens["bounded"] == expected
    assert world.tokens["free"] == world.expected("free")[0]
    late = [batch.late for batch in world.executor.sent if batch.yields_token.any()]
    assert rule is not None or late.count(True) <= 2 + max_in_flight, (
        "steps without a mask overlap as usual"
    )


def test_a_mark_that_comes_by_itself_is_not_forced() -> None:
    constraint = Constraint(None, RuleBackend(VOCAB), b"7 8 ", most=3, closing=(7, 8))
    for token in (1, 7, 8, 9, 9):
        assert constraint.forced is None
        assert constraint.see(token) is None
    assert (constraint.forced, constraint.matcher, constraint.may_mask(99)) == (None, None, False)


def test_requests_aborted_during_late_steps_do_not_affect_others() -> None:
    world = World(shape=Shape(max_num_seqs=12, num_pages=128))
    for index in range(12):
        world.add(Spec(f"r{index}", (index, *PROMPT), max_tokens=9, rule=4))
    for index in range(0, 12, 2):
        world.step()
        world.abort(f"r{index}")
    world.drain(check=True)


def test_stopping_with_a_late_step_in_flight_leaves_nothing() -> None:
    world = World(shape=Shape(max_in_flight=2))
    world.add(Spec("ruled", PROMPT, max_tokens=20, rule=5))
    for _ in range(3):
        world.step()
    assert world.core.is_computing
    world.core.stop()
