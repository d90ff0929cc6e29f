"""`TierFeature`: restores prefixes to the prefix cache before the policy sees their requests, and
saves what steps compute.

If the host pool or a tier has a longer prefix of a waiting request than the prefix cache, and
computing it would take longer than restoring it, the request is hidden until it is restored.
Neither the policy nor the KV-cache manager is involved: once shown, the request finds the longer
prefix by an ordinary lookup.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

from dovetail.api.blocks.hash_chain import Beginning, HashChain
from dovetail.api.clock import Clock
from dovetail.api.executor import Batch
from dovetail.api.kv_cache import KVCacheManager, KVLayout, PageCopy
from dovetail.api.kv_tier import KVTier
from dovetail.api.kv_transfers import KVTransfers
from dovetail.api.scheduler import Refusal
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.step_times import StepTimeFit
from dovetail.engine.tiers.host_pool import HostFrame, HostPool
from dovetail.engine.tiers.host_time import HostTime
from dovetail.engine.tiers.keys import FrameLayout, FrameName
from dovetail.engine.tiers.prospect import Pace, Prospect, prospect
from dovetail.engine.tiers.restores import Piece, Restoration, Restores
from dovetail.engine.tiers.saves import Saves
from dovetail.engine.tiers.stats import TierStats
from dovetail.engine.tiers.tier_jobs import JOB_FRAMES, TierJobs
from dovetail.errors import DovetailError

logger = logging.getLogger("dovetail")

LOOK_S = 0.001  # interval at which an idle engine polls copies
IDLE_S = 0.01  # longest wait for tiers at a time while there is no request
RESTORATIONS = 2  # maximum at a time
# Maximum number of requests with a restored prefix that aren't admitted: more would evict each
# other's
AWAITED = 8
ROOM_SHARE = 0.9  # of the available pages, which a part of a prefix may take
AWAITED_S = 30.0  # time for which the room of a restored prefix is reserved for its request
# Maximum number of waiting requests per step for which the restorable prefix is determined, and of
# tokens that are hashed for that unless it is one request: a thousand may wait.
FIRST_LOOKS = 16
FIRST_TOKENS = 1 << 13
LATER_LOOKS = 4  # of those that could not begin before
FIND_S = 0.25  # longest wait of a request for the answer of a tier, which may be busy
JOBS = 2  # maximum number of loads of one restoration at a time
CLOSE_S = 5.0  # timeout for pending saves and stores when the engine stops
READING_S = 0.5  # timeout for the thread that hashes the weights when the engine stops
SUSPECTS = 1 << 16  # maximum number of names of frames that are not trusted


@dataclass(slots=True, eq=False)
class _Visit:
    """A waiting request for which a longer prefix may be restored."""

    request: LiveRequest
    chain: HashChain
    to_ask: list[TierJobs]
    found: dict[FrameName, TierJobs] = field(default_factory=dict)
    # of the feature's queues, that which has it; None while a tier is asked
    queue: _Queue | None = None
    asked: float | None = None  # time since which the next tier is, or is too busy to be
    patience_s: float = 0.0  # time for which the policy's admission of it may be delayed
    until: float | None = None  # the end of that time; None: the policy hasn't tried yet
    lacked: int = -1  # pages that were available when there was no room for it
    needed: int = 0  # pages that it needed then
    restoration: Restoration | None = None
    jobs: int = 0  # loads of its restoration

    def move(self, queue: _Queue | None) -> None:
        """Move it to the end of `queue`."""
        if self.queue is not None:
            del self.queue[self]
        self.queue = queue
        if queue is not None:
            queue[self] = None


_Queue = OrderedDict[_Visit, None]


class TierFeature(EngineFeature):
    """Engine feature for K and V beyond the device. It applies to every request."""

    def __init__(
        self,
        layout: KVLayout,
        kv: KVCacheManager,
        transfers: KVTransfers,
        pool: HostPool,
        frames: FrameLayout,
        clock: Clock,
    ) -> None:
        self.stats = TierStats(host_limit=pool.limit)
        self.pace = Pace()
        self._layout = layout
        self._kv = kv
        self._transfers = transfers
        self.pool = pool
        self._frames = frames
        self._clock = clock
        self._ids = ids = count(1)
        self._tiers: list[TierJobs] = []
        self._saves = Saves(
            frames, kv, pool, transfers, ids, self.stats, self._saved, self._is_kept
        )
        self._saving = HostTime(clock)
        self._restoring_time = HostTime(clock)
        self._step_s = math.inf  # estimated time of the step before; infinity: nothing runs
        self._left = 0.0  # frames that may be restored before the next step
        self._restores = Restores(layout, frames, kv, pool, transfers, ids, self.stats)
        self._visits: dict[LiveRequest, _Visit] = {}
        # Each visit is in the queue of what it waits for, so that a step costs nothing for those
        # that can't go on.
        self._arrived: _Queue = OrderedDict()  # since the last step, or held back by gates
        self._unseen: _Queue = OrderedDict()
        self._unasked: _Queue = OrderedDict()  # the next tier is busy
        self._answered: _Queue = OrderedDict()  # by a tier, or another request's restoration
        self._followers: dict[Restoration, _Queue] = {}  # for the end of that restoration
        self._ready: _Queue = OrderedDict()  # for the policy, which sees them
        self._wanted: _Queue = OrderedDict()  # by the policy, which would have admitted them
        self._restoring: _Queue = OrderedDict()
        self._hidden: set[LiveRequest] = set()
        # requests with a restored prefix that aren't admitted yet: their restoration, and the time
        # until which its pages are reserved for them
        self._awaited: dict[LiveRequest, tuple[Restoration, float]] = {}
        self._copies: list[PageCopy] = []  # for the next batch
        # of requests whose rows failed; those in tiers aren't used until they were computed again
        self._suspects: OrderedDict[FrameName, None] = OrderedDict()
        self._chains: dict[LiveRequest, HashChain] = {}  # of waiting requests
        self._latest: Beginning | None = None  # of the newest chain
        self._now = clock.now()
        self._namespaces: Sequence[bytes] | None = None
        self.woken = threading.Event()  # a tier has something to report
        self._thread: threading.Thread | None = None

    def use(
        self, tiers: Sequence[tuple[str, KVTier]], namespaces: Callable[[], Sequence[bytes]]
    ) -> None:
        """Use these tiers in this order; each has a display name. `namespaces`: returns the
        namespace of each group's frames; called in a thread, since it may read all weights."""
        self._tiers = [
            TierJobs(name, tier, self.pool, self._clock, self._ids, self.stats)
            for name, tier in tiers
        ]
        if tiers:
            self._thread = threading.Thread(
                target=self._open_gates, args=(namespaces,), name="dovetail-tiers", daemon=True
            )
            self._thread.start()

    def _open_gates(self, namespaces: Callable[[], Sequence[bytes]]) -> None:
        try:
            self._namespaces = namespaces()
        except Exception:
            logger.exception("the KV tiers stay unused: the model's content has no name")

    def _open(self, tier: TierJobs) -> None:
        """Begin to use a tier, and store the frames that the host pool already has."""
        assert self._namespaces is not None
        tier.namespaces = self._namespaces
        for name in self.pool.names:
            frame = self.pool.find(name)
            assert frame is not None
            tier.store(frame, self._now)

    def wait_until_open(self) -> None:
        """Wait until the tiers can be used."""
        if self._thread is not None:
            self._thread.join()

    def measure(self, fit: StepTimeFit) -> None:
        """Estimate the time of computing by this fit of step times."""
        self.pace.fit = fit

    # Requests

    def arrived(self, request: LiveRequest) -> None:
        self._saves.arrived(request)
        self._visit(request)

    def _chain(self, request: LiveRequest) -> HashChain:
        """Return the chain of a waiting request, always the same."""
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = self._frames.chain(request, self._latest)
            self._latest = chain.beginning
        return chain

    def _visit(self, request: LiveRequest) -> None:
        if request.indivisible or request.params.prompt_logprobs is not None:
            return
        if self._frames.restorable(request.num_tokens):
            visit = _Visit(request, self._chain(request), [*self._tiers])
            self._visits[request] = visit
            visit.move(self._arrived)

    def admitted(self, request: LiveRequest) -> None:
        awaited = self._awaited.pop(request, None)
        if awaited is not None and request.first_scheduled_time is None:
            restoration = awaited[0]
            used = min(request.num_computed, restoration.restored) - restoration.cached
            request.restored_tokens = max(0, used)
            self.stats.restored_tokens += request.restored_tokens
        self._forget(request)
        if not request.indivisible:
            self._saves.begin(request, self._chain(request))
        self._chains.pop(request, None)

    def left(self, request: LiveRequest) -> None:
        self._saves.end(request)
        self._visit(request)  # of one that has ended, until `removed`

    def keeps(self, request: LiveRequest) -> bool:
        return self._saves.keep(request)

    def removed(self, request: LiveRequest) -> None:
        self._forget(request)
        self._chains.pop(request, None)

    def refuses(self, request: LiveRequest) -> Refusal | None:
        return Refusal.NOT_NOW if request in self._hidden else None

    def delays(self, request: LiveRequest, num_tokens: int) -> bool:
        visit = self._visits.get(request)
        if visit is None or not (visit.queue is self._ready or visit.queue is self._wanted):
            return False
        if self._kv.pages_needed(request, num_tokens) > self._kv.available_pages:
            visit.until = None  # it waits for others
            return False
        if visit.until is None:
            visit.until = self._now + visit.patience_s
        if self._now >= visit.until:
            return False
        if visit.queue is self._ready:
            visit.move(self._wanted)
        return True

    # Steps

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        self.pace.looked(now, bool(self._restores.active))
        self._poll(now)
        self._saves.make_room(waiting)
        self._left = self._restoring_time.frames(self._step_s)
        self._step_s = math.inf
        for visit in [*self._restoring]:
            assert visit.restoration is not None
            self._go_on(visit, visit.restoration)
        self._look_again()
        self._welcome()
        self._ask_again()
        self._look_first()
        return bool(self._hidden)

    def next_look(self, now: float) -> float:
        waits = self._hidden or self._wanted or self._restores.active
        return now + LOOK_S if waits else math.inf

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        tokens = int(batch.num_tokens.sum())
        self._step_s = self.pace.step_s(tokens - len(requests), len(requests))
        self._saves.plan(batch, requests, self._saving.frames(self._step_s))
        if self._copies:  # first: a request of this batch may start from that state
            batch = replace(batch, copies=(*self._copies, *batch.copies))
            self._copies = []
        return batch

    def submitted(self, step: int) -> None:
        self._saving.begin()
        saved = self._saves.submitted(step)
        if saved:
            self._saving.end(saved)

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        if flight.result.failed:
            failed = [flight.requests[index] for index in flight.result.failed]
            self._distrust(self._saves.failed(failed))
        self._saves.collected(flight)

    def _distrust(self, names: set[FrameName]) -> None:
        """Use none of these frames until they were computed again."""
        for name in names:
            self.pool.drop(name)
            self._restores.distrust(name)
            self._suspects[name] = None
        for visit in self._visits.values():
            for name in visit.found.keys() & names:
                del visit.found[name]
        while len(self._suspects) > SUSPECTS:
            self._suspects.popitem(last=False)

    def _poll(self, now: float) -> None:
        """Process transfers and jobs that have ended since the last call."""
        self._now = now
        # of a planned step that granted nothing: their target pages may be free again
        self._copies += self._kv.take_copies()
        self.stats.host_bytes = self.pool.bytes
        self.stats.host_frames = self.pool.frames
        for transfer in self._transfers.finished():
            if not self._saves.finished(transfer):
                self._restores.finished(transfer)
        for tier in self._tiers:
            if not tier.namespaces and self._namespaces is not None:
                self._open(tier)
            tier.poll(now)
        for restoration in [one for one in self._restores.active if one.ended]:
            self._end(restoration)
        for request, (_, until) in [*self._awaited.items()]:
            if now >= until or request.status is not Status.WAITING:
                del self._awaited[request]

    # What is waiting

    def _welcome(self) -> None:
        """Hide the requests that have arrived since the last step, until they are looked at."""
        for visit in [*self._arrived]:
            if visit.request.status is Status.WAITING:
                self._hide(visit, self._unseen)

    def _look_again(self) -> None:
        """Look at the first of those that the policy wants."""
        for visit in [*islice(self._wanted, LATER_LOOKS)]:
            if len(self._restores.active) >= RESTORATIONS:
                return
            if self._kv.available_pages > visit.lacked:
                self._look(visit)

    def _look_first(self) -> None:
        """Look at the first of those that are new, or for which something has changed."""
        tokens = FIRST_TOKENS
        for _ in range(FIRST_LOOKS):
            queue = self._answered or self._unseen
            if not queue:
                return
            visit = next(iter(queue))
            if queue is self._unseen:
                if visit.request.num_tokens > tokens < FIRST_TOKENS:
                    return
                tokens -= visit.request.num_tokens
            self._look(visit)

    def _look(self, visit: _Visit) -> None:
        """Look what can be restored for a request, and move it to the queue of what it waits
        for."""
        best = self._prospect(visit)
        if best.is_complete or not self._ask(visit, best):
            self._decide(visit, best)

    def _may_begin(self, visit: _Visit) -> bool:
        """Return True if a restoration may begin for a request: for one that the policy wants, or
        ahead of the policy if none waits for it, as long as few are restored in vain."""
        if len(self._restores.active) >= RESTORATIONS:
            return False
        if visit.queue is self._wanted:
            return True
        return not (self._ready or self._wanted) and len(self._awaited) < AWAITED

    @property
    def _room(self) -> int:
        """The number of pages that a restoration ahead of the policy may take."""
        awaited = self._awaited.values()
        left = sum(self._layout.visible_pages(one.restored + 1) for one, _ in awaited)
        return self._kv.available_pages - left

    def _hide(self, visit: _Visit, queue: _Queue | None) -> None:
        """Move it to `queue`, and hide its request."""
        visit.move(queue)
        self._hidden.add(visit.request)

    def _forget(self, request: LiveRequest) -> None:
        """Hide the request no longer, and restore nothing for it."""
        visit = self._visits.pop(request, None)
        if visit is None:
            return
        visit.move(None)
        self._hidden.discard(request)
        if visit.restoration is not None:
            self._restores.cut(visit.restoration, 0, "aborted")

    def _prospect(self, visit: _Visit, most: int | None = None) -> Prospect:
        """Return what can be restored, of at most `most` frames."""
        return prospect(
            self._frames, visit.request, visit.chain, self._kv, self.pool, visit.found, most
        )

    def _ask(self, visit: _Visit, best: Prospect) -> bool:
        """Ask the next tier for the frames that haven't been found. Return False if there is no
        tier left to ask."""
        while visit.to_ask:
            tier = visit.to_ask[0]
            if visit.asked is None:
                visit.asked = self._now
            left_s = visit.asked + FIND_S - self._now
            if tier.free_jobs <= 0 < left_s and tier.is_used(self._now):
                self._hide(visit, self._unasked)
                return True
            visit.to_ask.pop(0)
            visit.asked = None
            if self._find(visit, tier, best.missing, left_s):
                return True
        return False

    def _find(
        self, visit: _Visit, tier: TierJobs, names: Sequence[FrameName], within_s: float
    ) -> bool:
        """Ask a tier for frames. Return False if it can't be asked."""

        def then(ok: Sequence[bool]) -> None:
            if self._visits.get(visit.request) is visit:
                visit.move(self._answered)
            for name, here in zip(names, ok, strict=True):
                if here and name not in self._suspects:
                    visit.found[name] = tier

        if not tier.find(names, self._now, within_s, then):
            return False
        self._hide(visit, None)
        return True

    def _ask_again(self) -> None:
        """Let those go on whose next tier is no longer busy, or for which they waited in vain."""
        free: dict[TierJobs, int] = {}
        for visit in [*islice(self._unasked, FIRST_LOOKS)]:
            tier = visit.to_ask[0]
            left = free.setdefault(tier, tier.free_jobs)
            assert visit.asked is not None
            if left <= 0 and self._now < visit.asked + FIND_S:
                return
            free[tier] -= 1
            visit.move(self._answered)

    def _decide(self, visit: _Visit, best: Prospect) -> None:
        """Begin to restore if that is quicker than computing and there is room."""
        if not best.pieces:
            self._forget(visit.request)
            return
        computing_s = self.pace.computing_s(best.tokens - best.cached, best.tokens)
        if self.pace.loading_s(best.pieces) >= computing_s:
            self.stats.missed["slower"] += 1
            self.pace.too_slow(best.pieces)
            self._forget(visit.request)
            return
        visit.patience_s = self.pace.patience_s(computing_s)
        leading = self._restores.leading(best.pieces)
        if leading is not None:
            self._hide(visit, self._followers.setdefault(leading, OrderedDict()))
        elif not (self._may_begin(visit) and self._begin_some(visit, best)):
            self._hidden.discard(visit.request)
            if visit.queue is not self._wanted:
                visit.move(self._ready)

    def _begin_some(self, visit: _Visit, best: Prospect) -> bool:
        """Begin to restore; if the policy wants the request, as much as there is room for. Return
        False if nothing has begun."""
        if self._begin(visit, best):
            return True
        if visit.queue is not self._wanted or visit.needed <= max(0, visit.lacked):
            return False
        share = ROOM_SHARE * visit.lacked / visit.needed
        first = best.cached // self._frames.tokens
        part = self._prospect(visit, first + int(share * (best.frames - first)))
        return bool(part.pieces) and self._begin(visit, part)

    def _begin(self, visit: _Visit, best: Prospect) -> bool:
        """Begin to restore, if there is room. Return False otherwise, and while copies wait for the
        next batch, since the pages that they write might be allocated to others by then."""
        if self._copies:
            return False
        shadow = self._restores.shadow(visit.request, best.tokens)
        if self._kv.lookup(shadow) != best.cached:
            self._kv.free(shadow)
            return False
        needed = self._restores.pages_needed(shadow, best.frames)
        restoration = Restoration(visit.request, shadow, best.cached, best.frames, best.pieces)
        room = self._kv.available_pages if visit.queue is self._wanted else self._room
        if needed > room or not self._restores.begin(restoration):
            self._kv.free(shadow)
            visit.lacked = room
            visit.needed = needed
            return False
        restoration.begun = self._now
        restoration.deadline = self._now + visit.patience_s
        visit.restoration = restoration
        self._hide(visit, self._restoring)
        for piece in best.pieces:
            if piece.frame is not None:
                self.pool.hold(piece.frame)
        self._go_on(visit, restoration)
        return True

    def _go_on(self, visit: _Visit, restoration: Restoration) -> None:
        if self._now >= restoration.deadline and any(piece.tier for piece in restoration.to_copy):
            self._restores.cut(restoration, 0, "late")
        self._load(visit, restoration)
        self._restoring_time.begin()
        copied = self._restores.copy(restoration, self.pace.most_copying, self._left)
        if copied:
            self._left -= copied
            self._restoring_time.end(copied)

    def _load(self, visit: _Visit, restoration: Restoration) -> None:
        """Load its next frames from tiers, as far as the host pool has room."""
        while visit.jobs < JOBS:
            wanted = [
                piece
                for piece in restoration.to_copy
                if piece.tier is not None and piece.frame is None and not piece.loading
            ]
            if not wanted:
                return
            tier = wanted[0].tier
            assert tier is not None
            pieces: list[Piece] = []
            frames: list[HostFrame] = []
            for piece in wanted[:JOB_FRAMES]:
                if piece.tier is not tier:
                    break
                frame = self.pool.take(piece.group.bytes)
                if frame is None:
                    break
                pieces.append(piece)
                frames.append(frame)
            if not pieces:
                return
            if not self._submit(visit, restoration, tier, pieces, frames):
                for frame in frames:
                    self.pool.release(frame)
                return

    def _submit(
        self,
        visit: _Visit,
        restoration: Restoration,
        tier: TierJobs,
        pieces: Sequence[Piece],
        frames: Sequence[HostFrame],
    ) -> bool:
        def then(ok: Sequence[bool]) -> None:
            visit.jobs -= 1
            for piece, frame, loaded in zip(pieces, frames, ok, strict=True):
                if loaded and piece.dropped:
                    self.pool.release(frame)
                elif loaded:
                    piece.frame = frame
                elif not piece.dropped:
                    self._restores.cut(restoration, piece.index, "lost")

        within_s = max(0.0, restoration.deadline - self._now)
        names = [piece.name for piece in pieces]
        if tier.load(names, frames, self._now, within_s, then):
            visit.jobs += 1
            for piece in pieces:
                piece.loading = True
            return True
        if not tier.is_used(self._now):
            self._restores.cut(restoration, pieces[0].index, "unavailable")
        return False

    # What has been restored

    def _end(self, restoration: Restoration) -> None:
        """End a restoration, and release its pages so that its request finds them."""
        self._copies += self._restores.end(restoration)
        if restoration.cut is not None:
            self.stats.missed[restoration.cut] += 1
        seconds = self._now - restoration.begun
        self.stats.restore_s += seconds
        if restoration.cut is None:
            self.pace.restored(restoration, self._now)
        for follower in [*self._followers.pop(restoration, ())]:
            follower.move(self._answered)
        visit = self._visits.get(restoration.request)
        if visit is not None and visit.restoration is restoration:
            visit.restoration = None
            self._forget(restoration.request)
            if restoration.restored:
                until = self._now + max(seconds, AWAITED_S)
                self._awaited[restoration.request] = restoration, until

    def _saved(self, frame: HostFrame) -> None:
        assert frame.name is not None
        if frame.name in self._suspects:  # it is computed again, and replaces those in the tiers
            del self._suspects[frame.name]
            for tier in self._tiers:
                tier.lost(frame.name)
        for tier in self._tiers:
            if tier.namespaces:
                tier.store(frame, self._now)

    def _is_kept(self, name: FrameName) -> bool:
        return name not in self._suspects and any(tier.has(name) for tier in self._tiers)

    # Between requests, and their end

    def idle(self) -> bool:
        self._poll(self._clock.now())
        self._saves.save_kept()
        copies = self._saves.pending or bool(self._restores.active)
        if not copies and not any(tier.pending for tier in self._tiers):
            return False
        self.woken.wait(LOOK_S if copies else IDLE_S)  # tiers end the wait
        self.woken.clear()
        return True

    def reset(self) -> None:
        self._saves.drop()
        for restoration in self._restores.active:
            self._restores.cut(restoration, 0, "reset")
        self.pool.clear()
        for tier in self._tiers:
            tier.reset(self._clock.now())

    def check_forget(self) -> None:
        raise DovetailError(
            "an engine with kv_host_memory or kv_tiers can't swap its executor: the host pool is "
            "the executor's memory. Make another engine, or leave these keys out"
        )

    def stop(self) -> None:
        try:
            self._drain(CLOSE_S)
        except Exception:  # of an executor that has failed
            logger.debug("saves are lost", exc_info=True)
        for tier in self._tiers:
            tier.close(CLOSE_S)
        self.pool.close()
        if self._thread is not None:  # it may still read weights, and ends with the process then
            self._thread.join(READING_S)

    def _drain(self, timeout_s: float) -> None:
        """Wait until all copies have ended."""
        until = time.monotonic() + timeout_s
        while (self._saves.pending or self._restores.active) and time.monotonic() < until:
            self._poll(self._clock.now())
            self._saves.save_kept()
            self._clock.wait_until(self._clock.now() + LOOK_S)
