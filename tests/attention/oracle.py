"""Attention as the definition says it, in float64, one query at a time: no paging, no batching, no
torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


# the outermost code is NaN
E4M3 = np.array(
    sorted(
        {
            sign * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
            for sign in (1, -1)
            for e in range(16)
            for m in range(8)
        }
    )
)[1:-1]


def kept_in_e4m3(values: Float64, scale: float) -> Float64:
    """What a cache of FP8 keeps of K or V: values / scale, in float32, become the nearest of all
    numbers that the format has; of two as near, the one with the even code, which has an even place
    here too."""
    scaled = values.astype(np.float32) / np.float32(scale)
    place = np.clip(np.searchsorted(E4M3, scaled), 1, len(E4M3) - 1)
    from_below, from_above = scaled - E4M3[place - 1], E4M3[place] - scaled
    nearest = np.where(
        (from_below < from_above) | ((from_below == from_above) & (place % 2 == 1)),
        place - 1,
        place,
    )
    return E4M3[nearest] * float(np.float32(scale))


def attend_row(
    q: Float64,
    k: Float64,
    v: Float64,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Float64 | None = None,
) -> Float64:
    """The last len(q) of a row's tokens attend to all of it. q [queries, heads, size], k, v
    [tokens, kv_heads, size], sinks [heads] -> V's size."""
    queries, heads, _ = q.shape
    tokens, kv_heads, _ = k.shape
    out = np.empty((queries, heads, v.shape[2]))
    for i in range(queries):
        position = tokens - queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            scores = k[first : position + 1, kv_head] @ q[i, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            sink = -np.inf if sinks is None else sinks[head]
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            out[i, head] = (
                weights / (weights.sum() + np.exp(sink - top)) @ v[first : position + 1, kv_head]
            )
    return out
