"""The draft model: a small model of the target's vocabulary that proposes drafts (see
`dovetail.api.drafter.ModelDrafter`).

Its attention layers are in the target's cache groups, so that block tables, prefix reuse and
preemption serve it as well. It fills its K and V

  - right after the target, with the same tokens, in steps with prefills;
  - before it proposes: the known tokens of a row that it hasn't seen, mostly one or two. Plain
    decode steps don't run it.

It draws with the target's sampler, at the same output positions, so with the same noise: where both
are about equally sure, both draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerSpec
from dovetail.api.executor import Batch, ComponentRef, Drafts, ExecutorConfig, QuantizationRef
from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs, ParallelGroup
from dovetail.api.sampler import Capture, Lines, Sampler
from dovetail.api.token_sizes import half_of, row_sizes
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError
from dovetail.nn.transfer import to_device
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.features import FeaturePlan, FinalStates, Loaded, Proposer
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.kv_scales import CacheScales
from dovetail_executors.runtime.loading import ModelPlan, load_model
from dovetail_executors.runtime.model_io import GraphKey, ModelOutputs, StepTokens
from dovetail_executors.runtime.recorded_steps import NO_LINES, Builder, StepParts
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.sampling import Sampling, last_tokens, put_drafts, settled
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import DecodeInputs, HostInputs, HostLines

# the model's last two tokens of rows, and their first draft
FIRST: frozenset[str] = frozenset({"first"})
NEXT: frozenset[str] = frozenset()  # another draft of rows
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftPlan(FeaturePlan):
    """Decisions about the draft model, made before any weights are read."""

    plan: ModelPlan
    config: ExecutorConfig  # to load it with
    layers: list[LayerSpec]  # of `plan`, with indices that follow those of the target's

    @classmethod
    def of(
        cls,
        config: ExecutorConfig,
        target: ModelPlan,
        models: tuple[ComponentRef, ...],
        group: ParallelGroup,
        device: torch.device,
        quantizations: tuple[QuantizationRef, ...],
    ) -> DraftPlan:
        """Return the plan for `config.draft_model` in the dtypes and length of the `target`.

        Raises `ModelLoadError`, `UnsupportedError` or `ConfigError` that name the draft model if it
        can't be served, or doesn't fit the target.
        """
        assert config.draft_model is not None
        own = replace(
            config,
            model=config.draft_model,
            dtype=target.dtype_name,
            max_model_len=target.max_model_len,
            quantization=None,
        )
        try:
            plan = ModelPlan.of(own, models, group, device, quantizations)
        except (ConfigError, ModelLoadError, UnsupportedError) as error:
            raise type(error)(f"draft model {config.draft_model}: {error}") from error
        why = []
        if plan.vocab_size != target.vocab_size:
            why.append(
                f"it has a vocabulary of {plan.vocab_size} tokens, and the model one of "
                f"{target.vocab_size}"
            )
        if plan.states:
            why.append("it has recurrent layers, whose states can't take back a rejected draft")
        if config.kv_cache_scales == "calibrate":
            why.append("with kv_cache_scales: calibrate there can be none")
        if why:
            raise UnsupportedError(f"draft model {config.draft_model}: {'; '.join(why)}")
        first = 1 + max(spec.index for spec in target.specs)
        return cls(plan, own, [moved(spec, first) for spec in plan.specs])

    def build(self, loaded: Loaded) -> DraftModel:
        """Raises as `load_model`."""
        first = self.layers[0].index - self.plan.specs[0].index
        scales = None if self.plan.cache_dtype is None else CacheScales(loaded.device)

        def make_moved(spec: LayerSpec) -> AttentionLayer:
            return loaded.make_layer(moved(spec, first))

        make = make_moved if scales is None else scales.wrap(make_moved)
        if loaded.splitter is not None:
            make = loaded.splitter.wrap(make)
        model = load_model(
            self.plan,
            self.config,
            make,
            loaded.group,
            loaded.device,
            loaded.progress,
            loaded.environment,
        )
        if scales is not None and self.config.load_format != "dummy":
            scales.read(self.config.model)
        most = self.config.max_num_batched_tokens
        return DraftModel(
            model, self.layers, loaded.backend, loaded.sampling, most, self.config.model
        )


def moved(spec: LayerSpec, by: int) -> LayerSpec:
    """Return `spec` with another index."""
    return replace(
        spec, index=spec.index + by, shares=None if spec.shares is None else spec.shares + by
    )


class DraftWork(DeviceWork):
    """Stores the draft model's K and V of a step's tokens, in steps with prefills. To the draft
    model, placeholders of images are text."""

    parts = frozenset({"mixed"})
    every_row = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def after_model(self, tokens: StepTokens, outputs: ModelOutputs) -> None:
        self._model(replace(tokens.inputs, rows=None, is_row=None, axes=None))


class DraftSteps(Builder):
    """One draft for each of `size` rows: the draft model, a sample, and its place after the row's
    tokens. Each row has two neighbouring lines for its first draft, and one for another; the draft
    follows the last of them."""

    def __init__(self, key: GraphKey, sizes: Sequence[int], parts: StepParts, model: Any) -> None:
        super().__init__(key, sizes, parts)
        self._model = model
        self._lines_per_row = 2 if key.axes == FIRST else 1

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size * self._lines_per_row, self.parts.rows)
        self.parts.backend.plan(inputs.fill(NO_LINES, 0))
        return inputs

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return the drafts [size] int64."""
        rows = self.parts.rows
        sampling = self.parts.sampling
        token_ids, positions = map(settled, last_tokens(rows, inputs.lines))
        of_model = ModelInputs(token_ids=token_ids, positions=positions)
        hidden = settled(self._model(of_model))
        last = slice(self._lines_per_row - 1, None, self._lines_per_row)
        lines = Lines(
            rows=inputs.lines.rows[last].contiguous(),
            ahead=inputs.lines.ahead[last].contiguous(),
        )
        assert self.key.capture is not None
        logits = self._model.logits(hidden[last].contiguous())
        drafts = sampling.draft(logits, lines, capture=self.key.capture)
        put_drafts(rows, lines, positions[last], drafts, sampling.vocab_size)
        return drafts


