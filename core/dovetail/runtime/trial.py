"""Trial runs: given tokens computed in steps like those of requests, through recorded graphs where there are any, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np

from dovetail.api.executor import NewRow
from dovetail.api.sampler import RowSampling
from dovetail.runtime.profiling import empty_batch
from dovetail.runtime.runner import Runner

GREEDY = RowSampling(temperature=0.0, logprobs=0)


class TrialRun:
    """A `dovetail.api.model.TrialRun`. The KV pool must be allocated, and no row in use; afterwards none is."""

    def __init__(self, runner: Runner, num_blocks: int, max_tokens: int, *, rounds_kv: bool) -> None:
        """`num_blocks` of the pool; `max_tokens` of a step."""
        self._runner, self._num_blocks, self._max_tokens, self.rounds_kv = runner, num_blocks, max_tokens, rounds_kv

    def __call__(self, sequences: Sequence[Sequence[int]], first: int, *, recorded: bool = True) -> list[list[tuple[int, float]]]:
        rows, length = self._runner.rows, len(sequences[0])
        blocks = -(-length // rows.block_size)
        at_once = max(1, min(rows.max_rows, self._num_blocks // blocks, self._max_tokens // first))
        found: list[list[tuple[int, float]]] = []
        with nullcontext() if recorded else self._runner.without_graphs():
            for start in range(0, len(sequences), at_once):
                found += self._run([np.array(ids, np.int32) for ids in sequences[start : start + at_once]], first, blocks)
        return found

    def _run(self, sequences: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]], first: int, blocks: int) -> list[list[tuple[int, float]]]:
        index, length = np.arange(len(sequences), dtype=np.int32), len(sequences[0])
        found: list[list[tuple[int, float]]] = [[] for _ in sequences]
        steps = [*range(0, first, self._max_tokens), *range(first, length), length]  # where each begins
        nothing = index[:0]
        for step, (begin, end) in enumerate(pairwise(steps)):
            added = tuple(
                NewRow(row, "trial", ids[:end], end, begin, np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32), GREEDY)
                for row, ids in enumerate(sequences)
            )
            count, yields = np.full(len(index), end - begin, np.int32), np.full(len(index), end >= first)
            batch = empty_batch(removed=index if step else nothing, added=added, rows=index, num_tokens=count, yields_token=yields)
            result = self._runner.collect(self._runner.submit(batch))
            if result.logprobs is not None:
                for row, (token, logprob) in enumerate(zip(result.logprobs.token_ids[:, 0], result.logprobs.logprobs[:, 0], strict=True)):
                    found[row].append((int(token), float(logprob)))
        self._runner.rows.update(empty_batch(removed=index))
        self._runner.sampler.update(index.tolist(), [])
        return found
