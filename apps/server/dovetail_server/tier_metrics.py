"""Figures of K and V beyond the device, for `/metrics` and the page at `/`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dovetail.serving import TierStats
from dovetail_server.metric_parts import family


def tier_figures(stats: TierStats) -> dict[str, Any]:
    """Return the figures of K and V beyond the device for the page at `/`."""
    names = sorted({*stats.stored_bytes, *stats.loaded_bytes, *stats.off})
    return {
        "host": {"limit": stats.host_limit, "used": stats.host_bytes},
        "restored_tokens": stats.restored_tokens,
        "missed": stats.missed,
        "damaged": sum(stats.damaged_frames.values()),
        "dropped": sum(stats.dropped_frames.values()),
        "tiers": {
            name: {
                "stored": stats.stored_bytes.get(name, 0),
                "loaded": stats.loaded_bytes.get(name, 0),
                "off": stats.off.get(name, 0),
            }
            for name in names
        },
    }


def tier_metrics(stats: TierStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the figures of K and V beyond the device, which all front ends have in common."""
    held = {"limit": stats.host_limit, "used": stats.host_bytes}
    of_what = "dovetail_kv_host_bytes", "Bytes of the host pool of K and V"
    yield family(GaugeMetricFamily, *of_what, labels, held, "what")
    for name, documentation, value, by in (
        ("saved_frames", "Frames copied to the host pool", stats.saved_frames, None),
        ("saved_bytes", "Bytes of these", stats.saved_bytes, None),
        ("restored_frames", "Frames restored to the device", stats.restored_frames, None),
        ("restored_bytes", "Bytes of these", stats.restored_bytes, None),
        ("restored_tokens", "Prompt tokens restored and used", stats.restored_tokens, None),
        ("restore_seconds", "Seconds that restorations took", stats.restore_s, None),
        ("missed_restores", "Prefixes not restored, or in part", stats.missed, "reason"),
        ("dropped_frames", "Frames not saved or not stored", stats.dropped_frames, "reason"),
        ("damaged_frames", "Frames with other bytes than saved", stats.damaged_frames, "source"),
        ("tier_stored_frames", "Frames that a tier stored", stats.stored_frames, "tier"),
        ("tier_stored_bytes", "Bytes of these", stats.stored_bytes, "tier"),
        ("tier_loaded_frames", "Frames that a tier loaded", stats.loaded_frames, "tier"),
        ("tier_loaded_bytes", "Bytes of these", stats.loaded_bytes, "tier"),
        ("tier_load_seconds", "Seconds of loads, by tier", stats.load_s, "tier"),
        ("tier_off", "Times that a failing tier was switched off", stats.off, "tier"),
    ):
        yield family(CounterMetricFamily, f"dovetail_kv_{name}", documentation, labels, value, by)
