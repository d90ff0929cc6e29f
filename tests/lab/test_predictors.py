"""Predicted lengths: correct, repeatable, the same for every policy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_lab.predictors import Bucket, Noisy, Oracle, Predictor, parse_predictor, predict
from dovetail_lab.traces import Trace, TraceError, TraceRequest
from tests.support import examples

TRACE = Trace("t", "here", tuple(TraceRequest(str(i), float(i), 5, 100) for i in range(4000)))


def guesses(predictor: Predictor, trace: Trace = TRACE, seed: int = 0) -> list[int]:
    return [request.predicted_tokens or 0 for request in predict(trace, predictor, seed)]


def test_the_oracle_knows() -> None:
    assert set(guesses(Oracle())) == {100}


def test_a_guess_depends_on_trace_seed_and_id_alone() -> None:
    backwards = Trace("t", "elsewhere", TRACE.requests[::-3])
    assert guesses(Noisy(sigma=1), backwards) == guesses(Noisy(sigma=1))[::-3]
    assert guesses(Noisy(sigma=1), seed=1) != guesses(Noisy(sigma=1))
    assert guesses(Noisy(sigma=1), Trace("u", "here", TRACE.requests)) != guesses(Noisy(sigma=1))


def test_these_very_guesses_come_on_any_machine() -> None:
    assert guesses(Noisy(sigma=0.5))[:5] == [138, 47, 55, 51, 55]


def test_noise_is_lognormal_of_median_one() -> None:
    errors = [math.log(guess / 100) for guess in guesses(Noisy(sigma=0.5))]
    mean = sum(errors) / len(errors)
    assert mean == pytest.approx(0, abs=0.03)
    assert math.sqrt(sum((error - mean) ** 2 for error in errors) / len(errors)) == pytest.approx(
        0.5, rel=0.05
    )


def test_without_noise_a_guess_is_right() -> None:
    assert set(guesses(Noisy(sigma=0))) == {100}


def test_a_classifier_answers_with_the_middle_of_a_class() -> None:
    assert set(guesses(Bucket(growth=2))) == {91}  # of 64 to 128
    wrong = guesses(Bucket(growth=2, accuracy=0.8))
    assert set(wrong) == {45, 91, 181}
    assert wrong.count(91) / len(wrong) == pytest.approx(0.8, abs=0.03)


@examples(quick=100, full=2000)
@given(
    tokens=st.integers(1, 10**6),
    growth=st.floats(1.01, 100),
    accuracy=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_a_guess_is_a_whole_number_from_one(
    tokens: int, growth: float, accuracy: float, seed: int
) -> None:
    trace = Trace("t", "here", (TraceRequest("a", 0.0, 1, tokens),))
    for predictor in (Bucket(growth=growth, accuracy=accuracy), Noisy(sigma=2)):
        (guess,) = guesses(predictor, trace, seed)
        assert type(guess) is int
        assert guess >= 1


@pytest.mark.parametrize("power", range(12))
def test_a_power_of_two_begins_its_class(power: int) -> None:
    trace = Trace("t", "here", (TraceRequest("a", 0.0, 1, 2**power),))
    assert guesses(Bucket(growth=2), trace) == [max(1, round(2 ** (power + 0.5)))]


def test_predictors_are_written_as_calls() -> None:
    assert parse_predictor("oracle") == Oracle()
    assert parse_predictor("noisy(0.3)") == parse_predictor("noisy(sigma=0.3)") == Noisy(sigma=0.3)
    assert parse_predictor("bucket(4, accuracy=0.9)") == Bucket(growth=4, accuracy=0.9)


@pytest.mark.parametrize(
    "text", ["", "noise", "noisy(-1)", "noisy(x)", "bucket(1)", "oracle(5)", "noisy(1"]
)
def test_an_unknown_predictor_is_answered_in_words(text: str) -> None:
    with pytest.raises(TraceError, match="predictor: "):
        parse_predictor(text)


def test_it_is_told_who_predicted() -> None:
    assert predict(TRACE, Noisy(sigma=0.5), 7).notes == (
        "lengths predicted by noisy(sigma=0.5), seed 7",
    )
