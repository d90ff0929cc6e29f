"""Ragged steps for attention backends: drawn as plain lengths, run only through the interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    Indexer,
    KVScales,
    LayerSpec,
)
from dovetail.testing.checks import require
from dovetail.testing.memory import Place, bind_layers
from dovetail.testing.suites import attention_oracle as oracle

# [layer][row], on the CPU, with values representable in the case's dtype
Tensors = list[list[torch.Tensor]]
MakeBackend = Callable[[AttentionContext], AttentionBackend]
ALL_BITS = 0xFF  # in each byte: NaN in every dtype of a cache


@dataclass(frozen=True)
class Case:
    """Rows with `history` tokens in the cache that compute `queries` more in one step."""

    history: tuple[int, ...]
    queries: tuple[int, ...]
    block_size: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    windows: tuple[int | None, ...] = (None,)  # by layer
    # number of tokens, and of rows except for mixed graphs and fixed shapes
    padding: int = 0
    seed: int = 0
    spare_blocks: int = 3  # pages not owned by any row
    dtype: str = "float32"
    device: str = "cpu"
    scale: float | None = None  # None: 1 / sqrt(head_size)
    sinks: tuple[bool, ...] = (False,)  # whether layers have sinks; assigned to layers in turn
    softcaps: tuple[float | None, ...] = (None,)  # likewise
    # number of leading elements of K that are V; None: V is stored separately
    v_in_k: int | None = None
    mixed_graph: bool = False  # plan all steps with it
    cache_dtype: str | None = None  # of K and V in the cache; None: the dtype of q
    # of K and V in such a cache; assigned to layers in turn
    kv_scales: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    # by layer, if they differ: heads, kv_heads, head_size
    shapes: tuple[tuple[int, int, int], ...] = ()
    exact: bool = False  # prepare the backend for exactly this step
    poisoned: bool = True  # initialize every slot with NaN
    earlier_pages: int = 0  # of a pool that the layers are bound to before the case's
    # by layer; (): layers with the same window are a group, the full one first, with tensors of
    # their own
    places: tuple[Place, ...] = ()
    # the layer whose cache a layer has; assigned to layers in turn
    shares: tuple[int | None, ...] = (None,)
    causal: bool = True  # of all layers; if not, there is no history
    # by row, the [start, stop) of tokens that attend to each other in both directions; a step that
    # has some is divided there. (): no row has any
    spans: tuple[tuple[tuple[int, int], ...], ...] = ()
    both_ways: tuple[bool, ...] = (False,)  # whether layers heed these; assigned to layers in turn
    indexers: tuple[Indexer | None, ...] = (None,)  # assigned to layers in turn
    fixed_shapes: bool = False  # plan all steps with it
    seen: tuple[int, ...] = ()  # by row, `AttentionBatch.host_seen`; (): None

    def whole(self, most: int) -> Case:
        """Return the case with rows of the same lengths, but at most `most` tokens, that are
        computed whole, and whose tokens see later ones, too."""
        queries = tuple(min(length, most) for length in self.lens)
        return replace(self, history=(0,) * len(queries), queries=queries, causal=False)

    @property
    def lens(self) -> tuple[int, ...]:
        return tuple(h + q for h, q in zip(self.history, self.queries, strict=True))

    @property
    def specs(self) -> list[LayerSpec]:
        shapes = self.shapes or ((self.heads, self.kv_heads, self.head_size),) * len(self.windows)
        return [
            LayerSpec(
                i,
                *shape,
                self.scale or 1 / math.sqrt(shape[2]),
                self.windows[i],
                sinks=self.sinks[i % len(self.sinks)],
                softcap=self.softcaps[i % len(self.softcaps)],
                v_in_k=self.v_in_k is not None,
                v_head_size=self.v_in_k,
                shares=self.shares[i % len(self.shares)],
                causal=self.causal,
                both_ways=self.both_ways[i % len(self.both_ways)],
                indexer=self.indexers[i % len(self.indexers)],
            )
            for i, shape in enumerate(shapes)
        ]

    def scales_of(self, layer: int) -> tuple[float, float]:
        return self.kv_scales[layer % len(self.kv_scales)]

    @property
    def num_blocks(self) -> int:
        """Number of pages if all layers are in one group of a page a block."""
        return sum(-(-length // self.block_size) for length in self.lens) + self.spare_blocks

    @property
    def placed(self) -> tuple[Place, ...]:
        windows = sorted(set(self.windows), key=lambda window: window or 0)
        return self.places or tuple(
            Place(windows.index(window), block_size=self.block_size) for window in self.windows
        )

    @property
    def groups(self) -> list[Group]:
        """Return the cache groups in order."""
        found: list[Group] = []
        for index in range(1 + max(place.group for place in self.placed)):
            members = [
                (place, spec)
                for place, spec in zip(self.placed, self.specs, strict=True)
                if place.group == index and spec.shares is None
            ]
            found.append(
                Group(
                    members[0][0].block_size or self.block_size,
                    1 + max(place.page for place, _ in members),
                    members[0][1].window,
                )
            )
        return found

    @property
    def num_pages(self) -> int:
        return (
            sum(
                -(-length // group.block_size) * group.pages
                for group in self.groups
                for length in self.lens
            )
            + self.spare_blocks
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Group:
    """A cache group: tokens and pages of a block, and the window of its layers."""

    block_size: int
    pages: int
    window: int | None

    def first_visible(
        self, queries: NDArray[np.int64], lens: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the first block that rows with `queries` of `lens` tokens see. [rows] each."""
        return (
            np.zeros_like(lens)
            if self.window is None
            else np.maximum(lens - queries - self.window + 1, 0) // self.block_size
        )


