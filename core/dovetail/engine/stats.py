"""`EngineStats`: the engine's counts. `StormWatch`: a warning of excessive recomputation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from dovetail.api.kv_cache import BlockCounts

logger = logging.getLogger("dovetail")

STORM_STEPS = 1_000  # a recompute storm: over this many steps, more tokens are recomputed than computed for the first time


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started, and the present state. Times in seconds."""

    waiting: int = 0
    running: int = 0
    steps: int = 0
    arrived: int = 0
    finished: int = 0
    prefill_tokens: int = 0  # tokens computed, including those of re-prefills
    decode_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    recomputed_tokens: int = 0
    device_s: float = 0.0
    core_s: float = 0.0  # wall time of the core itself: planning, batches, results
    blocks: BlockCounts = field(default_factory=lambda: BlockCounts(0, 0, 0))


class StormWatch:
    """Warns once if, over a thousand steps, more tokens were recomputed after preemptions than computed for the first time."""

    def __init__(self, policy_name: str) -> None:
        self._policy_name = policy_name
        self._steps = self._recomputed = self._computed = 0
        self.seen = False

    def saw(self, recomputed: int, computed: int) -> None:
        self._steps += 1
        self._recomputed += recomputed
        self._computed += computed - recomputed
        if self._steps < STORM_STEPS:
            return
        if self._recomputed > self._computed and not self.seen:
            self.seen = True
            logger.warning(
                "scheduler %s preempts so much that %d tokens were recomputed and only %d computed anew in the last %d steps",
                self._policy_name,
                self._recomputed,
                self._computed,
                self._steps,
            )
        self._steps = self._recomputed = self._computed = 0
