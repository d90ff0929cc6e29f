"""`AsyncLLMEngine`: the engine for asyncio, running in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

from dovetail.errors import ConfigError, EngineDeadError, RequestError, shown
from dovetail.front.engine_thread import Aborted, Unread
from dovetail.front.llm_engine import LLMEngine, request_ids
from dovetail.front.media.facts import IMAGES_AT_ONCE
from dovetail.front.outputs import EngineOutput
from dovetail.front.prompts import Prompt, cuts, images_in, is_unmade
from dovetail.front.vllm_methods import SaysWhatIsMissing
from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import RequestOutput
from dovetail.request.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from dovetail.request.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.config.engine import EngineConfig
    from dovetail.front.engine_args import EngineArgs
    from dovetail.front.engine_info import (
        CacheConfig,
        DecodingConfig,
        LoRAConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )


class _Consumer:
    """The consumer of one request's outputs in its event loop."""

    __slots__ = ("aborted", "loop", "news", "unread")

    def __init__(self, notify: Callable[[_Consumer], None], joins: bool) -> None:
        self.loop, self.news = asyncio.get_running_loop(), asyncio.Event()
        self.unread = Unread(partial(notify, self), joins)
        # perhaps before the engine has the request: while its text is tokenized
        self.aborted = False

    async def next(self) -> tuple[EngineOutput | None, BaseException | None]:
        """Wait for news; return the new outputs coalesced into one, if any, and the exception that
        ended the request, if it has ended."""
        await self.news.wait()
        self.news.clear()
        return self.unread.take()


