"""The draft model: a small model of the target's vocabulary that proposes drafts (see `dovetail.api.drafter.ModelDrafter`).

Its attention layers are in the target's cache groups, so that block tables, prefix reuse and preemption serve it as well. It fills its K and V

  - right after the target, with the same tokens, in steps with prefills;
  - before it proposes: the known tokens of a row that it hasn't seen, mostly one or two. Plain decode steps don't run it.

It draws with the target's sampler, at the same output positions, so with the same noise: where both are about equally sure, both draw the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerSpec
from dovetail.api.executor import Batch, ComponentRef, Drafts, ExecutorConfig, QuantizationRef
from dovetail.api.model import ParallelGroup
from dovetail.api.sampler import Lines, Sampler
from dovetail.errors import ConfigError, ModelLoadError, UnsupportedError
from dovetail.runtime.decode_rows import put_drafts
from dovetail.runtime.graphs import DRAFT_KINDS, Graphs
from dovetail.runtime.kv_scales import CacheScales
from dovetail.runtime.loading import ModelPlan, load_model
from dovetail.runtime.recording import LayerSplitter
from dovetail.runtime.row_state import RowState
from dovetail.runtime.step_inputs import HostInputs, HostLines
from dovetail.runtime.transfer import to_device
from dovetail.runtime.weights import Progress

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Decisions about the draft model, made before any weights are read."""

    plan: ModelPlan
    config: ExecutorConfig  # to load it with
    specs: list[LayerSpec]  # of `plan`, with indices that follow those of the target's

    @classmethod
    def of(
        cls,
        config: ExecutorConfig,
        target: ModelPlan,
        models: tuple[ComponentRef, ...],
        group: ParallelGroup,
        device: torch.device,
        quantizations: tuple[QuantizationRef, ...],
    ) -> DraftPlan | None:
        """Return the plan for `config.draft_model` in the dtypes and length of the `target`; None if there is none.

        Raises `ModelLoadError`, `UnsupportedError` or `ConfigError` that name the draft model if it can't be served, or doesn't fit the target.
        """
        if config.draft_model is None:
            return None
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
                f"it has a vocabulary of {plan.vocab_size} tokens, and the model one of {target.vocab_size}"
            )
        if plan.states:
            why.append("it has recurrent layers, whose states can't take back a rejected draft")
        if config.kv_cache_scales == "calibrate":
            why.append("with kv_cache_scales: calibrate there can be none")
        if why:
            raise UnsupportedError(f"draft model {config.draft_model}: {'; '.join(why)}")
        first = 1 + max(spec.index for spec in target.specs)
        return cls(plan, own, [moved(spec, first) for spec in plan.specs])

    def load(
        self,
        splitter: LayerSplitter,
        make_layer: Callable[[LayerSpec], AttentionLayer],
        group: ParallelGroup,
        device: torch.device,
        progress: Progress | None,
        environment: str,
    ) -> torch.nn.Module:
        """Load the model, a `CausalLM` whose layers `make_layer` makes by `specs`. Raises as `load_model`."""
        first = self.specs[0].index - self.plan.specs[0].index
        scales = None if self.plan.cache_dtype is None else CacheScales(device)

        def make_moved(spec: LayerSpec) -> AttentionLayer:
            return make_layer(moved(spec, first))

        make = splitter.wrap(make_moved if scales is None else scales.wrap(make_moved))
        model = load_model(self.plan, self.config, make, group, device, progress, environment)
        if scales is not None and self.config.load_format != "dummy":
            scales.read(self.config.model)
        return model


def moved(spec: LayerSpec, by: int) -> LayerSpec:
    """Return `spec` with another index."""
    return replace(
        spec, index=spec.index + by, shares=None if spec.shares is None else spec.shares + by
    )


