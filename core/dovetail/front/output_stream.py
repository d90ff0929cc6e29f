"""`OutputStream`: the requests of one call of `LLM`, and their outputs as they come."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dovetail.errors import EngineDeadError, RequestError
from dovetail.front.engine_thread import Aborted
from dovetail.front.unread import Unread
from dovetail.request import RequestOutput
from dovetail.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.front.prompts import Prompt


class OutputStream:
    """An iterator of outputs, and a context that ends with `close`. One thread reads it. The engine doesn't wait for the reader: deltas that it
    hasn't read are joined, for each prompt."""

    def __init__(
        self, engine: LLMEngine, name: str, prompts: Sequence[Prompt], params: Sequence[SamplingParams], begun: Callable[[], None] = lambda: None
    ) -> None:
        """Add all requests or none, before any is computed, under ids that no other caller uses; `begun` is called after the next step. Raises as
        `LLMEngine.add_request` does."""
        self._thread = thread = engine.run_in_thread()
        self._ready: SimpleQueue[str] = SimpleQueue()  # ids of requests whose `Unread` has something
        prefix = f"{name}-{secrets.token_hex(4)}"
        self._readers = {  # of unfinished requests, by id, in the order of the prompts
            (id := f"{prefix}-{place}"): Unread(partial(self._ready.put, id), joins=one.output_kind is OutputKind.DELTA)
            for place, one in enumerate(params)
        }
        readers = dict(self._readers)

        def add() -> None:
            engine.add_list(zip(readers, prompts, params, strict=True))
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
