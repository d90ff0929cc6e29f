"""`Recorder`: records each request, and a row of the timeline per step, while an engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.request import Request
from dovetail_lab.host_times import FrontEnd
from dovetail_lab.records import RequestRecord, Timeline
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.token_ids import STOP_ID
from dovetail_lab.traces.request import Trace, TraceRequest
from dovetail_lab.traces.transform import arriving_at

if TYPE_CHECKING:
    from dovetail.serving import Delivery, EngineCore, Finish


class Recorder:
    """Records the core's deliveries. Times are in seconds after `start`, the start of the trace on
    the engine's clock."""

    def __init__(
        self, core: EngineCore, trace: Trace, start: float, front_end: FrontEnd | None = None
    ) -> None:
        self._core = core
        self._trace = trace
        self._start = start
        self._front_end = FrontEnd() if front_end is None else front_end
        self._of_trace = {request.id: request for request in trace}
        self._token_times: dict[str, list[float]] = {request.id: [] for request in trace}
        self._records: dict[str, RequestRecord] = {}
        self._steps: list[tuple[float, ...]] = []  # counts since the start
        self._simulated = core.executor if isinstance(core.executor, SimulatedExecutor) else None
        self._num_steps = 0

    def take(self, delivery: Delivery) -> None:
        """Record the result of a call of `EngineCore.step`."""
        now = self._core.clock.now()
        times = self._token_times
        pooled = [request for request, _ in delivery.pooled]
        sent = self._front_end.send(now, len(delivery.requests) + len(pooled))
        for request in (*delivery.requests, *pooled):
            times[request.id].append(sent)
        if self._core.stats.steps != self._num_steps:
            self._note_step(now - self._start)
        for request, finish in delivery.finished.items():
            self._finished(request, finish, sent - self._start)

    def refused(self, request: TraceRequest, reason: str) -> None:
        """Record that the engine rejected a request."""
        self._records[request.id] = RequestRecord(
            **_of_trace(request),
            first_scheduled_s=None,
            token_times_s=np.empty(0),
            finished_s=request.arrival_time,
            max_tokens=request.limit,
            finish_reason="rejected",
            stop_reason=reason,
        )

    @property
    def num_finished(self) -> int:
        return len(self._records)

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """Return the records of all requests, in the order of the trace, once all have ended."""
        return tuple(self._records[request.id] for request in self._trace)

    @property
    def ended(self) -> Mapping[str, RequestRecord]:
        """Records of the requests that have ended so far, by id."""
        return self._records

    @property
    def timeline(self) -> Timeline:
        return Timeline.of_totals(self._steps)

    def _note_step(self, time_s: float) -> None:
        """Record the engine's counters after a step."""
        stats = self._core.update_stats()
        self._num_steps = stats.steps
        pages = stats.pages
        self._steps.append(
            (
                time_s,
                stats.device_s,
                stats.waiting,
                stats.running,
                stats.prefill_tokens,
                stats.decode_tokens,
                stats.generated_tokens,
                stats.cached_tokens,
                stats.recomputed_tokens,
                stats.preemptions,
                pages.empty,
                pages.held,
                pages.cached,
                0.0 if self._simulated is None else self._simulated.masks_s,
                stats.draft_rows,
                stats.draft_tokens,
                sum(stats.accepted_drafts),
            )
        )

    def _finished(self, request: Request, finish: Finish, time_s: float) -> None:
        scheduled = request.first_scheduled_time
        of_trace = self._of_trace[request.id]
        arrival = self._front_end.arrival(request.id, request.arrival_time)
        if of_trace.after:  # the trace has its earliest arrival only
            of_trace = arriving_at(of_trace, arrival - self._start)
        self._records[request.id] = RequestRecord(
            **_of_trace(of_trace),
            first_scheduled_s=None if scheduled is None else scheduled - self._start,
            token_times_s=np.array(self._token_times.pop(request.id), np.float64) - self._start,
            finished_s=time_s,
            max_tokens=request.max_tokens,
            finish_reason=finish.reason.finish_reason,
            stop_reason=None if finish.stop_reason == STOP_ID else finish.stop_reason,
            cached_tokens=request.cached_tokens,
            restored_tokens=request.restored_tokens,
            preemptions=request.preemptions,
            recomputed_tokens=request.recomputed_tokens,
        )


def _of_trace(request: TraceRequest) -> dict[str, Any]:
    """Return the fields of a record that come from the trace."""
    return {
        "id": request.id,
        "client": request.client,
        "arrival_s": request.arrival_time,
        "prompt_tokens": request.prompt_tokens,
        "true_tokens": request.output_tokens,
        "predicted_tokens": request.predicted_tokens,
        "priority": request.priority,
        "deadline_s": request.deadline,
        "grammar": request.grammar,
        "session": request.session,
        "waited": bool(request.after),
    }
