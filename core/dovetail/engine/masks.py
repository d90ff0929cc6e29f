"""Token masks of a late step, filled by the matchers of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.api.executor import Masks
from dovetail.engine.constraint import failure
from dovetail.engine.live_request import LiveRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIKELY = 64  # words in which nearly every mask has a token: only the others are looked through


def fill_masks(
    requests: Sequence[LiveRequest], indices: Sequence[int], vocab_size: int, memory: Callable[[int, int], NDArray[np.uint32]]
) -> tuple[Masks, dict[LiveRequest, str]]:
    """Return the masks of a step's `requests` at these indices, which have constraints, in `memory` of so many lines and words a line; and why
    some of them can't go on: a matcher that fails, or that allows nothing at all, ends its own request alone."""
    at, matchers, backend = [], [], None
    forced: dict[int, int] = {}  # index -> the only token that may come
    for index in indices:
        constraint = requests[index].constraint
        if constraint is not None and (token := constraint.forced) is not None:
            forced[index] = token
        elif constraint is not None and (matcher := constraint.matcher) is not None:
            at.append(index)
            matchers.append(matcher)
            backend = constraint.backend
    words = memory(len(at), -(-vocab_size // 32))
    failed: dict[LiveRequest, str] = {}
    if backend is not None:
        try:
            backend.fill_many(matchers, words)
        except Exception:  # find out whose it is
            for line, (index, matcher) in enumerate(zip(at, matchers, strict=True)):
                try:
                    matcher.fill(words[line])
                except Exception as error:
                    words[line] = 0
                    failed[requests[index]] = failure(error)
    unlikely = np.flatnonzero(~words[:, :LIKELY].any(axis=1))
    for line in unlikely[~words[unlikely].any(axis=1)].tolist():
        failed.setdefault(requests[at[line]], "its grammar allows no token that the model has: nothing can come next")
    if failed:
        good = [line for line, index in enumerate(at) if requests[index] not in failed]
        at, words = [at[line] for line in good], words[good]
    if forced:
        at, words = _with_forced(at, words, forced)
    return Masks(np.array(at, np.int32), words), failed


def _with_forced(at: list[int], words: NDArray[np.uint32], forced: dict[int, int]) -> tuple[list[int], NDArray[np.uint32]]:
    """Return the indices, ascending, and masks with a line for each forced token."""
    lines = np.zeros((len(forced), words.shape[1]), np.uint32)
    tokens = np.fromiter(forced.values(), np.int64)
    lines[np.arange(len(forced)), tokens // 32] = np.uint32(1) << (tokens % 32).astype(np.uint32)
    every = [*at, *forced]
    order = sorted(range(len(every)), key=every.__getitem__)
    return [every[line] for line in order], np.concatenate((words, lines))[order]
