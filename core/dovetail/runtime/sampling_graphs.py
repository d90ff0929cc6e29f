"""The end of a step that isn't decodes alone, as CUDA graphs: logits of the rows that sample, sampling, and the row state's growth, recorded once for
each padded number of such rows, and once more for rows that need `Sampler.sample_fully_captured`.

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
from dovetail.errors import UnsupportedError
from dovetail.nn.token_masks import mask_tokens
from dovetail.runtime.decode_graphs import record, sample
from dovetail.runtime.decode_rows import last_tokens
from dovetail.runtime.mask_buffer import MaskBuffer
from dovetail.runtime.row_state import RowState
from dovetail.runtime.sampled import Sampled
from dovetail.runtime.token_sizes import half_of, row_sizes
from dovetail.runtime.transfer import upload

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingGraph:
    """The recording of one size. A replay reads `inputs`, whose first line says which rows sample, `hidden` and the masks; it writes `sampled`."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # [3, size] int64: rows, nobody's for padding; where the state of each one's last token is; its line in the masks, or -1
    hidden: torch.Tensor  # [size, hidden]
    sampled: Sampled


class SamplingGraphs:
    """The recorded sampling of steps with up to `most` sampled rows."""

    def __init__(self, model: Any, sampler: Sampler, rows: RowState, masks: MaskBuffer, most: int) -> None:
        self._model, self._sampler, self._rows, self._masks = model, sampler, rows, masks
        self._sizes = {False: row_sizes(most)}  # in full
        if sampler.capabilities.cuda_graph_full:
            self._sizes[True] = half_of(self._sizes[False])
        self._graphs: dict[tuple[bool, int], SamplingGraph] = {}

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Launch what `DecodeGraphs.rehearse` doesn't: kernels may be compiled, and compute nothing."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._rows.device)
        mask_tokens(self._model.logits(self._model(nothing, nothing)), nothing, self._masks.words)

    @torch.inference_mode()
    def capture(self, like: torch.Tensor, pool: Any, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size, in the memory `pool` of graphs that no replay runs beside. `like` [any, hidden]: hidden states of the model, for their
        size and dtype."""
        wanted = [(full, size) for full, sizes in self._sizes.items() for size in reversed(sizes)]
        for done, (full, size) in enumerate(wanted):
            try:
                self._graphs[full, size] = self._capture(full, size, like, pool)
            except UnsupportedError:
                if not full:
                    raise
                del self._sizes[full]  # the last that are wanted; `DecodeGraphs` has told of it
                break
            if progress is not None:
                progress("capturing CUDA graphs of sampling", done + 1, len(wanted))

    def replay(self, hidden: torch.Tensor, host_indices: Int64, host_rows: Int64, masked: Int64 | None) -> Sampled | None:
        """Enqueue what remains of a step: each of `host_rows` samples the token after its last known one, which has the state hidden[host_indices].
        `masked` [n] are their lines in the masks; None: no row is masked. Of what is returned the first entries are theirs. None, and nothing is
        done, if they ask for more than a graph gives: such as log-probabilities of raw logits beside masks."""
        full, count = not self._sampler.capturable(host_rows), len(host_rows)
        if full and not (full in self._sizes and self._sampler.fully_capturable(host_rows)):
            return None
        if full and masked is not None and (self._rows.logprobs[host_rows] >= 0).any():
            return None
        captured = self._graphs[full, self._sizes[full][bisect_left(self._sizes[full], count)]]
        host = np.zeros(captured.inputs.shape, np.int64)
        host[0, :count], host[0, count:] = host_rows, self._rows.max_rows
        host[1, :count] = host_indices
        host[2] = -1
        if masked is not None:
            host[2, :count] = masked
        upload(host, captured.inputs)
        torch.index_select(hidden, 0, captured.inputs[1], out=captured.hidden)
        captured.graph.replay()
        self._rows.known[host_rows] += 1
        return captured.sampled

    def _capture(self, full: bool, size: int, like: torch.Tensor, pool: Any) -> SamplingGraph:
        """Make the inputs of padding alone."""
        inputs = torch.zeros((3, size), dtype=torch.int64, device=like.device)
        inputs[0], inputs[2] = self._rows.max_rows, -1
        hidden = like.new_zeros(size, like.shape[1])
        graph, sampled = record(lambda: self._sample(inputs[0], inputs[2], hidden, full), pool, 1, like.device)
        return SamplingGraph(graph, inputs, hidden, sampled)

    def _sample(self, rows: torch.Tensor, masked: torch.Tensor, hidden: torch.Tensor, full: bool) -> Sampled:
        """Compute the part of a step that is recorded: device work only, at fixed addresses."""
        _, positions = last_tokens(self._rows, rows)
        logits = self._model.logits(hidden)
        mask_tokens(logits, masked, self._masks.words)
        return sample(self._sampler, self._rows, rows, positions, logits, hidden, full)
