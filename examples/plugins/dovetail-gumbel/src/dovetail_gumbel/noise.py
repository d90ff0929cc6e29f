"""Gumbel noise that is a function of seed, output position and vocabulary id alone, so that batches
and preemptions change no tokens.

Each number is hashed from the three, by the mixing function of SplitMix64 (Steele, Lea and Flood,
OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def gumbel(seeds: UInt64, positions: UInt64, vocab_size: int) -> NDArray[np.float64]:
    """seeds [n] and positions [n] -> [n, vocab_size]."""
    streams = mixed(mixed(seeds + GOLDEN) + positions * GOLDEN)  # [n]
    ids = mixed(np.arange(1, vocab_size + 1, dtype=np.uint64) * GOLDEN)  # [vocab]
    bits = mixed(streams[:, None] ^ ids) >> np.uint64(11)  # [n, vocab], 53 bits
    # exact near 0, where the large Gumbel numbers come from
    negative = np.log1p(-(bits * 2.0**-53 + 2.0**-54))
    noise: NDArray[np.float64] = -np.log(-negative)
    return noise


def mixed(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