class AsyncLLMEngine(SaysWhatIsMissing):
    """An engine for asyncio. It runs in a thread of its own; texts are tokenized in another, since
    a long one takes as long as a step or two.

    ```python
    async for output in engine.generate("a", "ROMEO:", SamplingParams(output_kind="delta")):
        print(output.outputs[0].text, end="")
    ```
    """

    _engine_class = LLMEngine

    def __init__(self, engine: LLMEngine) -> None:
        """Take ownership of `engine`, which is closed with this one. Raises `ConfigError` for
        anything but an `LLMEngine`."""
        if not isinstance(engine, LLMEngine):
            raise ConfigError(
                f'an AsyncLLMEngine is made by AsyncLLMEngine.from_config("demo") or of an '
                f"LLMEngine, got {shown(engine)}"
            )
        self.engine = engine
        # one thread: texts stay in order
        self._tokenizer = ThreadPoolExecutor(1, "dovetail-tokenizer")
        self._images = ThreadPoolExecutor(IMAGES_AT_ONCE, "dovetail-images")
        self._readers: dict[_Consumer, str] = {}  # request ids
        # since the last call of `_wake_readers`
        self._to_wake: dict[asyncio.AbstractEventLoop, list[_Consumer]] = {}
        engine.core.plan_timing.expects_arrivals = True
        self._thread = engine.run_in_thread(self._wake_readers)

    @classmethod
    def from_config(
        cls, config: str | Path | Mapping[str, Any] | EngineConfig, **overrides: Any
    ) -> AsyncLLMEngine:
        """As `LLMEngine.from_config`."""
        return cls(cls._engine_class.from_config(config, **overrides))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs | EngineConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        **others: Any,
    ) -> AsyncLLMEngine:
        """As `LLMEngine.from_engine_args`."""
        engine = cls._engine_class.from_engine_args(
            engine_args,
            usage_context,
            stat_loggers,
            start_engine_loop=start_engine_loop,
            **others,
        )
        return cls(engine)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    @overload
    def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @overload
    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]: ...

    def generate(self, *args: Any, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request: `generate(request_id, prompt, params)`, or in vLLM's
        order `generate(prompt, sampling_params, request_id)`, told apart by the position of the
        `SamplingParams`; all may be given by keyword. `fields` are those of
        `LLMEngine.add_request`, which is called, and whose errors are raised, when the first output
        is requested.

        Outputs are coalesced while the consumer is slow: deltas are joined, of cumulative outputs
        the newest is kept. So the buffer takes no more memory than the answer.

        Closing the iterator, or cancelling the task that reads it, aborts the request. Raises
        `RequestError` at once for arguments whose order is ambiguous, and `EngineDeadError` when
        the engine fails or is closed before the request has finished.
        """
        outputs = self._outputs(*_in_our_order(args, fields))
        return cast(AsyncGenerator[RequestOutput, None], outputs)  # those of a request that samples

    @overload
    def encode(
        self, request_id: str, prompt: Prompt, params: PoolingParams | None = None, **fields: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]: ...

    @overload
    def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, **fields: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]: ...

    def encode(
        self, *args: Any, **fields: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool one prompt: the iterator yields its one output. Arguments, errors and ends are those
        of `generate`, with `PoolingParams`."""
        request_id, prompt, params, fields = _in_our_order(args, fields, "encode")
        outputs = self._outputs(
            request_id, prompt, PoolingParams() if params is None else params, fields
        )
        return cast(AsyncGenerator[PoolingRequestOutput[PoolingOutput], None], outputs)

    async def _outputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        fields: dict[str, Any],
    ) -> AsyncGenerator[EngineOutput, None]:
        joins = isinstance(params, SamplingParams) and params.output_kind is OutputKind.DELTA
        done = False
        reader = _Consumer(self._notify, joins)
        self._readers[reader] = request_id
        try:
            if is_unmade(prompt):
                self._thread.check()
                if fields.get("arrival_time") is None:
                    fields["arrival_time"] = self.engine.now()
                tokenized = partial(self.engine.tokenized, cut=cuts(params))
                threads = self._images if images_in(prompt) else self._tokenizer
                prompt = await reader.loop.run_in_executor(threads, tokenized, prompt)
            self._thread.submit(partial(self._add, reader, request_id, prompt, params, fields))
            while not done:
                output, end = await reader.next()
                done = end is not None or (output is not None and output.finished)
                if output is not None:
                    yield output
                if end is not None and not isinstance(end, Aborted):
                    raise end
        finally:
            del self._readers[reader]
            if not done:
                self._thread.abandon([request_id], {0: reader.unread})

    async def abort(self, request_id: str | Sequence[str] | Set[str]) -> None:
        """Abort one request or several: their iterators stop after the outputs sent so far. Unknown
        ids are ignored. Raises `RequestError` if it is neither an id nor a list, tuple or set of
        ids."""
        ids = request_ids(request_id)
        for reader, its_id in [*self._readers.items()]:  # a copy: other event loops may change it
            reader.aborted |= its_id in ids
        with suppress(EngineDeadError):
            self._thread.submit(partial(self.engine.abort_request, ids))

    async def get_tokenizer(self) -> Any:
        """As `LLMEngine.get_tokenizer`."""
        return await asyncio.to_thread(self.engine.get_tokenizer)

    async def get_model_config(self) -> ModelConfig:
        """As `LLMEngine.get_model_config`."""
        return self.engine.get_model_config()

    async def get_scheduler_config(self) -> SchedulerConfig:
        """As `LLMEngine.get_scheduler_config`."""
        return self.engine.get_scheduler_config()

    async def get_cache_config(self) -> CacheConfig:
        """As `LLMEngine.get_cache_config`."""
        return self.engine.get_cache_config()

    async def get_parallel_config(self) -> ParallelConfig:
        """As `LLMEngine.get_parallel_config`."""
        return self.engine.get_parallel_config()

    async def get_decoding_config(self) -> DecodingConfig:
        """As `LLMEngine.get_decoding_config`."""
        return self.engine.get_decoding_config()

    async def get_lora_config(self) -> LoRAConfig | None:
        """As `LLMEngine.get_lora_config`."""
        return self.engine.get_lora_config()

    async def do_log_stats(self) -> None:
        """As `LLMEngine.do_log_stats`."""
        await asyncio.to_thread(self.engine.do_log_stats)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine takes no more requests."""
        self._thread.check()

    def close(self) -> None:
        """Stop the thread once the step under way is done, and release the model. Requests under
        way fail with `EngineDeadError`. Idempotent."""
        self._tokenizer.shutdown(wait=False)
        self._images.shutdown(wait=False)
        self.engine.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """Do what `close` does, by vLLM's name; `timeout` is ignored, since nothing waits for
        requests."""
        self.close()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Do what `LLMEngine.reset_prefix_cache` does."""
        return await asyncio.to_thread(
            self.engine.reset_prefix_cache, reset_running_requests, reset_connector
        )

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Do what `LLMEngine.add_lora` does."""
        return await asyncio.to_thread(self.engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Do what `LLMEngine.remove_lora` does."""
        return self.engine.remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """Do what `LLMEngine.list_loras` does."""
        return self.engine.list_loras()

    async def pin_lora(self, lora_id: int) -> bool:
        """Do what `LLMEngine.pin_lora` does."""
        return self.engine.pin_lora(lora_id)

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # In the engine's thread

    def _add(
        self,
        reader: _Consumer,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        fields: Mapping[str, Any],
    ) -> None:
        if reader.aborted:  # a later abort is queued behind this call
            reader.unread.end(Aborted())
            return
        try:
            self.engine.add_request(request_id, prompt, params, **fields)
        except BaseException as error:  # whatever it is, it is this caller's alone
            reader.unread.end(error)
        else:
            self._thread.read(request_id, reader.unread)

    def _notify(self, reader: _Consumer) -> None:
        self._to_wake.setdefault(reader.loop, []).append(reader)

    def _wake_readers(self) -> None:
        """Wake each event loop once for all of its readers: a call for each would take longer than
        planning the step."""
        to_wake = self._to_wake
        self._to_wake = {}
        for loop, readers in to_wake.items():
            with suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(_wake, readers)


