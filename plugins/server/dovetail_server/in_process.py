"""`InProcessEngine`: the engine in a thread of the server's own process, for debugging and tests (`dovetail serve --in-process`)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from dovetail.errors import DovetailError, EngineDeadError
from dovetail.front.async_engine import AsyncLLMEngine
from dovetail.front.chat import ChatFrontEnd
from dovetail.front.prompts import Prompt
from dovetail.front.tokenizer import Tokenizer
from dovetail.sampling_params import OutputKind, SamplingParams
from dovetail_server.engine import EngineFacts, Listener, Load


class InProcessEngine:
    """A `ServedEngine` over `AsyncLLMEngine`, with a task for each request."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        core, capacity, config = engine.engine.core, engine.engine.capacity, engine.engine.config
        self.facts = EngineFacts(
            model=config.model,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            block_size=capacity.layout.block_size,
            num_blocks=capacity.num_blocks,
            max_num_seqs=config.max_num_seqs,
            limits=config.limits,
            has_logprobs=core.executor.capabilities.logprobs,
            details=dict(capacity.details),
        )
        self.chat = ChatFrontEnd(self.tokenizer, config.limits)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        return self._engine.engine.default_sampling_params()

    @property
    def load(self) -> Load:
        stats = self._engine.engine.stats()
        return Load(stats.running, stats.waiting, stats.blocks.held, stats.blocks.free, stats.blocks.cached)

    async def submit(self, request_id: str, prompt: Prompt, params: SamplingParams, listener: Listener, **fields: Any) -> None:
        params = dataclasses.replace(params, output_kind=OutputKind.DELTA)
        prompt = await asyncio.to_thread(self._engine.engine.tokenized, prompt)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks[request_id] = asyncio.create_task(self._read(request_id, prompt, params, listener, fields, accepted))
        await accepted

    def abort(self, request_id: str) -> None:
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    def now(self) -> float:
        return self._engine.engine.now()

    def check_health(self) -> None:
        if self._engine._failure is not None:
            raise EngineDeadError(str(self._engine._failure))

    async def _read(
        self, request_id: str, prompt: Prompt, params: SamplingParams, listener: Listener, fields: dict[str, Any], accepted: asyncio.Future[None]
    ) -> None:
        try:
            async for output in self._engine.generate(request_id, prompt, params, **fields):
                if not accepted.done():
                    accepted.set_result(None)
                listener.on_output(output)
        except DovetailError as error:
            if accepted.done():
                listener.on_error(error)
            else:
                accepted.set_exception(error)
        finally:
            self._tasks.pop(request_id, None)
