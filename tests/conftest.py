"""What every test gets: one torch thread where torch is used, so that tests run beside each other, and results don't depend on the machine; and
no slow tests unless asked for."""

from __future__ import annotations

import os

import pytest

from tests.support import FULL

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="slow: runs with DOVETAIL_TEST_PROFILE=full, as in make test-full")
    for item in items:
        if not FULL and "slow" in item.keywords:
            item.add_marker(skip)
