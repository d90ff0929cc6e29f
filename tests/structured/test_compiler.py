"""The compiler of rules: each spec is compiled once, failures affect only their own request, and slow compilations are abandoned without delaying
others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from dovetail.api.grammar import Grammar, GrammarSpec
from dovetail.errors import RequestError
from dovetail.front.grammars import MAX_ABANDONED, GrammarCompiler
from dovetail.limits import Limits
from dovetail.sampling_params import SamplingParams
from tests.structured.toy import Toy

PATIENCE_S = 30
QUICK = Limits(max_grammar_s=0.05)


@pytest.fixture
def toy() -> Iterator[Toy]:
    toy = Toy()
    yield toy
    toy.release.set()


def choice(*words: str) -> GrammarSpec:
    return GrammarSpec("choice", "[" + ", ".join(f'"{word}"' for word in words) + "]")


def error_of(future: Future[Grammar]) -> str:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, RequestError)
    return str(error)


def test_equal_specs_are_compiled_once_for_all_samples_and_requests(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits())
    params = SamplingParams(n=3, structured={"choice": ["a", "b"]})
    constraints = [*compiler.constraints(params), *compiler.constraints(params)]
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
        GrammarCompiler(toy, Limits()).constraints(SamplingParams(structured={"regex": "a"}))


def test_what_takes_too_long_is_given_up_by_the_name_of_its_limit(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, QUICK, threads=1)
    assert "longer than 0.05 s (limits.max_grammar_s) to compile" in error_of(
        compiler.compile(choice("hangs"))
    )
    compiler.compile(choice("a")).result(PATIENCE_S)
    assert "longer than 0.05 s" in error_of(compiler.compile(choice("hangs"))), (
        "nor is it tried again while it is under way"
    )
    assert toy.compiled == ['["hangs"]', '["a"]']


def test_whoever_waits_behind_it_gets_another_thread(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, QUICK, threads=1)
    hanging, waiting = compiler.compile(choice("hangs")), compiler.compile(choice("a"))
    waiting.result(PATIENCE_S)
    assert error_of(hanging)


def test_two_that_come_at_once_do_not_wait_for_the_one_idle_thread(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(max_grammar_s=1000), threads=2)
    compiler.compile(choice("a")).result(PATIENCE_S)
    hangs = compiler.compile(choice("hangs"))
    compiler.compile(choice("b")).result(PATIENCE_S)
    assert not hangs.done()


def test_what_was_given_up_and_is_compiled_in_the_end_is_there_for_the_next(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, QUICK, threads=1)
    spec = choice("hangs")
    assert error_of(compiler.compile(spec))
    toy.release.set()
    while (again := compiler.compile(spec)).done() and again.exception() is not None:
        pass  # it is replaced as soon as the thread comes back
    again.result(PATIENCE_S)
    assert len(toy.compiled) == 1


def test_threads_that_hang_are_few(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, QUICK, threads=2)
    hanging = [compiler.compile(choice(f"hangs {index}")) for index in range(MAX_ABANDONED)]
    for future in hanging:
        assert "longer than" in error_of(future)
    assert f"nothing can be compiled now: {MAX_ABANDONED} grammars" in error_of(
        compiler.compile(choice("a"))
    )
    toy.release.set()
    while compiler.compile(choice("b")).exception(PATIENCE_S) is not None:
        pass  # they come back one by one
    compiler.compile(choice("a")).result(PATIENCE_S)


def test_who_waits_when_the_engine_is_closed_is_told(toy: Toy) -> None:
    compiler = GrammarCompiler(toy, Limits(), threads=1)
    compiler.compile(choice("hangs"))
    assert toy.begun.acquire(timeout=PATIENCE_S)
    waiting = compiler.compile(choice("a"))
    compiler.close()
    assert "closed" in error_of(waiting)
