"""Parts of the server's metrics: bounds of buckets, `Histogram`, and `family`, a metric for
Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# vLLM's bounds; those of inter-token latency begin below its 10 ms, since small models on fast
# devices are faster.
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)


def token_bounds(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to `largest`."""
    return tuple(
        digit * 10**power
        for power in range(len(str(largest)))
        for digit in (1, 2, 5)
        if digit * 10**power <= largest
    )


class Histogram:
    """Histogram: `counts[i]` counts values of at most `bounds[i]` and above the previous bound; the
    last element counts the rest."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # the sum of the values

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulated(self) -> list[tuple[str, float]]:
        """Return cumulative Prometheus buckets."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    documentation: str,
    labels: Mapping[str, str],
    value: float | Mapping[Any, float],
    by: str | None = None,
) -> Metric:
    """Return a metric of one value, or of several by a further label, `by`."""
    metric = kind(name, documentation, labels=list(labels) if by is None else [*labels, by])
    for key, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
        metric.add_metric([*labels.values(), *([] if key is None else [key])], one)
    return metric
