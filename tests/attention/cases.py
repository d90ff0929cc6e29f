"""Ragged steps, drawn as in the conformance suite and run through the backend interface only;
compared with an oracle that shares no code with the suite's."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    KVScales,
)
from dovetail.api.component import NoOptions
from dovetail.testing.memory import bind_layers
from dovetail.testing.suites.attention_bench import Case, cases
from tests.attention.oracle import attend_row, kept_in_e4m3
from tests.rounding import allowed

TOLERANCE = allowed(2000)  # sums over head sizes and keys

__all__ = ["TOLERANCE", "Bench", "Case", "assert_close", "cases"]


class Bench:
    """A backend with room for a case, whose every slot is NaN, and the true K, V and q of the
    case's rows."""

    def __init__(self, backend: type[AttentionBackend], case: Case, *, relabel: int = 0) -> None:
        self.case = case
        self.backend = backend(
            NoOptions(),
            AttentionContext(case.device, case.dtype, case.block_size, case.cache_dtype),
        )
        self.layers: list[AttentionLayer] = [self.backend.make_layer(spec) for spec in case.specs]
        for index, layer in enumerate(self.layers):
            scales = (torch.tensor(scale, device=case.device) for scale in case.scales_of(index))
            layer.kv_scales = KVScales(*scales) if case.cache_dtype else None
        self.pool = bind_layers(self.backend, self.layers, case.num_blocks)
        num_slots = case.num_blocks * case.block_size
        self.backend.prepare(
            max_rows=2 * len(case.lens) + 8,
            max_tokens=max(num_slots, sum(case.lens)) + case.padding,
            max_len=num_slots,
        )
        self.table = self._table(np.random.default_rng(relabel).permutation(case.num_blocks))
        rng = np.random.default_rng(case.seed)
        kv_shape, q_shape = (case.kv_heads, case.head_size), (case.heads, case.head_size)
        # [layer][row]
        self.k, self.v = (
            [[rng.normal(size=(n, *kv_shape)) for n in case.lens] for _ in case.windows]
            for _ in range(2)
        )
        if case.v_in_k is not None:
            self.v = [[row[..., : case.v_in_k] for row in rows] for rows in self.k]
        self.q = [[rng.normal(size=(n, *q_shape)) for n in case.queries] for _ in case.windows]
        self.sinks = [
            rng.normal(1, 2, case.heads).astype(np.float32) if spec.sinks else None
            for spec in case.specs
        ]
        for layer, sinks in zip(self.layers, self.sinks, strict=True):
            if sinks is not None:
                layer.bind_sinks(torch.from_numpy(sinks).to(case.device))
        self.poison()

    @property
    def waste_slot(self) -> int:
        """The last, so that what takes it for -1 or another is seen."""
        return (self.case.num_blocks + 1) * self.case.block_size - 1

    def _table(self, labels: NDArray[np.int64]) -> NDArray[np.int32]:
        """Each row's blocks; past them, the waste page, which is NaN too."""
        sizes = [-(-length // self.case.block_size) for length in self.case.lens]
        table = np.full((len(sizes), max(sizes) + 2), self.case.num_blocks, dtype=np.int32)
        for row, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
            table[row, :size] = labels[end - size : end]
        return table

    def poison(self) -> None:
        """NaN in every slot of the pool, and in the waste page: all bits set is one in each
        dtype."""
        for memory in self.pool:
            memory.fill_(0xFF)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.case.dtype)
        return dtype

    def _plan(
        self,
        table: NDArray[np.int32],
        queries: NDArray[np.int64],
        lens: NDArray[np.int64],
        padding: int,
    ) -> None:
        size = self.case.block_size
        positions = [np.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]
        slots = [
            table[row, p // size].astype(np.int64) * size + p % size
            for row, p in enumerate(positions)
        ]
        starts = np.concatenate([[0], np.cumsum(queries)])
        padded_rows = np.concatenate([starts, np.full(padding, starts[-1])])

        def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype).to(self.case.device)

        self.backend.plan(
            AttentionBatch(
                num_rows=len(queries),
                num_tokens=int(starts[-1]),
                query_starts=tensor(padded_rows, torch.int32),
                kv_lens=tensor(
                    np.concatenate([lens, np.zeros(padding, dtype=np.int64)]), torch.int32
                ),
                block_tables=(
                    tensor(
                        np.concatenate(
                            [table, np.full((padding, table.shape[1]), self.case.num_blocks)]
                        )[None],
                        torch.int32,
                    ),
                ),
                slots=(
                    tensor(
                        np.concatenate([*slots, np.full(padding, self.waste_slot)])[None],
                        torch.int64,
                    ),
                ),
                host_query_lens=queries.astype(np.int32),
                host_kv_lens=lens.astype(np.int32),
            )
        )

    def _tensor(self, rows: list[NDArray[np.float64]], padding: int) -> torch.Tensor:
        flat = np.concatenate([*rows, np.full((padding, *rows[0].shape[1:]), np.nan)])
        return torch.from_numpy(flat).to(dtype=self.dtype, device=self.case.device)

    def plan(self, starts: tuple[int, ...], ends: tuple[int, ...], padding: int = 0) -> None:
        """A step that computes tokens [start, end) of each row."""
        rows = [
            row for row, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start
        ]
        counts = np.array([ends[row] - starts[row] for row in rows])
        self._plan(self.table[rows], counts, np.array([ends[row] for row in rows]), padding)

    def write(self, starts: tuple[int, ...], ends: tuple[int, ...], padding: int = 0) -> None:
        """Plan such a step and write its K and V; padding tokens carry NaN."""
        self.plan(starts, ends, padding)
        for index, layer in enumerate(self.layers):
            k, v = (
                [
                    row[start:end]
                    for row, start, end in zip(values[index], starts, ends, strict=True)
                    if end > start
                ]
                for values in (self.k, self.v)
            )
            layer.write(
                self._tensor(k, padding),
                None if self.case.v_in_k is not None else self._tensor(v, padding),
            )

    def attend(self, padding: int = 0) -> list[NDArray[np.float64]]:
        """Return each layer's output for the case's queries, without padding."""
        results = [
            layer.attend(self._tensor(q, padding))
            for layer, q in zip(self.layers, self.q, strict=True)
        ]
        return [result[: sum(self.case.queries)].double().cpu().numpy() for result in results]

    def run(self) -> list[NDArray[np.float64]]:
        """The case: the history in a step of its own, then its step."""
        if any(self.case.history):
            self.write((0,) * len(self.case.history), self.case.history)
        self.write(self.case.history, self.case.lens, self.case.padding)
        return self.attend(self.case.padding)

    def _kept(self, values: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        """K or V as stored in the cache; not rounded to the case's dtype, which tolerances allow
        for."""
        if self.case.cache_dtype is None:
            return values
        return kept_in_e4m3(torch.from_numpy(values).to(self.dtype).double().numpy(), scale)

    def expected(self) -> list[NDArray[np.float64]]:
        """By the definition, of K and V as the cache keeps them."""
        kept_k, kept_v = (
            [
                [self._kept(row, self.case.scales_of(layer)[which]) for row in rows]
                for layer, rows in enumerate(layers)
            ]
            for which, layers in enumerate((self.k, self.v))
        )
        return [
            np.concatenate(
                [
                    attend_row(q, k, v, spec.scale, spec.window, spec.softcap, sinks)
                    for q, k, v in zip(self.q[i], kept_k[i], kept_v[i], strict=True)
                ]
            )
            for i, (spec, sinks) in enumerate(zip(self.case.specs, self.sinks, strict=True))
        ]


def assert_close(
    results: list[NDArray[np.float64]],
    expected_results: list[NDArray[np.float64]],
    tolerance: float = TOLERANCE,
) -> None:
    """Each layer's results are those expected."""
    for got, expected in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
