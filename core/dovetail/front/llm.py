"""`LLM`: offline generation for lists of prompts."""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm  # in a notebook a widget

from dovetail.checks import BINARY, is_integer, shown
from dovetail.errors import EngineDeadError, RequestError
from dovetail.front import engine_info
from dovetail.front.beam_search import BeamSearchOutput, beam_search
from dovetail.front.chat import ChatFrontEnd, ChatOptions
from dovetail.front.chat_messages import Message
from dovetail.front.engine_thread import Aborted, Unread
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.request_checks import Prompt
from dovetail.front.vllm_args import check_call, translated
from dovetail.front.vllm_methods import SaysWhatIsMissing
from dovetail.request import RequestOutput
from dovetail.sampling_params import BeamSearchParams, OutputKind, SamplingParams, changed_unchecked


class LLM(SaysWhatIsMissing):
    """An engine for offline use. Thread safe: requests of concurrent calls are batched together.

    ```python
    outputs = LLM("demo").generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=50))
    ```
    """

    def __init__(self, model: str | Path = "demo", **overrides: Any) -> None:
        """`model`: "demo", a local directory or a hub id. `overrides`: any key of `engine.yaml`, e.g. `scheduler="priority"`, or one of vLLM's
        arguments that `dovetail.front.vllm_args` supports. Pass a whole config as `LLM(**config)`, or use `LLMEngine.from_config`."""
        self.engine = LLMEngine.from_config({"model": str(model) if isinstance(model, Path) else model}, **translated(overrides))
        self.engine.run_in_thread()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list, each text or token ids, with one `SamplingParams` for all or one for each. So are `extra` and
        `predicted_tokens`, which `LLMEngine.add_request` describes.

        Returns an output for each prompt, in the order of the prompts, whatever the `output_kind`. Raises `RequestError` if any is invalid, before
        anything is computed, and `EngineDeadError` if the engine fails or is closed meanwhile. Ctrl-C aborts the requests; the engine stays usable.
        Python's garbage collector is paused until the first step has run.
        """
        if others:
            check_call("generate", others)
        prompts = _as_list(prompts)
        params = _one_each(sampling_params, len(prompts), OutputKind.FINAL)
        fields = _fields_of_each(len(prompts), extra=extra, predicted_tokens=predicted_tokens)
        collect = gc.enable if gc.isenabled() else lambda: None  # a collection would free nothing while the device waits
        gc.disable()
        try:
            with OutputStream(self.engine, "generate", self.engine.all_tokenized(prompts), params, fields, begun=collect) as stream:
                return self._collected(stream, len(prompts), use_tqdm)
        finally:
            collect()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
    ) -> OutputStream:
        """Generate like `generate`, but return an iterator of deltas: each output holds what is new for the prompt at its `prompt_index`.

        Raises `RequestError` at once if a prompt is invalid. Closing the iterator, or leaving its `with` block, aborts unfinished requests.
        """
        prompts = _as_list(prompts)
        params = _one_each(sampling_params, len(prompts), OutputKind.DELTA)
        fields = _fields_of_each(len(prompts), extra=extra, predicted_tokens=predicted_tokens)
        return OutputStream(self.engine, "stream", self.engine.all_tokenized(prompts), params, fields)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the model's chat template or the given one. The other options are those of
        `dovetail.front.chat.ChatOptions` and of `generate`. Raises `RequestError` if there is no template, it rejects a conversation, or an option
        is invalid."""
        if others:
            check_call("chat", others)
        options = ChatOptions(
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts: list[Prompt] = [*self._chat.prompts(_conversations(messages), options)]
        return self.generate(prompts, sampling_params, use_tqdm, extra=extra, predicted_tokens=predicted_tokens)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most probable answers to one prompt or a list, each text or token ids, as beam search finds them.

        Returns an output for each prompt, in order. `concurrency_limit`: the most prompts searched at a time; None: as many as the engine has seats
        for, counting beams. Raises and ends as `generate` does; concurrent calls share steps.
        """
        if others:
            check_call("beam_search", others)
        prompts = _as_list(prompts)
        generate = partial(self.generate, use_tqdm=False)
        with tqdm(total=len(prompts), desc="prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return beam_search(self.engine, generate, prompts, params, concurrency_limit, bar.update)

    @cached_property
    def _chat(self) -> ChatFrontEnd:
        return ChatFrontEnd(self.engine.tokenizer, self.engine.config.limits, self.engine.capacity.max_model_len)

    @property
    def llm_engine(self) -> LLMEngine:
        """The same as `engine`."""
        return self.engine

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, as `LLMEngine.get_tokenizer` does."""
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters, from its `generation_config.json`, if it has one."""
        return self.engine.default_sampling_params()

    def get_metrics(self) -> list[engine_info.Metric]:
        """Return the counts of `LLMEngine.stats` as a list of metrics."""
        return engine_info.metrics(self.engine.stats())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Do what `LLMEngine.reset_prefix_cache` does."""
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def close(self) -> None:
        """Close the engine, as `LLMEngine.close` does."""
        if "_chat" in vars(self):  # it was used
            self._chat.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _collected(self, stream: OutputStream, count: int, use_tqdm: bool) -> list[RequestOutput]:
        """Wait until all have finished."""
        outputs: dict[int, RequestOutput] = {}
        with tqdm(total=count, desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            speed = _Speed(self.engine)
            for output in stream:
                outputs[output.prompt_index] = output
                bar.set_postfix_str(speed.text(), refresh=False)
                bar.update()
        return [outputs[place] for place in range(count)]


class OutputStream:
    """An iterator of outputs, and a context that ends with `close`. One thread reads it. The engine doesn't wait for the reader: deltas that it
    hasn't read are joined, for each prompt."""

    def __init__(
        self,
        engine: LLMEngine,
        name: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        fields: Sequence[Mapping[str, Any]],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Add all requests or none, before any is computed, under ids that no other caller uses; `begun` is called after the next step. `fields`:
        other arguments of `LLMEngine.add_request`, by name. Raises as that does."""
        self._thread = thread = engine.run_in_thread()
        self._ready: SimpleQueue[str] = SimpleQueue()  # ids of requests whose `Unread` has something
        prefix = f"{name}-{secrets.token_hex(4)}"
        self._readers = {  # of unfinished requests, by id, in the order of the prompts
            (id := f"{prefix}-{place}"): Unread(partial(self._ready.put, id), joins=one.output_kind is OutputKind.DELTA)
            for place, one in enumerate(params)
        }
        readers = dict(self._readers)

        def add() -> None:
            engine.add_list(zip(readers, prompts, params, fields, strict=True))
            for request_id, unread in readers.items():
                thread.read(request_id, unread)
            thread.submit(begun)

        try:
            thread.call(add)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> RequestOutput:
        """Wait for the next output. Raises `EngineDeadError` if the engine has failed or was closed, `RequestError` if another caller aborted a
        request, and Ctrl-C; the stream is closed then."""
        try:
            while self._readers:
                request_id = self._ready.get()
                output, end = self._readers[request_id].take()
                if output is not None:
                    output.prompt_index = int(request_id.rpartition("-")[2])
                    if output.finished:
                        del self._readers[request_id]
                    elif end is not None:
                        self._ready.put(request_id)  # the next call raises it
                    return output
                if isinstance(end, Aborted):
                    raise RequestError("a request of this call was aborted by another caller")
                if end is not None:
                    raise EngineDeadError(f"the engine died while it generated: {end}") from end
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort what is unfinished; nothing more comes. Idempotent. Takes no lock and waits for nothing, so that finalizers may call it."""
        readers, self._readers = self._readers, {}
        for request_id, unread in readers.items():
            self._thread.abandon(request_id, unread)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Speed:
    """The speeds that the progress bar shows beside the count."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._begun = time.perf_counter()
        self._before = engine.stats()

    def text(self) -> str:
        stats, elapsed = self._engine.core.stats, max(time.perf_counter() - self._begun, 1e-9)
        prefill = (stats.prefill_tokens - self._before.prefill_tokens) / elapsed
        decode = (stats.decode_tokens - self._before.decode_tokens) / elapsed
        return f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


def _as_list(prompts: Any) -> list[Prompt]:
    """Return a list of prompts; a list that begins with an integer is one prompt, and so is a one-dimensional array."""
    if isinstance(prompts, str | BINARY | Mapping) or getattr(prompts, "ndim", 2) < 2:
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be text, token ids, or a list of these, got {shown(prompts)}")
    prompts = list(prompts)
    return [prompts] if prompts and is_integer(prompts[0]) else prompts


def _one_each(params: Any, count: int, kind: OutputKind) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts, with outputs of that kind. Raises `RequestError`."""
    if params is None or isinstance(params, SamplingParams):
        return [changed_unchecked(params or SamplingParams(), output_kind=kind)] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"sampling_params must be SamplingParams, or a list with one for each prompt, got {shown(params)}")
    if len(params) != count:
        raise RequestError(f"sampling_params must be one or one for each prompt: got {len(params)} for {count} prompts")
    return [changed_unchecked(one, output_kind=kind) for one in params]


def _fields_of_each(count: int, **given: Any) -> list[dict[str, Any]]:
    """Return the fields of each of `count` requests, by name; each is given once for all of them, or in a list of one for each. Raises
    `RequestError`."""
    fields: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in given.items():
        if value is None:
            continue
        each = value if isinstance(value, list | tuple) else [value] * count
        if len(each) != count:
            raise RequestError(f"{name} must be one or one for each prompt: got {len(each)} for {count} prompts")
        for place, one in enumerate(each):
            fields[place][name] = one
    return fields


def _conversations(messages: Any) -> Sequence[Any]:
    """Return a list of conversations, given one (a list of messages) or several."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list like [{{"role": "user", "content": "…"}}], or a list of such lists, got {shown(messages)}')
    return messages if all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in messages) else [messages]
