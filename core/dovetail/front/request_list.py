"""`RequestList`: the requests of one call of `LLM`, and their outputs as they come."""

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
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.front.llm_engine import LLMEngine
    from dovetail.front.prompts import Prompt


class RequestList:
    """Requests under ids that no other caller uses. A context: what is unfinished when it is left is aborted."""

    def __init__(self, engine: LLMEngine, name: str) -> None:
        self._engine = engine
        self._thread = engine.run_in_thread()
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._readers: dict[str, Unread] = {}  # of unfinished requests, by id, in the order of the prompts
        self._ready: SimpleQueue[str] = SimpleQueue()  # ids of those whose `Unread` has something

    @property
    def unfinished(self) -> bool:
        return bool(self._readers)

    def add(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], begun: Callable[[], None] = lambda: None) -> None:
        """Add all requests or none, before any is computed; `begun` is called after the next step. Raises as `LLMEngine.add_request` does."""
        ids = [f"{self._prefix}-{place}" for place in range(len(prompts))]
        readers = {request_id: Unread(partial(self._ready.put, request_id)) for request_id in ids}

        def add() -> None:
            engine = self._engine
            engine.add_list(zip(ids, prompts, params, strict=True))
            for request_id, unread in readers.items():
                self._thread.read(engine, request_id, unread)
            self._thread.after_step(begun)

        self._readers = dict(readers)

        try:
            self._thread.call(add)
        except BaseException:
            self.abort()
            raise

    def next(self) -> RequestOutput | None:
        """Wait for something to happen to one of the requests, and return its output, if there is one. Raises `EngineDeadError` if the engine has
        failed or was closed, and `RequestError` if one of them was aborted by another caller."""
        request_id = self._ready.get()
        output, end = self._readers[request_id].take()
        if output is not None:
            output.prompt_index = int(request_id.rpartition("-")[2])
            if output.finished:
                del self._readers[request_id]
            elif end is not None:
                self._ready.put(request_id)  # the next call raises it
        elif isinstance(end, Aborted):
            raise RequestError("a request of this call was aborted by another caller")
        elif end is not None:
            raise EngineDeadError(f"the engine died while it generated: {end}") from end
        return output

    def abort(self) -> None:
        """Abort the unfinished requests. Takes no lock and waits for nothing, so that finalizers may call it."""
        readers, self._readers, thread = self._readers, {}, self._thread

        def drop(engine: LLMEngine) -> None:
            for request_id, unread in readers.items():
                thread.drop(engine, request_id, unread)

        if readers:
            thread.abandon(drop)

    def __enter__(self) -> RequestList:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()