class Piece(NamedTuple):
    """Consecutive tokens of a case's row, which are a row of a step."""

    row: int
    start: int
    stop: int
    both_ways: bool = False


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
    row = st.tuples(
        st.sampled_from(["prefill", "chunk", "decode"]),
        st.integers(1, max_len),
        st.integers(1, max_len),
    )
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


@dataclass
class Index:
    """Random inputs of a layer's indexer, by row. They are whole numbers, so that scores are exact
    in every dtype, and many are equal."""

    keys: list[torch.Tensor]  # [tokens, size] each
    q: list[torch.Tensor]  # [queries, heads, size]
    weights: list[torch.Tensor]  # [queries, heads] float32
    top_k: int

    @classmethod
    def drawn(cls, indexer: Indexer, case: Case, generator: torch.Generator) -> Index:
        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=generator).to(case.torch_dtype)

        shape = indexer.heads, indexer.size
        return cls(
            [whole(n, indexer.size) for n in case.lens],
            [whole(n, *shape) for n in case.queries],
            [2 * whole(n, indexer.heads).float() + 1 for n in case.queries],
            indexer.top_k,
        )

    def selected(self, row: int) -> torch.Tensor:
        """Return which tokens the queries of a row attend to, [queries, tokens] bool."""
        return oracle.selected(self.q[row], self.weights[row], self.keys[row], self.top_k)


