"""Tests import a million objects. `conftest.py` excludes them from garbage collection; `count_once` keeps them from being counted for each
engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def count_once() -> Iterator[None]:
    """`gc.get_freeze_count` says how many things there were when they were frozen: to count them, it walks through all, which takes a tenth of a
    second, and each engine that is made asks twice."""
    freeze, unfreeze, count = gc.freeze, gc.unfreeze, gc.get_freeze_count
    known = count()

    def freeze_and_count() -> None:
        nonlocal known
        freeze()
        known = max(
            known + 1, count()
        )  # more than before, also if things have died since that were counted

    def unfreeze_all() -> None:
        nonlocal known
        unfreeze()
        known = 0

    with patch.multiple(
        gc, freeze=freeze_and_count, unfreeze=unfreeze_all, get_freeze_count=lambda: known
    ):
        yield
