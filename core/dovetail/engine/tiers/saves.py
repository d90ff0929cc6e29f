"""`Saves`: copies computed frames from the device to the host pool.

A frame is saved right after the submission of the step that computes its last token: the copy reads
after this step, and only later steps write to pages that are released afterwards. The frame is
published once the step's results show that its row hasn't failed; by then its tokens are known.
A step saves few frames. Those of a request that ends before are saved by later steps, which find
its blocks kept, or when nothing is computed.

A row whose K and V contain NaN fails only once it yields a token: perhaps many steps later, when
other requests have read its pages, or the request runs no more. A frame is therefore *proven* once
its request has yielded a token since. When a row fails, the frames of its request, and all frames
that aren't proven and may depend on it, are distrusted.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count
from secrets import randbits

from dovetail.api.blocks.hash_chain import HashChain
from dovetail.api.executor import Batch
from dovetail.api.kv_cache import HOLE, KVCacheManager, Pages
from dovetail.api.kv_transfers import KVTransfers, Transfer, Transferred
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.tiers.host_pool import HostFrame, HostPool
from dovetail.engine.tiers.kept_blocks import KeptBlocks
from dovetail.engine.tiers.keys import FrameLayout, FrameName, GroupFrames
from dovetail.engine.tiers.stats import TierStats

ORPHANS = 1 << 16  # maximum number of unproven frames that are known after their requests have left


class _Progress:
    """Progress of the saves of a running request."""

    __slots__ = ("chain", "due", "found", "next", "proven")

    def __init__(self, chain: HashChain, frames: FrameLayout, found: int) -> None:
        self.chain = chain
        self.due: float = frames.tokens  # computed tokens at which there is something to save
        self.found = found  # number of frames found in the prefix cache
        # the request has ended after a token that depends on all K and V before it
        self.proven = False
        # by group, but for a recurrent one: the frame to save next
        self.next = [0 for group in frames.groups if not group.spec.recurrent]


@dataclass(slots=True, eq=False)
class _Save:
    """A frame that is being saved."""

    request: LiveRequest
    chain: HashChain
    group: int
    index: int
    frame: HostFrame
    pages: Pages
    name: FrameName | None  # None: a token of it is in flight
    collected: bool = False  # its step was
    proven: bool = False  # its request has yielded a token since
    copied: bool = False
    dropped: bool = False


class Saves:
    """The saves of one engine."""

    def __init__(
        self,
        frames: FrameLayout,
        kv: KVCacheManager,
        pool: HostPool,
        transfers: KVTransfers,
        ids: count[int],
        stats: TierStats,
        saved: Callable[[HostFrame], None],
        is_kept: Callable[[FrameName], bool],
    ) -> None:
        """`ids`: ids of transfers. `saved`: called with each newly published frame. `is_kept`:
        returns True if a tier has the frame."""
        self._frames = frames
        self._kv = kv
        self._pool = pool
        self._transfers = transfers
        self._ids = ids
        self._stats = stats
        self._saved = saved
        self._is_kept = is_kept
        self._running: dict[LiveRequest, _Progress] = {}  # and of requests with kept blocks
        self._kept = KeptBlocks(kv, frames.tokens)
        self._planned: list[_Save] = []  # of the step being planned
        self._capacity = 0  # bytes that the step being planned may still save
        self._most_frames = math.inf  # that it may save
        self._uncollected: dict[int, list[_Save]] = {}  # by step
        self._copying: dict[int, _Save] = {}  # by transfer
        self._underway: set[FrameName] = set()  # names of those being saved
        # published frames that aren't proven: of running requests, and of those that left
        self._unproven: dict[LiveRequest, list[FrameName]] = {}
        self._orphans: OrderedDict[FrameName, None] = OrderedDict()

    @property
    def pending(self) -> bool:
        """True while pages are being copied, or are kept for that."""
        return bool(self._copying or self._kept)

    def begin(self, request: LiveRequest, chain: HashChain) -> None:
        """Begin to save frames of `request`, whose `num_computed` tokens were found in the cache."""
        found = request.num_computed // self._frames.tokens
        self._running[request] = _Progress(chain, self._frames, found)

    def end(self, request: LiveRequest) -> None:
        """Plan no more saves of `request`, unless its blocks are kept. Saves in flight continue."""
        if request not in self._kept:
            self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        progress = self._running.pop(request, None)
        for name in self._unproven.pop(request, ()):
            self._add_orphan(name)
        if progress is not None and progress.due < math.inf:
            whole = request.num_settled // self._frames.tokens
            left = sum(max(0, whole - index) for index in progress.next)
            if left:
                self._stats.dropped_frames["busy"] += left

    # Requests that have ended

    def keep(self, request: LiveRequest) -> bool:
        """Keep the blocks of a request that ends, if some of its frames aren't saved. Return True if
        they are kept."""
        progress = self._running.get(request)
        if progress is None or request.num_settled < progress.due:
            return False
        # it has got a token since it was admitted, which depends on all before it
        progress.proven = request.num_tokens > request.prefill_end
        return self._kept.add(request)

    def make_room(self, waiting: Iterable[LiveRequest]) -> None:
        """Free kept blocks while running requests, or these, might lack pages otherwise: first those
        of the request that ended last, since the others' will be saved sooner."""
        if not self._kept:
            return
        wanted = self._kept.pages_wanted(self._running, waiting)
        for request in reversed([*self._kept]):
            if self._kv.available_pages >= wanted:
                return
            self._free(request)

    def arrived(self, request: LiveRequest) -> None:
        """Free kept blocks of a request with the same id: the manager can't tell the two apart."""
        ended = self._kept.find(request.id)
        if ended is not None:
            self._free(ended)

    def _free(self, request: LiveRequest) -> None:
        """Free the kept blocks of a request; what isn't saved is lost."""
        self._forget(request)
        self._kept.free(request)

    def save_kept(self) -> None:
        """Enqueue saves of kept blocks, while nothing is being computed."""
        self._free_saved()
        if not self._kept:
            return
        self._most_frames = math.inf
        self._capacity = self._transfers.save_capacity()
        for request in self._kept:
            self._plan(request, self._running[request])
        for save in self._enqueue():
            save.collected = True
        self._free_saved()

    def _free_saved(self) -> None:
        """Free the kept blocks of which no more are to be saved: only later steps write to them."""
        for request in self._kept:
            if self._running[request].due > request.num_settled:
                self._free(request)

    # A step

    def plan(
        self, batch: Batch, requests: Iterable[LiveRequest], most_frames: float = math.inf
    ) -> None:
        """Choose what to save once `batch` is submitted: of kept blocks, and frames of its
        `requests` that it completes, at most `most_frames`, and states that it keeps."""
        self._most_frames = most_frames
        running = self._running
        planning = False
        for request in chain(self._kept, requests):
            progress = running.get(request)
            if progress is not None and request.num_settled >= progress.due:
                if not planning:
                    planning = True
                    self._capacity = self._transfers.save_capacity()
                self._plan(request, progress)
        if batch.checkpoints:
            self._plan_states(batch, requests)

    def _plan(self, request: LiveRequest, progress: _Progress) -> None:
        whole = request.num_settled // self._frames.tokens
        known = min(whole, self._frames.named(request.num_tokens))
        hashes = progress.chain.extend(known)
        tables = self._kv.tables(request)
        for group in self._frames.groups[: len(progress.next)]:
            index = progress.next[group.number]
            while index < whole:
                name = FrameName(group.number, hashes[index]) if index < known else None
                pages = group.pages(index, tables[group.number])
                is_new = index >= progress.found
                if self._is_wanted(name, pages, is_new):
                    if not self._has_room(group):
                        break  # later steps try again, as far as its pages stay
                    self._add(request, progress, group, index, pages, name, is_new)
                index += 1
            progress.next[group.number] = index
        progress.due = (min(progress.next) + 1) * self._frames.tokens

    def _plan_states(self, batch: Batch, requests: Iterable[LiveRequest]) -> None:
        group = self._frames.groups[-1]
        by_row = {request.row: request for request in requests}
        for checkpoint in batch.checkpoints:
            request = by_row[checkpoint.row]
            index, rest = divmod(checkpoint.tokens, self._frames.tokens)
            index -= 1
            if request not in self._running or rest:
                continue
            progress = self._running[request]
            name = FrameName(group.number, progress.chain.extend(index + 1)[index])
            pages = tuple(checkpoint.pages.tolist())
            if self._is_wanted(name, pages, True):
                self._add(request, progress, group, index, pages, name, True)

    def _is_wanted(self, name: FrameName | None, pages: Pages, is_new: bool) -> bool:
        """Return False if the frame is saved already, or some of its pages were released."""
        if HOLE in pages:
            return False
        if name is None:
            return True
        if name in self._underway or self._pool.find(name) is not None:
            return False
        return is_new or not self._is_kept(name)

    def _has_room(self, group: GroupFrames) -> bool:
        """Return True if a frame can be saved without delaying steps, or it is the only save of the
        step."""
        if not self._planned:
            return self._capacity > 0
        return group.bytes <= self._capacity and len(self._planned) < self._most_frames

    def _add(
        self,
        request: LiveRequest,
        progress: _Progress,
        group: GroupFrames,
        index: int,
        pages: Pages,
        name: FrameName | None,
        is_new: bool,
    ) -> None:
        """Plan to save a frame, if the pool has room. Frames found in the prefix cache evict no
        others, since they would do so at each use."""
        frame = self._pool.take(group.bytes, evicts=is_new)
        if frame is None:
            self._stats.dropped_frames["full"] += 1
            return
        self._capacity -= group.bytes
        save = _Save(request, progress.chain, group.number, index, frame, pages, name)
        save.proven = progress.proven and (index + 1) * self._frames.tokens < request.num_tokens
        self._planned.append(save)

    def submitted(self, step: int) -> int:
        """Enqueue the planned saves, after the submission of their batch. Return how many."""
        planned = self._enqueue()
        if planned:
            self._uncollected[step] = planned
        self._free_saved()
        return len(planned)

    def _enqueue(self) -> list[_Save]:
        planned = self._planned
        self._planned = []
        if not planned:
            return []
        transfers: list[Transfer] = []
        for save in planned:
            if save.name is not None:
                self._underway.add(save.name)
            save.frame.seed = randbits(64)
            transfer = Transfer(
                next(self._ids), save.frame.slab, save.frame.pages_at, save.pages, save.frame.seed
            )
            self._copying[transfer.id] = save
            transfers.append(transfer)
        self._transfers.save_all(transfers)
        return planned

    def collected(self, flight: InFlightStep) -> None:
        """Publish the frames of a collected step, except those of failed rows."""
        saves = self._uncollected.pop(flight.index, ())
        for save in saves:
            save.collected = True
        if self._copying or self._unproven:
            self._prove(flight)
        for save in saves:
            if save.name is None and not save.dropped:
                save.name = self._name(save)
            self._settle(save)

    def _prove(self, flight: InFlightStep) -> None:
        """Note that the requests to which a step gave a token have sound K and V up to there."""
        yields = flight.batch.yields_token.copy()
        yields[[*flight.result.failed]] = False
        sound = {*compress(flight.requests, yields.tolist())}
        for save in self._copying.values():
            save.proven = save.proven or (save.collected and save.request in sound)
        for request in sound & self._unproven.keys():
            del self._unproven[request]

    def _name(self, save: _Save) -> FrameName | None:
        """Return the name of a frame; None if its tokens aren't known, as of an aborted request, or
        if it is being saved already."""
        if self._frames.named(save.request.num_tokens) <= save.index:
            return None
        name = FrameName(save.group, save.chain.extend(save.index + 1)[save.index])
        return None if name in self._underway else name

    def failed(self, requests: Sequence[LiveRequest]) -> set[FrameName]:
        """Drop the saves of requests whose rows have failed, and those that may depend on them.
        Plan no more of them. Return the names of the frames that mustn't be used any more."""
        affected = self._affected(requests)
        names = {*self._orphans}
        self._orphans.clear()
        for request in affected:
            self._running[request].due = math.inf
            names.update(self._unproven.pop(request, ()))
        for request in requests:
            names.update(self._names(request))
        for save in self._unsettled():
            depends = save.request in affected or save.request not in self._running
            if save.request in requests or (depends and not save.proven):
                save.dropped = True
        return names

    def _affected(self, failed: Sequence[LiveRequest]) -> set[LiveRequest]:
        """Return the running requests that share pages with those in `failed`, and these."""
        tainted: set[int] = set()
        for request in failed:
            if not request.capacity:  # its pages aren't known any more
                return {*self._running}
            tainted.update(*self._kv.tables(request))
        tainted.discard(HOLE)
        return {
            request
            for request in self._running
            if request in failed or not tainted.isdisjoint(self._pages(request))
        }

    def _unsettled(self) -> list[_Save]:
        """Return the saves that aren't copied yet, or whose step isn't collected."""
        uncollected = [save for saves in self._uncollected.values() for save in saves]
        return [*uncollected, *self._copying.values()]

    def _names(self, request: LiveRequest) -> list[FrameName]:
        """Return the names of all frames of a request that were computed; of one that runs no
        more, of all its tokens."""
        progress = self._running.get(request)
        hash_chain = self._frames.chain(request) if progress is None else progress.chain
        whole = self._frames.named(request.num_tokens)
        if progress is not None:
            whole = min(whole, request.num_settled // self._frames.tokens)
        hashes = hash_chain.extend(whole)[:whole]
        return [FrameName(group.number, name) for name in hashes for group in self._frames.groups]

    def _add_orphan(self, name: FrameName) -> None:
        self._orphans[name] = None
        if len(self._orphans) > ORPHANS:
            self._orphans.popitem(last=False)

    def _pages(self, request: LiveRequest) -> set[int]:
        return set().union(*self._kv.tables(request)) if request.capacity else set()

    # Their ends

    def finished(self, transfer: Transferred) -> bool:
        """Record the end of a transfer. Return False if it isn't a save."""
        save = self._copying.pop(transfer.id, None)
        if save is None:
            return False
        save.copied = True
        save.frame.checksum = transfer.checksum
        self._settle(save)
        return True

    def _settle(self, save: _Save) -> None:
        """Publish a frame once it is copied and its step collected; release it if dropped."""
        if not (save.copied and save.collected):
            return
        if save.name is not None:
            self._underway.discard(save.name)
            if not save.dropped and self._pool.publish(save.frame, save.name):
                self._stats.saved_frames += 1
                self._stats.saved_bytes += save.frame.bytes
                self._saved(save.frame)
                if not save.proven and save.request in self._running:
                    self._unproven.setdefault(save.request, []).append(save.name)
                elif not save.proven:
                    self._add_orphan(save.name)
        self._pool.release(save.frame)

    def drop(self) -> None:
        """Drop all saves, and plan no more for running requests: their K and V mustn't be
        reused."""
        for request in self._kept:
            self._free(request)
        for progress in self._running.values():
            progress.due = math.inf
        for save in self._unsettled():
            save.dropped = True
