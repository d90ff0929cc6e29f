"""`Rig`: makes a real engine run chosen kinds of steps, and records the time of each, for
`calibrate`.

The engine is complete: its core plans, its KV-cache manager allocates blocks, its executor
computes, with overlap. Only the policy is replaced, so that a step contains what is requested, and
the executor is wrapped by a `Probe`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail import LLMEngine, SamplingParams
from dovetail.api.executor import Batch, Capacity, Executor, Result
from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.errors import DovetailError
from dovetail.request.lora import LoRARequest
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import OutputKind
from dovetail_lab.cache_layout import windows_of
from dovetail_lab.step_time import StepShape, Windows

if TYPE_CHECKING:
    from dovetail.serving import Prompt

NEVER = 1 << 30  # tokens: more than any request can have


@dataclass(slots=True)
class Sighting:
    """One step. Times are seconds on the engine's clock."""

    shape: StepShape
    planned: float  # when the core was called for a step
    submitted: float
    launched: float  # when the executor had received it
    asked: float = 0.0  # when the core started to wait for its end
    started: float = 0.0  # this and `ended` are the executor's, which reads the clock when called
    ended: float = 0.0
    delivered: float = 0.0  # 0: no request was left to receive its tokens
    added: int = 0  # number of requests that took a row
    sampled: int | None = None  # number of rows that yield a token; None: not recorded
    rehearsed: bool = False  # part of the rehearsal, not of the grid


class TimeIsUpError(Exception):
    """The time limit for measuring has passed."""


class Probe(Executor):
    """Wraps an executor and records its calls and results."""

    def __init__(self, inner: Executor, rows: int, windows: Windows = ()) -> None:
        super().__init__(inner.options, inner.context)
        self._inner = inner
        self._computed = np.zeros(rows, np.int64)
        self._windows = windows
        self._in_flight: deque[tuple[Any, Sighting]] = deque()
        self.planned = 0.0
        self.collected: list[Sighting] = []

    def start(self) -> Capacity:
        return self._inner.start()

    def submit(self, batch: Batch) -> Any:
        submitted = self.context.clock.now()
        handle = self._inner.submit(batch)
        launched = self.context.clock.now()
        for new in batch.added:
            self._computed[new.row] = new.computed
        shape = StepShape.of(batch.num_tokens, self._computed[batch.rows], self._windows)
        self._computed[batch.rows] += batch.num_tokens
        sighting = Sighting(
            shape,
            self.planned,
            submitted,
            launched,
            added=len(batch.added),
            sampled=int(batch.yields_token.sum()),
        )
        self._in_flight.append((handle, sighting))
        return handle

    def collect(self, handle: Any) -> Result:
        _, sighting = self._in_flight.popleft()
        sighting.asked = self.context.clock.now()
        result = self._inner.collect(handle)
        sighting.started = result.started
        sighting.ended = result.ended
        self.collected.append(sighting)
        return result

    def check(self) -> None:
        self._inner.check()

    def stop(self) -> None:
        self._inner.stop()


class _Script(Scheduler):
    """Grants all decodes, and at most `chunk` prompt tokens, in order of arrival."""

    capabilities = SchedulerCapabilities(
        prefill_limited=False
    )  # steps must be computed as requested
    chunk = NEVER

    def schedule(self, step: Step) -> None:
        step.grant_each(step.decoding)
        left = min(self.chunk, step.tokens_left)
        begun = [request for request in step.running if request.prefill_left]
        for request in (*begun, *step.waiting):
            if left <= 0:
                return
            grant = step.grant(request, left)
            if not grant:
                return
            left -= grant.tokens


