"""Helpers that many tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FULL = os.environ.get("DOVETAIL_TEST_PROFILE") == "full"


def examples(quick: int, full: int) -> settings:
    """Hypothesis settings with as many examples as the profile asks for: `quick` in CI, `full` in `make test-full`."""
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=full if FULL else quick, deadline=None, suppress_health_check=slow_is_fine, derandomize=not FULL)
