"""Trial runs: given tokens computed in steps like those of requests, through recorded graphs where
there are any, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np

from dovetail.api.executor import NewRow
from dovetail.api.kv_cache import KVLayout
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime.profiling import empty_batch
from dovetail_executors.runtime.runner import Runner

GREEDY = RowSampling(temperature=0.0, logprobs=0)


class TrialRun:
    """A `dovetail.api.model.TrialRun`. The KV pool must be allocated, and no row in use; afterwards
    none is."""

    def __init__(self, runner: Runner, num_pages: int, max_tokens: int, *, rounds_kv: bool) -> None:
        """`num_pages` of the pool; `max_tokens` of a step."""
        self._runner = runner
        self._num_pages = num_pages
        self._max_tokens = max_tokens
        self.rounds_kv = rounds_kv

    def __call__(
        self, sequences: Sequence[Sequence[int]], first: int, *, recorded: bool = True
    ) -> list[list[tuple[int, float]]]:
        rows = self._runner.rows
        length = len(sequences[0])
        at_once = max(
            1,
            min(
                rows.max_rows,
                self._num_pages // rows.layout.pages(length),
                self._max_tokens // first,
            ),
        )
        found: list[list[tuple[int, float]]] = []
        with nullcontext() if recorded else self._runner.without_graphs():
            for start in range(0, len(sequences), at_once):
                found += self._run(
                    [np.array(ids, np.int32) for ids in sequences[start : start + at_once]], first
                )
        return found

    def _run(
        self, sequences: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]], first: int
    ) -> list[list[tuple[int, float]]]:
        index = np.arange(len(sequences), dtype=np.int32)
        length = len(sequences[0])
        tables = [_tables(self._runner.rows.layout, row, length) for row in range(len(sequences))]
        found: list[list[tuple[int, float]]] = [[] for _ in sequences]
        # where each begins
        steps = [
            *range(0, first, self._max_tokens),
            *range(first, length),
            length,
        ]
        nothing = index[:0]
        for step, (begin, end) in enumerate(pairwise(steps)):
            added = tuple(
                NewRow(row, "trial", ids[:end], end, begin, tables[row], GREEDY)
                for row, ids in enumerate(sequences)
            )
            count = np.full(len(index), end - begin, np.int32)
            yields = np.full(len(index), end >= first)
            batch = empty_batch(
                removed=index if step else nothing,
                added=added,
                rows=index,
                num_tokens=count,
                yields_token=yields,
            )
            result = self._runner.collect(self._runner.submit(batch))
            if result.logprobs is not None:
                for row, (token, logprob) in enumerate(
                    zip(
                        result.logprobs.token_ids[:, 0], result.logprobs.logprobs[:, 0], strict=True
                    )
                ):
                    found[row].append((int(token), float(logprob)))
        self._runner.apply(empty_batch(removed=index))
        return found


def _tables(
    layout: KVLayout, row: int, length: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], ...]:
    """Return block tables of `length` tokens by group, in the `row`-th part of the pool."""
    counts = [group.blocks(length) * group.pages_per_block for group in layout.groups]
    starts = np.cumsum([row * sum(counts), *counts])
    return tuple(
        np.arange(start, start + count, dtype=np.int32)
        for start, count in zip(starts, counts, strict=False)
    )
