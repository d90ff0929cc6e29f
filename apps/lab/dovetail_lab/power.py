"""Sample sizes of paired t-tests, and confidence sequences: intervals that stay valid while runs
are added.

Both take paired differences: two policies on the same requests, one difference for each seed.
"""

from __future__ import annotations

import math

from scipy import special  # type: ignore[import-untyped]

POWER = 0.8  # probability with which `units_needed` pairs show a difference
MOST = 100_000  # highest finite result of `anytime_count`
EFFECT = 2.0  # standard deviation of the prior of the standardized effect in `anytime_half`


def units_needed(difference: float, deviation: float, confidence: float = 0.95) -> float:
    """Return the number of pairs with which a paired t-test detects a true mean `difference` with
    probability `POWER`, if the standard deviation of a pair's difference is `deviation`. At least
    2; infinite if `difference` is 0.

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
    """Return half the width of a confidence sequence for the mean of `count` differences with the
    sample standard deviation `deviation`. With probability `confidence`, the intervals of all
    counts contain the true mean, so an interval is valid however often one looks and whenever one
    stops. Infinite for few differences.

    It inverts the Bayes factor of the t-test with a normal prior of the effect, of standard
    deviation `EFFECT`. With r = 1 + n EFFECT² and v = n - 1, the factor is (1 + t² / v)^(n / 2) /
    (1 + t² / (r v))^(n / 2) / √r. It is a martingale if there is no effect, so it exceeds 1 / α with
    probability at most α (Ville). See Wang and Ramdas, "Anytime-valid t-tests and confidence
    sequences for Gaussian means with unknown variance" (Sequential Analysis 44, 2025,
    arXiv:2310.03722). The coverage holds for normally distributed differences.
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
    """Return the number of differences, at least `least`, for which `anytime_half` is at most
    `half`; up to 5 % too many, and infinite beyond `MOST`."""
    count = least
    while anytime_half(deviation, count, confidence) > half:
        count += 1 + count // 20
        if count > MOST:
            return math.inf
    return count
