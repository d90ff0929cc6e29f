"""The steps that CUDA graphs record: keys and sizes, inputs of a size, and the device work on them.

To add a kind: name its key, write its `Builder`, add it to `mixed_builders` or `decode_builders` or
to a feature's `DeviceWork.recordings`, and have the runner or the feature `find`, fill and `replay`
its recording in `graphs.Graphs`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import Capture
from dovetail.api.token_sizes import (
    half_of,
    padded_sizes,
    row_sizes,
    sharing_row_sizes,
    sharing_token_sizes,
)
from dovetail_executors.runtime.model_io import (
    DECODE,
    MIXED,
    MODEL,
    MODEL_PARTS,
    PROCESSED,
    SHARED,
    GraphKey,
    ModelOutputs,
    StepTokens,
)
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.sampling import Sampling, last_tokens, settled
from dovetail_executors.runtime.state_plan import StatePlan
from dovetail_executors.runtime.step import Sampled
from dovetail_executors.runtime.step_inputs import (
    DecodeInputs,
    HostLines,
    MixedInputs,
    SamplingInputs,
)
from dovetail_executors.runtime.step_model import StepModel

# pool of recordings whose outputs must outlive the replay that samples from them
OUTPUTS = "outputs"
NO_LINES = HostLines(np.zeros(0, np.int64), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class StepParts:
    """Objects that compute steps."""

    model: StepModel
    states: tuple[StatePlan, ...]  # of recurrent layers, one if there are any
    backend: AttentionBackend
    sampling: Sampling
    generates: bool = True  # some steps sample

    @property
    def rows(self) -> RowState:
        return self.sampling.rows

    def plan_recorded(self, inputs: DecodeInputs, *, shared: bool = False) -> None:
        """Plan a decode step of padding."""
        self.backend.plan(inputs.fill(NO_LINES, int(shared)))
        for states in self.states:
            states.plan_recorded(inputs)


class Builder(ABC):
    """One key of recordings: sizes, inputs of a size, and the device work on them."""

    # Recordings of one pool share memory: a replay may overwrite the outputs of others.
    pool = "steps"
    # Runs before a recording. 0 if an earlier one launches the same kernels for each size.
    warm_ups = 1
    optional: bool  # skip the key if recording raises `UnsupportedError`
    on_demand = False  # no size is recorded before the first step that it serves
    splitter: LayerSplitter | None = None  # set to record in pieces

    def __init__(self, key: GraphKey, sizes: Sequence[int], parts: StepParts) -> None:
        """`sizes` are ascending. Larger ones are recorded first, so that smaller ones reuse their
        memory."""
        self.key, self.sizes, self.parts = key, tuple(sizes), parts
        self.optional = key.capture is Capture.FULL

    def with_axes(self, axes: frozenset[str]) -> Builder:
        """Return the builder of the same steps with these axes more."""
        other = copy(self)
        other.key = replace(self.key, axes=self.key.axes | axes)
        return other

    @abstractmethod
    def inputs(self, size: int) -> Any:
        """Create the inputs of a padding-only step, which reads and writes nothing, at the
        addresses that replays will read, and plan it for all layers."""

    @abstractmethod
    def run(self, inputs: Any) -> Any:
        """Run the work to record: device work only, at fixed addresses, without reading a result on
        the host. Returns what a replay overwrites. Results of kernels must pass through `settled`
        before torch uses them as indices."""

    def rehearse(self, inputs: Any) -> None:
        """Launch every kernel that such a step needs, while kernels are only compiled."""
        self.run(inputs)


class MixedSteps(Builder):
    """The model's part of any step, of `size` tokens."""

    pool = OUTPUTS
    fixed_shapes = False  # see `AttentionBatch`

    def __init__(
        self,
        key: GraphKey,
        sizes: Sequence[int],
        parts: StepParts,
        splitter: LayerSplitter | None,
    ) -> None:
        """With a `splitter`, attention isn't part of the graphs."""
        super().__init__(key, sizes, parts)
        self.splitter = splitter

    def make_inputs(self, size: int) -> MixedInputs:
        """Return inputs that aren't planned."""
        rows = self.parts.rows
        # Large steps compute only wanted states, of at most half of the tokens.
        most_wanted = rows.max_lines if size >= 2 * rows.max_lines else 0
        return MixedInputs(size, rows, most_wanted)

    def inputs(self, size: int) -> MixedInputs:
        rows = self.parts.rows
        nothing = np.zeros(0, np.int32)
        inputs = self.make_inputs(size)
        of_no_rows = inputs.rows(0)
        padding = AttentionBatch(
            num_rows=0,
            num_tokens=0,
            query_starts=of_no_rows.query_starts,
            kv_lens=of_no_rows.kv_lens,
            block_tables=rows.by_group(rows.tables[:, :0, :1]),
            slots=rows.by_group(of_no_rows.slots),
            host_query_lens=nothing,
            host_kv_lens=nothing,
            shared_prefix_blocks=int("shared" in self.key.axes),
            mixed_graph=self.splitter is None,
            fixed_shapes=self.fixed_shapes,
        )
        self.parts.backend.plan(padding)
        return inputs

    def run(self, inputs: MixedInputs) -> ModelOutputs:
        """Return hidden states of all tokens [size, hidden], or of wanted ones [most_wanted,
        hidden]."""
        rows = self.parts.rows
        token_ids = rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        wanted = None if inputs.all_states else inputs.wanted
        of_model = ModelInputs(token_ids=token_ids, positions=inputs.positions, wanted=wanted)
        tokens = StepTokens(of_model, rows.row_width, inputs.token_indices)
        return self.parts.model.run(tokens, self.key)

    def rehearse(self, inputs: MixedInputs) -> None:
        # What follows the sampling isn't recorded with it.
        self.parts.model.after_growth(self.run(inputs).without_padding(0), self.key)


