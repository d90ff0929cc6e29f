"""Fixtures that tests of whole engines share."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from dovetail.api.grammar import GrammarSpec
from tests.e2e.test_same_tokens import model_dir


@pytest.fixture(autouse=True, scope="session")
def _a_small_model_is_written() -> None:
    """Make the checkpoint that most tests load before the first test, whose budget would pay for
    transformers' import."""
    model_dir()


class NoTrials:
    """Lets all rules pass. A trial starts a process, which takes as long as a test has:
    `tests/structured` tests them."""

    def __init__(self, *_: object) -> None:
        pass

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        pass

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def trusted_rules() -> Iterator[None]:
    """Engines of a file compile rules without a trial: they are the tests' own."""
    with patch("dovetail.front.grammars.GrammarTrials", NoTrials):
        yield