def _wake(readers: list[_Consumer]) -> None:
    for reader in readers:
        reader.news.set()


def _in_our_order(
    args: tuple[Any, ...], fields: dict[str, Any], method: str = "generate"
) -> tuple[str, Prompt, Any, dict[str, Any]]:
    """Sort the arguments of `AsyncLLMEngine.generate` or `encode`, given in either order, into id,
    prompt, params and the other fields. Raises `RequestError`, also for parameters of the other
    method."""
    kind, theirs = (
        (SamplingParams, "sampling_params")
        if method == "generate"
        else (PoolingParams, "pooling_params")
    )
    if theirs in fields:
        if "params" in fields:
            raise RequestError(f"params and {theirs} are the same: give one of them")
        fields["params"] = fields.pop(theirs)
    names = [name for name in _names(method, args, fields) if name not in fields]
    if len(args) > len(names):
        raise RequestError(
            f"{method}() was given {len(args)} arguments by position, and by keyword "
            f"{', '.join(sorted(fields))}: {_ORDERS}"
        )
    given = dict(zip(names, args, strict=False)) | {
        name: fields.pop(name) for name in ("request_id", "prompt", "params") if name in fields
    }
    for name in ("request_id", "prompt"):
        if name not in given:
            raise RequestError(f"{method}() lacks {name}: {_ORDERS}")
    if (params := given.get("params")) is not None and not isinstance(params, kind):
        raise RequestError(f"{method}() takes {kind.__name__}, got {shown(params)}")
    return given["request_id"], given["prompt"], given.get("params"), fields


_ORDERS = (
    "it takes (request_id, prompt, params), or in vLLM's order (prompt, sampling_params or "
    "pooling_params, request_id)"
)


def _names(method: str, args: tuple[Any, ...], fields: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the names of the positional arguments: vLLM has the parameters second, we have them
    last."""
    ours = ("request_id", "prompt", "params")
    vllms = ("prompt", "params", "request_id")
    if "request_id" in fields or len(args) < 2 or "prompt" in fields:
        return vllms if "request_id" in fields else ours
    if isinstance(args[1], SamplingParams | PoolingParams):
        return vllms
    if args[1] is None or (len(args) > 2 and isinstance(args[2], str)):
        raise RequestError(
            f"{method}() can't tell the id from the prompt: {_ORDERS}; name them, as in "
            f"{method}(request_id=…, prompt=…)"
        )
    return ours