class DecodeSteps(Builder):
    """Decode steps of `size` lines, from their last tokens to the sampled ones; without a capture,
    only the model's part."""

    def __init__(self, key: GraphKey, sizes: Sequence[int], parts: StepParts) -> None:
        super().__init__(key, sizes, parts)
        self.warm_ups = 0 if key.capture is None else 1
        if key.capture is None:
            self.pool = OUTPUTS

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size, self.parts.rows)
        self.parts.plan_recorded(inputs, shared="shared" in self.key.axes)
        return inputs

    def run(self, inputs: DecodeInputs) -> Any:
        """Return `Sampled`, or `ModelOutputs` with hidden states [size, hidden]."""
        parts = self.parts
        lines = inputs.lines
        token_ids, positions = map(settled, last_tokens(parts.rows, lines, inputs.drafts))
        of_model = ModelInputs(token_ids=token_ids, positions=positions)
        tokens = StepTokens(of_model, parts.rows.row_width, line_rows=lines.rows)
        outputs = parts.model.run(tokens, self.key)
        hidden = settled(outputs.hidden)
        if self.key.capture is None:
            return outputs
        logits = parts.model.logits(hidden, lines.rows, parts.model.works_with_axes(self.key))
        sampled = parts.sampling.record(
            logits,
            lines,
            positions,
            hidden,
            self.key.capture,
            processed="processed" in self.key.axes,
        )
        parts.model.after_growth(outputs, self.key)
        return sampled


class SamplingSteps(Builder):
    """The rest of a step after its model, for `size` sampled lines.

    Launching its kernels one by one takes longer than a small step.
    """

    def __init__(
        self, key: GraphKey, sizes: Sequence[int], parts: StepParts, model: DecodeSteps
    ) -> None:
        super().__init__(key, sizes, parts)
        self._model = model

    @cached_property
    def _states(self) -> torch.Tensor:
        """[1, hidden] hidden state of padding, for its width and dtype."""
        outputs: ModelOutputs = self._model.run(self._model.inputs(1))
        return outputs.hidden

    def inputs(self, size: int) -> SamplingInputs:
        return SamplingInputs(size, self.parts.rows.max_rows, self._states)

    def run(self, inputs: SamplingInputs) -> Sampled:
        positions = settled(last_tokens(self.parts.rows, inputs.lines)[1])
        logits = self.parts.model.logits(inputs.hidden, inputs.lines.rows)
        assert self.key.capture is not None
        return self.parts.sampling.record(
            logits,
            inputs.lines,
            positions,
            inputs.hidden,
            self.key.capture,
            inputs.masked,
            processed="processed" in self.key.axes,
        )


def mixed_builders(parts: StepParts, splitter: LayerSplitter, most_tokens: int) -> list[Builder]:
    """Return the builders for steps of up to `most_tokens` tokens. Only graphs that include
    attention support shared prefixes."""
    sizes = padded_sizes(most_tokens)
    if parts.backend.capabilities.cuda_graph is not GraphSupport.ALL:
        return [MixedSteps(MIXED, sizes, parts, splitter)]
    builders: list[Builder] = [MixedSteps(MIXED, sizes, parts, None)]
    if parts.backend.capabilities.shared_prefix:
        sharing = GraphKey("mixed", axes=SHARED)
        builders.append(MixedSteps(sharing, sharing_token_sizes(sizes), parts, None))
    return builders


OfFeature = Callable[[StepParts, int], Sequence[Builder]]  # see `StepFeature.recordings`


def decode_builders(
    parts: StepParts, most_lines: int, of_features: Sequence[OfFeature] = ()
) -> list[Builder]:
    """Return the builders for decode steps of up to `most_lines` lines, for sampling as many, and
    those of features, if the sampler can be captured. Sampling comes after the model and reads its
    states: later recordings in a pool don't reuse the memory of outputs that are kept."""
    can = parts.sampling.sampler.capabilities
    processors = parts.sampling.processors
    if not can.cuda_graph or not parts.generates:
        return []
    sizes = row_sizes(most_lines, with_drafts=parts.rows.max_lines > parts.rows.max_rows)
    few = half_of(sizes)
    sharing = sharing_row_sizes(most_lines)
    # Sampling beside plain one: with everything, and with logits processors, too.
    more = [frozenset[str]()] if can.cuda_graph is GraphSupport.ALL else []
    if more and processors.captured:
        more.append(PROCESSED)
    model = DecodeSteps(MODEL, few, parts)
    builders: list[Builder] = [DecodeSteps(DECODE, sizes, parts)]
    if parts.backend.capabilities.shared_prefix and sharing:
        builders.append(DecodeSteps(replace(DECODE, axes=SHARED), sharing, parts))
    builders.append(model)
    builders += [DecodeSteps(GraphKey("decode", Capture.FULL, axes), few, parts) for axes in more]
    builders.append(SamplingSteps(GraphKey("sampling", Capture.TOKENS), sizes, parts, model))
    for axes in more:
        key = GraphKey("sampling", Capture.FULL, axes)
        builders.append(SamplingSteps(key, few, parts, model))
    for recordings in of_features:
        builders += recordings(parts, most_lines)
    return builders


def with_axes_of_features(builders: Sequence[Builder], parts: StepParts) -> list[Builder]:
    """Return the builders of the same steps for each feature that has recordings of its own, and
    for all such features at once."""
    axes = parts.model.axes
    wanted = [frozenset({axis}) for axis in axes] + ([frozenset(axes)] if len(axes) > 1 else [])
    return [
        builder.with_axes(own)
        for own in wanted
        for builder in builders
        if builder.key.part in MODEL_PARTS and "shared" not in builder.key.axes
    ]
