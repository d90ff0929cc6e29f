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
from dovetail.checks import INT64, MAX_TIME_S, as_number, is_integer, plain_integer, plain_text, shown
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.siblings import make_siblings
from dovetail.engine.stats import EngineStats
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front import bounds
from dovetail.front.assembly import Assembly, assemble
from dovetail.front.outputs import OutputBuilder, RequestGroup
from dovetail.front.prompts import Prompt, as_ids, as_sequence, content_of, is_text
from dovetail.front.stop_strings import StopStrings
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.front.turns import Turns, in_turn
from dovetail.request import RequestOutput, token_array
from dovetail.sampling_params import OutputKind, SamplingParams, changed_unchecked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.api.sampler import RowSampling
    from dovetail.config import EngineConfig
    from dovetail.front.detokenizer import IncrementalText
    from dovetail.front.facts import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
    from dovetail.front.vllm_args import EngineArgs
    from dovetail.registry.registry import Registry

logger = logging.getLogger("dovetail")

Taker = Callable[[RequestOutput | None], None]  # is given the outputs of a request, and None if it was aborted

_SHOWN = ("device", "dtype", "attention")  # of what the executor chose, in a repr
_SEED_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of samples


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
        self._groups: dict[str, RequestGroup] = {}
        self._random = random.Random(assembly.config.seed)
        self._builder = OutputBuilder(None)
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
        parts = [f"{key}={getattr(self.config, key)!r}" for key in ("model", "max_num_seqs")]
        parts += [f"{key}={getattr(self.config, key).name!r}" for key in ("scheduler", "kv_cache", "executor")]
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
        **others: Any,
    ) -> None:
        """Take a request. Raises, having changed nothing, `RequestError` if something is wrong with it, `ModelLoadError` if it needs a
        tokenizer that the model doesn't have, `EngineDeadError` if the engine has failed or was closed.

        `arrival_time` and `deadline` are seconds on the engine's clock (`engine.now()`), from -1e9 to 1e9: until its time no policy sees the
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
        request_id, client, cache_salt, priority, predicted_tokens = map(_plain, (request_id, client, cache_salt, priority, predicted_tokens))
        arrival_time, deadline = map(_seconds, (arrival_time, deadline))
        self._check_fields(request_id, arrival_time, priority, client, deadline, cache_salt, predicted_tokens)
        text, token_ids, prompt_array = self._read_prompt(prompt, params)
        self._check_params(params)
        bounds.check_size("extra", extra, self.config.limits)
        extras = self._assembly.check_extra(extra)
        came = self.now() if arrival_time is None else arrival_time
        arrival = self.core.earliest_arrival(came)
        room = self.capacity.max_model_len - len(token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > limit:  # more than there is room for: all that there is room for
            params = changed_unchecked(params, min_tokens=limit)
        texts = self._texts(params, token_ids)
        seed = params.seed if params.seed is not None else self._random.getrandbits(_SEED_BITS)
        sampling = self._assembly.sampling(params, seed % 2**_SEED_BITS)
        samples = []
        for index, sample_text in enumerate(texts):
            request = LiveRequest(
                request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_array,
                params if params.n == 1 else _params_of_sample(params, index),
                max_tokens=limit,
                sampling=sampling if index == 0 else _sampling_of_sample(sampling, seed, index),
                stop_ids=sampling.stop_token_ids,
                stopper=sample_text.append_and_check if sample_text is not None and params.stop else None,
                arrival_time=arrival,
                client=client,
                priority=priority,
                deadline=deadline,
                predicted_tokens=predicted_tokens,
                parent=None if params.n == 1 else request_id,
                cache_keys=() if cache_salt is None else (f"salt:{cache_salt}",),
                extra=extras,
            )
            samples.append(request)
        if params.n > 1:
            make_siblings(samples)
        self._groups[request_id] = group = RequestGroup(request_id, text, token_ids, params, samples)
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
        return self.all_tokenized([prompt])[0] if is_text(prompt) else prompt

    def all_tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """As `tokenized` each, in a fraction of the time that the texts would take one by one."""
        texts = {place: content for place, content in enumerate(map(content_of, prompts)) if isinstance(content, str)}
        for text in texts.values():
            self._check_text(text)
        ids = iter(self.tokenizer.encode_all(list(texts.values())) if texts else ())
        return [TokenizedText(texts[place], next(ids)) if place in texts else prompt for place, prompt in enumerate(prompts)]

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
        """Whether `step` has something to compute, or to return."""
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

        return facts.ParallelConfig()

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

    def _check_fields(self, request_id: Any, arrival: Any, priority: Any, client: Any, deadline: Any, salt: Any, predicted: Any) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, got {shown(request_id)}")
        for name, value in (("request_id", request_id), ("client", client), ("cache_salt", salt)):
            if value is None:
                continue
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string or None, got {shown(value)}")
            bounds.at_most(f"{name}: its characters", len(value), self.config.limits, "max_name_chars")
        if request_id in self._groups:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request")
        for name, value in (("arrival_time", arrival), ("deadline", deadline)):
            if value is not None and ((seconds := as_number(value)) is None or abs(seconds) > MAX_TIME_S):
                raise RequestError(
                    f"{name} must be a finite number of seconds or None, got {shown(value)}: on the engine's clock (engine.now()), from "
                    f"-{MAX_TIME_S:g} to {MAX_TIME_S:g}"
                )
        if not is_integer(priority) or not INT64[0] <= priority <= INT64[1]:
            raise RequestError(f"priority must be an integer from {INT64[0]} to {INT64[1]}, got {shown(priority)}")
        if predicted is not None and not (is_integer(predicted) and 0 <= predicted <= INT64[1]):
            raise RequestError(f"predicted_tokens must be an integer from 0 to {INT64[1]} or None, got {shown(predicted)}")

    def _check_text(self, text: str) -> None:
        """Before it is tokenized, which takes a while for a text that is far too long."""
        most = self.config.limits.max_prompt_chars
        if most is None and len(text) > self.capacity.max_model_len:
            most = self.capacity.max_model_len * self.tokenizer.longest_token
        if most is not None and len(text) > most:
            raise RequestError(f"the prompt has {len(text)} characters: at most {most} are tokenized (limits.max_prompt_chars)")

    def _read_prompt(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, tuple[int, ...], NDArray[np.int64]]:
        """Its text, if it was one, and its token ids, twice."""
        prompt = self.tokenized(prompt)
        text, given = (prompt.text, prompt.token_ids) if isinstance(prompt, TokenizedText) else (None, as_sequence(content_of(prompt)))
        room = self.capacity.max_model_len - 1
        if params.truncate_prompt_tokens is not None:
            given = given[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]
        if not given:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(given) > room:
            raise RequestError(
                f"the prompt has {len(given)} tokens; with max_model_len {self.capacity.max_model_len} at most {room} leave room for one to generate"
            )
        token_ids = as_ids(given)
        vocab_size = self.capacity.vocab_size
        try:
            numbers = token_array(token_ids)
            wrong = [int(token) for token in (numbers.min(), numbers.max()) if not 0 <= token < vocab_size]
        except OverflowError:
            wrong = [max(token_ids, key=abs)]
        if wrong:
            raise RequestError(f"prompt token id {shown(wrong[0])} is out of the vocabulary: allowed are 0 to {vocab_size - 1}")
        return text, token_ids, numbers

    def _check_params(self, params: SamplingParams) -> None:
        bounds.check_params(params, self.config.limits)
        vocab_size = self.capacity.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = [token for token in getattr(params, name) or () if token >= vocab_size]
            if wrong:
                raise RequestError(f"{name}: token id {shown(wrong[0])} is out of the vocabulary: allowed are 0 to {vocab_size - 1}")
        if not self._assembly.has_logprobs and (params.logprobs is not None or params.prompt_logprobs is not None):
            raise RequestError(f"logprobs: executor {self.config.executor.name} can't return them")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise RequestError(f"{name} must be at most the vocabulary's {vocab_size} tokens, got {getattr(params, name)}")
        unknown = sorted(set(params.extra_args) - self._assembly.extra_args)
        if unknown:
            known = ", ".join(sorted(self._assembly.extra_args)) or "none"
            raise RequestError(f"extra_args: {shown(unknown[0])} means nothing to sampler {self.config.sampler.name}; it understands: {known}")

    def _texts(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> list[IncrementalText | None]:
        """The text that each sample will grow; None, if nobody wants it."""
        if not params.detokenize:
            return [None] * params.n
        from dovetail.front.detokenizer import IncrementalText  # the tokenizers package, only if there is text to make

        stops = StopStrings(params.stop) if params.stop else None
        return [IncrementalText(self.tokenizer, params, prompt_token_ids, stops) for _ in range(params.n)]

    def _forget(self, group: RequestGroup) -> None:
        self._builder.forget(group)
        group.take_apart()


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """The prompt's log-probabilities are the first sample's business alone."""
    return changed_unchecked(params, n=1, prompt_logprobs=params.prompt_logprobs if index == 0 else None)


def _sampling_of_sample(sampling: RowSampling, seed: int, index: int) -> RowSampling:
    """That of a sample but the first, whose lists it shares."""
    return dataclasses.replace(sampling, seed=(seed + index * _GOLDEN) % 2**_SEED_BITS, prompt_logprobs=None)


def _plain(value: Any) -> Any:
    """Text and integers of exactly the types `str` and `int`, so that what was checked is what policies count with; anything else as it is, for the
    checks to refuse."""
    plain = plain_text(value) if isinstance(value, str) else plain_integer(value)
    return value if plain is None else plain


def _seconds(value: Any) -> Any:
    """As `_plain`, for floats."""
    number = as_number(value)
    return value if number is None else number


def request_ids(value: Any) -> list[str]:
    """An id, or several, as a list. Raises `RequestError` for anything else."""
    if (text := plain_text(value)) is not None:
        return [text]
    if not isinstance(value, Sequence | Set) or isinstance(value, bytes | bytearray | memoryview) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"a request id must be a string, and several a list of strings, got {shown(value)}")
    return [str.__str__(one) for one in value]