class DraftModel:
    """Runs the draft model of one rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        specs: Sequence[LayerSpec],
        backend: AttentionBackend,
        sampler: Sampler,
        rows: RowState,
        max_tokens: int,
    ) -> None:
        """`model` is a CausalLM with the layers `specs`. The others are the target's. `max_tokens`: of a step."""
        self.model: Any = model
        self._backend, self._sampler, self._rows, self._max_tokens = (
            backend,
            sampler,
            rows,
            max_tokens,
        )
        self._computed = np.zeros(
            rows.max_rows, np.int64
        )  # of each row, leading known tokens whose K and V are in the cache
        # Blocks before a window belong to others: earlier tokens of a row are left out, as if their K and V were those that happen to be there.
        self._reach = min(
            (spec.window for spec in specs if spec.window is not None), default=rows.max_len
        )

    def begin(self, batch: Batch) -> None:
        """Note the batch's new rows. It is assumed that blocks with K and V of the target have those of the draft model, too."""
        if batch.added:
            self._computed[[new.row for new in batch.added]] = [new.computed for new in batch.added]

    def computed(self, batch: Batch) -> None:
        """Note that the model has run over the batch's tokens. The rows' counts are those before the step."""
        follows = self._computed[batch.rows] == self._rows.computed[batch.rows]
        self._computed[batch.rows] += batch.num_tokens * follows

    def collected(self, rows: Int32) -> None:
        """Note that drafts of `rows` were checked: K and V of rejected ones are worthless."""
        self._computed[rows] = np.minimum(self._computed[rows], self._rows.computed[rows])

    def propose(self, drafts: Drafts, rows: Int32, graphs: Graphs | None) -> None:
        """Enqueue the computation of the drafts of `rows` [b] that are -1, and write them after the rows' known tokens. No step is in flight, and the
        sampler knows all rows."""
        chosen = asks_model(drafts)
        drafting, counts = rows[chosen].astype(np.int64), drafts.counts[chosen]
        if not len(drafting):
            return
        self._propose_first(drafting, graphs)
        for ahead in range(1, int(counts.max())):
            left = drafting[counts > ahead]
            lines = HostLines(left, np.full(len(left), ahead, np.int32))
            if not self._replay(1, left, lines, graphs):
                self._launch(
                    left, self._rows.known[left] - 1 + ahead, np.ones(len(left), np.int64), ahead
                )
        self._computed[drafting] = self._rows.known[drafting] + counts - 1

    def _propose_first(self, rows: Int64, graphs: Graphs | None) -> None:
        """Compute the known tokens of `rows` [n] that lack K and V, and draw the first draft of each."""
        known = self._rows.known[rows]
        starts = np.maximum(self._computed[rows], known - self._reach)
        if known.min() >= 2 and (known - starts).max() <= 2:
            lines = HostLines(rows.repeat(2), np.tile(np.array([-1, 0], np.int32), len(rows)))
            if self._replay(0, rows, lines, graphs):
                return
        while (left := known - starts).sum() > self._max_tokens:
            before = left.cumsum() - left
            counts = np.clip(self._max_tokens - before, 0, left - 1)
            some = counts > 0
            self._launch(rows[some], starts[some], counts[some], None)
            starts = starts + counts
        self._launch(rows, starts, left, 0)

    def _replay(self, nth: int, rows: Int64, lines: HostLines, graphs: Graphs | None) -> bool:
        """Replay the `nth` of `DRAFT_KINDS` for the `lines` of `rows`. Return False if there is no graph for them."""
        capture = None if graphs is None else self._sampler.capture_for(rows)
        graph = (
            None
            if graphs is None or capture is None
            else graphs.find(DRAFT_KINDS[capture][nth], len(rows))
        )
        if graphs is None or graph is None:
            return False
        graphs.replay(graph, graph.inputs.fill(lines, 0))
        return True

    def _launch(self, rows: Int64, starts: Int64, counts: Int64, ahead: int | None) -> None:
        """Run the model over `counts` tokens of `rows` [n] from `starts` on. Draw the draft that follows them, with `ahead` others before it; None:
        only K and V are needed."""
        host = HostInputs.of_tokens(rows, starts, counts, self._rows)
        inputs = host.to_device(self._rows)
        self._backend.plan(host.attention_batch(self._rows, inputs))
        token_ids = self._rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        ends = to_device(host.ends.astype(np.int64) - 1, self._rows.device)
        hidden = self.model(token_ids, inputs.positions, ends)
        if ahead is None:
            return
        lines = Lines(inputs.rows, torch.full_like(inputs.kv_lens, ahead))
        sampled = self._sampler.sample(self.model.logits(hidden), lines, rows)
        put_drafts(
            self._rows,
            lines,
            inputs.positions.index_select(0, ends),
            sampled.token_ids,
            self._sampler.context.vocab_size,
        )


def asks_model(drafts: Drafts) -> NDArray[np.bool_]:
    """Return [b]: True for rows whose drafts are -1, all of them."""
    starts = drafts.counts.cumsum() - drafts.counts
    asks = drafts.counts > 0
    asks[asks] = drafts.token_ids[starts[asks]] < 0
    return asks


def are_mixed(drafts: Drafts) -> bool:
    """Return True if some drafts of a row are -1 and others aren't."""
    return bool(((drafts.token_ids < 0) != asks_model(drafts).repeat(drafts.counts)).any())
