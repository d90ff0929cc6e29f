"""`Feeder`: adds a trace's requests to an engine when they are due; only the simulated executor
learns their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail import LLMEngine
from dovetail.errors import RequestError
from dovetail.request.lora import LoRARequest
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail.serving import AnswerRule, Constraint, MediaPrompt, at_most
from dovetail_lab.grammars import RULE
from dovetail_lab.host_times import FrontEnd
from dovetail_lab.sessions import Followers, Released
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.token_ids import STOP_ID, media_items, output_ids, prompt_ids
from dovetail_lab.traces.request import Trace, TraceRequest

if TYPE_CHECKING:
    from dovetail.serving import Delivery, Prompt

# requests are created this long before they are due, one per step, so that no step waits for many
AHEAD_S = 1.0


class SimulatedRules:
    """Holds the constraints of the request that is being added, in place of compiled ones."""

    def __init__(self) -> None:
        self.constraints: list[Constraint] = []

    def __call__(self, rule: AnswerRule, n: int, client: Hashable) -> list[Constraint]:
        return self.constraints


class Feeder:
    """Source of requests. Creates them late, since millions of prompt ids would fill the memory,
    but in time: the engine always has all requests that have arrived, and the next one, so that it
    knows how long it may sleep."""

    def __init__(
        self,
        engine: LLMEngine,
        simulated: SimulatedExecutor | None,
        trace: Trace,
        start: float,
        refused: Callable[[TraceRequest, str], None],
        rules: SimulatedRules | None = None,
        front_end: FrontEnd | None = None,
    ):
        """Create a feeder. The trace starts at `start` on the engine's clock.

        `refused(request, reason)` is called for each rejected request. `rules`: those of a
        simulated engine; None: no request has a grammar. `front_end`: of a simulated server; None:
        it takes no time.
        """
        self._engine = engine
        self._simulated = simulated
        self._start = start
        self._refused = refused
        self._rules = SimulatedRules() if rules is None else rules
        self._front_end = FrontEnd() if front_end is None else front_end
        # a front end accepts requests between tokens, which can't be known in advance
        self._ahead_s = 0.0 if self._front_end.costs else AHEAD_S
        self._followers = Followers(trace)
        self._released: list[Released] = []  # followers with an arrival time, a heap
        self._coming: Iterator[TraceRequest] = iter(
            [request for request in trace if request.id not in self._followers]
        )
        self._next = next(self._coming, None)
        self._updates = trace.length_updates
        # requests under way, if predictions of their lengths are renewed
        self._sent: dict[str, TraceRequest] = {}
        self._known_until = -math.inf  # the engine has every request up to this time
        self.taken = 0  # number of requests accepted by the engine
        self._entered = 0  # number of requests charged to the host's time
        self.cut = 0  # number of requests with answers longer than the engine supports

    def feed(self, now: float) -> None:
        """Add all requests due by `now`, on the engine's clock, and the next one, unless
        `limits.max_waiting` are unfinished: then the next may be rejected, which is only known when
        it arrives."""
        if now + self._ahead_s < self._known_until:
            return
        # before the trace starts there is time to create many
        soon = now + self._ahead_s if self._known_until == -math.inf else now
        while (request := self._first()) is not None:
            arrival = self._start + request.arrival_time
            if arrival > now and self._is_full:
                return
            if request is self._next:
                self._next = next(self._coming, None)
            else:
                heappop(self._released)
            seen = self.take(request, arrival)
            if seen is not None and seen > soon:
                self._known_until = seen
                return
        self._known_until = math.inf

    def _first(self) -> TraceRequest | None:
        """Return the request that arrives next, of those whose arrival is known."""
        released = self._released[0].request if self._released else None
        if released is None or (
            self._next is not None and self._next.arrival_time <= released.arrival_time
        ):
            return self._next
        return released

    @property
    def done(self) -> bool:
        """True once all requests have been added, or never will be."""
        return self._known_until == math.inf and not self._followers

    def take(self, request: TraceRequest, arrival: float) -> float | None:
        """Add a request that arrives at `arrival` on the engine's clock. Returns from when on the
        core sees it; None if it was rejected."""
        seen = self._front_end.accept(request.id, arrival, request.prompt_tokens)
        capacity = self._engine.capacity
        if self._simulated is not None:
            self._simulated.rows.expect(
                request.id, _answer(request, capacity.vocab_size), request.acceptance
            )
            self._rules.constraints = (
                [_constraint(self._simulated, request, seen)] if request.grammar else []
            )
        try:
            self._engine.add_request(
                request.id,
                self._prompt(request),
                self._params(request),
                arrival_time=seen,
                priority=request.priority,
                client=request.client,
                deadline=None if request.deadline is None else self._start + request.deadline,
                predicted_tokens=request.predicted_tokens,
                ttft_deadline=None
                if request.ttft_deadline is None
                else self._start + request.ttft_deadline,
                tbt_s=request.tbt_s,
                lora_request=self._adapter(request, seen),
            )
        except RequestError as error:
            if self._simulated is not None:
                self._simulated.rows.forget(request.id)
            self._refused(request, str(error))
            self._front_end.arrival(request.id, seen)
            self._abandon(request.id, request.arrival_time)
            return None
        if self._updates is not None:
            self._sent[request.id] = request
        self.taken += 1
        self.cut += request.prompt_tokens + request.output_tokens > capacity.max_model_len
        return seen

    def _adapter(self, request: TraceRequest, seen: float) -> LoRARequest | None:
        """Return the request's adapter, which the engine gets from the executor. Raises
        `RequestError` if it has no slots."""
        if request.adapter is None or self._simulated is None:
            return None
        if self._engine.capacity.adapters is None:
            raise RequestError("this engine takes no adapters: `adapters` says how many slots")
        self._simulated.adapters.arrival = seen
        return LoRARequest(request.adapter, 1, request.adapter)

    def _prompt(self, request: TraceRequest) -> Prompt:
        """Return the request's prompt. Raises `RequestError` for images that the engine can't
        compute."""
        ids: Any = prompt_ids(request, self._engine.capacity.vocab_size)  # as good as a list
        if not request.images:
            return ids  # type: ignore[no-any-return]
        media = self._engine.capacity.media
        if media is None:
            raise RequestError("this engine takes no images")
        at_most("images of a prompt", len(request.images), self._engine.config.limits, "max_images")
        rows = max(image.rows for image in request.images)
        if rows > media.cache_rows:
            raise RequestError(
                f"an image has {rows:,} rows, and at most {media.cache_rows:,} fit "
                f"(media.cache_rows)"
            )
        return MediaPrompt(None, ids, media_items(request))

    def delivered(self, delivery: Delivery) -> None:
        """Process a step's results: update predicted lengths, drop the state of finished requests,
        and release the requests that waited for them.

        The engine doesn't drop its state itself, since its core is stepped directly: it would count
        the requests as unfinished, and hold their prompts in memory.
        """
        if self._updates is not None:
            for request in delivery.requests:
                guess = self._updates.after(self._sent[request.id], request.generated)
                if guess is not None:
                    request.predicted_tokens = guess
        ids = [request.id for request in delivery.finished]
        self._engine.abort_request(ids)
        for request_id in ids:
            self._sent.pop(request_id, None)
            if self._simulated is not None:
                self._simulated.rows.forget(request_id)
        if self._followers:
            self._release(delivery)

    def _release(self, delivery: Delivery) -> None:
        """Let those arrive who waited for requests that have ended now."""
        now_s = self._front_end.last_sent(self._engine.now()) - self._start
        for request, finish in delivery.finished.items():
            if finish.reason.finish_reason not in ("stop", "length"):
                self._abandon(request.id, now_s)
            for released in self._followers.ended(request.id, now_s):
                heappush(self._released, released)
                # it may arrive before the next one that the engine has
                self._known_until = min(self._known_until, self._engine.now())

    def _abandon(self, id: str, time_s: float) -> None:
        """Refuse the requests that were to follow one that didn't complete."""
        for request, why in self._followers.failed(id, time_s):
            self._refused(request, why)

    @property
    def _is_full(self) -> bool:
        most = self._engine.config.limits.max_waiting
        return most is not None and self._engine.get_num_unfinished_requests() >= most

    def let_in(self) -> None:
        """Advance the clock by the host's time for a request: one before each step, as a real
        engine accepts them one by one."""
        if self._simulated is not None and self._entered < self.taken:
            self._entered = self._entered + 1 if self._simulated.take_in() else self.taken

    def _params(self, request: TraceRequest) -> SamplingParams | PoolingParams:
        """Return the request's parameters. The answer is streamed, since each token's time is
        measured and policies may treat streamed requests differently."""
        if request.pools:
            return PoolingParams("embed")
        stop = (STOP_ID,) if self._simulated is not None else ()
        params = SamplingParams(
            max_tokens=request.limit,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.DELTA,
            stop_token_ids=stop,
        )
        # real grammars would need EOS, which synthetic answers lack
        return changed_unchecked(params, structured=RULE) if request.grammar else params


def _constraint(simulated: SimulatedExecutor, request: TraceRequest, arrival: float) -> Constraint:
    return Constraint(simulated.grammars.compile(request.id, arrival), simulated.grammars.backend)


def _answer(request: TraceRequest, vocab_size: int) -> NDArray[np.int32]:
    """Return the request's true answer, followed by the stop token if it is shorter than the
    limit."""
    answer = output_ids(request, vocab_size)
    if request.limit > request.output_tokens:
        answer[-1] = STOP_ID
    return answer
