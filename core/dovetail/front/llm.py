"""`LLM`: generate for a list of prompts and be done."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tqdm.auto import tqdm  # in a notebook a widget

from dovetail.checks import BINARY, is_integer, shown
from dovetail.errors import RequestError
from dovetail.front import facts
from dovetail.front.chat import ChatFrontEnd, ChatOptions
from dovetail.front.chat_messages import Message
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.own_requests import OwnRequests
from dovetail.front.prompts import Prompt
from dovetail.front.vllm_args import check_call, translated
from dovetail.request import RequestOutput
from dovetail.sampling_params import OutputKind, SamplingParams, changed_unchecked


class LLM:
    """An engine for offline use. Several threads may use one: what they ask for at the same time runs in the same steps.

    ```python
    outputs = LLM("demo").generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=50))
    ```
    """

    def __init__(self, model: str | Path = "demo", **overrides: Any) -> None:
        """`model`: "demo", a local directory or a hub id. `overrides`: any key of `engine.yaml`, e.g. `scheduler="priority"`, or an argument of
        vLLM's that has a meaning here (see `dovetail.front.vllm_args`). A whole config goes through `LLM(**config)` or `LLMEngine.from_config`."""
        self.engine = LLMEngine.from_config({"model": str(model) if isinstance(model, Path) else model}, **translated(overrides))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts: one or a list, each text or token ids; with one `SamplingParams`, or one each.

        Returns an output for each prompt, in the order of the prompts, whatever the `output_kind`. Raises `RequestError` if any is wrong, before
        anything is computed, and `EngineDeadError` if the engine fails on the way or is closed. Ctrl-C takes effect when the step under way is
        done: nothing stays behind, and the engine can be used again; a second one takes effect at once, and may be the engine's end.
        Until the first step runs, Python's garbage collector is held back.
        """
        check_call("generate", others)
        prompts = _as_list(prompts)
        params = _one_each(sampling_params, len(prompts), OutputKind.FINAL)
        with _CollectorHeld() as collector, OwnRequests(self.engine, "generate") as requests:  # interrupted or not, nothing stays behind
            requests.add(self.engine.all_tokenized(prompts), params)
            return self._run(requests, len(prompts), use_tqdm, collector)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> OutputStream:
        """Generate like `generate`, but return an iterator of deltas as they are computed: an output holds what is new for the prompt at its
        `prompt_index`.

        Raises `RequestError` at once if a prompt is wrong. Closing the iterator, or leaving its `with` block, aborts what is unfinished.
        """
        prompts = _as_list(prompts)
        params = _one_each(sampling_params, len(prompts), OutputKind.DELTA)
        requests = OwnRequests(self.engine, "stream")
        stream = OutputStream(requests)  # first: it is what gives up its requests if this is interrupted
        requests.add(self.engine.all_tokenized(prompts), params)
        return stream

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
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the model's chat template or the one that is given; `dovetail.front.chat.ChatOptions` says
        what the other options do. Raises `RequestError` if the model has no template, it refuses a conversation, or an option is wrong."""
        check_call("chat", others)
        options = ChatOptions(
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        prompts: list[Prompt] = [*self._chat.prompts(_conversations(messages), options)]
        return self.generate(prompts, sampling_params, use_tqdm)

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
        """Return the parameters of a request that leaves everything open: the model's own defaults, from its `generation_config.json`, where it
        has any."""
        return self.engine.default_sampling_params()

    def get_metrics(self) -> list[facts.Metric]:
        """The counts of `LLMEngine.stats`, one by one."""
        return facts.metrics(self.engine.stats())

    def close(self) -> None:
        """Close the engine, as `LLMEngine.close` does."""
        if "_chat" in vars(self):  # it was used
            self._chat.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, requests: OwnRequests, count: int, use_tqdm: bool, collector: _CollectorHeld) -> list[RequestOutput]:
        """Step until all have finished. The collector is let go once the device has something to do."""
        outputs: dict[int, RequestOutput] = {}
        bar = tqdm(total=count, desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        with bar, _InterruptsBetweenSteps() as interrupts:
            speed = _Speed(self.engine)
            while requests.unfinished:
                for output in requests.step():
                    outputs[output.prompt_index] = output
                    bar.update()
                collector.let_go()
                bar.set_postfix_str(speed.text(), refresh=False)
                interrupts.check()
        return [outputs[place] for place in range(count)]


class OutputStream:
    """The deltas of `LLM.stream`: an iterator, and a context that ends with `close`. One thread reads it."""

    def __init__(self, requests: OwnRequests) -> None:
        self._requests = requests
        self._outputs: deque[RequestOutput] = deque()  # that came in one step and weren't read

    def __iter__(self) -> OutputStream:
        return self

    def __next__(self) -> RequestOutput:
        """The next delta. Raises as `LLM.generate` does, Ctrl-C included, and is closed then."""
        if not self._outputs:
            self._step()
        if not self._outputs:
            raise StopIteration
        return self._outputs.popleft()

    def _step(self) -> None:
        """Step until something has come, or nothing will."""
        try:
            with _InterruptsBetweenSteps() as interrupts:
                while not self._outputs and self._requests.unfinished:
                    self._outputs.extend(self._requests.step())
                    interrupts.check()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is unfinished; nothing more comes. Twice is as good as once."""
        self._outputs.clear()
        self._requests.abort()

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._requests.abandon()


class _InterruptsBetweenSteps:
    """Holds back Ctrl-C until a step is done, since a step cut in two leaves an engine that can't be trusted. Only where Ctrl-C would raise
    `KeyboardInterrupt` here: in the main thread, with Python's own handler."""

    def __init__(self) -> None:
        self._asked = False
        self._holds = False

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if there was one."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def __enter__(self) -> _InterruptsBetweenSteps:
        self._holds = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


class _CollectorHeld:
    """Holds Python's garbage collector back while requests come, all of which stay: it would look through them and the caller's prompts, and find
    nothing, while the device waits."""

    def __enter__(self) -> _CollectorHeld:
        self._held = gc.isenabled()
        gc.disable()
        return self

    def let_go(self) -> None:
        if self._held:
            self._held = False
            gc.enable()

    def __exit__(self, *error: object) -> None:
        self.let_go()


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
    """A list that begins with an integer is one prompt, and so is an array of one dimension."""
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


def _conversations(messages: Any) -> Sequence[Any]:
    """One conversation is a list of messages; of several, each is."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f'messages must be a list like [{{"role": "user", "content": "…"}}], or a list of such lists, got {shown(messages)}')
    return messages if all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in messages) else [messages]
