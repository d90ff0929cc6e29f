"""vLLM's kinds of metrics, for `isinstance`. `LLM.get_metrics` returns counters and gauges."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing
from dovetail.front.engine_info import Counter, Gauge, Metric


class Histogram(Metric):
    """A kind that no metric is of: the server's /metrics has histograms."""


class Vector(Metric):
    """A kind that no metric is of."""


__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
__getattr__ = missing(__name__)
