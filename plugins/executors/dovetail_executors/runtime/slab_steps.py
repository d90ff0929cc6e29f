"""Computes the deterministic rows of steps: see `slabs`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs
from dovetail.nn.fixed_shapes import fixed_shapes
from dovetail.nn.transfer import to_device
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.graphs import Graphs, MixedSteps, StepParts
from dovetail_executors.runtime.model_io import SLABS, ModelOutputs, StepTokens
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.slabs import LINES, PLACES, SLAB, Slabs, rounded_up
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import HostInputs, Int64, MixedInputs

log = logging.getLogger("dovetail")

NONE: Int64 = np.zeros(0, np.int64)


class SlabSteps:
    """Forwards of a fixed number of slabs: see `PLACES`. It is 1 if places turn out to differ, and
    so is `RowState.fixed_lines`."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        device = parts.rows.device.type
        self._places = PLACES.get(device, 1)
        parts.rows.fixed_lines = LINES.get(device, 1)
        self._tried = self._places == parts.rows.fixed_lines == 1
        self._inputs: MixedInputs | None = None  # of launched forwards, made when first needed
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
        for part in self._forwards(slabs, works):
            inputs = slabs.take(part).inputs(self._parts.rows)
            states = self._forward(inputs, works[int(slabs.rows[part.start])], graphs)
            found = np.flatnonzero((of_tokens >= part.start) & (of_tokens < part.stop))
            if len(found):
                at = (of_tokens[found] - part.start) * SLAB + places[found]
                yield found, states.index_select(0, to_device(at, states.device))

    def _forwards(self, slabs: Slabs, works: dict[int, list[DeviceWork]]) -> Iterator[slice]:
        """Yield the slabs that are computed together: `_places` at most, and a single one where
        features add work, whose shapes follow from the number of their tokens."""
        start = 0
        for end, row in enumerate(slabs.rows.tolist(), 1):
            following = int(slabs.rows[end]) if end < len(slabs) else row
            alone = bool(works[row] or works[following])
            if alone or end - start == self._places or end == len(slabs):
                yield slice(start, end)
                start = end

    def _forward(
        self, host: HostInputs, works: Sequence[DeviceWork], graphs: Graphs | None
    ) -> torch.Tensor:
        """Return the final states [tokens, hidden] of a forward, which the next one overwrites."""
        rows = self._parts.rows
        size = self._places * SLAB
        graph = None
        if graphs is not None and not works and self._places > 1:
            graph = graphs.find(SLABS, size)
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
        """Return the inputs of launched forwards."""
        if self._inputs is None:
            self._inputs = slab_inputs(size, self._parts.rows)
        return self._inputs

    def _try(self, slab: Slabs, works: Sequence[DeviceWork], graphs: Graphs | None) -> None:
        """Compute a slab in each place of a forward, and a line in each of the lines. Where bits
        differ, the engine computes single ones from now on."""
        self._tried = True
        states = None
        same = True
        for place in range(self._places):
            repeated = slab.take(np.zeros(place + 1, np.int64))
            host = repeated.inputs(self._parts.rows, unstored=place)
            found = self._forward(host, works, graphs)[place * SLAB : (place + 1) * SLAB].clone()
            states = found if states is None else states
            same &= _same_bits(found, states)
        assert states is not None
        lines = self._parts.rows.fixed_lines
        logits = self._parts.model.model.logits(states[-1:].repeat(lines, 1))
        if not same:
            self._places = 1
            self._inputs = None
            log.info("deterministic requests: slabs are computed one by one on this device")
        if not _same_bits(logits, logits[:1].expand_as(logits)):
            self._parts.rows.fixed_lines = 1
            log.info("deterministic requests: lines are sampled one by one on this device")


class RecordedSlabs(MixedSteps):
    """The forward of slabs. It is recorded when first needed."""

    pool = "steps"
    warm_ups = 0
    on_demand = True
    fixed_shapes = True

    def __init__(self, parts: StepParts) -> None:
        sizes = [SLAB * PLACES.get(parts.rows.device.type, 1)]
        super().__init__(SLABS, sizes, parts, None)

    def make_inputs(self, size: int) -> MixedInputs:
        return slab_inputs(size, self.parts.rows)

    def run(self, inputs: MixedInputs) -> ModelOutputs:
        return ModelOutputs(states_of(self.parts, inputs, ()))


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


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype have the same bits, those of NaN too."""
    one, other = (each.contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)
