"""Decode steps as CUDA graphs: model, sampling and the row state's growth, recorded once for each padded number of rows and replayed.

Launching some hundred kernels takes Python longer than a small batch takes the GPU; a replay is one call. What varies from step to step lies in
tensors of fixed address: which rows run (here), their tokens and lengths (`RowState`), where K and V are (the attention backend's own buffers,
filled by its `plan` before the replay). Rows beyond those that run are padding: they stand for an extra row that belongs to nobody.

There are several kinds of recordings, so that no step pays for what it doesn't need: see `Kind`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.sampler import Sampler
from dovetail.errors import UnsupportedError
from dovetail.runtime.decode_rows import append, last_tokens
from dovetail.runtime.row_state import RowState
from dovetail.runtime.sampled import Sampled
from dovetail.runtime.step_inputs import TABLE_ENTRIES
from dovetail.runtime.token_sizes import half_of, row_sizes, typical
from dovetail.runtime.transfer import Mirror

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]

WARM_UPS = 2  # runs before the first capture: kernels are compiled, workspaces made


class Kind(Enum):
    """The kind of step that a recording replays."""

    PLAIN = auto()
    SHARING = auto()  # attention reads a prefix that all rows share once
    FULL = auto()  # sampling is `Sampler.sample_fully_captured`
    LATE = auto()  # the model alone: sampling waits for masks of the tokens that may come


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecodeGraph(Generic[T]):
    """One size of a kind. What `inputs` holds is read by a replay, and `outputs` written: hidden states [size, hidden] of kind `LATE`, otherwise what
    was sampled."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    outputs: T


