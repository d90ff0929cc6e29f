"""`TierStats`: counts of an engine's saves, restores and tiers since its start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """Counts of frames, bytes, tokens and seconds. Dicts are keyed by reason or by tier name."""

    host_limit: int = 0  # bytes
    host_bytes: int = 0  # of published frames
    host_frames: int = 0
    saved_frames: int = 0  # copied from the device to the host pool
    saved_bytes: int = 0
    # not saved, or not stored in a tier, by reason: see `saves` and `tier_jobs`
    dropped_frames: dict[str, int] = field(default_factory=dict)
    stored_frames: dict[str, int] = field(default_factory=dict)  # by tier
    stored_bytes: dict[str, int] = field(default_factory=dict)
    loaded_frames: dict[str, int] = field(default_factory=dict)  # by tier, undamaged
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    load_s: dict[str, float] = field(default_factory=dict)  # seconds of load jobs, by tier
    restored_frames: int = 0  # copied from the host pool to the device, undamaged
    restored_bytes: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0  # seconds from the begin to the end of restorations
    # by reason: prefixes that were found but not restored, or not completely
    missed: dict[str, int] = field(default_factory=dict)
    damaged_frames: dict[str, int] = field(default_factory=dict)  # by source
    off: dict[str, int] = field(default_factory=dict)  # how often each tier was switched off


def add(counts: dict[str, int], key: str, number: int = 1) -> None:
    """Add to one of several counts."""
    counts[key] = counts.get(key, 0) + number