class DraftModel(Proposer):
    """Runs the draft model of one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        specs: Sequence[LayerSpec],
        backend: AttentionBackend,
        sampling: Sampling,
        max_tokens: int,
        name: str = "",
    ) -> None:
        """`model` is a CausalLM with the layers `specs`. The others are the target's. `max_tokens`:
        of a step. `name`: for humans."""
        self.model: Any = model
        self.work = DraftWork(model)
        self.name = name
        self._backend = backend
        self._sampling = sampling
        self._rows = sampling.rows
        self._max_tokens = max_tokens
        # Of each row, leading known tokens whose K and V are in the cache
        self._computed = np.zeros(self._rows.max_rows, np.int64)
        # Blocks before a window belong to others: earlier tokens of a row are left out, as if their
        # K and V were those that happen to be there.
        self._reach = min(
            (spec.window for spec in specs if spec.window is not None), default=self._rows.max_len
        )

    def recordings(self, parts: StepParts, most_lines: int) -> list[Builder]:
        sizes = draft_sizes(parts.rows, most_lines)
        return [
            DraftSteps(GraphKey("draft", capture, axes), sizes, parts, self.model)
            for capture in captures(parts.sampling.sampler)
            for axes in (FIRST, NEXT)
        ]

    def begin(self, step: Step) -> Literal[True]:
        """It is assumed that blocks with K and V of the target have those of the draft model,
        too."""
        if added := step.batch.added:
            self._computed[[new.row for new in added]] = [new.computed for new in added]
        check_drafts(step.batch)
        return True

    def after_model(self, step: Step, note: Literal[True], states: FinalStates) -> None:
        """Take note if the draft model has run over the step's tokens."""
        if step.key.part == "mixed":
            rows = step.rows
            follows = self._computed[rows] == self._rows.computed[rows]
            self._computed[rows] += step.batch.num_tokens * follows

    def collect(self, step: Step, note: Literal[True], failed: dict[int, str]) -> None:
        """Take note of checked drafts: K and V of rejected ones are worthless."""
        if step.batch.drafts is not None:
            rows = step.rows
            self._computed[rows] = np.minimum(self._computed[rows], self._rows.computed[rows])

    def propose(self, drafts: Drafts, rows: Int32, graphs: Graphs | None) -> None:
        chosen = asks_model(drafts)
        drafting = rows[chosen].astype(np.int64)
        counts = drafts.counts[chosen]
        if not len(drafting):
            return
        self._propose_first(drafting, graphs)
        for ahead in range(1, int(counts.max())):
            left = drafting[counts > ahead]
            lines = HostLines(left, np.full(len(left), ahead, np.int32))
            if not self._replay(NEXT, left, lines, graphs):
                self._launch(
                    left, self._rows.known[left] - 1 + ahead, np.ones(len(left), np.int64), ahead
                )
        self._computed[drafting] = self._rows.known[drafting] + counts - 1

    def _propose_first(self, rows: Int64, graphs: Graphs | None) -> None:
        """Compute the known tokens of `rows` [n] that lack K and V, and draw the first draft of
        each."""
        known = self._rows.known[rows]
        starts = np.maximum(self._computed[rows], known - self._reach)
        if known.min() >= 2 and (known - starts).max() <= 2:
            lines = HostLines(rows.repeat(2), np.tile(np.array([-1, 0], np.int32), len(rows)))
            if self._replay(FIRST, rows, lines, graphs):
                return
        while (left := known - starts).sum() > self._max_tokens:
            before = left.cumsum() - left
            counts = np.clip(self._max_tokens - before, 0, left - 1)
            some = counts > 0
            self._launch(rows[some], starts[some], counts[some], None)
            starts = starts + counts
        self._launch(rows, starts, left, 0)

    def _replay(
        self, axes: frozenset[str], rows: Int64, lines: HostLines, graphs: Graphs | None
    ) -> bool:
        """Replay a draft for the `lines` of `rows`. Return False if there is no graph for them."""
        if graphs is None:
            return False
        graph = graphs.for_drafts(rows, axes)
        if graph is not None:
            graphs.replay(graph, graph.inputs.fill(lines, 0))
        return graph is not None

    def _launch(self, rows: Int64, starts: Int64, counts: Int64, ahead: int | None) -> None:
        """Run the model over `counts` tokens of `rows` [n] from `starts` on.

        Draw the draft that follows them, with `ahead` others before it; None: only K and V are
        needed.
        """
        host = HostInputs.of_tokens(rows, starts, counts, self._rows)
        inputs = host.to_device(self._rows)
        self._backend.plan(host.attention_batch(self._rows, inputs))
        token_ids = self._rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        ends = to_device(host.line_ends, self._rows.device)
        of_model = ModelInputs(token_ids=token_ids, positions=inputs.positions, wanted=ends)
        hidden = self.model(of_model)
        if ahead is None:
            return
        lines = Lines(rows=inputs.rows, ahead=torch.full_like(inputs.kv_lens, ahead))
        drafts = self._sampling.draft(self.model.logits(hidden), lines, rows)
        positions = inputs.positions.index_select(0, ends)
        put_drafts(self._rows, lines, positions, drafts, self._sampling.vocab_size)


