"""Hypothesis settings for checks: the same examples everywhere, so that verdicts are reproducible,
and bounded shrinking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from dovetail.testing.checks import CheckFailed

T = TypeVar("T")

SHRINK_S = 5.0  # time limit for shrinking a failing example


def repeatable(max_examples: int, *, shrink: bool = True) -> settings:
    """Return settings for a function inside a check: `@repeatable(50) @given(…) def holds(…): …`,
    then `holds()`."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink)
        if shrink
        else (Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def for_all(
    among: SearchStrategy[T],
    examples: int,
    holds: Callable[[T], None],
    smaller: Callable[[T], Iterable[T]],
) -> None:
    """Check `holds` on `examples` examples. Raises the `CheckFailed` of the smallest failing one
    `smaller` reaches in `SHRINK_S`, noted in it."""
    failing: list[T] = []

    @repeatable(examples, shrink=False)
    @given(among)
    def in_any(example: T) -> None:
        failing.append(example)
        holds(example)
        failing.pop()

    try:
        in_any()
    except CheckFailed as error:
        example, failure = _shrunk(failing[-1], error, holds, smaller)
        failure.__notes__ = [f"for example in {example}"]
        raise failure from failure.__cause__


def _shrunk(
    example: T,
    failure: CheckFailed,
    holds: Callable[[T], None],
    smaller: Callable[[T], Iterable[T]],
) -> tuple[T, CheckFailed]:
    """Shrink an example greedily, while a smaller one also fails and there is time."""
    until = time.monotonic() + SHRINK_S
    candidates = iter(smaller(example))
    while time.monotonic() < until and (candidate := next(candidates, None)) is not None:
        try:
            holds(candidate)
        except CheckFailed as error:
            example = candidate
            failure = error
            candidates = iter(smaller(candidate))
    return example, failure
