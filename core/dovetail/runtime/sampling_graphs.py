"""The end of a step that isn't decodes alone, as CUDA graphs: logits of the rows that sample, sampling, and the row state's growth, recorded once for
each padded number of such rows.

Launched one by one this takes the host longer than a small step takes the GPU, and the rows that decode beside a prompt wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Sampler
from dovetail.runtime.decode_graphs import record
from dovetail.runtime.decode_rows import append, last_tokens
from dovetail.runtime.row_state import RowState
from dovetail.runtime.token_sizes import row_sizes
from dovetail.runtime.transfer import upload

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingGraph:
    """One size. A replay reads `places`, of which the first row says which rows sample, and `hidden`; it writes `outputs`."""

    graph: torch.cuda.CUDAGraph
    places: torch.Tensor  # [2, size] int64: rows, nobody's for padding; and where the state of each one's last token is
    hidden: torch.Tensor  # [size, hidden]
    outputs: torch.Tensor  # [2, size] int64: the sampled ids, and whether the hidden state holds NaN


class SamplingGraphs:
    """All sizes up to `most` rows."""

    def __init__(self, model: Any, sampler: Sampler, rows: RowState, most: int) -> None:
        self._model, self._sampler, self._rows = model, sampler, rows
        self._sizes = row_sizes(most)
        self._graphs: dict[int, SamplingGraph] = {}

    @torch.inference_mode()
    def capture(self, like: torch.Tensor, pool: Any, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size, in the memory `pool` of graphs that no replay runs beside. `like` [any, hidden]: hidden states of the model, for their
        size and dtype."""
        for done, size in enumerate(reversed(self._sizes)):
            self._graphs[size] = self._capture(size, like, pool)
            if progress is not None:
                progress("capturing CUDA graphs of sampling", done + 1, len(self._sizes))

    def replay(self, hidden: torch.Tensor, host_places: Int64, host_rows: Int64) -> torch.Tensor:
        """Enqueue what remains of a step: each of `host_rows` samples the token after its last known one, which has the state hidden[host_places].
        Returns `SamplingGraph.outputs`, whose first entries are theirs, and which the next replay overwrites."""
        count = len(host_rows)
        captured = self._graphs[self._sizes[bisect_left(self._sizes, count)]]
        host = np.zeros(captured.places.shape, np.int64)
        host[0, :count], host[0, count:] = host_rows, self._rows.max_rows
        host[1, :count] = host_places
        upload(host, captured.places)
        torch.index_select(hidden, 0, captured.places[1], out=captured.hidden)
        captured.graph.replay()
        self._rows.known[host_rows] += 1
        return captured.outputs

    def _capture(self, size: int, like: torch.Tensor, pool: Any) -> SamplingGraph:
        """Of padding alone."""
        places = torch.zeros((2, size), dtype=torch.int64, device=like.device)
        places[0] = self._rows.max_rows
        hidden = like.new_zeros(size, like.shape[1])
        graph, outputs = record(lambda: self._sample(places[0], hidden), pool, 1, like.device)
        return SamplingGraph(graph, places, hidden, outputs)

    def _sample(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What is recorded: device work only, at fixed addresses."""
        _, positions = last_tokens(self._rows, rows)
        sampled = self._sampler.sample_captured(self._model.logits(hidden), rows)
        return append(self._rows, rows, positions, sampled, hidden)
