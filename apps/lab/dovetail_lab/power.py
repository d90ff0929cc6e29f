"""Number of runs: how many a difference needs, and intervals that hold while runs are added.

Both take differences of pairs: two policies on the same requests, one difference for each seed.
"""

from __future__ import annotations

import math

from scipy import special  # type: ignore[import-untyped]

POWER = 0.8  # probability with which `units_needed` finds a difference
MOST = 100_000  # differences that `anytime_count` returns
EFFECT = 2.0  # standard deviation of differences over theirs for which `anytime_half` is narrow


def units_needed(difference: float, deviation: float, confidence: float = 0.95) -> float:
    """Return how many pairs a paired t-test needs to find a true mean `difference` with probability
    `POWER`, if the standard deviation of a pair's difference is `deviation`. Infinite for no
    difference; at least 2.

    n = (z₁ + z₂)² s² / d² + z₁² / 2, with the normal quantiles z₁ of the two-sided level and z₂ of
    the power (Guenther, "Sample size formulas for normal theory t tests", The American Statistician
    35, 1981).
    """
    if not difference:
        return math.inf
    level = float(special.ndtri((1 + confidence) / 2))
    ratio = (level + float(special.ndtri(POWER))) * deviation / difference
    return max(2.0, ratio * ratio + (level * level / 2 if deviation else 0.0))


def anytime_half(deviation: float, count: int, confidence: float = 0.95) -> float:
    """Return half the width of an interval of the mean of `count` differences with the sample
    standard deviation `deviation`. The intervals of all counts contain the true mean together with
    probability `confidence`, so it stays valid however often one looks, and whenever one stops.
    Infinite for few differences.

    It inverts the Bayes factor of the t-test with a normal prior of the effect, of standard
    deviation `EFFECT`: with r = 1 + n EFFECT² and v = n - 1 it is (1 + t² / v)^(n / 2) / (1 + t² /
    (r v))^(n / 2) / √r, a martingale if there is no effect, so that it exceeds 1 / α with
    probability α at most (Ville). See Wang and Ramdas, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance" (Sequential Analysis 44, 2025,
    arXiv:2310.03722). It is exact for normal differences.
    """
    if count < 2:
        return math.inf
    ratio = 1 + count * EFFECT * EFFECT
    bound = (math.sqrt(ratio) / (1 - confidence)) ** (2 / count)
    if bound >= ratio:
        return math.inf
    squared = (count - 1) * (bound - 1) / (1 - bound / ratio)  # of the largest t within
    return math.sqrt(squared / count) * deviation


def anytime_count(deviation: float, half: float, least: int, confidence: float = 0.95) -> float:
    """Return how many differences, `least` or more, make `anytime_half` at most `half`, to within 5
    %; infinite beyond `MOST`."""
    count = least
    while anytime_half(deviation, count, confidence) > half:
        count += 1 + count // 20
        if count > MOST:
            return math.inf
    return count
