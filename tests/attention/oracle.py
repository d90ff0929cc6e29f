"""Attention as the definition says it, in float64, one query at a time: no paging, no batching, no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def attend_row(q: Float64, k: Float64, v: Float64, scale: float, window: int | None) -> Float64:
    """The last len(q) of a row's tokens attend over all of it. q [queries, heads, size], k and v [tokens, kv_heads, size] -> like q."""
    queries, heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    out = np.empty_like(q)
    for i in range(queries):
        position = tokens - queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = k[first : position + 1, kv_head] @ q[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[first : position + 1, kv_head]
    return out
