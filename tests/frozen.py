"""Tests import a million objects, more as they run. `conftest.py` excludes them from garbage
collection by `freeze_what_lasts`, since each engine collects garbage on closing; `count_once` keeps
them from being counted for each engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

MANY = 30_000  # objects that are worth a collection, so that later ones skip them
_freeze = gc.freeze  # `count_once` replaces it


def freeze_what_lasts() -> None:
    """Freeze all objects but garbage, if there are many."""
    if len(gc.get_objects()) > MANY:
        gc.collect()
        _freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while things are imported, which last; freeze them then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def count_once() -> Iterator[None]:
    """`gc.get_freeze_count` says how many things there were when they were frozen: to count them,
    it walks through all, which takes a tenth of a second, and each engine that is made asks
    twice."""
    freeze, unfreeze, count = gc.freeze, gc.unfreeze, gc.get_freeze_count
    known = count()

    def freeze_and_count() -> None:
        nonlocal known
        freeze()
        # more than before, also if things have died since that were counted
        known = max(known + 1, count())

    def unfreeze_all() -> None:
        nonlocal known
        unfreeze()
        known = 0

    with patch.multiple(
        gc, freeze=freeze_and_count, unfreeze=unfreeze_all, get_freeze_count=lambda: known
    ):
        yield
