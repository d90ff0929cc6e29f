"""Fixtures that tests of whole engines share."""

from __future__ import annotations

import pytest

from tests.e2e.test_same_tokens import model_dir


@pytest.fixture(autouse=True, scope="session")
def _a_small_model_is_written() -> None:
    """Make the checkpoint that most tests load before the first test, whose budget would pay for transformers' import."""
    model_dir()