class Inputs:
    """The inputs of a step that come from the host, in one buffer on the device, so that one copy brings them."""

    def __init__(self, size: int, nobody: int, device: torch.device) -> None:
        self.size, self._nobody = size, nobody
        numbers, kv_lens, table = np.zeros(size, np.int64), np.zeros(size, np.int32), np.zeros(TABLE_ENTRIES, np.int32)
        self._mirror = Mirror([numbers, numbers, kv_lens, table], device)
        self.rows, self.slots, self.kv_lens, self._table = self._mirror.tensors
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.fill(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def holds_table(self, width: int) -> bool:
        """True if there is room for the rows' block tables when the widest has `width` blocks."""
        return self.size * width <= TABLE_ENTRIES

    def table(self, width: int) -> torch.Tensor:
        """[size, width] int32: the table that `fill` was given last, which was as wide, and zeros."""
        return self._table[: self.size * width].view(self.size, width)

    def fill(self, rows: Int64, slots: Int64, kv_lens: Int64, table: NDArray[np.int32] | None = None) -> None:
        """Enqueue the copy. [n] each, n <= size; the rest stands for nobody's row, whose token goes nowhere. `table` [n, width] if `holds_table`."""
        all_rows, all_slots, all_lens, blocks = self._mirror.arrays
        count = len(rows)
        for padded, own, padding in ((all_rows, rows, self._nobody), (all_slots, slots, -1), (all_lens, kv_lens, 0)):
            padded[:count], padded[count:] = own, padding
        used = 0
        if table is not None:
            used = self.size * table.shape[1]
            blocks[: table.size], blocks[table.size : used] = table.reshape(-1), 0
        self._mirror.send(numbers=used)


def sharing_sizes(max_rows: int) -> tuple[int, ...]:
    """Padded numbers of rows, rising, for steps that read a shared prefix once: few, for each costs start-up time."""
    return tuple(sorted({min(1 << power, max_rows) for power in range(2, max_rows.bit_length() + 1)}))


def sample(
    sampler: Sampler, rows: RowState, of: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor, hidden: torch.Tensor, full: bool
) -> Sampled:
    """Sample a token for each of the rows `of` [n] int64 whose last known one is at `positions` [n] int64, and append it to the row: the end of a
    recorded step, device work only. `logits` is [n, vocab], computed from `hidden` [n, hidden]."""
    if not full:
        return Sampled(append(rows, of, positions, sampler.sample_captured(logits, of), hidden))
    sampled = sampler.sample_fully_captured(logits, of)
    tokens = append(rows, of, positions, sampled.token_ids, hidden)
    return Sampled(tokens) if sampled.logprobs is None else Sampled.pack(tokens, sampled.logprobs)


def record(run: Callable[[], T], pool: Any, warm_ups: int, device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `run`, and what that returned: its replays overwrite it."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = run()
    return graph, outputs


class DecodeGraphs:
    """The recorded decode steps of all kinds and sizes. They share one memory pool, since only one replay at a time uses it."""

    def __init__(self, model: Any, backend: AttentionBackend, sampler: Sampler, rows: RowState, max_tokens: int) -> None:
        """Plan recordings for steps of up to all rows, or up to `max_tokens` rows if that is less."""
        self._model, self._backend, self._sampler, self._rows = model, backend, sampler, rows
        sizes = row_sizes(min(rows.max_rows, max_tokens))
        self._sizes = {Kind.PLAIN: sizes}
        if backend.capabilities.shared_prefix:
            self._sizes[Kind.SHARING] = sharing_sizes(sizes[-1])
        self._sizes[Kind.LATE] = half_of(sizes)
        if sampler.capabilities.cuda_graph_full:
            self._sizes[Kind.FULL] = half_of(sizes)
        self._graphs: dict[tuple[Kind, int], DecodeGraph[Sampled]] = {}
        self._late_graphs: dict[int, DecodeGraph[torch.Tensor]] = {}
        self.pool: Any = None  # of memory; once captured

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch what will be recorded, once for each kind of size, on numbers that are made up: kernels may be compiled, and compute nothing."""
        for kind, sizes in self._sizes.items():
            for size in typical(sizes):
                rows = self._padding_inputs(kind, size).rows
                last_tokens(self._rows, rows)
                nothing = torch.zeros_like(rows)
                hidden = self._model(nothing, nothing).zero_()
                sample(self._sampler, self._rows, rows, nothing, self._model.logits(hidden).zero_(), hidden, kind is Kind.FULL)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size. The KV pool must be there."""
        wanted = [(kind, size) for kind, sizes in self._sizes.items() for size in reversed(sizes)]
        for done, (kind, size) in enumerate(wanted):
            try:
                warm_ups = 0 if kind is Kind.LATE else 1  # the model of a plain step, which was recorded before, of that size too
                graph = self._capture(kind, size, self.pool, warm_ups if done else WARM_UPS)
            except UnsupportedError as error:
                if kind is not Kind.FULL:
                    raise
                log.info("decodes that ask for more than a token to be drawn aren't recorded: %s", error)
                del self._sizes[kind]  # the last kind that is wanted
                break
            self.pool = self.pool or graph.pool()
            if progress is not None:
                progress("capturing CUDA graphs", done + 1, len(wanted))

    def kind_for(self, host_rows: Int64, shared_prefix_blocks: int, *, late: bool) -> Kind | None:
        """Return the kind of recording that can replay a decode step of these rows, or None. Of a `late` step it replays the model."""
        shares = shared_prefix_blocks > 0 and Kind.SHARING in self._sizes
        if late:
            return None if shares else Kind.LATE
        if self._sampler.capturable(host_rows):
            return Kind.SHARING if shares else Kind.PLAIN
        return Kind.FULL if Kind.FULL in self._sizes and not shares and self._sampler.fully_capturable(host_rows) else None

    def replay(self, kind: Kind, host_rows: Int64, shared_prefix_blocks: int) -> Sampled:
        """Enqueue a step in which each of `host_rows` computes its last known token and samples the next. Of what is returned the first entries are
        theirs."""
        captured = self._graphs[kind, self._padded(kind, len(host_rows))]
        self._run(captured, host_rows, shared_prefix_blocks)
        self._rows.known[host_rows] += 1
        return captured.outputs

    def replay_model(self, host_rows: Int64) -> torch.Tensor:
        """Enqueue the model's part of such a step, without a shared prefix. Return hidden states [any, hidden], of which the first are theirs; the
        next replay overwrites them."""
        captured = self._late_graphs[self._padded(Kind.LATE, len(host_rows))]
        self._run(captured, host_rows, 0)
        return captured.outputs

    def _padded(self, kind: Kind, count: int) -> int:
        sizes = self._sizes[kind]
        return sizes[bisect_left(sizes, count)]

    def _run(self, captured: DecodeGraph[Any], host_rows: Int64, shared_prefix_blocks: int) -> None:
        state, inputs = self._rows, captured.inputs
        kv_lens = state.known[host_rows]
        width = -(-int(kv_lens.max(initial=1)) // state.block_size)
        from_host = inputs.holds_table(width)
        inputs.fill(host_rows, state.slots(host_rows, kv_lens - 1), kv_lens, state.host_blocks[host_rows, :width] if from_host else None)
        table = inputs.table(width) if from_host else state.block_table[:, :width].index_select(0, inputs.rows)
        self._backend.plan(self._batch(inputs, kv_lens, table, shared_prefix_blocks))
        captured.graph.replay()

    def _batch(self, inputs: Inputs, kv_lens: Int64, table: torch.Tensor, shared_prefix_blocks: int) -> AttentionBatch:
        count = len(kv_lens)
        return AttentionBatch(
            num_rows=count,
            num_tokens=count,
            query_starts=inputs.query_starts,
            kv_lens=inputs.kv_lens,
            block_table=table,
            slots=inputs.slots,
            host_query_lens=np.ones(count, np.int32),
            host_kv_lens=kv_lens.astype(np.int32),
            shared_prefix_blocks=shared_prefix_blocks,
        )

    def _capture(self, kind: Kind, size: int, pool: Any, warm_ups: int) -> torch.cuda.CUDAGraph:
        """Record one, and keep it."""
        inputs = self._padding_inputs(kind, size)
        if kind is Kind.LATE:
            graph, hidden = self._record(lambda: self._model_of(inputs.rows)[0], pool, warm_ups)
            self._late_graphs[size] = DecodeGraph(graph, inputs, hidden)
        else:
            graph, sampled = self._record(lambda: self._decode(inputs.rows, kind is Kind.FULL), pool, warm_ups)
            self._graphs[kind, size] = DecodeGraph(graph, inputs, sampled)
        return graph

    def _padding_inputs(self, kind: Kind, size: int) -> Inputs:
        """Make the inputs of a step of padding alone, which reads and writes nothing, and tell the backend of it."""
        inputs = Inputs(size, self._rows.max_rows, self._rows.device)
        nobodys = self._rows.block_table[-1:, :1].expand(size, 1)
        self._backend.plan(self._batch(inputs, np.zeros(0, np.int64), nobodys, int(kind is Kind.SHARING)))
        return inputs

    def _record(self, run: Callable[[], T], pool: Any, warm_ups: int) -> tuple[torch.cuda.CUDAGraph, T]:
        return record(run, pool, warm_ups, self._rows.device)

    def _model_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [size, hidden] of the last known tokens of `rows` [size], and their positions [size]."""
        token_ids, positions = last_tokens(self._rows, rows)
        hidden: torch.Tensor = self._model(token_ids, positions)
        return hidden, positions

    def _decode(self, rows: torch.Tensor, full: bool) -> Sampled:
        """Compute the step that is recorded: device work only, at fixed addresses. rows [size] int64."""
        hidden, positions = self._model_of(rows)
        return sample(self._sampler, self._rows, rows, positions, self._model.logits(hidden), hidden, full)
