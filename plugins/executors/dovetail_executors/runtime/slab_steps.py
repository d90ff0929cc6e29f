"""Computes the deterministic rows of steps: see `slabs`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import Capture, SampledTokens, SampleInputs
from dovetail.nn.fixed_shapes import fixed_shapes
from dovetail.nn.transfer import to_device
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.model_io import SLABS, GraphKey, ModelOutputs, StepTokens
from dovetail_executors.runtime.recorded_steps import Builder, MixedSteps, StepParts
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.slabs import (
    LINES,
    MANY_LINES,
    MOST_LOGITS,
    PLACES,
    SLAB,
    Slabs,
    cheapest,
    rounded_up,
    sizes_of_forwards,
)
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import (
    HostInputs,
    HostLines,
    Int64,
    MixedInputs,
    SamplingInputs,
)

log = logging.getLogger("dovetail")

NONE: Int64 = np.zeros(0, np.int64)


class SlabSteps:
    """Forwards of a fixed number of slabs: `PLACES`, or another one that was tried to have the same
    bits. It is 1 if places turn out to differ, and so is `RowState.fixed_lines`."""

    def __init__(self, parts: StepParts, max_tokens: int | None = None) -> None:
        """`max_tokens`: most of a forward; None: those of `PLACES`."""
        self._parts = parts
        device = parts.rows.device.type
        self._places = PLACES.get(device, 1)  # whose bits all sizes have
        self._sizes = sizes_of_forwards(device, max_tokens or self._places * SLAB)
        parts.rows.fixed_lines = parts.rows.many_lines = LINES.get(device, 1)
        self._tried = self._sizes == [1] and parts.rows.fixed_lines == 1
        self.like: torch.Tensor | None = None  # [1, hidden] a state, once a slab was tried
        self._records_lines = True
        # of launched forwards by their number of slabs, made when first needed
        self._inputs: dict[int, MixedInputs] = {}
        # Launched ones have the kernels of recorded ones.
        self._mixed_graph = parts.backend.capabilities.cuda_graph is GraphSupport.ALL

    def run(
        self, step: Step, host: HostInputs, tokens: Int64, graphs: Graphs | None
    ) -> Iterator[tuple[Int64, torch.Tensor]]:
        """Compute the rows `Step.in_slabs`. Yields the final states of `tokens` [n], of the step:
        indices [m] among these, and states [m, hidden] that the caller may keep."""
        slabs = Slabs.of(host, step.in_slabs)
        works = {row: step.works_of_row(row) for row in np.unique(slabs.rows).tolist()}
        if not self._tried:
            self._try(slabs.take(slice(1)), works[int(slabs.rows[0])], graphs)
        of_tokens, places = slabs.find(tokens)
        for part, size in self._forwards(slabs, works):
            inputs = slabs.take(part).inputs(self._parts.rows)
            states = self._forward(inputs, size, works[int(slabs.rows[part.start])], graphs)
            found = np.flatnonzero((of_tokens >= part.start) & (of_tokens < part.stop))
            if len(found):
                at = (of_tokens[found] - part.start) * SLAB + places[found]
                yield found, states.index_select(0, to_device(at, states.device))

    def _forwards(
        self, slabs: Slabs, works: dict[int, list[DeviceWork]]
    ) -> Iterator[tuple[slice, int]]:
        """Yield the slabs that are computed together, and the size of their forward: a single one
        of `_places` where features add work, whose shapes follow from the number of its tokens."""
        working = np.isin(slabs.rows, [row for row, own in works.items() if own])
        edges = np.flatnonzero(working[1:] | working[:-1]) + 1
        for start, end in pairwise([0, *edges.tolist(), len(slabs)]):
            while start < end:
                size = self._places if working[start] else cheapest(self._sizes, end - start)
                yield slice(start, min(start + size, end)), size
                start += size

    def _forward(
        self, host: HostInputs, size: int, works: Sequence[DeviceWork], graphs: Graphs | None
    ) -> torch.Tensor:
        """Return the final states [tokens, hidden] of a forward of `size` slabs, which the next one
        overwrites."""
        rows = self._parts.rows
        graph = None
        if graphs is not None and not works:
            graph = graphs.find(SLABS, size * SLAB)
        if graph is not None and graph.size != size * SLAB:
            graph = None
        inputs = self._launched(size) if graph is None else graph.inputs
        filled = inputs.fill(host, NONE)
        attention = host.attention_batch(
            rows, filled, mixed_graph=self._mixed_graph, fixed_shapes=True
        )
        if graphs is not None and graph is not None:
            outputs: ModelOutputs = graphs.replay(graph, attention)
            return outputs.hidden
        self._parts.backend.plan(attention)
        return states_of(self._parts, inputs, works)

    def _launched(self, size: int) -> MixedInputs:
        """Return the inputs of launched forwards of so many slabs."""
        if size not in self._inputs:
            self._inputs[size] = slab_inputs(size * SLAB, self._parts.rows)
        return self._inputs[size]

    def _try(self, slab: Slabs, works: Sequence[DeviceWork], graphs: Graphs | None) -> None:
        """Compute a slab in each place of each size of forwards, and a line in each of the lines.
        Sizes whose bits differ from those of `_places` aren't used. Where bits differ between its
        own places, or lines, the engine computes single ones from now on."""
        self._tried = True
        states = self._in_all_places(slab, self._places, works, graphs)
        if not _all_alike(states, states[:1]):
            self._places = 1
            self._sizes = [1]
        else:
            tried = self._sizes
            self._sizes = [
                size
                for size in tried
                if size == self._places
                or _all_alike(self._in_all_places(slab, size, works, graphs), states[:1])
            ]
            if self._sizes != tried:
                log.info("deterministic requests: forwards of %s slabs on this device", self._sizes)
        self._inputs.clear()
        self.like = states[0, -1:]
        self._try_lines(self.like, graphs)

    def sample(
        self,
        hidden: torch.Tensor,
        indices: Int64,
        lines: HostLines,
        capture: Capture,
        graphs: Graphs,
    ) -> SampledTokens | None:
        """Sample lines [n] whose states are hidden[indices], with a recording of as many as are
        sampled together. None if there is none. The next call overwrites the result."""
        if not self._records_lines:
            return None
        found = self._replay_lines(hidden, indices, lines, capture, graphs)
        return None if found is None else found.sampled

    def _replay_lines(
        self,
        hidden: torch.Tensor,
        indices: Int64,
        lines: HostLines,
        capture: Capture,
        graphs: Graphs,
    ) -> LineOutputs | None:
        graph = graphs.find(GraphKey("lines", capture), self._parts.rows.fixed_lines)
        if graph is None or graph.size != self._parts.rows.fixed_lines:
            return None
        graph.inputs.fill(hidden, indices, lines, None)
        outputs: LineOutputs = graphs.replay(graph)
        return outputs

    def _try_lines(self, state: torch.Tensor, graphs: Graphs | None) -> None:
        """Compute logits of a state [1, hidden] in each of the lines."""
        rows = self._parts.rows
        logits_of = self._parts.model.model.logits
        one = logits_of(state.repeat(rows.fixed_lines, 1))
        if not _all_alike(one, one[:1]):
            rows.fixed_lines = rows.many_lines = 1
            log.info("deterministic requests: lines are sampled one by one on this device")
            return
        if graphs is not None:
            indices = np.zeros(rows.fixed_lines, np.int64)
            nobody = HostLines(np.full(rows.fixed_lines, rows.max_rows), indices.astype(np.int32))
            found = self._replay_lines(state, indices, nobody, Capture.TOKENS, graphs)
            self._records_lines = found is not None and _all_alike(found.logits, one[:1])
        many = MANY_LINES.get(rows.device.type, 1)
        fits = rows.fixed_lines < many <= MOST_LOGITS // one.shape[1]
        if fits and _all_alike(logits_of(state.repeat(many, 1)), one[:1]):
            rows.many_lines = many

    def _in_all_places(
        self, slab: Slabs, size: int, works: Sequence[DeviceWork], graphs: Graphs | None
    ) -> torch.Tensor:
        """Return the states [size, SLAB, hidden] of a slab in each place of a forward. The last one
        stores K and V."""
        repeated = slab.take(np.zeros(size, np.int64))
        host = repeated.inputs(self._parts.rows, unstored=size - 1)
        states = self._forward(host, size, works, graphs)
        return states.clone().view(size, SLAB, -1)


class RecordedSlabs(MixedSteps):
    """Forwards of slabs. A size is recorded when first needed."""

    pool = "steps"
    warm_ups = 0
    on_demand = True
    fixed_shapes = True

    def __init__(self, parts: StepParts, max_tokens: int) -> None:
        """`max_tokens`: most of a step."""
        sizes = [SLAB * size for size in sizes_of_forwards(parts.rows.device.type, max_tokens)]
        super().__init__(SLABS, sizes, parts, None)

    def make_inputs(self, size: int) -> MixedInputs:
        return slab_inputs(size, self.parts.rows)

    def run(self, inputs: MixedInputs) -> ModelOutputs:
        return ModelOutputs(states_of(self.parts, inputs, ()))


class LineOutputs(NamedTuple):
    """Results of recorded lines. The next replay overwrites the tensors."""

    logits: torch.Tensor  # [lines, vocab]
    sampled: SampledTokens


class RecordedLines(Builder):
    """Logits and tokens of the lines that are computed together. Many at once are launched, for
    their memory. Recorded when first needed, once `slabs` have been tried."""

    warm_ups = 0
    on_demand = True

    def __init__(self, parts: StepParts, capture: Capture, slabs: SlabSteps) -> None:
        size = LINES.get(parts.rows.device.type, 1)
        super().__init__(GraphKey("lines", capture), [size], parts)
        self._slabs = slabs

    def inputs(self, size: int) -> SamplingInputs:
        assert self._slabs.like is not None
        return SamplingInputs(size, self.parts.rows.max_rows, self._slabs.like)

    def run(self, inputs: SamplingInputs) -> LineOutputs:
        logits = self.parts.model.logits(inputs.hidden, inputs.lines.rows)
        sampler = self.parts.sampling.sampler
        asked = SampleInputs(logits=logits, lines=inputs.lines, capture=self.key.capture)
        return LineOutputs(logits, sampler.sample(asked))


def slab_inputs(size: int, rows: RowState) -> MixedInputs:
    """Return the inputs of a forward of `size` tokens."""
    blocks = -(-rounded_up(rows.max_len) // rows.block_size)
    places = size // SLAB
    entries = rows.num_tables * places * blocks
    return MixedInputs(size, rows, 0, max_rows=places, table_entries=entries)


def states_of(parts: StepParts, inputs: MixedInputs, works: Sequence[DeviceWork]) -> torch.Tensor:
    """Compute the final states of planned slabs, with `works` around the model."""
    rows = parts.rows
    ids = rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
    of_model = ModelInputs(token_ids=ids, positions=inputs.positions)
    tokens = StepTokens(of_model, rows.row_width, inputs.token_indices)
    with fixed_shapes():
        return parts.model.states(tokens, works)


def _all_alike(each: torch.Tensor, one: torch.Tensor) -> bool:
    """Return True if all of `each` [n, ...] have the bits of `one` [1, ...], those of NaN too."""
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (each, one)]
    return torch.equal(bits[0], bits[1].expand_as(bits[0]))