class Rig:
    """Control of an engine: its executor is wrapped permanently, its policy replaced until
    `give_back`."""

    def __init__(self, engine: LLMEngine, until: float) -> None:
        """`until`: time limit on the machine's monotonic clock."""
        config = engine.config
        capacity = engine.capacity
        self.engine = engine
        self._until = until
        context = SchedulerContext(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            capacity.num_pages,
            capacity.layout.block_size,
            config.seed,
        )
        self._policy = engine.core.scheduler
        self._script = _Script(self._policy.options, context)
        while engine.core.idle(finish_start=True):
            pass  # else recording would be part of the steps that are measured
        self.probe = Probe(engine.core.executor, config.max_num_seqs, windows_of(capacity.layout))
        engine.core.swap(scheduler=self._script, executor=self.probe)
        self._random = np.random.default_rng(config.seed)
        self._made = 0
        self._streaming: set[str] = set()  # requests with a first token that aren't finished
        self._alive: set[str] = set()
        self.adapter: LoRARequest | None = None  # of requests that are added from now on
        self.taking_in: list[float] = []  # seconds spent on accepting each request

    @property
    def sightings(self) -> list[Sighting]:
        """Complete sightings, in order."""
        return self.probe.collected

    def has_rows_for(self, prompts: Sequence[int]) -> bool:
        """Return True if there are rows for these prompts beside the decoding requests."""
        return len(self._streaming) + len(prompts) <= self.engine.config.max_num_seqs

    def grow(self, rows: int, context: int, chunk: int = NEVER) -> None:
        """Add requests until `rows` are decoding; new ones have `context` tokens, prefilled in
        chunks beside the decodes."""
        self._script.chunk = chunk
        room = self.engine.capacity.max_model_len - context
        names = [self._add(context, room) for _ in range(rows - len(self._streaming))]
        self._run(lambda: self._streaming.issuperset(self._alive.intersection(names)))
        self._script.chunk = NEVER

    def decode(self, steps: int) -> None:
        """Run `steps` steps with the decoding requests."""
        end = len(self.sightings) + steps
        self._run(lambda: len(self.sightings) >= end)

    def inject(self, prompts: Sequence[int], then: int = 0, chunk: int = NEVER) -> None:
        """Add prompts of the given numbers of tokens to the decoding requests, if any, in one step
        or in chunks; then run `then` decode steps."""
        self._script.chunk = chunk
        names = [self._add(tokens, 1) for tokens in prompts]
        self._run(lambda: self._alive.isdisjoint(names))
        self._script.chunk = NEVER
        if self._streaming:
            self.decode(then)

    def time_of(
        self,
        prompt: Prompt,
        adapter: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
    ) -> float:
        """Run a prompt by itself, and return the seconds from its submission to the end of its last
        step. Its steps aren't among the sightings. `pooling`: it pools."""
        first = len(self.sightings)
        self.adapter = adapter
        name = self._give(prompt, 1, pooling)
        self.adapter = None
        self._run(lambda: name not in self._alive)
        steps = self.sightings[first:]
        del self.sightings[first:]
        return steps[-1].ended - steps[0].submitted

    def clear(self) -> None:
        """End all requests."""
        self.engine.abort_request(list(self._alive))
        self._alive.clear()
        self._streaming.clear()
        while self.engine.core.has_unfinished():
            self.engine.core.step()

    def give_back(self) -> None:
        """Abort all requests and restore the engine's own policy; the executor stays wrapped."""
        self.clear()
        self.engine.core.swap(scheduler=self._policy)

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        prompt = self._random.integers(1, self.engine.capacity.vocab_size, prompt_tokens)
        ids = prompt.tolist()
        begun = self.engine.now()
        name = self._give(ids, output_tokens)
        self.taking_in.append(self.engine.now() - begun)
        return name

    def _give(
        self, prompt: Prompt, output_tokens: int, pooling: PoolingParams | None = None
    ) -> str:
        name = f"calibration-{self._made}"
        self._made += 1
        params = SamplingParams(
            max_tokens=output_tokens,
            max_drafts=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL,
        )
        self.engine.add_request(name, prompt, pooling or params, lora_request=self.adapter)
        self._alive.add(name)
        return name

    def _run(self, done: Callable[[], bool]) -> None:
        core = self.engine.core
        probe = self.probe
        while not done() and core.has_unfinished():
            if time.monotonic() > self._until:
                raise TimeIsUpError
            seen = len(probe.collected)
            probe.planned = core.clock.now()
            delivery = core.step()
            if core.dead is not None:
                raise DovetailError(
                    f"the engine failed while it was measured: {core.dead}"
                ) from core.dead
            for sighting in probe.collected[seen:]:
                sighting.delivered = core.clock.now()
            self._streaming.update(request.id for request in delivery.requests)
            for request in delivery.finished:
                self._streaming.discard(request.id)
                self._alive.discard(request.id)
