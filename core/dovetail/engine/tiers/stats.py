"""`TierStats`: counts of an engine's saves, restores and tiers since its start."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field

logger = logging.getLogger("dovetail")


@dataclass(slots=True)
class TierStats:
    """Counts of frames, bytes, tokens and seconds. Dicts are keyed by reason or by tier name; a
    missing key counts 0."""

    host_limit: int = 0  # bytes
    host_bytes: int = 0  # of published frames
    host_frames: int = 0
    saved_frames: int = 0  # copied from the device to the host pool
    saved_bytes: int = 0
    # not saved, or not stored in a tier, by reason: see `saves` and `tier_jobs`
    dropped_frames: dict[str, int] = field(default_factory=Counter)
    stored_frames: dict[str, int] = field(default_factory=Counter)  # by tier
    stored_bytes: dict[str, int] = field(default_factory=Counter)
    loaded_frames: dict[str, int] = field(default_factory=Counter)  # by tier, undamaged
    loaded_bytes: dict[str, int] = field(default_factory=Counter)
    # seconds during which frames were loaded, by tier
    load_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    restored_frames: int = 0  # copied from the host pool to the device, undamaged
    restored_bytes: int = 0
    restored_tokens: int = 0
    restore_s: float = 0.0  # seconds from the begin to the end of restorations
    # by reason: prefixes that were found but not restored, or not completely
    missed: dict[str, int] = field(default_factory=Counter)
    damaged_frames: dict[str, int] = field(default_factory=Counter)  # by source
    off: dict[str, int] = field(default_factory=Counter)  # how often each tier was switched off

    def damaged(self, source: str) -> None:
        """Count a frame with other bytes than were saved, and warn, each time when there are twice
        as many. `source`: "host", or the name of a tier."""
        self.damaged_frames[source] += 1
        count = self.damaged_frames[source]
        if count & (count - 1) == 0:
            logger.warning(
                "%d frames from %s had other bytes than were saved since the start: their K and V "
                "are computed",
                count,
                "the host pool" if source == "host" else f"KV tier {source}",
            )
