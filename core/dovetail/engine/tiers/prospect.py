"""Finds the longest restorable prefix of a request, and estimates whether restoring it is quicker
than computing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.api.blocks.hash_chain import HashChain
from dovetail.api.kv_cache import KVCacheManager
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.step_times import StepTimeFit
from dovetail.engine.tiers.host_pool import HostPool
from dovetail.engine.tiers.keys import FrameLayout, FrameName
from dovetail.engine.tiers.restores import Piece, Restoration
from dovetail.engine.tiers.tier_jobs import TierJobs

LEAST_COPYING = 64 << 20  # bytes that may be copied at a time, at any rate
COPYING_S = 0.03  # copies that take this long at the measured rate may be enqueued at a time
UNKNOWN_S = 1.0  # longest wait of a request while the time of computing is unknown
OPTIMISM = 1.02  # factor on estimated rates after each restoration rejected as too slow


@dataclass(frozen=True, slots=True)
class Prospect:
    """The longest prefix of a request that can be restored."""

    cached: int  # tokens that the prefix cache has
    frames: int  # number of frames of the whole prefix
    tokens: int  # number of their tokens
    pieces: list[Piece]  # in order; empty: nothing can be restored
    missing: Sequence[FrameName]  # frames of a longer prefix that haven't been found

    @property
    def is_complete(self) -> bool:
        return not self.missing


def prospect(
    frames: FrameLayout,
    request: LiveRequest,
    chain: HashChain,
    kv: KVCacheManager,
    pool: HostPool,
    found: Mapping[FrameName, TierJobs],
    limit: int | None = None,
) -> Prospect:
    """Return what can be restored for a waiting `request`. `found`: frames known to be in tiers.
    `limit`: maximum number of frames of the prefix."""
    most = frames.restorable(request.num_tokens)
    if limit is not None:
        most = min(most, limit)
    cached = kv.lookup(request)
    first = cached // frames.tokens
    if most <= first:
        return Prospect(cached, first, cached, [], ())
    hashes = chain.extend(most)

    def is_here(group: int, index: int) -> bool:
        name = FrameName(group, hashes[index])
        return name in pool or name in found

    whole = _longest(frames, first, most, is_here)
    pieces = []
    for index in range(first, whole):
        for group in frames.groups:
            if index in group.needed(whole * frames.tokens):
                name = FrameName(group.number, hashes[index])
                frame = pool.find(name)
                tier = found.get(name) if frame is None else None
                pieces.append(Piece(group, index, name, tier, frame))
    missing = [
        FrameName(group.number, hashes[index])
        for index in range(first, most)
        for group in frames.groups
        if whole < most and not is_here(group.number, index)
    ]
    return Prospect(cached, whole, whole * frames.tokens, pieces, missing)


def _longest(
    frames: FrameLayout, first: int, most: int, is_here: Callable[[int, int], bool]
) -> int:
    """Return the number of frames, from `first` to `most`, of the longest prefix that is complete
    in each group."""
    trunk = [
        group for group in frames.groups if group.spec.window is None and not group.spec.recurrent
    ]
    end = first
    while end < most and all(is_here(group.number, end) for group in trunk):
        end += 1
    others = [group for group in frames.groups if group not in trunk]
    while end > first and not all(
        is_here(group.number, index)
        for group in others
        for index in group.needed(end * frames.tokens)
        if index >= first
    ):
        end -= 1
    return end


class Pace:
    """Measured rates of restoring and computing."""

    def __init__(self) -> None:
        self.fit: StepTimeFit | None = None  # of steps
        self._rate = 0.0  # bytes per second of restores; 0: not measured
        self._looks_s = 0.0  # between two looks, a running mean
        self._looked: tuple[float, float] = (0.0, 0.0)  # the time of the last look, and before it

    def looked(self, now: float, restoring: bool) -> None:
        """Record the time of a poll for ended copies."""
        before = self._looked[1]
        self._looked = before, now
        if restoring:
            self._looks_s += 0.1 * (now - before - self._looks_s)

    def computing_s(self, tokens: int, context: int) -> float:
        """Estimate the seconds of computing `tokens` tokens; infinity if nothing is measured yet."""
        if self.fit is None or not self.fit.steps:
            return math.inf
        return self.fit.estimate_s(tokens, 0, context)

    def step_s(self, prefill_tokens: int, decodes: int) -> float:
        """Estimate the seconds of a step; infinity if nothing is measured yet."""
        if self.fit is None or not self.fit.steps:
            return math.inf
        return self.fit.estimate_s(prefill_tokens, decodes, 0)

    def loading_s(self, pieces: Sequence[Piece]) -> float:
        """Estimate the seconds of restoring `pieces`. What isn't measured yet counts as 0."""
        seconds = self._looks_s
        if self._rate:
            seconds += sum(piece.group.bytes for piece in pieces) / self._rate
        tiers = set()
        for piece in pieces:
            if piece.frame is None and piece.tier is not None and piece.tier.rate:
                seconds += piece.group.bytes / piece.tier.rate
                tiers.add(piece.tier)
        return seconds + sum(tier.loading_bytes / tier.rate for tier in tiers)

    def patience_s(self, computing_s: float) -> float:
        """Return how many seconds a request may wait for what takes `computing_s` to compute."""
        return UNKNOWN_S if computing_s == math.inf else computing_s

    def too_slow(self, pieces: Sequence[Piece]) -> None:
        """Make estimates a little more optimistic, so that restoring is tried again eventually."""
        self._rate *= OPTIMISM
        self._looks_s /= OPTIMISM
        for tier in {piece.tier for piece in pieces if piece.tier is not None}:
            tier.rate *= OPTIMISM

    def restored(self, restoration: Restoration, now: float) -> None:
        """Update the rate by a restoration that has just ended. Ignores restorations from tiers."""
        if any(piece.tier is not None for piece in restoration.pieces):
            return
        # it may have ended right after the previous poll
        seconds = max(self._looked[0] - restoration.begun, 0.1 * (now - restoration.begun))
        if seconds > 0:
            rate = restoration.restored_bytes / seconds
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate

    @property
    def most_copying(self) -> int:
        """Maximum number of bytes to copy at a time."""
        return max(LEAST_COPYING, int(COPYING_S * self._rate))