class Bench:
    """A backend with memory for a case, with NaN in every slot, and the true K, V and q of the
    case's rows.

    `relabel` maps logical to physical pages; None: they are in order.
    """

    def __init__(self, make: MakeBackend, case: Case, *, relabel: int | None = 0) -> None:
        self.case = case
        self.backend = make(
            AttentionContext(case.device, case.dtype, case.block_size, case.cache_dtype)
        )
        self.layers: list[AttentionLayer] = [self.backend.make_layer(spec) for spec in case.specs]
        self.scales = [
            KVScales(*(torch.tensor(scale, device=case.device) for scale in case.scales_of(i)))
            for i in range(len(self.layers))
        ]
        for layer, scales in zip(self.layers, self.scales, strict=True):
            layer.kv_scales = scales if case.cache_dtype is not None else None
        if case.earlier_pages:
            bind_layers(self.backend, self.layers, case.earlier_pages, case.placed)
        tokens = case.num_blocks * case.block_size
        self.max_rows, self.max_tokens, self.max_len = (
            2 * len(case.lens) + 72,
            max(tokens, sum(case.lens)) + case.padding,
            tokens,
        )
        if case.exact:
            self.max_rows, self.max_tokens, self.max_len = (
                len(case.lens),
                sum(case.queries),
                max(case.lens),
            )
        self.groups = case.groups
        self.waste_page = case.num_pages
        pages = np.arange(case.num_pages)
        if relabel is not None:
            pages = np.random.default_rng(relabel).permutation(case.num_pages)
        self.tables = self._tables(pages)
        generator = torch.Generator().manual_seed(case.seed)

        def normal(lens: tuple[int, ...], heads: Callable[[LayerSpec], int]) -> Tensors:
            return [
                [
                    torch.randn((n, heads(spec), spec.head_size), generator=generator).to(
                        case.torch_dtype
                    )
                    for n in lens
                ]
                for spec in case.specs
            ]

        self.k, self.v = (normal(case.lens, lambda spec: spec.kv_heads) for _ in range(2))
        if case.v_in_k is not None:
            self.v = [[row[..., : case.v_in_k] for row in rows] for rows in self.k]  # views
        for values in (self.k, self.v):
            values[:] = [
                rows if spec.shares is None else values[spec.shares]
                for spec, rows in zip(case.specs, values, strict=True)
            ]
        self.q = normal(case.queries, lambda spec: spec.heads)
        self.sinks = [
            2 * torch.randn(spec.heads, generator=generator) + 1 if spec.sinks else None
            for spec in case.specs
        ]
        # by layer: of those that select
        self.index = {
            spec.index: Index.drawn(spec.indexer, case, generator)
            for spec in case.specs
            if spec.indexer is not None and spec.indexer.selects
        }
        # as the model's parameters, on the device
        self.bound_sinks = [None if one is None else one.to(case.device) for one in self.sinks]
        for layer, sinks in zip(self.layers, self.bound_sinks, strict=True):
            if sinks is not None:
                layer.bind_sinks(sinks)
        self.bind()

    def bind(self) -> None:
        """Make the pool of the case, and poison it; prepare for its steps."""
        self.pool = bind_layers(self.backend, self.layers, self.case.num_pages, self.case.placed)
        if self.case.poisoned:
            for memory in self.pool:
                memory.fill_(ALL_BITS)
        self.backend.prepare(self.max_rows, self.max_tokens, self.max_len)

    def _tables(self, labels: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        """Return each group's tables [pages, rows, blocks]; entries past a row's blocks are the
        waste page."""
        tables = []
        free = iter(labels.tolist())
        for group in self.groups:
            sizes = [-(-length // group.block_size) for length in self.case.lens]
            table = np.full(
                (group.pages, len(sizes), max(sizes) + 2 * (not self.case.exact)),
                self.waste_page,
                dtype=np.int32,
            )
            for row, size in enumerate(sizes):
                table[:, row, :size] = (
                    np.array([next(free) for _ in range(size * group.pages)], dtype=np.int32)
                    .reshape(size, group.pages)
                    .T
                )
            tables.append(table)
        return tables

    @property
    def table(self) -> NDArray[np.int32]:
        """Return the first page of each of the first group's blocks [rows, blocks], to be changed
        in place."""
        first: NDArray[np.int32] = self.tables[0][0]
        return first

    def batch(
        self,
        rows: Sequence[int],
        queries: NDArray[np.int64],
        lens: NDArray[np.int64],
        padding: int = 0,
        shared: int = 0,
        both_ways: NDArray[np.bool_] | None = None,
    ) -> AttentionBatch:
        """Return a step of these of the case's rows, that compute their last `queries` of `lens`
        tokens. Entries of blocks that no query sees are the waste page, as everything in the tables
        of padding rows."""
        starts = np.concatenate([[0], np.cumsum(queries)])
        padding_rows = 0 if self.case.mixed_graph or self.case.fixed_shapes else padding
        positions = [np.arange(n - q, n) for q, n in zip(queries, lens, strict=True)]

        def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype).to(self.case.device)

        tables = []
        slots = []
        for group, own in zip(self.groups, self.tables, strict=True):
            # [pages, rows, blocks]
            size = group.block_size
            table = own[:, list(rows)]
            written = [
                table[:, row, p // size].astype(np.int64) * size + p % size
                for row, p in enumerate(positions)
            ]
            waste = np.broadcast_to(
                self.waste_page * size + np.arange(padding) % size, (group.pages, padding)
            )
            slots.append(tensor(np.concatenate([*written, waste], axis=1), torch.int64))
            unseen = np.arange(table.shape[2]) < group.first_visible(queries, lens)[:, None]
            table[:, unseen] = self.waste_page
            tables.append(
                tensor(
                    np.pad(
                        table, ((0, 0), (0, padding_rows), (0, 0)), constant_values=self.waste_page
                    ),
                    torch.int32,
                )
            )
        return AttentionBatch(
            num_rows=len(queries),
            num_tokens=int(starts[-1]),
            query_starts=tensor(
                np.concatenate([starts, np.full(padding_rows, starts[-1])]), torch.int32
            ),
            kv_lens=tensor(
                np.concatenate([lens, np.zeros(padding_rows, dtype=np.int64)]), torch.int32
            ),
            block_tables=tuple(tables),
            slots=tuple(slots),
            host_query_lens=queries.astype(np.int32),
            host_kv_lens=lens.astype(np.int32),
            shared_prefix_blocks=shared,
            mixed_graph=self.case.mixed_graph,
            host_both_ways=both_ways,
            fixed_shapes=self.case.fixed_shapes,
            host_seen=self._seen(rows),
        )

    def _seen(self, rows: Sequence[int]) -> NDArray[np.int32] | None:
        return np.array([self.case.seen[row] for row in rows], np.int32) if self.case.seen else None

    def plan_rows(
        self,
        rows: Sequence[int],
        queries: NDArray[np.int64],
        lens: NDArray[np.int64],
        padding: int = 0,
        shared: int = 0,
    ) -> None:
        self.backend.plan(self.batch(rows, queries, lens, padding, shared))

    def plan_padding(self, tokens: int) -> None:
        """Plan a step of no rows."""
        self.plan_rows((), np.zeros(0, np.int64), np.zeros(0, np.int64), padding=tokens)

    def plan(
        self, starts: Sequence[int], ends: Sequence[int], padding: int = 0, shared: int = 0
    ) -> None:
        """Plan a step that computes tokens [start, end) of each row; rows without tokens are
        omitted."""
        pieces = [
            piece
            for row, (start, end) in enumerate(zip(starts, ends, strict=True))
            for piece in self._pieces(row, start, end)
        ]
        counts = np.array([piece.stop - piece.start for piece in pieces], np.int64)
        lens = np.array([piece.stop for piece in pieces], np.int64)
        both_ways = np.array([piece.both_ways for piece in pieces], np.bool_)
        rows = [piece.row for piece in pieces]
        told = both_ways if both_ways.any() else None
        self.backend.plan(self.batch(rows, counts, lens, padding, shared, told))

    def _pieces(self, row: int, start: int, end: int) -> Iterator[Piece]:
        """Yield the rows that a step has for these tokens of a row. Spans that it computes to their
        end are rows of their own."""
        for first, stop in self.case.spans[row] if self.case.spans else ():
            if not start < stop <= end:
                continue
            if first > start:
                yield Piece(row, start, first)
            yield Piece(row, max(first, start), stop, both_ways=True)
            start = stop
        if start < end:
            yield Piece(row, start, end)

    def reorder(self, order: Sequence[int]) -> None:
        """Let the case's rows, with their blocks, stand in another order; they must be of equal
        lengths."""
        self.tables = [table[:, list(order)] for table in self.tables]
        for layers in (self.k, self.v, self.q):
            layers[:] = [[rows[index] for index in order] for rows in layers]

    def write(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        padding: int = 0,
        shared: int = 0,
        without: int | None = None,
    ) -> None:
        """Plan such a step and write its K and V; padding tokens have NaN. `without`: the index of
        a layer that isn't written."""
        self.plan(starts, ends, padding, shared)
        for index, layer in enumerate(self.layers):
            if layer.spec.shares is not None or index == without:
                continue
            self._write(index, starts, ends, padding)

    def _write(self, index: int, starts: Sequence[int], ends: Sequence[int], padding: int) -> None:
        k, v = (
            [
                row[start:end]
                for row, start, end in zip(values[index], starts, ends, strict=True)
                if end > start
            ]
            for values in (self.k, self.v)
        )
        layer = self.layers[index]
        layer.write(self.tensor(k, padding), None if layer.spec.v_in_k else self.tensor(v, padding))
        if index in self.index:
            keys = zip(self.index[index].keys, starts, ends, strict=True)
            layer.write_index(self.tensor([row[start:end] for row, start, end in keys], padding))

    def tensor(self, rows: Sequence[torch.Tensor], padding: int = 0) -> torch.Tensor:
        """Return the rows' values [tokens, ...] on the device, with NaN for padding tokens."""
        nan = torch.full((padding, *rows[0].shape[1:]), torch.nan, dtype=self.case.torch_dtype)
        return torch.cat([*rows, nan]).to(self.case.device)

    def attend(self, padding: int = 0) -> list[torch.Tensor]:
        """Return each layer's output for the case's queries, in float64 on the CPU and without
        padding. Layers that aren't causal are written again, each before it attends: they needn't
        store anything."""
        results = []
        for index, (layer, q) in enumerate(zip(self.layers, self.q, strict=True)):
            if not layer.spec.causal:
                self._write(index, self.case.history, self.case.lens, padding)
            if index in self.index:
                of_index = self.index[index]
                weights = self.tensor(of_index.weights, padding)
                layer.select(self.tensor(of_index.q, padding), weights)
            results.append(layer.attend(self.tensor(q, padding)).clone())
        for spec, result in zip(self.case.specs, results, strict=True):
            expected = (sum(self.case.queries) + padding, spec.heads, spec.out_size)
            require(
                result.shape == expected,
                f"attend() returned the shape {list(result.shape)}, expected {list(expected)}",
            )
            require(
                result.dtype == self.case.torch_dtype,
                f"attend() returned {result.dtype}, expected the dtype of q, "
                f"{self.case.torch_dtype}",
            )
        return [result[: sum(self.case.queries)].double().cpu() for result in results]

    def attend_rows(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Return each layer's output for the queries of these rows, whose K and V have been
        written, in float64 on the CPU. The step is padded to the tokens of the case's."""
        queries = np.array([self.case.queries[row] for row in rows], np.int64)
        lens = np.array([self.case.lens[row] for row in rows], np.int64)
        padding = sum(self.case.queries) - int(queries.sum())
        self.plan_rows(rows, queries, lens, padding)
        return [
            layer.attend(self.tensor([q[row] for row in rows], padding))[: queries.sum()]
            .double()
            .cpu()
            for layer, q in zip(self.layers, self.q, strict=True)
        ]

    def compute(self) -> None:
        """Write the history's K and V in one step, then those of the case's step."""
        if any(self.case.history):
            self.write((0,) * len(self.case.history), self.case.history)
        self.write(self.case.history, self.case.lens, self.case.padding)

    def run(self) -> list[torch.Tensor]:
        self.compute()
        return self.attend(self.case.padding)

    def expected(self) -> list[torch.Tensor]:
        """Return exact values in the form of `attend`."""
        return [
            torch.cat(
                [
                    oracle.exact(q, k, v, self._rules(i, row))
                    for row, (q, k, v) in enumerate(self._rows(i))
                ]
            )
            for i in range(len(self.layers))
        ]

    def allowed_errors(self) -> list[torch.Tensor]:
        """Return the allowed error of each layer, for each token; it is the same for all tokens of
        a row."""
        return [
            torch.cat(
                [
                    self._allowed(self._rules(layer, row), q, k, v).expand(len(q))
                    for row, (q, k, v) in enumerate(self._rows(layer))
                ]
            )
            for layer in range(len(self.layers))
        ]

    def _rules(self, layer: int, row: int) -> oracle.Rules:
        spec = self.case.specs[layer]
        spans = self.case.spans[row] if self.case.spans and spec.both_ways else ()
        sinks = self.sinks[layer]
        rules = oracle.Rules(spec.scale, spec.window, spec.softcap, sinks, spec.causal, spans)
        if self.case.seen:
            rules = rules._replace(seen=self.case.seen[row])
        if spec.indexer is None:
            return rules
        selecting = max(index for index in self.index if index <= layer)
        return rules._replace(selected=self.index[selecting].selected(row))

    def _allowed(
        self, rules: oracle.Rules, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        exact = oracle.exact(q, k, v, rules)
        dtype = self.case.torch_dtype
        return oracle.allowed_error(exact, oracle.plain(q, k, v, rules, dtype), dtype)

    def _rows(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return q, K and V of each row; K and V as stored in the cache."""
        k = self.k[layer]
        v = self.v[layer]
        if (name := self.case.cache_dtype) is not None:
            dtype: torch.dtype = getattr(torch, name)
            k_scale, v_scale = self.case.scales_of(layer)
            v_scale = k_scale if self.case.v_in_k is not None else v_scale
            k, v = (
                [oracle.kept(row, scale, dtype) for row in rows]
                for rows, scale in ((k, k_scale), (v, v_scale))
            )
        return list(zip(self.q[layer], k, v, strict=True))
