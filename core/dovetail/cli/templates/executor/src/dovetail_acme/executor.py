"""The executor: it computes the steps that the core plans. This one has no model, and answers each request with its own prompt, over and over. It
helps to try schedulers, servers and clients where there is no device."""

from dataclasses import dataclass

import numpy as np
from dovetail.api.executor import Batch, Capacity, Executor, ExecutorCapabilities, ExecutorContext, Result
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import DovetailError, UnsupportedError
from pydantic import BaseModel, ConfigDict, Field

BLOCK_SIZE = 16  # tokens


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_pages: int = Field(1024, ge=1, description="Pages of the KV pool, which is only counted and never written.")
    vocab_size: int = Field(32000, ge=1, description="As many token ids as the model's tokenizer has.")


@dataclass(slots=True)
class AcmeRow:
    """The state of a request while it has a row."""

    prompt: list[int]
    num_tokens: int  # number of known tokens: prompt and generated


class AcmeExecutor(Executor):
    """An executor that computes at `submit` and keeps the results until `collect`."""

    # It samples nothing; `logprobs=True`, `samples=True`, … declare what it can do
    capabilities = ExecutorCapabilities()
    options: AcmeOptions

    def __init__(self, options: AcmeOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._rows: dict[int, AcmeRow] = {}
        self._results: list[Result] = []
        self._running = False

    def start(self) -> Capacity:
        config, size = self.context.config, self.context.config.block_size or BLOCK_SIZE
        holds = self.options.num_pages * size
        length = config.max_model_len or holds
        if length > holds:
            raise UnsupportedError(f"max_model_len: {length} tokens don't fit into {self.options.num_pages} pages of {size}")
        self._running = True
        layout = KVLayout((CacheGroup((0,), size),), 1, "none")
        return Capacity(
            num_pages=self.options.num_pages,
            max_in_flight=2,
            layout=layout,
            vocab_size=self.options.vocab_size,
            max_model_len=length,
            details={"device": "none"},
        )

    def submit(self, batch: Batch) -> int:
        self.check()
        started = self.context.clock.now()
        for row in batch.removed.tolist():
            del self._rows[row]
        for new in batch.added:
            self._rows[new.row] = AcmeRow(new.token_ids[: new.prompt_len].tolist(), len(new.token_ids))
        tokens = [
            self._next_token(self._rows[row]) if yields_token else -1
            for row, yields_token in zip(batch.rows.tolist(), batch.yields_token.tolist(), strict=True)
        ]
        self._results.append(Result(batch.step, np.array(tokens, np.int64), started, self.context.clock.now()))
        return batch.step

    def collect(self, handle: int) -> Result:
        self.check()
        if not self._results or self._results[0].step != handle:
            raise DovetailError(f"step {handle} is not the oldest uncollected one")
        return self._results.pop(0)

    def check(self) -> None:
        if not self._running:
            raise DovetailError("it isn't running: start() hasn't been called, or stop() has")

    def stop(self) -> None:
        self._running = False
        self._rows.clear()
        self._results.clear()

    def _next_token(self, row: AcmeRow) -> int:
        """Return the prompt's next token again, which becomes the row's next known token."""
        token = row.prompt[row.num_tokens % len(row.prompt)]
        row.num_tokens += 1
        return token
