"""Ragged steps for attention backends: drawn as plain lengths, run through the interface alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch, AttentionContext, AttentionLayer, LayerSpec
from dovetail.testing.checks import require
from dovetail.testing.suites import attention_oracle as oracle

Tensors = list[list[torch.Tensor]]  # [layer][row], on the CPU, values that the case's dtype can hold
MakeBackend = Callable[[AttentionContext], AttentionBackend]
NO_BLOCK = 2**31 - 1  # in a block table past a row's blocks: nonsense that must not be followed


@dataclass(frozen=True)
class Case:
    """Rows with `history` tokens in the cache, that compute `queries` more in one step."""

    history: tuple[int, ...]
    queries: tuple[int, ...]
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    windows: tuple[int | None, ...] = (None,)  # of each layer
    padding: int = 0  # tokens, and as many rows, but for those planned for a mixed graph
    seed: int = 0
    spare_blocks: int = 3  # that no row owns
    dtype: str = "float32"
    device: str = "cpu"
    scale: float | None = None  # None: 1 / sqrt(head_size)
    mixed_graph: bool = False  # all steps are planned so

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(h + q for h, q in zip(self.history, self.queries, strict=True))

    @property
    def specs(self) -> list[LayerSpec]:
        scale = self.scale or 1 / math.sqrt(self.head_size)
        return [LayerSpec(i, self.heads, self.kv_heads, self.head_size, scale, window) for i, window in enumerate(self.windows)]

    @property
    def num_blocks(self) -> int:
        return sum(-(-length // self.block_size) for length in self.lens) + self.spare_blocks

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_len: int = 80,
    block_sizes: Sequence[int] = (1, 3, 8, 16, 64),
    head_sizes: Sequence[int] = (4, 8, 20, 64),
    windows: bool = True,
) -> Case:
    """Mixes of prefills, chunks and decodes."""
    row = st.tuples(st.sampled_from(["prefill", "chunk", "decode"]), st.integers(1, max_len), st.integers(1, max_len))
    rows = draw(st.lists(row, min_size=1, max_size=7))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    window = st.one_of(st.none(), st.integers(1, max_len)) if windows else st.none()
    return Case(
        tuple(0 if kind == "prefill" else past for kind, past, _ in rows),
        tuple(1 if kind == "decode" else new for kind, _, new in rows),
        block_size=draw(st.sampled_from(list(block_sizes))),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from(list(head_sizes))),
        windows=tuple(draw(st.lists(window, min_size=1, max_size=2))),
        padding=draw(st.sampled_from([0, 0, 1, 5])),
        seed=draw(st.integers(0, 2**31)),
    )


class Bench:
    """A backend with room for a case, whose every slot is NaN, and the true K, V and q of the case's rows.

    `relabel` chooses which physical blocks the rows have.
    """

    def __init__(self, make: MakeBackend, case: Case, *, relabel: int = 0) -> None:
        self.case = case
        self.backend = make(AttentionContext(case.device, case.dtype, case.block_size))
        self.layers: list[AttentionLayer] = [self.backend.make_layer(spec) for spec in case.specs]
        self.backend.allocate(case.num_blocks)
        num_slots = case.num_blocks * case.block_size
        self.backend.prepare(max_rows=2 * len(case.lens) + 8, max_tokens=max(num_slots, sum(case.lens)) + case.padding, max_len=num_slots)
        self.table = self._table(np.random.default_rng(relabel).permutation(case.num_blocks))
        generator = torch.Generator().manual_seed(case.seed)

        def normal(lens: tuple[int, ...], heads: int) -> Tensors:
            return [[self._random(n, heads, generator) for n in lens] for _ in case.windows]

        self.k, self.v = normal(case.lens, case.kv_heads), normal(case.lens, case.kv_heads)
        self.q = normal(case.queries, case.heads)
        self.poison()

    def _random(self, tokens: int, heads: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn((tokens, heads, self.case.head_size), generator=generator).to(self.case.torch_dtype)

    def _table(self, labels: NDArray[np.int64]) -> NDArray[np.int32]:
        """Each row's blocks; past them, nonsense."""
        sizes = [-(-length // self.case.block_size) for length in self.case.lens]
        table = np.full((len(sizes), max(sizes) + 2), NO_BLOCK, dtype=np.int32)
        for row, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
            table[row, :size] = labels[end - size : end]
        return table

    def poison(self) -> None:
        """NaN in every slot of the pool."""
        nan = torch.full((self.case.num_blocks * self.case.block_size, self.case.kv_heads, self.case.head_size), torch.nan)
        self.write_pool(nan, nan)

    def write_pool(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V of every slot of the pool, in every layer: [slots, kv_heads, head_size] each."""
        count = np.array([len(k)])
        self.plan_rows(np.arange(self.case.num_blocks, dtype=np.int32)[None], count, count)
        for layer in self.layers:
            layer.write(*(values.to(dtype=self.case.torch_dtype, device=self.case.device) for values in (k, v)))

    def plan_rows(self, table: NDArray[np.int32], queries: NDArray[np.int64], lens: NDArray[np.int64], padding: int = 0, shared: int = 0) -> None:
        """Plan a step of rows with these block tables, that compute their last `queries` of `lens` tokens."""
        size = self.case.block_size
        positions = [np.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]
        slots = [table[row, p // size].astype(np.int64) * size + p % size for row, p in enumerate(positions)]
        starts, padding_rows = np.concatenate([[0], np.cumsum(queries)]), 0 if self.case.mixed_graph else padding

        def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype).to(self.case.device)

        self.backend.plan(
            AttentionBatch(
                num_rows=len(queries),
                num_tokens=int(starts[-1]),
                query_starts=tensor(np.concatenate([starts, np.full(padding_rows, starts[-1])]), torch.int32),
                kv_lens=tensor(np.concatenate([lens, np.zeros(padding_rows, dtype=np.int64)]), torch.int32),
                block_table=tensor(np.concatenate([table, np.full((padding_rows, table.shape[1]), -7, dtype=np.int32)]), torch.int32),
                slots=tensor(np.concatenate([*slots, np.full(padding, -1)]), torch.int64),
                host_query_lens=queries.astype(np.int32),
                host_kv_lens=lens.astype(np.int32),
                shared_prefix_blocks=shared,
                mixed_graph=self.case.mixed_graph,
            )
        )

    def plan(self, starts: Sequence[int], ends: Sequence[int], padding: int = 0, shared: int = 0) -> None:
        """A step that computes tokens [start, end) of each row; a row that computes none is left out."""
        rows = [row for row, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
        counts = np.array([ends[row] - starts[row] for row in rows], np.int64)
        self.plan_rows(self.table[rows], counts, np.array([ends[row] for row in rows], np.int64), padding, shared)

    def write(self, starts: Sequence[int], ends: Sequence[int], padding: int = 0, shared: int = 0) -> None:
        """Plan such a step and write its K and V; padding tokens carry NaN."""
        self.plan(starts, ends, padding, shared)
        for index, layer in enumerate(self.layers):
            k, v = (
                [row[start:end] for row, start, end in zip(values[index], starts, ends, strict=True) if end > start] for values in (self.k, self.v)
            )
            layer.write(self.tensor(k, padding), self.tensor(v, padding))

    def tensor(self, rows: Sequence[torch.Tensor], padding: int = 0) -> torch.Tensor:
        """The rows' values [tokens, ...] on the device, and NaN for the padding tokens."""
        nan = torch.full((padding, *rows[0].shape[1:]), torch.nan, dtype=self.case.torch_dtype)
        return torch.cat([*rows, nan]).to(self.case.device)

    def attend(self, padding: int = 0) -> list[torch.Tensor]:
        """Return each layer's output for the case's queries, in float64 on the CPU and without padding."""
        results = [layer.attend(self.tensor(q, padding)) for layer, q in zip(self.layers, self.q, strict=True)]
        for result in results:
            expected = (sum(self.case.queries) + padding, self.case.heads, self.case.head_size)
            require(result.shape == expected, f"attend() returned the shape {list(result.shape)}, expected {list(expected)}")
            require(result.dtype == self.case.torch_dtype, f"attend() returned {result.dtype}, expected the dtype of q, {self.case.torch_dtype}")
        return [result[: sum(self.case.queries)].double().cpu() for result in results]

    def compute(self) -> None:
        """The history's K and V in a step of its own, then those of the case's step."""
        if any(self.case.history):
            self.write((0,) * len(self.case.history), self.case.history)
        self.write(self.case.history, self.case.lens, self.case.padding)

    def run(self) -> list[torch.Tensor]:
        self.compute()
        return self.attend(self.case.padding)

    def expected(self) -> list[torch.Tensor]:
        """Exact values, like those of `attend`."""
        return [torch.cat([oracle.exact(q, k, v, spec.scale, spec.window) for q, k, v in self._rows(i)]) for i, spec in enumerate(self.case.specs)]

    def allowed_errors(self) -> list[torch.Tensor]:
        """Return the allowed error of each layer, for each token; it is the same for all tokens of a row."""
        return [
            torch.cat([self._allowed(spec, q, k, v).expand(len(q)) for q, k, v in self._rows(layer)]) for layer, spec in enumerate(self.case.specs)
        ]

    def _allowed(self, spec: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        exact, dtype = oracle.exact(q, k, v, spec.scale, spec.window), self.case.torch_dtype
        return oracle.allowed_error(exact, oracle.plain(q, k, v, spec.scale, spec.window, dtype), dtype)

    def _rows(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return list(zip(self.q[layer], self.k[layer], self.v[layer], strict=True))
