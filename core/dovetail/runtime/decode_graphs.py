"""Decode steps as CUDA graphs: model, sampling and the row state's growth, recorded once for each padded number of rows and replayed.

Launching some hundred kernels takes Python longer than a small batch takes the GPU; a replay is one call. What varies from step to step lies in
tensors of fixed address: which rows run (here), their tokens and lengths (`RowState`), where K and V are (the attention backend's own buffers,
filled by its `plan` before the replay). Rows beyond those that run are padding: they stand for an extra row that belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.sampler import Sampler
from dovetail.runtime.row_state import RowState
from dovetail.runtime.transfer import to_device

WARM_UPS = 2  # runs before a capture: kernels are compiled, workspaces made


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One size. `rows` is its input, the others are its outputs; all are overwritten by the next replay."""

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor  # [size] int64
    token_ids: torch.Tensor  # [size] int64
    broken: torch.Tensor  # [size] bool: the hidden state holds NaN


def graph_sizes(max_rows: int) -> list[int]:
    """Padded numbers of rows, largest first: dense where padding would cost most."""
    sizes = {1, 2, 4, max_rows}
    for step, last in ((8, 128), (16, 256), (32, 512), (64, max_rows)):
        sizes |= set(range(step, last + 1, step))
    return sorted((size for size in sizes if size <= max_rows), reverse=True)


class DecodeGraphs:
    """All sizes, sharing one memory pool: one replay at a time uses it."""

    def __init__(self, model: Any, backend: AttentionBackend, sampler: Sampler, rows: RowState) -> None:
        self._model, self._backend, self._sampler, self._rows = model, backend, sampler, rows
        self._graphs: dict[int, DecodeGraph] = {}
        self._size_for = np.zeros(rows.max_rows + 1, np.int64)  # number of rows -> padded size

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size. The KV pool must be there."""
        sizes, pool = graph_sizes(self._rows.max_rows), None
        for done, size in enumerate(sizes):
            rows = torch.full((size,), self._rows.max_rows, dtype=torch.int64, device=self._rows.device)
            self._backend.plan(self._padding(rows))
            stream = torch.cuda.Stream(self._rows.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS if done == 0 else 1):
                    self._decode(rows)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                token_ids, broken = self._decode(rows)
            pool = pool or graph.pool()
            self._graphs[size] = DecodeGraph(graph, rows, token_ids, broken)
            self._size_for[: size + 1] = size
            if progress is not None:
                progress("capturing CUDA graphs", done + 1, len(sizes))

    def replay(self, host_rows: NDArray[np.int64], shared_prefix_blocks: int) -> DecodeGraph:
        """Enqueue a step in which each of `host_rows` computes its last known token and samples the next. The outputs' first entries are theirs."""
        state, count = self._rows, len(host_rows)
        graph = self._graphs[int(self._size_for[count])]
        size = len(graph.rows)
        numbers = np.zeros((2, size), np.int64)  # rows; tokens that each can see
        numbers[0, :count], numbers[0, count:] = host_rows, state.max_rows
        numbers[1, :count] = state.known[host_rows]
        rows, lens = to_device(numbers, state.device)
        graph.rows.copy_(rows)
        places = (lens - 1).clamp_(min=0)
        blocks = state.block_table.view(-1).take(rows * state.max_blocks + places // state.block_size)
        slots = torch.where(lens > 0, blocks.long() * state.block_size + places % state.block_size, -1)
        kv_lens = numbers[1, :count].astype(np.int32)
        widest = -(-int(kv_lens.max()) // state.block_size)
        self._backend.plan(
            AttentionBatch(
                num_rows=count,
                num_tokens=count,
                query_starts=self._starts(size),
                kv_lens=lens.to(torch.int32),
                block_table=state.block_table[:, :widest].index_select(0, rows),
                slots=slots,
                host_query_lens=np.ones(count, np.int32),
                host_kv_lens=kv_lens,
                shared_prefix_blocks=shared_prefix_blocks,
            )
        )
        graph.graph.replay()
        state.known[host_rows] += 1
        return graph

    def _decode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is recorded: device work only, at fixed addresses. rows [size] int64 -> sampled ids [size] int64, whether NaN [size] bool."""
        state = self._rows
        positions = state.num_tokens[rows].long() - 1
        places = rows * state.row_width + positions
        hidden = self._model(state.token_ids.view(-1)[places].long(), positions)
        token_ids = self._sampler.sample_captured(self._model.logits(hidden), rows)
        state.token_ids.view(-1)[places + 1] = token_ids.to(torch.int32)
        state.num_tokens[rows] = (positions + 2).to(torch.int32)
        state.num_tokens[state.max_rows :].fill_(1)  # the row of nobody stays as it was
        return token_ids, hidden.isnan().any(dim=1)

    def _padding(self, rows: torch.Tensor) -> AttentionBatch:
        """A step of nobody's row alone, which reads one token of block 0 and writes nothing."""
        size = len(rows)
        lens = torch.zeros(size, dtype=torch.int32, device=rows.device)
        lens[0] = 1
        return AttentionBatch(
            num_rows=1,
            num_tokens=1,
            query_starts=self._starts(size),
            kv_lens=lens,
            block_table=self._rows.block_table[:, :1].index_select(0, rows),
            slots=torch.full((size,), -1, dtype=torch.int64, device=rows.device),
            host_query_lens=np.ones(1, np.int32),
            host_kv_lens=np.ones(1, np.int32),
        )

    def _starts(self, size: int) -> torch.Tensor:
        return torch.arange(size + 1, dtype=torch.int32, device=self._rows.device)
