"""`LLMEngine`: the engine's Python API.

Validates and tokenizes requests, steps the core, and builds outputs from its results.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial, wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from dovetail.api.clock import Clock, VirtualClock
from dovetail.base.checks import MAX_TIME_S, as_number
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import EngineStats
from dovetail.errors import ConfigError, EngineDeadError, RequestError, shown
from dovetail.front import engine_info, request_checks
from dovetail.front.admission import Admission, ConstraintsOf
from dovetail.front.assembly import Assembly, assemble
from dovetail.front.engine_thread import EngineThread
from dovetail.front.intake import ENABLE, Intake
from dovetail.front.media.prompts import ImagePrompts
from dovetail.front.outputs import EngineOutput, OutputBuilder, RequestGroup
from dovetail.front.pooling import PoolingIntake
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import Tokenizer
from dovetail.front.vllm_methods import SaysWhatIsMissing
from dovetail.request.lora import LoRARequest
from dovetail.request.pooling import PoolingParams
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.config.engine import EngineConfig
    from dovetail.engine.adapter import Adapter
    from dovetail.front.adapters import AdapterStore
    from dovetail.front.engine_args import EngineArgs
    from dovetail.front.engine_info import (
        CacheConfig,
        DecodingConfig,
        LoRAConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from dovetail.registry.registry import Registry

logger = logging.getLogger("dovetail")

P = ParamSpec("P")
R = TypeVar("R")

# of what the executor chose, in a repr
_SHOWN = (
    "device",
    "ranks",
    "dtype",
    "quantization",
    "attention",
)


def exclusive(
    method: Callable[Concatenate[LLMEngine, P], R],
) -> Callable[Concatenate[LLMEngine, P], R]:
    """Serialize calls of a method; if the engine has a thread, run them there, between steps."""

    @wraps(method)
    def call(self: LLMEngine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._thread is not None:
            return self._thread.call(partial(method, self, *args, **kwargs))
        with self._calling:
            self._calling.notify_all()  # ends the wait of a step
            return method(self, *args, **kwargs)

    return call


class LLMEngine(SaysWhatIsMissing):
    """Takes requests, computes them step by step, returns outputs.

    Meant for one thread. Concurrent calls are serialized, but a thread that steps in a loop may
    starve the others. `LLM` and `AsyncLLMEngine` serve many threads: each drives its engine in an
    `EngineThread`, which also runs the calls of this engine's methods, between two steps.

    ```python
    with LLMEngine.from_config("engine.yaml") as engine:
        engine.add_request("a", "ROMEO:", SamplingParams(max_tokens=50))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)
    ```
    """

    _as_ids: Callable[[Iterable[int]], Sequence[int]] = tuple  # the type of token ids in outputs

    def __init__(
        self,
        assembly: Assembly | None = None,
        *others: Any,
        constraints_of: ConstraintsOf | None = None,
        adapter_of: Callable[[LoRARequest], Adapter] | None = None,
        **named: Any,
    ) -> None:
        """Take an assembled engine: programs use `from_config` or `from_engine_args`.

        `constraints_of`, `adapter_of`: take the place of the assembly's, for a simulation, which
        compiles no rules and reads no adapters. Raises `ConfigError` for the arguments of those two.
        """
        if not isinstance(assembly, Assembly) or others or named:
            raise ConfigError(
                'an LLMEngine is made by LLMEngine.from_config("demo"), with a model or an '
                "engine.yaml, or by "
                "LLMEngine.from_engine_args(EngineArgs(model=…))"
            )
        self._assembly = assembly
        self.config = assembly.config
        self.core = assembly.core
        self.capacity = assembly.capacity
        self._groups: dict[str, RequestGroup[LiveRequest]] = {}
        self._intake = Intake(
            assembly.intake_facts, lambda: self.tokenizer, random.Random(assembly.config.seed)
        )
        self._builder = OutputBuilder(None, self._as_ids)
        self._admission = Admission(assembly, constraints_of, adapter_of)
        self._closed = False
        self._numbers = itertools.count()  # for `new_ids`
        # held during a call; released while a step waits for an arrival
        self._calling = threading.Condition()
        self._thread: EngineThread | None = None  # runs all calls, once started
        # How the core waits while it is idle; a virtual clock advances when it waits
        self._wait = None if isinstance(self.core.clock, VirtualClock) else self._wait_until

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
        """Resolve the components that the config names, assemble the engine and load the model.

        `overrides` replace keys of the config. `clock` replaces the engine's clock; `progress(what,
        done, total)` is called during loading. Raises `ConfigError`, `PluginError`,
        `UnsupportedError`, `ModelLoadError` or `MissingExtraError`, each saying what to change.
        """
        return cls(assemble(config, overrides, registry=registry, clock=clock, progress=progress))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs | EngineConfig,
        usage_context: Any = None,
        stat_loggers: Any = None,
        **others: Any,
    ) -> LLMEngine:
        """Make the engine that `EngineArgs` describe.

        The other arguments are vLLM's: `usage_context` has no effect, and a `RequestError` says
        what to use instead of the rest. Raises as `from_config`.
        """
        from dovetail.front.engine_args import engine_config_of
        from dovetail.front.vllm_calls import check_call

        given = {"usage_context": usage_context, "stat_loggers": stat_loggers}
        check_call("from_engine_args", given | others)
        return cls.from_config(engine_config_of(engine_args))

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else "running"
            if self.core.dead is None
            else f"dead: {self.core.dead}"
        )
        parts = [f"model={self.config.model.path!r}", f"max_num_seqs={self.config.max_num_seqs!r}"]
        parts += [
            f"{key}={getattr(self.config, key).label!r}"
            for key in ("scheduler", "kv_cache", "executor")
        ]
        parts += [
            f"max_model_len={self.capacity.max_model_len}",
            *(
                f"{key}={self.capacity.details[key]!r}"
                for key in _SHOWN
                if key in self.capacity.details
            ),
        ]
        return f"{type(self).__name__}({', '.join(parts)}, unfinished={len(self._groups)}, {state})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first used.

        Raises `ModelLoadError` if there is none.
        """
        tokenizer = self._assembly.tokenizer()
        self._builder.tokenizer = tokenizer
        return tokenizer

    def run_in_thread(self, flush: Callable[[], None] = lambda: None) -> EngineThread:
        """Return the `EngineThread` that runs all calls from now on, started by the first call:
        that of `LLM` or `AsyncLLMEngine`."""
        if self._thread is None:
            self._thread = EngineThread(self, flush)
        return self._thread

    def new_ids(self, count: int) -> list[str]:
        """Return ids for `add_list`: numbers as text, which no unfinished request has."""
        free = (id for number in self._numbers if (id := str(number)) not in self._groups)
        return list(itertools.islice(free, count))

    @exclusive
    def add_list(
        self,
        requests: Iterable[tuple[str, Prompt, SamplingParams | PoolingParams, Mapping[str, Any]]],
    ) -> None:
        """Add all requests (id, prompt, params, other arguments of `add_request` by name), or none.

        They are exempt from `limits.max_waiting`. Raises as `add_request`.
        """
        ids: list[str] = []
        try:
            for request_id, prompt, params, others in requests:
                fields = dict(others)
                extra = fields.pop("extra", None)
                self._add(request_id, prompt, params, RequestFields(**fields), extra, exempt=True)
                ids.append(request_id)
        except BaseException:
            self.abort_request(ids)
            raise

    @exclusive
    def add_request(
        self,
        /,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        cache_salt: str | None = None,
        extra: Mapping[str, Any] | None = None,
        predicted_tokens: int | None = None,
        ttft_deadline: float | None = None,
        tbt_s: float | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        **others: Any,
    ) -> None:
        """Add a request, which generates, or with `PoolingParams` ends with its prompt and a
        `PoolingRequestOutput`. Raises, without side effects, `RequestError` if it is invalid,
        `ModelLoadError` if it needs a tokenizer and the model has none, `EngineDeadError` if the
        engine has failed or was closed.

        `arrival_time`, `deadline` (of the last token) and `ttft_deadline` (of the first) are
        seconds on the engine's clock (`engine.now()`), from -1e9 to 1e9; larger ones are taken as
        Unix time (`time.time()`). `tbt_s` is the largest acceptable time between two tokens. They
        are objectives for the policy: no request ends because of them. Policies see a request only
        from its arrival time on, and requests in order of time: an arrival time before that of a
        request already seen is raised to it, so that backdating gains nothing. `client`: the client
        that policies charge. `cache_salt`: share cached K and V only with requests of the same
        salt. `extra`: distribution -> fields for its components. `predicted_tokens`: a predicted
        length of the output, for policies that use one. `lora_request`: the adapter to compute it
        with. It is loaded while the request waits; one that can't be used ends its requests as
        "rejected", with the reason. `trace_headers`: `traceparent` and `tracestate` of the trace
        that its span belongs to, for the observer `otlp`.
        """
        if others:
            from dovetail.front.vllm_calls import check_call

            check_call("add_request", others)
        if trace_headers:
            extra = self._assembly.values.extra_with(extra, trace_headers)
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams | PoolingParams):
            raise RequestError(
                f"params must be SamplingParams or PoolingParams, got {type(params).__name__}"
            )
        fields = RequestFields(
            arrival_time=self._on_our_clock(arrival_time),
            priority=priority,
            client=client,
            deadline=self._on_our_clock(deadline),
            cache_salt=cache_salt,
            predicted_tokens=predicted_tokens,
            ttft_deadline=self._on_our_clock(ttft_deadline),
            tbt_s=tbt_s,
            lora_request=lora_request,
        )
        self._add(request_id, prompt, params, fields, extra)

    def _on_our_clock(self, instant: Any) -> Any:
        """Convert a Unix time, which vLLM's programs pass, to the engine's clock, unless that is
        virtual."""
        seconds = as_number(instant)
        if seconds is None or seconds <= MAX_TIME_S or isinstance(self.core.clock, VirtualClock):
            return instant
        return self.now() + (seconds - time.time())

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        given: SamplingParams | PoolingParams,
        fields: RequestFields,
        extra: Mapping[str, Any] | None,
        *,
        exempt: bool = False,
    ) -> None:
        self._check_open()
        entered = self._intake.check(request_id, prompt, given, fields, extra)
        if request_id in self._groups:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        params = entered.params
        texts = self._intake.texts(entered)
        watchers = texts if params.stop else ()
        samples = self._admission.admit(entered.request, watchers, fields.client, exempt=exempt)
        ids = self._as_ids(entered.prompt_token_ids)
        media = entered.request.media
        group = RequestGroup(
            request_id, entered.prompt, ids, params, samples, reading=entered.reading, media=media
        )
        if entered.request.fields.arrival_time is not None:  # which policies may see later
            group.metrics.arrival_time = entered.request.fields.arrival_time
        self._groups[request_id] = group
        self._builder.expect(group, texts)

    def tokenized(self, prompt: Prompt, *, cut: bool = False) -> Prompt:
        """Tokenize a text prompt, so that `add_request` needn't, which takes milliseconds for a
        long one; return any other prompt unchanged. `cut`: the request's parameters truncate it, so
        it may be longer. Thread safe. Raises as `add_request` does."""
        return self._intake.prompts.tokenized(prompt, cut=cut)

    def all_tokenized(self, prompts: Sequence[Prompt], *, cut: bool = False) -> list[Prompt]:
        """Do as `tokenized` with each; batching takes a fraction of the time."""
        return self._intake.prompts.source(prompts, cut=cut).all()

    def tokenized_in_parts(
        self, prompts: Sequence[Prompt], *, cut: bool = False
    ) -> Iterator[tuple[slice, list[Prompt]]]:
        """Do as `all_tokenized`, but yield consecutive parts of the prompts and their places: all
        at once, or if there are images, as many as are prepared at once."""
        return self._intake.prompts.source(prompts, cut=cut).parts()

    @property
    def pooling(self) -> PoolingIntake:
        """Return the object that prepares prompts of pooling requests.

        Raises `RequestError` if the engine can't pool.
        """
        return self._intake.pooling

    @property
    def images(self) -> ImagePrompts | None:
        """The object that prepares images of prompts; None if the model reads none."""
        return self._intake.images

    @exclusive
    def checked_prompts(
        self, prompts: Sequence[Prompt], params: SamplingParams
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt.

        Raises as `add_request` does of a request with such a prompt and parameters; adds none.
        """
        self._check_open()
        fields = RequestFields()
        checked = [self._intake.check("unnamed", prompt, params, fields) for prompt in prompts]
        if any(one.request.media for one in checked):
            raise RequestError("beam search takes no images")
        return [tuple(one.prompt_token_ids) for one in checked]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer by default: those of the model's `generation_config.json`
        or `config.json`."""
        return self._assembly.defaults.eos_token_ids

    @exclusive
    def abort_request(self, request_id: str | Sequence[str] | Set[str]) -> None:
        """Abort one request or several: no more outputs are delivered.

        Unknown ids are ignored. Raises `RequestError` if it is neither an id nor a list, tuple or
        set of ids.
        """
        ids = request_ids(request_id)
        if self._thread is not None:
            self._thread.aborted(ids)
        for one in ids:
            if (group := self._groups.pop(one, None)) is not None:
                for sample in group.samples:
                    self.core.abort(sample)
                if (
                    self.core.dead is None
                ):  # or its other samples are still to be delivered, as failed
                    self._builder.forget(group)
                    self._admission.ended(group.samples)

    def step(self) -> list[EngineOutput]:
        """Run a step, and return the new outputs, if any.

        Waits for the device, or for the next arrival.

        For `llm.llm_engine`, of an `LLM`: return the outputs of requests added by `add_request`
        only. A call of the `LLM` in another thread computes them too; outputs that came that way
        are returned first, coalesced per request. If there are none, this runs one step, between
        two of the `LLM`'s.

        When a component fails, each unfinished request is returned once, finished with "error" and
        the reason; later calls raise `EngineDeadError`. An interrupt (Ctrl-C) within a step counts
        as a failure, since it is unknown what was computed.
        """
        if self._thread is not None:
            return self._thread.step()
        # `with` would hold an object during the step, and a few more may mean a garbage collection
        # in
        # each
        self._calling.acquire()
        try:
            return self.compute()
        finally:
            self._calling.release()

    @exclusive
    def has_unfinished_requests(self) -> bool:
        """Return True if `step` has something to compute or to return."""
        return self.core.has_unfinished() or (
            self._thread is not None and self._thread.has_unclaimed
        )

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int) -> bool:
        """Do what `has_unfinished_requests` does.

        Raises `RequestError` for a number other than 0: there is one engine.
        """
        if virtual_engine != 0:
            raise RequestError(
                f"virtual_engine must be 0, got {shown(virtual_engine)}: there is one engine"
            )
        return self.has_unfinished_requests()

    @exclusive
    def get_num_unfinished_requests(self) -> int:
        """Return the number of unfinished requests; samples of n > 1 count once."""
        return len(self._groups)

    def now(self) -> float:
        """Return the time in seconds on the engine's clock."""
        return self.core.clock.now()

    @exclusive
    def stats(self) -> EngineStats:
        """Return a snapshot of the counts since the engine started and of its present state."""
        return dataclasses.replace(self.core.update_stats())

    @exclusive
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Invalidate all cached K and V: later requests reuse nothing computed before.

        Return True. Raises `RequestError` for an option of vLLM's that isn't False.
        """
        if reset_running_requests or reset_connector:
            name = "reset_running_requests" if reset_running_requests else "reset_connector"
            raise RequestError(
                f"reset_prefix_cache(): {name}: running requests keep what they have computed, and "
                "no connector holds any: leave it out"
            )
        self.core.reset_cache()
        return True

    def close(self) -> None:
        """Abort unfinished requests, and release the model and its memory. Idempotent."""
        if self._thread is not None:
            self._thread.close()
        self._close()

    @exclusive
    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.abort_request(list(self._groups))
            self._intake.close()
            self._assembly.close()
            self.core.stop()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # vLLM's accessors

    def get_tokenizer(self) -> Any:
        """Return what `tokenizer` wraps: the tokenizer of transformers, or the component that the
        config names."""
        return self.tokenizer.own

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters."""
        return SamplingParams(**self._assembly.defaults.sampling())

    def get_model_config(self) -> ModelConfig:

        return engine_info.model_config(self.config, self.capacity, self._assembly.model_dir)

    def get_scheduler_config(self) -> SchedulerConfig:

        return engine_info.scheduler_config(self.config, self.capacity)

    def get_cache_config(self) -> CacheConfig:

        return engine_info.cache_config(
            self.config, self.capacity, enable_prefix_caching=self.core.kv.capabilities.reuse
        )

    def get_parallel_config(self) -> ParallelConfig:

        return engine_info.parallel_config(self.capacity)

    def get_decoding_config(self) -> DecodingConfig:

        return engine_info.decoding_config(self._assembly.rules.backend)

    def get_lora_config(self) -> LoRAConfig | None:
        """Return the settings of adapters; None without `adapters`."""
        return engine_info.lora_config(self.config)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter to the host before a request needs it, and wait for it.

        Raises `RequestError` if it can't be used.
        """
        self._check_open()
        adapters = self._adapters("add_lora")
        request_checks.check_name("lora_name", lora_request.lora_name, self.config.limits)
        adapters.get(lora_request).copy.result()
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget the adapters of a `lora_int_id` on the host; running requests keep theirs.

        Returns False if there are none.
        """
        return self._adapters("remove_lora").remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of the adapters on the host."""
        return self._adapters("list_loras").ids()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapters of a `lora_int_id` on the host until they are removed.

        Returns False if there are none.
        """
        return self._adapters("pin_lora").pin(lora_id)

    def _adapters(self, method: str) -> AdapterStore:
        if self._assembly.adapters is None:
            raise RequestError(f"{method}(): this engine takes no adapters: {ENABLE}")
        return self._assembly.adapters

    def do_log_stats(self) -> None:
        """Log a line of statistics at level INFO to the logger "dovetail".

        The observer `log` does so periodically.
        """
        logger.info("%s", engine_info.line(self.stats()))

    # Steps

    def compute(self) -> list[EngineOutput]:
        """Run a step in this thread, as `step` does."""
        if self._closed:
            raise EngineDeadError("the engine was closed")
        delivery = self.core.step(self._wait)
        if not delivery.requests and not delivery.finished and not delivery.prompt_logprobs:
            return []
        outputs = self._builder.build(delivery, self.core.clock.now())
        if delivery.finished:
            for group in self._builder.take_ended(delivery):
                self._groups.pop(group.request_id, None)
                self._admission.ended(group.samples)
        return outputs

    def returns_deltas(self, request_id: str) -> bool:
        """Return True if the outputs of an unfinished request are deltas."""
        group = self._groups.get(request_id)
        return group is not None and group.params.output_kind is OutputKind.DELTA

    def _wait_until(self, instant: float) -> None:
        """Wait until `instant` or another thread's call: the core's wait while it is idle."""
        remaining = min(instant - self.now(), threading.TIMEOUT_MAX)
        if remaining > 0 and self._thread is not None:
            self._thread.wait(remaining)
        elif remaining > 0:
            with self._calling:  # which `step` holds, but not a caller of `EngineCore.step`
                self._calling.wait(remaining)

    # Checks

    def _check_open(self) -> None:
        self.core.check_alive()
        if self._closed:
            raise EngineDeadError("the engine was closed")


def request_ids(value: Any) -> list[str]:
    """Return an id, or several, as a list. Raises `RequestError` for anything else."""
    if isinstance(value, str):
        return [value]
    if (
        not isinstance(value, Sequence | Set)
        or isinstance(value, bytes | bytearray | memoryview)
        or not all(isinstance(one, str) for one in value)
    ):
        raise RequestError(
            f"a request id must be a string, and several a list of strings, got {shown(value)}"
        )
    return list(value)
