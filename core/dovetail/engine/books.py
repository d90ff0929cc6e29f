"""`Books`: the state of all requests between steps: which wait, which run, and the blocks of each;
and the queues and rows that it consists of.

`PlannedStep` changes it on a policy's behalf, `EngineCore` when requests arrive, when results come
in and when requests finish.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from dovetail.api.kv_cache import KVCacheManager, KVLayout
from dovetail.engine.feature import EngineFeature
from dovetail.engine.finish import Gate
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.siblings import has_fresh, is_awaited
from dovetail.engine.step_times import StepTimeFit


class Books:
    """The queues, rows and blocks of all requests, kept consistent: a request holds blocks exactly
    while it is RUNNING or DRAINING (or lingers, or a feature keeps them)."""

    def __init__(
        self,
        kv: KVCacheManager,
        layout: KVLayout,
        num_pages: int,
        max_num_seqs: int,
        policy_name: str,
        features: Sequence[EngineFeature] = (),
    ) -> None:
        self.kv = kv
        self.features = features
        self.layout = layout
        self.num_pages = num_pages
        self.block_size = layout.block_size  # tokens of the smallest block
        self._has_windows = layout.has_windows
        # a live state is past the prompt; its checkpoint is found instead
        self.forks = kv.capabilities.fork and not layout.recurrent
        self.policy_name = policy_name
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.rows = RowAllocator(max_num_seqs)
        self.fit = StepTimeFit()
        # arrived and not finished: the requests that a policy may name
        self.known: set[LiveRequest] = set()
        # Known requests that ask for features, and these; others aren't in it
        self.asking: dict[LiveRequest, tuple[EngineFeature, ...]] = {}
        # Features that known requests ask for, with the number of these; see `open_step`
        self.concerned: dict[EngineFeature, int] = {}
        self.gated: dict[LiveRequest, None] = {}  # arrived and held back, in order
        # Finished, but keep their blocks for one more planning, so that siblings can fork them
        self.lingering: list[LiveRequest] = []

    def arrive(self, request: LiveRequest) -> None:
        """Add an arrived request to the waiting ones, or hold it back while a gate is closed."""
        self.known.add(request)
        for feature in self.features:
            if feature.asked_by(request) is not None:
                self.asking[request] = (*self.asking.get(request, ()), feature)
                self.concerned[feature] = self.concerned.get(feature, 0) + 1
                feature.arrived(request)
        if request.gates and any(gate.closed() for gate in request.gates):
            request.status = Status.GATED
            self.gated[request] = None
        else:
            self._show(request)

    def open_gates(self) -> None:
        """Show the requests whose gates are all open now, in the order in which they arrived."""
        # a closed gate stays closed for the rest of this pass: showing a request opens none
        closed: set[Gate] = set()
        for request in [*self.gated]:
            if closed.isdisjoint(request.gates):
                closed.update([gate for gate in request.gates if gate.closed()])
                if closed.isdisjoint(request.gates):
                    self._show(request)

    def _show(self, request: LiveRequest) -> None:
        self.gated.pop(request, None)
        request.gates.clear()
        request.status = Status.WAITING
        self.waiting.add(request)

    def open_step(self, now: float) -> bool:
        """Tell the features that requests ask for of a step. Return True if one hides requests."""
        hiding = [one.open_step(now, self.waiting) for one in self.concerned_features]
        for feature in [one for one, requests in self.concerned.items() if not requests]:
            del self.concerned[feature]
        return any(hiding)

    def next_look(self, now: float) -> float:
        """Return the time at which features want a step to be planned even if nothing changes."""
        return min([feature.next_look(now) for feature in self.concerned], default=math.inf)

    @property
    def concerned_features(self) -> tuple[EngineFeature, ...]:
        """The features that a step's requests may ask for, in the order of their calls."""
        return tuple([feature for feature in self.features if feature in self.concerned])

    def admit(self, request: LiveRequest) -> None:
        """Run a waiting request, which has its blocks and knows its computed tokens."""
        self.waiting.remove(request)
        for feature in self.asking.get(request, ()):
            feature.admitted(request)
        request.status = Status.RUNNING
        request.prefill_end = request.num_tokens
        request.next_commit = (request.num_computed // self.block_size + 1) * self.block_size
        self.running.add(request)

    def submitted(self, granted: Sequence[LiveRequest]) -> None:
        """Count the tokens of `granted` requests as computed, now that their step is a batch.

        Requests whose last allowed token is in flight are hidden from the policy, blocks that have
        left a window are released, and gates may open.
        """
        for request in granted:
            request.granted = 0
            if request.num_computed >= request.last_computed:
                self.drain(request)
        if self._has_windows:
            for request in granted:
                if request.num_computed >= request.next_trim:
                    self._trim(request)
        self.open_gates()

    def drain(self, request: LiveRequest) -> None:
        """Hide a request from the policy: it has nothing to compute until results come in."""
        if request.status is Status.RUNNING:
            request.status = Status.DRAINING
            self.running.remove(request)

    def wake(self, request: LiveRequest) -> None:
        """Show the policy a draining request again: its end is uncertain. No-op for others."""
        if request.status is Status.DRAINING:
            request.status = Status.RUNNING
            self.running.add(request)

    def commit(self, request: LiveRequest) -> None:
        """Commit the full blocks of its known, planned tokens, except provisional K and V; if it is
        preempted, only note the number of its known tokens."""
        if not request.capacity:
            request.prefill_end = request.num_tokens
            return
        upto = min(request.num_settled, request.prompt_tokens + len(request.output))
        if upto >= request.next_commit:
            self.kv.commit(request, upto)
            request.next_commit = (upto // self.block_size + 1) * self.block_size

    def _trim(self, request: LiveRequest) -> None:
        """Release the blocks that have left their group's window, unless a sample of the same
        prompt will need them, or what is provisional is computed again. Later batches may use
        them."""
        computed = request.num_settled
        request.next_trim = self.layout.next_release(computed)
        if request.siblings and computed >= request.prompt_tokens:
            if has_fresh(request.siblings) and not request.trimmed:
                computed = request.prompt_tokens - 1  # a fork computes the prompt's last token
            else:
                request.trimmed = True
        self.kv.trim(request, computed)

    def release_prompts(self) -> bool:
        """Release blocks that running requests keep only for samples of their prompts.

        Those samples will compute them again. Only if some request lacks pages; returns True if
        there are more pages then.
        """
        if not self._has_windows or not any(map(self._lacks_pages, self.running)):
            return False
        before = self.kv.available_pages
        for request in self.running:
            kept = request.siblings and not request.trimmed
            if kept and request.num_computed >= request.prompt_tokens:
                request.trimmed = True
                self._trim(request)
        return self.kv.available_pages > before

    def too_large(self) -> LiveRequest | None:
        """Return a decode that lacks pages, and would if no other request held any; None: none."""
        for request in filter(self._lacks_pages, self.running):
            others = [other for other in self.running if other is not request]
            if not request.prefill_left and self._lacks_pages(request, others):
                return request
        return None

    def _lacks_pages(self, request: LiveRequest, without: Sequence[LiveRequest] = ()) -> bool:
        """Return True if its known tokens lack pages, even if requests `without` held none."""
        if request.num_tokens <= request.capacity:
            return False
        needed = self.kv.pages_needed(request, request.num_tokens, without)
        return needed > self.kv.available_pages

    def drop_blocks(self, request: LiveRequest) -> None:
        """Release its blocks and its row."""
        request.trimmed = False
        self.rows.release(request)
        self.kv.free(request)
        request.capacity = 0
        request.num_computed = 0
        request.next_commit = request.next_trim = 0

    def requeue(self, request: LiveRequest) -> None:
        """Put a preempted request back into the waiting queue, without blocks; its tokens will be
        prefilled again."""
        self.running.remove(request)
        self.commit(request)  # what accepted drafts have filled, if no step followed
        self._tell_left(request)
        request.lost = max(request.lost, request.num_computed)
        self.drop_blocks(request)
        request.status = Status.WAITING
        request.preemptions += 1
        request.prefill_end = request.num_tokens
        self.waiting.add(request)

    def remove(self, request: LiveRequest, *, sound: bool = True) -> None:
        """Remove a finished request from the queues.

        If its blocks are `sound`, they are committed, since its output may be part of the next
        turn's prompt; they are released, unless samples of the same prompt will fork them, or a
        feature keeps them.
        """
        siblings = request.siblings
        kept = False
        if sound and request.capacity:
            self.commit(request)
            kept = self._is_kept(request)
        if request.status in (Status.RUNNING, Status.DRAINING):
            self._tell_left(request)
        if request.status is Status.GATED:
            del self.gated[request]
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is Status.RUNNING:
            self.running.remove(request)
        request.status = Status.FINISHED
        self.known.discard(request)
        for feature in self.asking.pop(request, ()):
            self.concerned[feature] -= 1
            feature.removed(request)
        if sound and self._is_forked(request):
            self.rows.release(request)
            self.lingering.append(request)
        elif kept:
            self.rows.release(request)
        else:
            self.drop_blocks(request)
        if siblings and not has_fresh(siblings):
            self.drop_lingering([r for r in self.lingering if r.siblings is siblings])

    def _is_forked(self, request: LiveRequest) -> bool:
        """Return True if samples of the same prompt will fork its blocks."""
        return bool(request.siblings) and self.forks and is_awaited(request)

    def _is_kept(self, request: LiveRequest) -> bool:
        """Return True if a feature keeps the blocks of a request that finishes."""
        features = () if self._is_forked(request) else self.asking.get(request, ())
        return any(feature.keeps(request) for feature in features)

    def _tell_left(self, request: LiveRequest) -> None:
        for feature in self.asking.get(request, ()):
            feature.left(request)

    def drop_lingering(self, requests: list[LiveRequest]) -> None:
        """Release the blocks of those of finished `requests` that still have any."""
        for request in requests:
            if request in self.lingering:
                self.lingering.remove(request)
                self.drop_blocks(request)


class Arrivals:
    """Requests that arrive later, by `arrival_time`, then `order`.

    Aborted requests stay in it until they are first, or half of it: amortized O(log n).
    """

    def __init__(self) -> None:
        self.next_time = math.inf  # when the next request arrives; infinity: none is known
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._aborted = 0  # how many of these have finished

    def __len__(self) -> int:
        """Return the number of requests, with aborted ones that are still kept."""
        return len(self._heap)

    def add(self, request: LiveRequest) -> None:
        heapq.heappush(self._heap, (request.arrival_time, request.order, request))
        self.next_time = self._heap[0][0]

    def pop(self) -> LiveRequest:
        """Remove and return the request that arrives at `next_time`, which must be finite."""
        request = heapq.heappop(self._heap)[2]
        if self._aborted:
            self._drop_aborted()
        self.next_time = self._heap[0][0] if self._heap else math.inf
        return request

    def aborted(self) -> None:
        """Note that one of the requests has finished."""
        self._aborted += 1
        self._drop_aborted()
        self.next_time = self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        self._heap.clear()
        self._aborted = 0
        self.next_time = math.inf

    def _drop_aborted(self) -> None:
        """Drop those that have finished from the top, and all of them if they are half."""
        while self._heap and self._heap[0][2].status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._aborted -= 1
        if self._aborted and 2 * self._aborted >= len(self._heap):
            self._heap = [
                arrival for arrival in self._heap if arrival[2].status is not Status.FINISHED
            ]
            heapq.heapify(self._heap)
            self._aborted = 0


class RequestQueue:
    """Requests in the order that policies see: by arrival time, then order added.

    O(log n) and a memmove; the tuple is cached until a change.
    """

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._requests: list[LiveRequest] = []
        self.cached: tuple[LiveRequest, ...] | None = ()  # all of them; None: see `as_tuple`

    def add(self, request: LiveRequest) -> None:
        key = (request.arrival_time, request.order)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)
        self.cached = None

    def remove(self, request: LiveRequest) -> None:
        """Remove `request`. Raises `ValueError` if it isn't there."""
        at = bisect_left(self._keys, (request.arrival_time, request.order))
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"{request!r} is not in the queue")
        del self._keys[at]
        del self._requests[at]
        self.cached = None

    def as_tuple(self) -> tuple[LiveRequest, ...]:
        if self.cached is None:
            self.cached = tuple(self._requests)
        return self.cached

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests)


