"""`Pooling`: requests that end with their prompts, and yield an array instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from dovetail.api.executor import Batch, Pooled, PoolingRows
from dovetail.end_reason import EndReason
from dovetail.engine.feature import EngineFeature
from dovetail.engine.finish import Finish
from dovetail.engine.flight import Delivery, InFlightStep
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.errors import DovetailError


class Pooling(EngineFeature):
    """Marks the rows whose results are due, and delivers these."""

    asked_by = attrgetter("pooling")

    def __init__(self) -> None:
        self._running = 0  # admitted requests that pool

    def admitted(self, request: LiveRequest) -> None:
        self._running += 1

    def left(self, request: LiveRequest) -> None:
        self._running -= 1

    def fill(
        self, batch: Batch, requests: Sequence[LiveRequest], added: Sequence[LiveRequest]
    ) -> Batch:
        if not self._running:
            return batch
        due = [i for i, r in enumerate(requests) if r.pooling is not None and r.yields_token]
        yields_token = batch.yields_token.copy()
        yields_token[due] = False
        pooling = {request.row: request.pooling for request in added if request.pooling is not None}
        part = PoolingRows(pooling, np.array(due, np.int32))
        rows = (replace(row, sampling=None) if row.row in pooling else row for row in batch.added)
        return replace(
            batch, added=tuple(rows), yields_token=yields_token, parts=(*batch.parts, part)
        )

    def collected(self, flight: InFlightStep, delivery: Delivery) -> None:
        part = flight.batch.part(PoolingRows)
        pooled = flight.result.values(Pooled)
        due = [] if part is None else part.due.tolist()
        if missing := {*due} - {*pooled, *flight.result.failed}:
            raise DovetailError(
                f"step {flight.index}: the executor returned no pooled result of rows "
                f"{sorted(missing)}"
            )
        for index in due:
            request = flight.requests[index]
            if request.status is Status.FINISHED or request in delivery.finished:
                continue
            request.in_flight -= 1
            request.first_token_time = request.last_token_time = flight.results_at
            delivery.pooled.append((request, pooled[index]))
            delivery.finished[request] = Finish(EndReason.STOP)
