"""`update_rows`: passes added and removed rows to a sampler. Parameters that it rejects end only their own request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from dovetail.api.sampler import RowSampling, Sampler
from dovetail.errors import describe

logger = logging.getLogger("dovetail")


def update_rows(sampler: Sampler, removed: Sequence[int], added: Sequence[tuple[int, RowSampling]]) -> dict[int, str]:
    """Call `sampler.update`; if it raises, call it for each row alone. Returns the rows that it refused, and why. They have default parameters, so
    that the step can be computed; their tokens are worth nothing.

    Raises the sampler's error if it rejects even default parameters.
    """
    try:
        sampler.update(removed, added)
    except Exception:
        if not added:
            raise
    else:
        return {}
    for row in removed:
        with suppress(Exception):  # the failed call may have removed it
            sampler.update([row], [])
    refused = {}
    for row, sampling in added:
        try:
            _begin(sampler, row, sampling)
        except Exception as error:
            refused[row] = f"sampler {type(sampler).__name__} raised in update(): {describe(error)}"
            logger.warning("ending a request: %s", refused[row], exc_info=error)
            _begin(sampler, row, RowSampling())
    return refused


def _begin(sampler: Sampler, row: int, sampling: RowSampling) -> None:
    """Start a row that the sampler may already have, depending on how far the failed call got."""
    try:
        sampler.update([row], [(row, sampling)])
    except Exception:
        sampler.update([], [(row, sampling)])
