"""`update_one_by_one`: passes added and removed rows to a sampler or logits processor that has
rejected all of them. Parameters that it rejects end only their own request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from dovetail.api.logits_processor import ProcessedRow
from dovetail.api.sampler import SampledRow
from dovetail.errors import describe

logger = logging.getLogger("dovetail")

Row = TypeVar("Row", SampledRow, ProcessedRow)


def update_one_by_one(
    owner: str,
    update: Callable[[Sequence[int], Sequence[Row]], None],
    removed: Sequence[int],
    added: Sequence[Row],
    instead: Callable[[int], Row] | None = None,
) -> dict[int, str]:
    """Call `update`, a method of `owner` that has just raised for all these rows, for each alone.

    Returns the rows that it rejected, and why. They are started with `instead`, so that the step
    can be computed, or without it removed; ignore their tokens. Raises the owner's error if it
    rejects even that.
    """
    for row in removed:
        with suppress(Exception):  # the failed call may have removed it
            update([row], [])
    refused = {}
    for one in added:
        row = one.row
        try:
            _begin(update, one)
        except Exception as error:
            refused[row] = f"{owner} raised in update(): {describe(error)}"
            logger.warning("ending a request: %s", refused[row], exc_info=error)
            if instead is None:
                update([row], [])
            else:
                _begin(update, instead(row))
    return refused


def _begin(update: Callable[[Sequence[int], Sequence[Row]], None], one: Row) -> None:
    """Start a row that the owner may already have, depending on how far the failed call got."""
    try:
        update([one.row], [one])
    except Exception:
        update([], [one])
