"""Executor `toy`: no model and no memory. A token is a function of its request's seed and position
only, and a step takes as long as it is told to, on the wall clock. Tests and soaks of the server
use it: whoever knows a request's seed knows its whole answer.

With the demo model's tokenizer the tokens are printable characters of ASCII, one each, so that a
text shows every token that was lost or came twice.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.executor import (
    Batch,
    Capacity,
    Executor,
    ExecutorContext,
    Result,
)
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.sampler import SampledRow, SampledTokens, SampleInputs, Sampler
from dovetail.errors import DovetailError

LETTERS = 94  # token ids 1 to 94 are the characters from "!" on
FIRST_LETTER = ord("!")


def answer_ids(seed: int | NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids [n] at these positions [n] of an answer, 0 being its first token: SplitMix64's
    mixing of seed and position."""
    x = np.uint64(seed) if isinstance(seed, int) else seed
    x = x + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(LETTERS) + np.uint64(1)).astype(np.int64)


def answer(seed: int, tokens: int) -> str:
    """Return the text of a request's first tokens, as decoded by the demo model's tokenizer."""
    return (
        (answer_ids(seed, np.arange(tokens)) + FIRST_LETTER - 1)
        .astype(np.uint8)
        .tobytes()
        .decode("ascii")
    )


class ToyOptions(BaseModel):
    """Options of the executor `toy`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float = Field(0.0, ge=0, le=3600, description="Seconds that a step takes.")
    num_pages: int = Field(65_536, ge=1, description="Pages in the KV pool.")
    vocab_size: int = Field(1024, ge=LETTERS + 1, description="Token ids of prompts are below it.")
    max_model_len: int = Field(
        1024, ge=2, description="Tokens of the longest sequence, unless the config says how many."
    )
    max_in_flight: int = Field(
        2, ge=1, le=8, description="Steps submitted before the oldest is collected."
    )
    fails_at_step: int | None = Field(
        None, ge=0, description="The step at which the device is lost."
    )
    hangs_at_step: int | None = Field(None, ge=0, description="The step that never ends.")


class ToyExecutor(Executor):
    """Keeps the seed and the number of generated tokens of each row."""

    options: ToyOptions

    def __init__(self, options: ToyOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        rows = context.config.max_num_seqs
        self._seeds, self._answered = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)
        self._pending: deque[Result] = deque()
        self._last_ended = 0.0

    def start(self) -> Capacity:
        options = self.options
        config = self.context.config
        return Capacity(
            num_pages=options.num_pages,
            max_in_flight=options.max_in_flight,
            layout=KVLayout((CacheGroup((0,), config.block_size or 16),), 1, "none"),
            vocab_size=options.vocab_size,
            max_model_len=config.max_model_len or options.max_model_len,
            details={"device": "none", "step": f"{1e3 * options.step_s:g} ms"},
        )

    def submit(self, batch: Batch) -> int:
        if batch.step == self.options.fails_at_step:
            raise DovetailError(
                f"executor toy: the device was lost at step {batch.step}, as its options ask for"
            )
        for new in batch.added:
            self._seeds[new.row] = new.sampling.seed
            self._answered[new.row] = len(new.token_ids) - new.prompt_len
        rows = batch.rows
        token_ids = np.where(
            batch.yields_token, answer_ids(self._seeds[rows], self._answered[rows]), -1
        )
        self._answered[rows] += batch.yields_token
        # as on a device, which begins a step when the one before has ended
        started = max(self.context.clock.now(), self._last_ended)
        self._last_ended = (
            math.inf if batch.step == self.options.hangs_at_step else started + self.options.step_s
        )
        self._pending.append(Result(batch.step, token_ids, started, self._last_ended))
        return batch.step

    def collect(self, handle: int) -> Result:
        result = self._pending.popleft()
        self.context.clock.wait_until(result.ended)
        return result

    def check(self) -> None: ...

    def stop(self) -> None:
        self._pending.clear()


class ToySampler(Sampler):
    """No-op sampler, since the executor computes its tokens: an engine's process then doesn't need
    torch."""

    def prepare(self, max_rows: int) -> None: ...

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None: ...

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        raise NotImplementedError


def installed_in(directory: Path) -> dict[str, str]:
    """Install the toy as a distribution into a directory, and return an environment in which other
    processes find it."""
    info = directory / "dovetail_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dovetail.plugins]\nmain = bench.toy_plugin\n")
    paths = [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
