"""`Feeder`: adds a trace's requests to an engine when they are due; only the simulated executor learns their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from dovetail import LLMEngine
from dovetail.engine.constraint import Constraint
from dovetail.errors import RequestError
from dovetail.request import Request
from dovetail.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail_lab.grammars import RULE
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.token_ids import STOP_ID, output_ids, prompt_ids
from dovetail_lab.traces.request import Trace, TraceRequest

AHEAD_S = 1.0  # requests are created this long before they are due, one per step, so that no step waits for many


class Feeder:
    """Source of requests. Creates them late, since millions of prompt ids would fill the memory, but in time: the engine always has all requests that
    have arrived, and the next one, so that it knows how long it may sleep."""

    def __init__(
        self, engine: LLMEngine, simulated: SimulatedExecutor | None, trace: Trace, start: float, refused: Callable[[TraceRequest, str], None]
    ):
        """Create a feeder. The trace starts at `start` on the engine's clock; `refused(request, reason)` is called for each rejected request."""
        self._engine, self._simulated, self._start, self._refused = engine, simulated, start, refused
        self._constraints: list[Constraint] = []  # of the request being added
        if simulated is not None:
            engine.constraints_of = lambda params: self._constraints
        self._coming: Iterator[TraceRequest] = iter(trace)
        self._next = next(self._coming, None)
        self._known_until = -math.inf  # the engine has every request up to this time
        self.taken = 0  # number of requests accepted by the engine
        self._entered = 0  # number of requests charged to the host's time
        self.cut = 0  # number of requests with answers longer than the engine supports

    def feed(self, now: float) -> None:
        """Add all requests due by `now`, on the engine's clock, and the next one, unless `limits.max_waiting` are unfinished: then the next may be
        rejected, which is only known when it arrives."""
        if now + AHEAD_S < self._known_until:
            return
        soon = now + AHEAD_S if self._known_until == -math.inf else now  # before the trace starts there is time to create many
        while (request := self._next) is not None:
            arrival = self._start + request.arrival_time
            if arrival > now and self._is_full:
                return
            self._next = next(self._coming, None)
            if self.take(request, arrival) and arrival > soon:
                self._known_until = arrival
                return
        self._known_until = math.inf

    @property
    def done(self) -> bool:
        """True once all requests have been added."""
        return self._known_until == math.inf

    def take(self, request: TraceRequest, arrival: float) -> bool:
        """Add a request that arrives at `arrival` on the engine's clock. Returns False if it was rejected."""
        capacity = self._engine.capacity
        if self._simulated is not None:
            self._simulated.expect(request.id, _answer(request, capacity.vocab_size))
            self._constraints = [_constraint(self._simulated, request, arrival)] if request.grammar else []
        try:
            self._engine.add_request(
                request.id,
                prompt_ids(request, capacity.vocab_size),  # type: ignore[arg-type]  # an array of integers is as good as a list
                self._params(request),
                arrival_time=arrival,
                priority=request.priority,
                client=request.client,
                deadline=None if request.deadline is None else self._start + request.deadline,
                predicted_tokens=request.predicted_tokens,
                ttft_deadline=None if request.ttft_deadline is None else self._start + request.ttft_deadline,
                tbt_s=request.tbt_s,
            )
        except RequestError as error:
            if self._simulated is not None:
                self._simulated.forget(request.id)
            self._refused(request, str(error))
            return False
        self.taken += 1
        self.cut += request.prompt_tokens + request.output_tokens > capacity.max_model_len
        return True

    def forget(self, ended: Iterable[Request]) -> None:
        """Drop the state that the engine and the simulated executor keep of finished requests. The engine doesn't do that itself, since its core is
        stepped directly: it would count them as unfinished, and hold their prompts in memory."""
        ids = [request.id for request in ended]
        self._engine.abort_request(ids)
        if self._simulated is not None:
            for request_id in ids:
                self._simulated.forget(request_id)

    @property
    def _is_full(self) -> bool:
        most = self._engine.config.limits.max_waiting
        return most is not None and self._engine.get_num_unfinished_requests() >= most

    def let_in(self) -> None:
        """Advance the clock by the host's time for a request: one before each step, as a real engine accepts them one by one."""
        if self._simulated is not None and self._entered < self.taken:
            self._entered = self._entered + 1 if self._simulated.take_in() else self.taken

    def _params(self, request: TraceRequest) -> SamplingParams:
        """Return the request's parameters. The answer is streamed, since each token's time is measured and policies may treat streamed requests
        differently."""
        stop = (STOP_ID,) if self._simulated is not None else ()
        params = SamplingParams(max_tokens=request.limit, ignore_eos=True, detokenize=False, output_kind=OutputKind.DELTA, stop_token_ids=stop)
        return changed_unchecked(params, structured=RULE) if request.grammar else params  # real grammars would need EOS, which synthetic answers lack


def _constraint(simulated: SimulatedExecutor, request: TraceRequest, arrival: float) -> Constraint:
    return Constraint(simulated.grammars.compile(request.id, arrival), simulated.grammars.backend)


def _answer(request: TraceRequest, vocab_size: int) -> NDArray[np.int32]:
    """Return the request's true answer, followed by the stop token if it is shorter than the limit."""
    answer = output_ids(request, vocab_size)
    if request.limit > request.output_tokens:
        answer[-1] = STOP_ID
    return answer