class RowAllocator:
    """Assigns the executor's `max_num_seqs` rows.

    A request keeps its row from step to step, so that its token ids needn't be sent again; one that
    holds blocks but isn't in the step may lose its row to one that is, and gets a new one later;
    but not if its row has a state that is nowhere else.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._holders: list[LiveRequest | None] = [None] * num_rows
        self.removed: list[int] = []  # rows given up since `take_removed`
        # Requests with rows that they must keep until their last token is planned
        self.keeping: set[LiveRequest] = set()

    def release(self, request: LiveRequest) -> None:
        """Free its row, if it has one."""
        row = request.row
        if row >= 0:
            self._holders[row] = None
            self._free.append(row)
            self.removed.append(row)
            self.keeping.discard(request)
            request.row = -1

    def assign(self, request: LiveRequest) -> None:
        """Give a row to a request that runs in the step being planned and has none."""
        if not self._free:
            self.release(self._victim())
        row = self._free.pop()
        self._holders[row] = request
        request.row = row
        if request.keeps_row:
            self.keeping.add(request)

    def kept_from(self, request: LiveRequest) -> int:
        """Return how many rows `request` can't get in the step being planned, because others keep
        them, which aren't in it."""
        if request in self.keeping:
            return 0
        return sum(self._keeps(r) and not r.granted for r in self.keeping)

    def _keeps(self, holder: LiveRequest) -> bool:
        return holder in self.keeping and not holder.in_flight

    def take_removed(self) -> list[int]:
        """Return the rows given up since the last call, each once."""
        removed = sorted({*self.removed})
        self.removed = []
        return removed

    def _victim(self) -> LiveRequest:
        """Return the request to take a row from: it doesn't run in this step, has the fewest tokens
        in flight, and among such ran longest ago."""
        idle = [
            holder
            for holder in self._holders
            if holder is not None and not holder.granted and not self._keeps(holder)
        ]
        return min(idle, key=lambda r: (r.in_flight, r.decided_in))
