"""`LLMEngine`: the engine as a program uses it. It checks and tokenizes requests on their way in, and turns what the core delivers into outputs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dovetail.api.clock import Clock
from dovetail.checks import BINARY, INT64, MAX_TIME_S, as_number, is_integer, shown
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.siblings import make_siblings
from dovetail.engine.stats import EngineStats
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front import bounds
from dovetail.front.assembly import Assembly, assemble
from dovetail.front.outputs import OutputBuilder, RequestGroup
from dovetail.front.stop_strings import StopStrings
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request import RequestOutput, token_array
from dovetail.sampling_params import SamplingParams, changed_unchecked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.api.sampler import RowSampling
    from dovetail.config import EngineConfig
    from dovetail.front.detokenizer import IncrementalText
    from dovetail.registry.registry import Registry

Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedText  # text, token ids, or {"prompt": …} / {"prompt_token_ids": …}

_SEED_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of samples


class LLMEngine:
    """Takes requests, computes them step by step, returns outputs. One thread calls it; see `AsyncLLMEngine` for several.

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

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when first used. Raises `ModelLoadError` if there is none."""
        tokenizer = self._assembly.tokenizer()
        self._builder.tokenizer = tokenizer
        return tokenizer

    def add_request(
        self,
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
    ) -> None:
        """Take a request. Raises, having changed nothing, `RequestError` if something is wrong with it, `ModelLoadError` if it needs a
        tokenizer that the model doesn't have, `EngineDeadError` if the engine has failed or was closed.

        `arrival_time` and `deadline` are seconds on the engine's clock (`engine.now()`), from -1e9 to 1e9: until its time no policy sees the
        request. `client` is whom policies charge. `cache_salt`: share cached K and V only with requests of the same salt. `extra`: per distribution,
        what its components want to know of the request. `predicted_tokens`: a guess of how many it will generate, for policies that use one.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        self._check_open()
        self._check_fields(request_id, arrival_time, priority, client, deadline, cache_salt, predicted_tokens)
        text, token_ids, prompt_array = self._read_prompt(prompt, params)
        self._check_params(params)
        bounds.check_size("extra", extra, self.config.limits)
        extras = self._assembly.check_extra(extra)
        arrival = self.now() if arrival_time is None else float(arrival_time)
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
                priority=int(priority),
                deadline=None if deadline is None else float(deadline),
                predicted_tokens=None if predicted_tokens is None else int(predicted_tokens),
                parent=None if params.n == 1 else request_id,
                cache_keys=() if cache_salt is None else (f"salt:{cache_salt}",),
                extra=extras,
            )
            samples.append(request)
        if params.n > 1:
            make_siblings(samples)
        self._groups[request_id] = group = RequestGroup(request_id, text, token_ids, params, samples)
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
        texts = {place: content for place, content in enumerate(map(_content, prompts)) if isinstance(content, str)}
        for text in texts.values():
            self._check_text(text)
        ids = iter(self.tokenizer.encode_all(list(texts.values())) if texts else ())
        return [TokenizedText(texts[place], next(ids)) if place in texts else prompt for place, prompt in enumerate(prompts)]

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End one or several; nothing more is delivered of them. An unknown id is nobody's: nothing happens."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            group = self._groups.pop(one, None)
            if group is not None:
                for sample in group.samples:
                    self.core.abort(sample)
                if self.core.dead is None:  # or its other samples are still to be delivered, as failed
                    self._forget(group)

    def step(self) -> list[RequestOutput]:
        """Compute for a while, and return what is new; perhaps nothing. Waits for the device, or for the next arrival time.

        When a component fails, every unfinished request is returned once, finished with "error" and the reason; after that each call raises
        `EngineDeadError`. An interrupt (Ctrl-C) amidst a step is such a failure too, since nobody knows what was computed.
        """
        if self._closed:
            raise EngineDeadError("the engine was closed")
        delivery = self.core.step()
        if not delivery.requests and not delivery.finished and not delivery.prompt_logprobs:
            return []
        outputs = self._builder.build(delivery, self.core.clock.now())
        for group in self._builder.ended_by(delivery):
            self._groups.pop(group.request_id, None)
            self._forget(group)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished()

    def get_num_unfinished_requests(self) -> int:
        """Samples of n > 1 count once."""
        return len(self._groups)

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.core.clock.now()

    def stats(self) -> EngineStats:
        """Counts since the engine started, and its present state: a snapshot."""
        return dataclasses.replace(self.core.update_stats())

    def reset_prefix_cache(self) -> None:
        """Forget all cached K and V: later requests find nothing that was computed before."""
        self.core.kv.reset()

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

    # Checks

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
        text, given = (prompt.text, prompt.token_ids) if isinstance(prompt, TokenizedText) else (None, _as_sequence(_content(prompt)))
        room = self.capacity.max_model_len - 1
        if params.truncate_prompt_tokens is not None:
            given = given[-(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :]
        if not given:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(given) > room:
            raise RequestError(
                f"the prompt has {len(given)} tokens; with max_model_len {self.capacity.max_model_len} at most {room} leave room for one to generate"
            )
        token_ids = _as_ids(given)
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


def is_text(prompt: Any) -> bool:
    """Whether it is still to be tokenized. Raises `RequestError` for what can't be a prompt."""
    return isinstance(_content(prompt), str)


def _content(prompt: Any) -> Any:
    """What a prompt holds: text if it says so, else what should be token ids."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
        keys = shown(list(prompt))
        raise RequestError(f'a prompt given as a mapping must be {{"prompt": …}} or {{"prompt_token_ids": …}}, got the keys {keys}')
    [(key, content)] = prompt.items()
    if (key == "prompt") != isinstance(content, str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(f'the prompt\'s "{key}" must be {expected}, got {shown(content)}')
    return content


def _as_sequence(prompt: Any) -> Sequence[Any]:
    """A list, tuple, numpy array or torch tensor, as something to be cut and counted. Raises `RequestError`."""
    ids = prompt if isinstance(prompt, BINARY) or not hasattr(prompt, "tolist") else prompt.tolist()
    if isinstance(ids, BINARY) or not isinstance(ids, Sequence):
        raise RequestError(f"the prompt must be text or a list of token ids, got {shown(prompt)}")
    return ids if isinstance(ids, list | tuple | range) else tuple(ids)


def _as_ids(ids: Sequence[Any]) -> tuple[int, ...]:
    """Integers of any kind, as ints. Raises `RequestError`."""
    if [type(token) for token in ids].count(int) == len(ids):  # nearly always, and quickly seen
        return tuple(ids)
    for token in ids:
        if not is_integer(token):
            raise RequestError(f"the prompt's token ids must be integers, got {shown(token)}")
    return tuple(int(token) for token in ids)
