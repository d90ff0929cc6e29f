"""Runs a draft head (see `dovetail.api.draft_head`) beside its target.

Its attention layers are in the target's cache groups, so that block tables, prefix reuse and
preemption serve it as well. In each step, once the tokens are sampled, K and V of all the step's
tokens are stored, from the target's states at the taps. So it never has to catch up: each row keeps
one state, that of its last token but one, from which the first draft is made, and while it drafts
the head's own output.

It draws with the target's sampler, at the same output positions, so with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, LayerSpec
from dovetail.api.draft_head import HeadArch, HeadContext, HeadInputs
from dovetail.api.executor import Drafts, ExecutorConfig
from dovetail.api.model import ParallelGroup
from dovetail.api.sampler import Lines
from dovetail.errors import DovetailError, PluginError, UnsupportedError, describe
from dovetail.nn.build import RuntimeContext
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.draft_model import (
    asks_model,
    captures,
    check_drafts,
    draft_sizes,
    moved,
)
from dovetail_executors.runtime.features import FeaturePlan, Loaded, Proposer
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.kv_scales import CacheScales
from dovetail_executors.runtime.loading import ModelPlan, load_into
from dovetail_executors.runtime.media_positions import POSITION_OFFSET, model_positions
from dovetail_executors.runtime.model_io import GraphKey, ModelOutputs, TappedStates
from dovetail_executors.runtime.recorded_steps import NO_LINES, Builder, StepParts
from dovetail_executors.runtime.sampling import Sampling, last_tokens, put_drafts, settled
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import DecodeInputs, HostInputs, HostLines

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HeadPlan(FeaturePlan):
    """Decisions about the draft head, made before any weights are read."""

    arch: HeadArch
    target: ModelPlan
    config: ExecutorConfig  # to load it with
    layers: list[LayerSpec]  # with indices that follow those of the target's

    @classmethod
    def of(cls, config: ExecutorConfig, target: ModelPlan, group: ParallelGroup) -> HeadPlan:
        """Return the plan for `config.draft_head`. Raises `PluginError` if it can't be made, and
        `ModelLoadError`, `UnsupportedError` or `ConfigError` that name the checkpoint if it
        can't be served, or doesn't fit the target."""
        assert config.draft_head is not None
        assert config.draft_model is not None

        directory = Path(config.draft_model)
        is_dummy = config.load_format == "dummy"
        context = HeadContext(directory=directory, target=target.config, dummy=is_dummy)
        try:
            arch: HeadArch = config.draft_head.make(context)
            specs = arch.layer_specs(group)
        except DovetailError as error:
            raise type(error)(f"draft head {directory}: {error}") from error
        except Exception as error:
            path = config.draft_head.path
            raise PluginError(f"draft head {path}: {describe(error)}") from error
        layers = int(target.config.num_hidden_layers)
        why = []
        if not target.arch.capabilities.taps:
            why.append(
                f"states of the model can't be read: {type(target.arch).__name__} lacks the "
                f"capability `taps`"
            )
        if far := [tap for tap in arch.taps if not 0 <= tap <= layers]:
            why.append(
                f"it reads states after {', '.join(map(str, far))} layers, and the model has "
                f"{layers}"
            )
        if config.kv_cache_scales == "calibrate":
            why.append("with kv_cache_scales: calibrate there can be none")
        if why:
            raise UnsupportedError(f"draft head {directory}: {'; '.join(why)}")
        first = 1 + max(
            [spec.index for spec in target.specs] + [state.index for state in target.states]
        )
        return cls(
            arch,
            target,
            replace(config, model=config.draft_model),
            [moved(spec, first) for spec in specs],
        )

    reads_next = True

    def build(self, loaded: Loaded) -> RunningHead:
        """Load the head of the loaded model. Raises as `load_model`."""
        target = self.target
        first = self.layers[0].index
        device = loaded.device
        make = loaded.make_layer
        if target.cache_dtype is not None:
            make = CacheScales(device).wrap(make)
        quantization = target.quantization if self.arch.is_stored_as_target else None
        context = RuntimeContext(
            parallel=loaded.group,
            dtype=target.dtype,
            device=device,
            make_attention=lambda spec: make(moved(spec, first)),
            max_len=target.max_model_len,
            weights_later=quantization is not None,
            environment=loaded.environment,
        )
        built: Any = loaded.model  # `Tapped`
        head = load_into(
            self.arch.build(context, built),
            quantization,
            self.config,
            device,
            loaded.progress,
            partly=True,
        )
        return RunningHead(
            head, self.arch, target.dtype, loaded.backend, loaded.sampling, self.config.model
        )


class HeadWork(DeviceWork):
    """Lets the head follow a step once its tokens are sampled."""

    every_row = True

    def __init__(self, head: RunningHead) -> None:
        self.taps = head.taps
        self._head = head

    def after_growth(self, outputs: ModelOutputs) -> None:
        assert outputs.tapped is not None
        self._head.follow(outputs.tapped)


class HeadSteps(Builder):
    """One draft for each of `size` rows. A line of its inputs is one token short of the line that
    the draft follows: the head's last position is that of the last token but one."""

    def __init__(
        self, key: GraphKey, sizes: Sequence[int], parts: StepParts, head: RunningHead
    ) -> None:
        super().__init__(key, sizes, parts)
        self._head = head

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size, self.parts.rows)
        self.parts.backend.plan(inputs.fill(NO_LINES, 0))
        return inputs

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return the drafts [size] int64."""
        positions = settled(last_tokens(self.parts.rows, inputs.lines)[1])
        lines = Lines(rows=inputs.lines.rows, ahead=inputs.lines.ahead + 1)
        assert self.key.capture is not None
        sample = partial(self.parts.sampling.draft, capture=self.key.capture)
        return self._head.draft(lines, positions, sample)


class RunningHead(Proposer):
    """The draft head of one rank."""

    def __init__(
        self,
        head: torch.nn.Module,
        arch: HeadArch,
        dtype: torch.dtype,
        backend: AttentionBackend,
        sampling: Sampling,
        name: str = "",
    ) -> None:
        """`dtype`: of the target's states. The backend and the sampling are the target's. `name`:
        for humans."""
        self.model: Any = head  # a DraftHead
        self.taps = arch.taps
        self.name = name
        self._backend = backend
        self._sampling = sampling
        self._rows = sampling.rows
        self._offsets = sampling.rows.columns.get(POSITION_OFFSET)
        self.work = HeadWork(self)
        rows = sampling.rows
        # by row: what its next draft is made of
        self._states = torch.zeros(
            rows.max_rows + 1, arch.hidden_size, dtype=dtype, device=rows.device
        )

    def recordings(self, parts: StepParts, most_lines: int) -> list[Builder]:
        sizes = draft_sizes(parts.rows, most_lines)
        return [
            HeadSteps(GraphKey("draft", capture), sizes, parts, self)
            for capture in captures(parts.sampling.sampler)
        ]

    def begin(self, step: Step) -> Literal[True]:
        """Forget the states of earlier requests, for those that might draft at once: they have run
        before, in other rows."""
        added = step.batch.added
        if rows := [new.row for new in added if new.computed + 1 == len(new.token_ids)]:
            self._states[torch.tensor(rows, device=self._rows.device)] = 0
        check_drafts(step.batch)
        return True

    def follow(self, tapped: TappedStates) -> None:
        """Enqueue the storing of K and V of a step's tokens, and keep each row's state of its last
        known token but one. Rows have grown by what was sampled, and the step's plan of attention
        is still valid."""
        token_indices, positions, states, count, axes = tapped
        states = self.model.fuse(states)
        after = self._tokens_after(token_indices)
        self.model.store(HeadInputs(token_ids=after, positions=positions, states=states, axes=axes))
        rows = token_indices[:count] // self._rows.row_width
        states = states[:count]
        is_last = positions[:count] + 2 == self._rows.num_tokens[rows]
        self._states[torch.where(is_last, rows, self._rows.max_rows)] = states

    def propose(self, drafts: Drafts, rows: Int32, graphs: Graphs | None) -> None:
        chosen = asks_model(drafts)
        drafting = rows[chosen].astype(np.int64)
        counts = drafts.counts[chosen]
        for ahead in range(int(counts.max(initial=0))):
            left = drafting[counts > ahead]
            graph = None if graphs is None else graphs.for_drafts(left)
            if graphs is not None and graph is not None:
                graphs.replay(
                    graph,
                    graph.inputs.fill(HostLines(left, np.full(len(left), ahead - 1, np.int32)), 0),
                )
            else:
                self._launch(left, ahead)

    def draft(
        self,
        lines: Lines,
        positions: torch.Tensor,
        sample: Callable[[torch.Tensor, Lines], torch.Tensor],
    ) -> torch.Tensor:
        """Draft the token that follows each of `lines` [n], whose last tokens but one are at
        `positions` [n] int64. `sample`: draws an id for each line from logits. Returns the drafts
        [n] int64."""
        after = self._tokens_after(lines.rows * self._rows.row_width + positions)
        known = self._states.index_select(0, lines.rows)
        axes = None
        if self._offsets is not None:
            axes = model_positions(positions, self._offsets, lines.rows).expand(3, -1)
        states = self.model(
            HeadInputs(token_ids=after, positions=positions, states=known, axes=axes)
        )
        self._states[lines.rows] = states
        drafts = sample(self.model.logits(states), lines)
        put_drafts(self._rows, lines, positions + 1, drafts, self._sampling.vocab_size)
        return drafts

    def _launch(self, rows: Int64, ahead: int) -> None:
        """Draft for `rows` [n] without a graph, after `ahead` other drafts."""
        host = HostInputs.of_tokens(
            rows, self._rows.known[rows] - 2 + ahead, np.ones(len(rows), np.int64), self._rows
        )
        inputs = host.to_device(self._rows)
        self._backend.plan(host.attention_batch(self._rows, inputs))
        lines = Lines(rows=inputs.rows, ahead=torch.full_like(inputs.kv_lens, ahead))
        self.draft(
            lines,
            inputs.positions,
            partial(self._sampling.draft, host_rows=rows),
        )

    def _tokens_after(self, token_indices: torch.Tensor) -> torch.Tensor:
        """Return the ids [n] int64 of the tokens after those at token_indices [n] int64. Ids that
        were sampled from NaN may be any."""
        ids = self._rows.token_ids.view(-1).index_select(0, token_indices + 1)
        return ids.long().clamp_(0, self._sampling.vocab_size - 1)
