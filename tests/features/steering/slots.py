"""The loop's side: a request takes a slot when it is admitted, and gives it back when it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dovetail.api.executor import Batch
from dovetail.api.scheduler import Refusal
from dovetail.engine.feature import EngineFeature
from dovetail.engine.live_request import LiveRequest
from tests.features.steering.parts import SteeringRows, vector_of


class SteeringSlots(EngineFeature):
    """The slots of one engine, one for each running request with a vector. Batches run in order, so
    a slot that was given back may be taken while steps in flight still read it."""

    asked_by = staticmethod(vector_of)

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(1, 1 + count))
        self._slots: dict[LiveRequest, int] = {}
        self._were_taken = False  # all, when the step began

    def arrived(self, request: LiveRequest) -> None:
        request.cache_keys = (*request.cache_keys, f"steering:{vector_of(request)}")

    def open_step(self, now: float, waiting: Iterable[LiveRequest]) -> bool:
        self._were_taken = not self._free
        return self._were_taken and any(vector_of(request) is not None for request in waiting)

    def refuses(self, request: LiveRequest) -> Refusal | None:
        if self._were_taken:
            return Refusal.NOT_NOW
        return None if self._free else Refusal.ADAPTERS

    def admitted(self, request: LiveRequest) -> None:
        self._slots[request] = self._free.pop()

    def left(self, request: LiveRequest) -> None:
        self._free.append(self._slots.pop(request))

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        rows = {
            request.row: (self._slots[request], name)
            for request in added
            if (name := vector_of(request)) is not None
        }
        return replace(batch, parts=(*batch.parts, SteeringRows(rows))) if rows else batch

    @property
    def free(self) -> int:
        """Number of slots that no request has."""
        return len(self._free)
