"""`Restoration`: copies the frames of one prefix into the prefix cache.

An internal request, the *shadow*, owns the pages. It has the tokens of the prefix and one more.
Frames with the right checksum are committed in order, as if the shadow had computed them; once the
shadow is freed, any request finds these blocks by an ordinary lookup. Frames with a wrong checksum
are never committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex

import numpy as np

from dovetail.api.blocks.hash_chain import token_bytes
from dovetail.api.kv_cache import HOLE, KVCacheManager, KVLayout, PageCopy, Pages
from dovetail.api.kv_transfers import KVTransfers, Transfer, Transferred
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.tiers.host_pool import HostFrame, HostPool
from dovetail.engine.tiers.keys import FrameLayout, FrameName, GroupFrames
from dovetail.engine.tiers.stats import TierStats
from dovetail.engine.tiers.tier_jobs import TierJobs
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams

MOST_COPIES = 64  # at a time: executors limit them
TOGETHER = 8  # frames enqueued together: they may end together, and others wait until then
CHUNK_FRAMES = 8  # allocated at a time, so that windows release their blocks in between


@dataclass(slots=True, eq=False)
class Piece:
    """One frame of a prefix."""

    group: GroupFrames
    index: int
    name: FrameName
    # where it comes from; None: the host pool
    tier: TierJobs | None = None
    frame: HostFrame | None = None  # None: it isn't in the host pool yet
    pages: Pages = ()
    loading: bool = False
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Restoration:
    """A prefix of `frames` frames that is being restored; `cached` tokens were cached before."""

    request: LiveRequest
    shadow: Request
    cached: int
    frames: int
    pieces: list[Piece]
    restored: int = 0  # tokens that are committed
    begun: float = 0.0
    deadline: float = 0.0  # for the tiers
    cut: str | None = None  # why it is incomplete
    to_copy: deque[Piece] = field(default_factory=deque)
    # by frame index, the number of pieces that haven't arrived
    missing: dict[int, int] = field(default_factory=dict)
    copying: int = 0  # transfers that haven't ended
    restored_bytes: int = 0
    copies: list[PageCopy] = field(default_factory=list)  # of its state, to be run by a batch

    @property
    def ended(self) -> bool:
        """True once no transfer is in flight and no frame is missing."""
        return not self.copying and not self.missing


class Restores:
    """The restorations of one engine."""

    def __init__(
        self,
        layout: KVLayout,
        frames: FrameLayout,
        kv: KVCacheManager,
        pool: HostPool,
        transfers: KVTransfers,
        ids: count[int],
        stats: TierStats,
    ) -> None:
        self._stats = stats
        self._layout = layout
        self._frames = frames
        self._kv = kv
        self._pool = pool
        self._transfers = transfers
        self._ids = ids
        self.active: list[Restoration] = []  # in the order in which they began
        self.names: dict[FrameName, Restoration] = {}  # of all their pieces
        self._copying: dict[int, tuple[Restoration, Piece]] = {}  # by transfer
        self.copying_bytes = 0

    def shadow(self, request: Request, tokens: int) -> Request:
        """Return a request whose longest cacheable prefix is the first `tokens` tokens of
        `request`."""
        known = tokens + 1 + self._frames.after
        return Request(
            f"restoring {next(self._ids)} {token_hex(8)}",  # no user can guess it
            np.frombuffer(token_bytes(request, 0, min(known, request.num_tokens)), np.int32),
            SamplingParams(),
            max_tokens=1,
            cache_keys=request.cache_keys,
            media=tuple(span for span in request.media if span.start < known),
        )

    # Its begin

    def pages_needed(self, shadow: Request, frames: int) -> int:
        """Return an upper bound on the pages that restoring holds at a time."""
        tokens = frames * self._frames.tokens
        chunk = CHUNK_FRAMES * self._frames.tokens
        return min(self._kv.pages_needed(shadow, tokens), self._layout.most_pages(tokens, chunk))

    def leading(self, pieces: Sequence[Piece]) -> Restoration | None:
        """Return an active restoration that has one of these frames; None: there is none."""
        return next((self.names[piece.name] for piece in pieces if piece.name in self.names), None)

    def begin(self, restoration: Restoration) -> bool:
        """Allocate its pages, or change nothing and return False. The manager must have no pending
        copies."""
        shadow = restoration.shadow
        if not self._allocate(shadow, restoration.cached, restoration.frames):
            return False
        self._kv.take_copies()  # into the shadow's own state, which is restored instead
        tables = self._kv.tables(shadow)
        for piece in restoration.pieces:
            piece.pages = self._place(piece, tables, restoration.cached)
        for piece in restoration.pieces:
            restoration.missing[piece.index] = restoration.missing.get(piece.index, 0) + 1
            self.names[piece.name] = restoration
        restoration.to_copy.extend(restoration.pieces)
        self.active.append(restoration)
        return True

    def _allocate(self, shadow: Request, cached: int, frames: int) -> bool:
        """Allocate the blocks of the shadow's prefix that later tokens see, or none."""
        end = frames * self._frames.tokens
        tokens = cached
        while tokens < end:
            tokens = min(end, tokens + CHUNK_FRAMES * self._frames.tokens)
            allocation = self._kv.allocate(shadow, tokens)
            if allocation is None:
                self._kv.free(shadow)
                return False
            if self._layout.has_windows:
                self._kv.trim(shadow, tokens)
        return True

    def _place(self, piece: Piece, tables: Sequence[Pages], cached: int) -> Pages:
        """Return the target pages of a frame; `HOLE` for blocks that the cache has, or that no
        later token sees."""
        group = piece.group
        table = tables[group.number]
        if group.spec.recurrent:
            return table
        pages = group.pages(piece.index, table)
        found = cached // group.spec.block_tokens - group.blocks(piece.index).start
        held = max(0, found) * group.spec.pages_per_block
        return (HOLE,) * min(held, len(pages)) + pages[held:]

    # Its progress

    def copy(self, restoration: Restoration, most_bytes: int, most_frames: float) -> int:
        """Begin to copy at most `most_frames` pieces in order, as far as they are in the host pool,
        with at most `most_bytes`, and `MOST_COPIES` transfers, in flight. Return how many."""
        transfers: list[Transfer] = []
        while restoration.to_copy and len(transfers) < most_frames:
            piece = restoration.to_copy[0]
            frame = piece.frame
            if frame is None or len(self._copying) >= MOST_COPIES:
                break
            if self.copying_bytes and self.copying_bytes + frame.bytes > most_bytes:
                break
            restoration.to_copy.popleft()
            transfer = Transfer(
                next(self._ids), frame.slab, frame.pages_at, piece.pages, frame.seed
            )
            self._copying[transfer.id] = restoration, piece
            self.copying_bytes += frame.bytes
            restoration.copying += 1
            transfers.append(transfer)
        for begin in range(0, len(transfers), TOGETHER):
            self._transfers.restore_all(transfers[begin : begin + TOGETHER])
        return len(transfers)

    def finished(self, transfer: Transferred) -> None:
        """Record the end of a transfer, and commit complete frames. Ignores transfers of saves."""
        restoration, piece = self._copying.pop(transfer.id, (None, None))
        if restoration is None or piece is None:
            return
        frame = piece.frame
        assert frame is not None
        restoration.restored_bytes += frame.bytes
        self.copying_bytes -= frame.bytes
        restoration.copying -= 1
        sound = transfer.checksum == frame.checksum
        if sound and frame.name is None and not piece.dropped:  # a reset drops it
            self._pool.publish(frame, piece.name)
        elif not sound and frame.name is not None:
            self._pool.drop(frame.name)
        self._pool.release(frame)
        piece.frame = None
        if not sound:
            self._stats.damaged("host" if piece.tier is None else piece.tier.name)
            if piece.tier is not None:
                piece.tier.lost(piece.name)
            self.cut(restoration, piece.index, "damaged")
            return
        self._stats.restored_frames += 1
        self._stats.restored_bytes += frame.bytes
        if not piece.dropped:
            restoration.missing[piece.index] -= 1
            self._commit(restoration)

    def _commit(self, restoration: Restoration) -> None:
        """Commit the tokens of complete frames, from the first to the first incomplete one."""
        whole = 0
        for index in sorted(restoration.missing):
            if restoration.missing[index]:
                break
            del restoration.missing[index]
            whole = index + 1
        if not whole:
            return
        if not self._layout.recurrent:
            restoration.restored = whole * self._frames.tokens
            self._kv.commit(restoration.shadow, restoration.restored)

    def cut(self, restoration: Restoration, index: int, why: str) -> None:
        """Truncate it before frame `index`."""
        restoration.cut = restoration.cut or why
        for piece in restoration.pieces:
            if piece.index >= index:
                piece.dropped = True
        for piece in restoration.to_copy:
            if piece.dropped and piece.frame is not None:
                self._pool.release(piece.frame)
                piece.frame = None
        restoration.to_copy = deque(piece for piece in restoration.to_copy if not piece.dropped)
        restoration.missing = {at: n for at, n in restoration.missing.items() if at < index}

    def distrust(self, name: FrameName) -> None:
        """Truncate the restoration of a frame before it, if it is being restored."""
        restoration = self.names.get(name)
        if restoration is not None:
            index = next(piece.index for piece in restoration.pieces if piece.name == name)
            self.cut(restoration, index, "damaged")

    def _commit_state(self, restoration: Restoration) -> None:
        """Commit the prefix, and copy the state restored to the shadow into a checkpoint."""
        shadow = restoration.shadow
        tokens = restoration.frames * self._frames.tokens
        self._kv.commit(shadow, tokens)
        live = self._kv.tables(shadow)[-1]
        pages = self._kv.place_checkpoint(shadow, tokens)
        if pages is not None:
            restoration.restored = tokens
            restoration.copies = [PageCopy(*pair) for pair in zip(live, pages, strict=True)]

    def end(self, restoration: Restoration) -> list[PageCopy]:
        """Release the pages of an ended restoration. Return the copies that the next batch must run
        first."""
        self.active.remove(restoration)
        if self._layout.recurrent and restoration.cut is None:
            self._commit_state(restoration)
        for piece in restoration.pieces:
            self.names.pop(piece.name, None)
        self._kv.free(restoration.shadow)
        return restoration.copies
