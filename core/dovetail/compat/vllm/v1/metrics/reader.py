"""vLLM's metric classes, for `isinstance`. `LLM.get_metrics` returns counters and gauges."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing
from dovetail.front.engine_info import Counter, Gauge, Metric


class Histogram(Metric):
    """Never returned; the server's /metrics has histograms."""


class Vector(Metric):
    """Never returned."""


__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
__getattr__ = missing(__name__)
