"""LoRA adapters: which one each slot of the device's bank holds, and which requests may use one.

A request takes its adapter's slot with the grant that admits it, and keeps it while it runs.
Unused slots keep their adapters; the one unused for the longest time is overwritten first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from dovetail.api.executor import AdapterLoad, AdapterRows, Batch
from dovetail.api.observer import StepFinished
from dovetail.api.scheduler import Refusal
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest

if TYPE_CHECKING:
    from dovetail.engine.adapter import Adapter


@dataclass(slots=True, eq=False)
class _Slot:
    number: int  # in the bank, from 1
    digest: str | None = None  # of the adapter that it holds, or is to hold
    loaded: bool = False  # a batch with the load was built
    users: int = 0  # requests that run with it
    used_since: float = 0.0
    read_until: int = -1  # the last step that may read it


class AdapterSlots(EngineFeature):
    """The slots of one engine. An adapter is named by its digest.

    When an adapter has waited for `wait_s` seconds, no new request joins the adapter that has been
    used longest, and the next slot that becomes free is kept for the one that waits. It is offered
    to the policy for as long again.
    """

    asked_by = attrgetter("adapter")

    def __init__(self, count: int, wait_s: float) -> None:
        self.count = count
        self._wait_s = wait_s
        self._holding: dict[str, _Slot] = {}  # digest -> its slot
        # the one unused for the longest time first
        self._unused = dict.fromkeys(_Slot(number + 1) for number in range(count))
        self._changed: dict[_Slot, Adapter] = {}  # taken for another adapter since the last batch
        self._hidden: frozenset[str] = frozenset()  # digests that could get no slot at `open_step`
        self._free = count  # unused ones that no step in flight reads
        # The last step of each, of those while requests with adapters are in the engine: no other
        # step reads a slot.
        self._submitted = self._collected = -1
        self._now = 0.0
        # digest that can get no slot -> since when; the longest first
        self._waiting: dict[str, float] = {}
        self._first: str | None = None  # the digest that has waited for too long
        self._offered: float | None = None  # since when a slot has been kept for it
        self._closed: _Slot | None = None  # no new request joins its adapter
        self.loads = 0  # in all

    def arrived(self, request: LiveRequest) -> None:
        request.cache_keys = (*request.cache_keys, f"adapter:{_digest(request)}")

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        if (
            self._free - self._kept() > 0
        ):  # after the last step there was a slot for each: the policy left it
            self._waiting = {
                digest: since for digest, since in self._waiting.items() if digest == self._first
            }
        self._now = now
        self._free = sum(slot.read_until <= self._collected for slot in self._unused)
        wanted = dict.fromkeys(r.adapter.digest for r in waiting if r.adapter is not None)
        self._waiting = {
            digest: since
            for digest, since in self._waiting.items()
            if digest in wanted and not self._is_used(digest)
        }
        self._find_first()
        hidden = [digest for digest in wanted if not self._can_take(digest)]
        for digest in hidden:
            if not self._is_used(digest):
                self._waiting.setdefault(digest, now)
        self._hidden = frozenset(hidden)
        return bool(hidden)

    def _find_first(self) -> None:
        """Find the adapter that has waited for too long, and keep a slot for it, or close the one
        used longest."""
        first = next(
            (
                digest
                for digest, since in self._waiting.items()
                if self._now - since >= self._wait_s
            ),
            None,
        )
        if first != self._first or not self._free:
            self._first = first
            self._offered = None
        self._closed = None
        if first is None:
            return
        if not self._free:
            used = [slot for slot in self._holding.values() if slot.users]
            self._closed = (
                min(used, key=lambda slot: slot.used_since) if len(used) == self.count else None
            )
        elif self._offered is None:
            self._offered = self._now
        elif (
            self._now - self._offered >= self._wait_s
        ):  # the policy prefers others, which shall not wait for it
            del self._waiting[first]
            self._first = self._offered = None

    def refuses(self, request: LiveRequest) -> Refusal | None:
        digest = _digest(request)
        if digest in self._hidden:
            return Refusal.NOT_NOW
        return None if self._can_take(digest) else Refusal.ADAPTERS

    def _can_take(self, digest: str) -> bool:
        """Return True if a request may be admitted with that adapter now."""
        slot = self._holding.get(digest)
        if slot is not None and slot.users:
            return slot is not self._closed
        takes_free = slot is None or slot.read_until <= self._collected
        return self._free - takes_free >= (0 if digest == self._first else self._kept())

    def admitted(self, request: LiveRequest) -> None:
        """Give it its adapter's slot: that which has it, or a free one."""
        adapter = request.adapter
        assert adapter is not None
        slot = self._holding.get(adapter.digest)
        if slot is None:
            free = (slot for slot in self._unused if slot.read_until <= self._collected)
            slot = min(free, key=lambda slot: slot.digest is not None)
            if slot.digest is not None:
                del self._holding[slot.digest]
            slot.digest = adapter.digest
            slot.loaded = False
            self._holding[adapter.digest] = slot
            self._changed[slot] = adapter
        if not slot.users:
            self._free -= slot.read_until <= self._collected
            del self._unused[slot]
            slot.used_since = self._now
        slot.users += 1

    def left(self, request: LiveRequest) -> None:
        """Take its slot back. Steps in flight may still read it."""
        slot = self._holding[_digest(request)]
        slot.users -= 1
        if slot.loaded:
            slot.read_until = self._submitted
        if slot.users:
            return
        if not slot.loaded:  # taken in the step being planned, and given back in it
            del self._holding[_digest(request)], self._changed[slot]
            slot.digest = None
        self._unused[slot] = None
        self._free += slot.read_until <= self._collected

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        slots = {request.row: slot for request in added if (slot := self.slot_of(request))}
        if not slots and not self._changed:
            return batch
        return replace(batch, parts=(*batch.parts, AdapterRows(self.take_loads(), slots)))

    def slot_of(self, request: LiveRequest) -> int:
        """Return the number of the slot that a running request uses; 0: none."""
        return 0 if request.adapter is None else self._holding[request.adapter.digest].number

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return what the next batch has to load, once."""
        changed = self._changed
        self._changed = {}
        for slot in changed:
            slot.loaded = True
        self.loads += len(changed)
        return tuple(
            AdapterLoad(slot.number, adapter.path, adapter.digest)
            for slot, adapter in changed.items()
        )

    def submitted(self, step: int) -> None:
        self._submitted = step

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        self._collected = flight.index

    def observed(self, flight: InFlightStep, event: StepFinished) -> StepFinished:
        part = flight.batch.part(AdapterRows)
        return replace(event, adapter_loads=0 if part is None else len(part.loads))

    def forget(self) -> None:
        """Note that all slots are empty: another executor has a bank of its own."""
        self._holding.clear()
        for slot in self._unused:
            slot.digest = None
            slot.loaded = False
            slot.read_until = -1

    @property
    def used(self) -> int:
        """Number of slots that running requests use."""
        return self.count - len(self._unused)

    def _kept(self) -> int:
        """Return the number of free slots that are kept for the adapter that has waited for too
        long."""
        return int(self._first is not None and not self._is_used(self._first))

    def _is_used(self, digest: str) -> bool:
        return digest in self._holding and self._holding[digest].users > 0


def _digest(request: LiveRequest) -> str:
    """Return the digest of the adapter of a request that has one."""
    assert request.adapter is not None
    return request.adapter.digest