def draft_sizes(rows: RowState, most_lines: int) -> tuple[int, ...]:
    """Return for how many rows a draft is recorded, of steps of up to `most_lines` lines."""
    return half_of(row_sizes(max(1, min(rows.max_rows, most_lines // 2))))


def captures(sampler: Sampler) -> list[Capture]:
    """Return the captures of a sampler that declares any."""
    supported = sampler.capabilities.cuda_graph
    return [Capture.TOKENS, *([Capture.FULL] if supported is GraphSupport.ALL else [])]


def check_drafts(batch: Batch) -> None:
    """Raise `DovetailError` if a row has both drafts that are to be proposed and others."""
    if batch.drafts is not None and are_mixed(batch.drafts):
        raise DovetailError(f"step {batch.step}: of a row's drafts, some are -1 and others aren't")


def asks_model(drafts: Drafts) -> NDArray[np.bool_]:
    """Return [b]: True for rows whose drafts are -1, all of them."""
    starts = drafts.counts.cumsum() - drafts.counts
    asks = drafts.counts > 0
    asks[asks] = drafts.token_ids[starts[asks]] < 0
    return asks


def are_mixed(drafts: Drafts) -> bool:
    """Return True if some drafts of a row are -1 and others aren't."""
    return bool(((drafts.token_ids < 0) != asks_model(drafts).repeat(drafts.counts)).any())
