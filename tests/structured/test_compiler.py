"""The compiler of rules: each spec is compiled once, failures affect only their own request, and
slow compilations delay no others."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dovetail.api.grammar import Grammar, GrammarSpec
from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.grammar_trials import GrammarTrials, TrialEndedError, TrialTimeoutError
from dovetail.front.grammars import MAX_SLOW, AnswerRule, GrammarCompiler
from tests.structured.toy import Toy, ToyPart, ToyTrials

PATIENCE_S = 30


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    yield toy
    toy.release.set()


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(ToyPart().ref(), Toy().context, 1)
    trials.check(choice("a"), PATIENCE_S)  # starts the process
    yield trials
    trials.close()


def choice(*words: str) -> GrammarSpec:
    return GrammarSpec("choice", "[" + ", ".join(f'"{word}"' for word in words) + "]")


def error_of(future: Future[Grammar]) -> str:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, RequestError)
    return str(error)


def test_equal_specs_are_compiled_once_for_all_samples_and_requests(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits())
    rule = AnswerRule(choice("a", "b"))
    constraints = [*compiler.constraints(rule, 3), *compiler.constraints(rule, 3)]
    assert compiler.compile(choice("a", "b")).result(PATIENCE_S) is compiler.compile(
        choice("a", "b")
    ).result(PATIENCE_S)
    assert len(constraints) == 6
    assert len({id(constraint.matcher) for constraint in constraints}) == 6, (
        "each sample has a matcher of its own"
    )
    assert len(toy.compiled) == 1


def test_the_least_used_goes_when_there_is_no_room(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), cache_bytes=3 * 70_000)
    for word in ("a", "b", "ab", "a", "ba", "a", "b"):
        compiler.compile(choice(word)).result(PATIENCE_S)
    assert toy.compiled == ['["a"]', '["b"]', '["ab"]', '["ba"]', '["b"]']


def test_grammars_that_have_grown_are_forgotten(toy: Toy) -> None:
    """Only Linux tells how much memory a process has."""
    # one thread: when it compiles the last one, it refers to none before
    compiler = GrammarCompiler(toy, Limits(), threads=1, grown_bytes=32 << 20)
    grown = compiler.compile(choice("a"))
    compiler.compile(choice("b")).result(PATIENCE_S)
    assert compiler.compile(choice("a")) is grown
    grammar = grown.result(PATIENCE_S)  # compiled before this process grows
    grammar.memory = b"a" * (64 << 20)  # type: ignore[attr-defined]
    freed = weakref.ref(grown)
    del grown, grammar
    compiler.compile(choice("ab")).result(PATIENCE_S)
    assert (freed() is None) == (sys.platform == "linux")


def test_a_refusal_names_the_rule(toy: Toy) -> None:
    assert (
        error_of(GrammarCompiler(toy, Limits()).compile(choice("wrong")))
        == "structured.choice: the word isn't liked here"
    )


def test_a_panic_ends_its_own_request_alone(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), threads=1)
    assert "the grammar backend failed: Panic: the native library is beside itself" in error_of(
        compiler.compile(choice("panics"))
    )
    compiler.compile(choice("a")).result(PATIENCE_S)


def test_a_kind_that_the_backend_lacks_is_refused_at_once(toy: Toy) -> None:
    with pytest.raises(
        RequestError, match=r"structured\.regex: grammar backend Toy can't do it; it has choice"
    ):
        GrammarCompiler(toy, Limits()).constraints(AnswerRule(GrammarSpec("regex", "a")), 1)


def test_what_takes_too_long_is_refused_by_the_name_of_its_limit(toy: Toy) -> None:
    for max_grammar_s in (0.05, 3.0):
        trials = ToyTrials()
        compiler = GrammarCompiler(toy, Limits(max_grammar_s=max_grammar_s), trials=trials)
        refusal = f"longer than {max_grammar_s:g} s (limits.max_grammar_s) to compile"
        assert refusal in error_of(compiler.compile(choice("endless")))
        tried = len(trials.tried)
        assert refusal in error_of(compiler.compile(choice("endless")))
        assert len(trials.tried) == 2 * tried, "it is tried again: this machine may have been busy"
    assert not toy.compiled


def test_what_fails_its_trial_is_refused_and_not_compiled(toy: Toy, trials: GrammarTrials) -> None:
    compiler = GrammarCompiler(toy, Limits(), trials=trials)
    assert error_of(compiler.compile(choice("wrong"))) == (
        "structured.choice: the word isn't liked here"
    )
    assert "the grammar backend failed: Panic" in error_of(compiler.compile(choice("panics")))
    assert "more than 1024 MiB to compile" in error_of(compiler.compile(choice("gorges")))
    assert "ended the process that did" in error_of(compiler.compile(choice("crashes")))
    assert not toy.compiled
    compiler.compile(choice("a")).result(PATIENCE_S)


def test_a_trial_ends_when_its_time_is_up(toy: Toy, trials: GrammarTrials) -> None:
    with pytest.raises(TrialTimeoutError):
        trials.check(choice("hangs"), 0.05)
    trials.check(choice("a"), PATIENCE_S)


def test_closing_ends_a_trial_that_is_under_way(trials: GrammarTrials) -> None:
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(trials.check, choice("hangs"), 1000)
        while not hanging.done():
            trials.close()
    assert "ended the process" in str(hanging.exception())


def test_what_is_slow_delays_no_other(toy: Toy) -> None:
    trials = ToyTrials()
    compiler = GrammarCompiler(toy, Limits(), threads=1, trials=trials)
    slow = [compiler.compile(choice(f"slow {index}")) for index in range(4)]
    compiler.compile(choice("a")).result(PATIENCE_S)
    assert not any(future.done() for future in slow)
    trials.release.set()
    for future in slow:
        future.result(PATIENCE_S)


def test_slow_ones_that_wait_are_few(toy: Toy) -> None:
    trials = ToyTrials()
    compiler = GrammarCompiler(toy, Limits(), threads=1, trials=trials)
    slow = [compiler.compile(choice(f"slow {index}")) for index in range(MAX_SLOW)]
    more = compiler.compile(choice("slow and more"))
    assert f"{MAX_SLOW} rules that do are waiting already" in error_of(more)
    trials.release.set()
    for future in slow:
        future.result(PATIENCE_S)


def test_who_waits_when_the_engine_is_closed_is_told(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), threads=1)
    hanging = compiler.compile(choice("hangs"))
    assert toy.begun.acquire(timeout=PATIENCE_S)
    waiting = compiler.compile(choice("a"))
    compiler.close()
    assert "closed" in error_of(waiting)
    assert "closed" in error_of(compiler.compile(choice("b")))
    assert not hanging.done()


def test_what_no_request_waits_for_any_more_is_not_compiled(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), threads=1)
    hanging = compiler.compile(choice("hangs"))
    assert toy.begun.acquire(timeout=PATIENCE_S)
    for index in range(100):
        compiler.compile(choice(f"left {index}"))
    kept = compiler.compile(choice("a"))
    toy.release.set()
    kept.result(PATIENCE_S)
    assert hanging.done()
    assert toy.compiled == ['["hangs"]', '["a"]']


def test_clients_are_served_in_turn(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), threads=1)
    hanging = compiler.compile(choice("hangs"), "greedy")
    assert toy.begun.acquire(timeout=PATIENCE_S)
    flood = [compiler.compile(choice(f"{index}"), "greedy") for index in range(100)]
    shared = compiler.compile(choice("99"), "modest")
    others = compiler.compile(choice("a"), "other")
    toy.release.set()
    shared.result(PATIENCE_S)
    others.result(PATIENCE_S)
    assert hanging.done()
    assert {*toy.compiled[1:4]} == {'["0"]', '["99"]', '["a"]'}
    for future in flood:
        future.result(PATIENCE_S)
    assert len(toy.compiled) == 102


def test_slow_rules_of_one_client_keep_no_other_out(toy: Toy) -> None:
    trials = ToyTrials()
    compiler = GrammarCompiler(toy, Limits(), threads=1, trials=trials)
    slow = [compiler.compile(choice(f"slow {index}"), "greedy") for index in range(MAX_SLOW)]
    more = compiler.compile(choice("slow and more"), "modest")
    assert "are waiting already" in error_of(slow[-1])
    trials.release.set()
    for future in [*slow[:-1], more]:
        future.result(PATIENCE_S)


def test_slow_rules_that_nobody_waits_for_keep_no_other_out(toy: Toy) -> None:
    trials = ToyTrials()
    compiler = GrammarCompiler(toy, Limits(), threads=1, trials=trials)
    for index in range(MAX_SLOW + 1):
        left = compiler.compile(choice(f"slow {index}"))
        while len(trials.tried) <= index:
            assert not left.done()
    kept = compiler.compile(choice("slow but wanted"))
    trials.release.set()
    kept.result(PATIENCE_S)


def test_what_ended_its_process_is_tried_again(toy: Toy) -> None:
    trials = EndingTrials()
    compiler = GrammarCompiler(toy, Limits(), trials=trials)
    assert "ended the process" in error_of(compiler.compile(choice("a")))
    compiler.compile(choice("a")).result(PATIENCE_S)


class EndingTrials(ToyTrials):
    """Trials of which the first loses its process."""

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        super().check(spec, seconds)
        if len(self.tried) == 1:
            raise TrialEndedError("compiling it ended the process that did")
