"""Helpers that many tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

PROFILE = os.environ.get("DOVETAIL_TEST_PROFILE", "quick")
FULL = PROFILE == "full"


def examples(quick: int, full: int) -> settings:
    """Hypothesis settings with the profile's number of examples.

    `full` in `make test-full`, a quarter of `quick` in `make test` and `make test-slow`, and a
    tenth of `quick` in "brief", for tests that run once more in another environment.
    """
    few = -(-quick // 4)
    count = {"full": full, "quick": few, "slow": few, "brief": max(1, quick // 10)}[PROFILE]
    slow_is_fine = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ]
    return settings(
        max_examples=count, deadline=None, suppress_health_check=slow_is_fine, derandomize=not FULL
    )
