"""`LLMEngine`: the engine as a program uses it. It checks and tokenizes requests on their way in, and turns what the core delivers into outputs."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dovetail.api.clock import Clock, WallClock
from dovetail.checks import plain_text, shown
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import EngineStats
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front import bounds
from dovetail.front.assembly import Assembly, assemble
from dovetail.front.intake import Intake, RequestFields, make_samples
from dovetail.front.outputs import OutputBuilder, RequestGroup
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import Tokenizer
from dovetail.front.turns import Turns, in_turn
from dovetail.request import RequestOutput
from dovetail.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.front.facts import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from dovetail.front.vllm_args import EngineArgs
    from dovetail.registry.registry import Registry

logger = logging.getLogger("dovetail")

Taker = Callable[[RequestOutput | None], None]  # is given the outputs of a request, and None if it was aborted

_SHOWN = ("device", "ranks", "dtype", "quantization", "attention")  # of what the executor chose, in a repr


class LLMEngine:
    """Takes requests, computes them step by step, returns outputs. Several threads may call it: one call at a time, first come, first served. What
    a step brings goes to the one who called `step`; for a thread each that waits for its own answers see `LLM` and `AsyncLLMEngine`.

    ```python
    with LLMEngine.from_config("engine.yaml") as engine:
        engine.add_request("a", "ROMEO:", SamplingParams(max_tokens=50))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)
    ```
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self.config = assembly.config
        self.core = assembly.core
        self.capacity = assembly.capacity
        self._groups: dict[str, RequestGroup[LiveRequest]] = {}
        self._intake = Intake(assembly.intake_facts, lambda: self.tokenizer, random.Random(assembly.config.seed))
        self._builder = OutputBuilder(None)
        self.constraints_of = assembly.constraints  # what holds a request's samples to its rule; a simulation, which compiles nothing, has its own
        self._closed = False
        self._taking_list = False  # within `add_list`
        self.turns = Turns()  # of the threads that call
        self._takers: dict[str, Taker] = {}  # by request id: who gets its outputs instead of the caller of `step`
        self._kept: dict[str, list[RequestOutput]] = {}  # by request id: for the next `step`
        self._abandoned: deque[str] = deque()  # request ids; added to by any thread at any time
        if type(self.core.clock) is WallClock:
            self.core.pacing.wait_until = self._wait_until

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | EngineConfig,
        *,
        registry: Registry | None = None,
        clock: Clock | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **overrides: Any,
    ) -> LLMEngine:
        """Find the parts that the config names, put them together and load the model.

        `overrides` replace keys of the config. `clock` replaces the engine's clock, `progress(what, done, total)` hears of the loading.
        Raises `ConfigError`, `PluginError`, `UnsupportedError`, `ModelLoadError` or `MissingExtraError`, each saying what to change.
        """
        return cls(assemble(config, overrides, registry=registry, clock=clock, progress=progress))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs | EngineConfig) -> LLMEngine:
        """The engine that `EngineArgs` describe. Raises as `from_config`."""
        from dovetail.front.vllm_args import engine_config_of

        return cls.from_config(engine_config_of(engine_args))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self.core.dead is None else f"dead: {self.core.dead}"
        parts = [f"model={self.config.model.path!r}", f"max_num_seqs={self.config.max_num_seqs!r}"]
        parts += [f"{key}={getattr(self.config, key).label!r}" for key in ("scheduler", "kv_cache", "executor")]
        parts += [
            f"max_model_len={self.capacity.max_model_len}",
            *(f"{key}={self.capacity.details[key]!r}" for key in _SHOWN if key in self.capacity.details),
        ]
        return f"{type(self).__name__}({', '.join(parts)}, unfinished={len(self._groups)}, {state})"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first used. Raises `ModelLoadError` if there is none."""
        tokenizer = self._assembly.tokenizer()
        self._builder.tokenizer = tokenizer
        return tokenizer

    def add_list(self, add: Callable[[], None]) -> None:
        """Call `add`, in which `add_request` takes as many requests as it is given: `limits.max_waiting` doesn't count them. Raises what it does."""
        self.turns.take(self._add_list, add)

    @in_turn
    def add_request(
        self,
        /,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        extra: Mapping[str, Any] | None = None,
        predicted_tokens: int | None = None,
        ttft_deadline: float | None = None,
        tbt_s: float | None = None,
        **others: Any,
    ) -> None:
        """Take a request. Raises, having changed nothing, `RequestError` if something is wrong with it, `ModelLoadError` if it needs a
        tokenizer that the model doesn't have, `EngineDeadError` if the engine has failed or was closed.

        `arrival_time`, `deadline` (for the last token) and `ttft_deadline` (for the first) are seconds on the engine's clock (`engine.now()`), from
        -1e9 to 1e9; `tbt_s` is the most seconds between two tokens. Policies decide what they make of them. Until its arrival no policy sees the
        request. One that is earlier than that of a request which policies have seen is lifted to it for them, since they see requests in order of
        time: nobody comes before those who are waiting by dating back. `client` is whom policies charge. `cache_salt`: share cached K and V only
        with requests of the same salt. `extra`: per distribution, what its components want to know of the request. `predicted_tokens`: a guess of
        how many it will generate, for policies that use one.
        """
        if others:
            from dovetail.front.vllm_args import check_call

            check_call("add_request", others)
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        self._check_open()
        if not self._taking_list:
            self._check_waiting()
        fields = RequestFields(arrival_time, priority, client, deadline, cache_salt, predicted_tokens, ttft_deadline, tbt_s)
        checked = self._intake.check(request_id, prompt, params, fields, extra)
        request_id, params = checked.request_id, checked.params
        if request_id in self._groups:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        extras = self._assembly.check_extra(extra)
        came = self.now() if checked.fields.arrival_time is None else checked.fields.arrival_time
        texts = self._intake.texts(params, checked.token_ids)
        sampling = self._assembly.sampling(params, self._intake.seed_of(params), self._intake.bad_word_ids(params))
        constraints = self.constraints_of(params)
        watchers = [text if params.stop else None for text in texts]
        samples = make_samples(checked, sampling, self.core.earliest_arrival(came), watchers, extras, constraints)
        self._groups[request_id] = group = RequestGroup(request_id, checked.text, checked.token_ids, params, samples)
        group.metrics.arrival_time = came
        self._builder.expect(group, texts)
        try:
            for request in samples:
                self.core.add(request)
        except RequestError:  # the id of a sample is somebody else's
            self.abort_request(request_id)
            raise

    def tokenized(self, prompt: Prompt) -> Prompt:
        """A prompt of text with its token ids, so that `add_request` needn't tokenize it, which takes milliseconds for a long one; any other as it
        is. May be called in another thread than the engine's. Raises as `add_request` does."""
        return self._intake.tokenized(prompt)

    def all_tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """As `tokenized` each, in a fraction of the time that the texts would take one by one."""
        return self._intake.all_tokenized(prompts)

    @in_turn
    def abort_request(self, request_id: str | Sequence[str] | Set[str]) -> None:
        """End one or several; nothing more is delivered of them. An unknown id is nobody's: nothing happens. Raises `RequestError` if it is
        neither an id nor a list, tuple or set of ids."""
        for one in request_ids(request_id):
            group = self._groups.pop(one, None)
            self._kept.pop(one, None)
            if (taker := self._takers.pop(one, None)) is not None:
                taker(None)
            if group is not None:
                for sample in group.samples:
                    self.core.abort(sample)
                if self.core.dead is None:  # or its other samples are still to be delivered, as failed
                    self._forget(group)

    def step(self) -> list[RequestOutput]:
        """Compute for a while, and return what is new; perhaps nothing. Waits for the device, or for the next arrival time. What steps of an `LLM`
        brought of this engine's other requests is returned first.

        When a component fails, every unfinished request is returned once, finished with "error" and the reason; after that each call raises
        `EngineDeadError`. An interrupt (Ctrl-C) amidst a step is such a failure too, since nobody knows what was computed.
        """
        return self.turns.take(LLMEngine._step, self)  # as `in_turn`, without its objects: see `Turns.take`

    @in_turn
    def divert(self, request_id: str, taker: Taker) -> None:
        """Have the outputs of a request given to `taker`, instead of returned by `step`: within the step that brings them, in any thread."""
        self._takers[request_id] = taker

    @in_turn
    def step_for_takers(self) -> None:
        """As `step`, for those who diverted their outputs: what it brings of other requests is kept for the next `step`."""
        self._compute(keep=True)

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Have requests aborted before the next step. Unlike `abort_request` it may be called amidst another call of this thread, as the garbage
        collector does when it finalizes an object."""
        self._abandoned.extend(request_ids)

    @in_turn
    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to compute, or to return."""
        self._drop_abandoned()
        return self.core.has_unfinished() or bool(self._kept)

    @in_turn
    def get_num_unfinished_requests(self) -> int:
        """Samples of n > 1 count once."""
        self._drop_abandoned()
        return len(self._groups)

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.core.clock.now()

    @in_turn
    def stats(self) -> EngineStats:
        """Counts since the engine started, and its present state: a snapshot."""
        self._drop_abandoned()
        return dataclasses.replace(self.core.update_stats())

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Forget all cached K and V: later requests find nothing that was computed before."""
        self.core.kv.reset()

    @in_turn
    def close(self) -> None:
        """Release the model and its memory. Unfinished requests are aborted. Twice is as good as once."""
        if not self._closed:
            self._closed = True
            self.abort_request(list(self._groups))
            self._assembly.close()
            self.core.stop()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What users of vLLM ask an engine

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers that `tokenizer` covers."""
        return self.tokenizer.transformers

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that leaves everything open."""
        return SamplingParams(**self._assembly.defaults.sampling())

    def get_model_config(self) -> ModelConfig:
        from dovetail.front import facts

        return facts.model_config(self.config, self.capacity)

    def get_scheduler_config(self) -> SchedulerConfig:
        from dovetail.front import facts

        return facts.scheduler_config(self.config, self.capacity)

    def get_cache_config(self) -> CacheConfig:
        from dovetail.front import facts

        return facts.cache_config(self.config, self.capacity, enable_prefix_caching=self.core.kv.capabilities.reuse)

    def get_parallel_config(self) -> ParallelConfig:
        from dovetail.front import facts

        return facts.parallel_config(self.capacity)

    def do_log_stats(self) -> None:
        """Log what the engine has done so far, in one line at level INFO of the logger "dovetail". The observer `log` does so by itself."""
        from dovetail.front import facts

        logger.info("%s", facts.line(self.stats()))

    # Steps

    def _step(self) -> list[RequestOutput]:
        if self._kept:
            outputs = [output for kept in self._kept.values() for output in kept]
            self._kept.clear()
            return outputs
        return self._compute(keep=False)

    def _compute(self, *, keep: bool) -> list[RequestOutput]:
        """A step. What it brings of requests that nobody has diverted is returned or, to `keep`, put aside."""
        if self._closed:
            raise EngineDeadError("the engine was closed")
        self._drop_abandoned()
        delivery = self.core.step()
        if not delivery.requests and not delivery.finished and not delivery.prompt_logprobs:
            return []
        outputs = self._builder.build(delivery, self.core.clock.now())
        if keep or self._takers:
            outputs = self._hand_out(outputs, keep)
        for group in self._builder.ended_by(delivery):
            self._groups.pop(group.request_id, None)
            self._forget(group)
        return outputs

    def _hand_out(self, outputs: list[RequestOutput], keep: bool) -> list[RequestOutput]:
        """Returns what is left."""
        left = []
        for output in outputs:
            taker = self._takers.get(output.request_id)
            if taker is not None:
                if output.finished:
                    del self._takers[output.request_id]
                taker(output)
            elif keep:
                self._keep(output)
            else:
                left.append(output)
        return left

    def _keep(self, output: RequestOutput) -> None:
        kept = self._kept.setdefault(output.request_id, [])
        if kept and not kept[-1].finished and self._groups[output.request_id].params.output_kind is not OutputKind.DELTA:
            kept.pop()  # the new one holds all of it
        kept.append(output)

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self.abort_request(self._abandoned.popleft())

    def _wait_until(self, instant: float) -> None:
        """The core's idle wait, cut short for whoever wants a turn."""
        remaining = instant - self.now()
        if remaining > 0:
            self.turns.sleep(remaining)

    # Checks

    def _add_list(self, add: Callable[[], None]) -> None:
        self._taking_list = True
        try:
            add()
        finally:
            self._taking_list = False

    def _check_waiting(self) -> None:
        bounds.at_most("unfinished requests", len(self._groups) - len(self._takers) + 1, self.config.limits, "max_waiting")

    def _check_open(self) -> None:
        self.core.check_alive()
        if self._closed:
            raise EngineDeadError("the engine was closed")

    def _forget(self, group: RequestGroup[LiveRequest]) -> None:
        """It is over. Its samples refer to each other: so they would wait for the garbage collector, which looks through all of their tokens and lets
        a step wait meanwhile."""
        self._builder.forget(group)
        for sample in group.samples:
            sample.siblings = ()


def request_ids(value: Any) -> list[str]:
    """An id, or several, as a list. Raises `RequestError` for anything else."""
    if (text := plain_text(value)) is not None:
        return [text]
    if not isinstance(value, Sequence | Set) or isinstance(value, bytes | bytearray | memoryview) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"a request id must be a string, and several a list of strings, got {shown(value)}")
    return [str.__str__(one) for one in value]
