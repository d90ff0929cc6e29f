"""`update_rows`: tells a sampler which rows come and go. Parameters that it can't take end their own request, not the engine."""

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

    Raises what the sampler raises if it takes not even default parameters.
    """
    try:
        sampler.update(removed, added)
    except Exception:
        if not added:
            raise
    else:
        return {}
    for row in removed:
        with suppress(Exception):  # the call that failed may have forgotten it
            sampler.update([row], [])
    refused = {}
    for row, sampling in added:
        try:
            _begin(sampler, row, sampling)
        except Exception as error:
            refused[row] = f"sampler {type(sampler).__name__} raised in update(): {describe(error)}"
            logger.warning("a request is ended: %s", refused[row], exc_info=error)
            _begin(sampler, row, RowSampling())
    return refused


def _begin(sampler: Sampler, row: int, sampling: RowSampling) -> None:
    """Begin a row that the sampler may know or not, depending on how far the call that failed came."""
    try:
        sampler.update([row], [(row, sampling)])
    except Exception:
        sampler.update([], [(row, sampling)])
