"""`TierStats`: what the tiers of an engine have done since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierStats:
    """Counts of frames, bytes, tokens and seconds. Of `Counter`s, the keys are names of tiers,
    "host" for the host pool, or reasons."""

    host_limit: int = 0  # bytes
    host_bytes: int = 0  # of frames that can be found there
    host_frames: int = 0
    saved_frames: int = 0  # copied from the device to the host pool
    saved_bytes: int = 0
    # not saved, or not stored in a tier, by reason: see `saves` and `tier_jobs`
    dropped_frames: Counter[str] = field(default_factory=Counter)
    stored_frames: Counter[str] = field(default_factory=Counter)  # by tier
    stored_bytes: Counter[str] = field(default_factory=Counter)
    loaded_frames: Counter[str] = field(default_factory=Counter)  # by tier, undamaged
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    load_s: dict[str, float] = field(default_factory=dict)  # time of jobs, by tier
    restored_frames: int = 0  # copied from the host pool to the device, and found undamaged
    restored_bytes: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0  # that requests were held back for them
    # by reason: requests whose prefix was there, but wasn't restored, or not to its end
    missed: Counter[str] = field(default_factory=Counter)
    damaged_frames: Counter[str] = field(default_factory=Counter)  # by where they came from
    off: Counter[str] = field(default_factory=Counter)  # how often each tier was switched off
