"""One step on one device: `Runner` turns a `Batch` into the flat inputs of a model, runs it,
samples, and copies the results to the host.

`submit` only enqueues; waiting for the device happens in `collect`. On a CPU `submit` computes.
What features add to a step is in `features` and in the files of each; what follows the model is
`sampling`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.clock import Clock
from dovetail.api.executor import Batch, Masks, Result
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import Lines, SampledTokens
from dovetail.errors import DovetailError
from dovetail.nn.transfer import all_to_device, to_device
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.features import FinalStates, Proposer, StepFeature
from dovetail_executors.runtime.graphs import Graph, Graphs
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.model_io import GraphKey, ModelOutputs, StepTokens
from dovetail_executors.runtime.recorded_steps import StepParts
from dovetail_executors.runtime.sampling import LinePart, Sampling
from dovetail_executors.runtime.slab_steps import SlabSteps
from dovetail_executors.runtime.state_plan import StatePlan
from dovetail_executors.runtime.step import DeviceSpan, Step, Yielded
from dovetail_executors.runtime.step_inputs import DeviceInputs, HostInputs, HostLines
from dovetail_executors.runtime.step_model import StepModel

SHARING_WORTH = 4096  # tokens of K and V saved; with fewer, sharing costs more than it saves
Int64 = NDArray[np.int64]


@dataclass
class WantedStates:
    """The final states that a step's lines and its features read."""

    lines: Int64  # [n] the lines' last tokens
    tokens: Int64  # of all, lines first
    every: bool = False
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # see `Wanted`
    of: dict[Any, slice] = field(default_factory=dict)  # feature -> its part of `tokens`
    both_ways: NDArray[np.bool_] | None = None  # see `Wanted`
    seen: NDArray[np.int32] | None = None  # see `Wanted`

    def ask(self, step: Step, host: HostInputs, most: int) -> None:
        """Add those of the step's features. More than `most` states aren't computed apart."""
        tokens = [self.tokens]
        count = len(self.tokens)
        for feature, note in step.notes.items():
            wanted = feature.wants(step, note, host)
            if wanted is not None:
                tokens.append(wanted.tokens)
                self.of[feature] = slice(count, count + len(wanted.tokens))
                count += len(wanted.tokens)
                self.every |= wanted.every
                self.inputs |= wanted.inputs
                if wanted.both_ways is not None:
                    self.both_ways = wanted.both_ways
                if wanted.seen is not None:
                    self.seen = wanted.seen
        self.tokens = np.concatenate(tokens)
        self.every |= bool(self.of) and count > most

    @property
    def needs_whole_step(self) -> bool:
        """True if features gave inputs of all of the step's tokens or rows."""
        return bool(self.inputs) or self.both_ways is not None or self.seen is not None

    def places(self, part: slice) -> Int64:
        """Return where in the computed states those of a part of `tokens` are."""
        return self.tokens[part] if self.every else np.arange(part.start, part.stop)


class Runner:
    """Model, attention, sampler and rows of one device. Its arguments are ready to run; it has no
    lasting allocations itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        pool: KVPool,
        sampling: Sampling,
        clock: Clock,
        features: Sequence[StepFeature[Any]] = (),
        *,
        generates: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        """`model`: a `CausalLM`. `max_tokens`: most of a step; None: as few as `SlabSteps` needs.

        `features`: in the order in which they take part. `generates`: False if no row yields a
        token.
        """
        self.model: Any = model
        self.backend = backend
        self.pool = pool
        self.sampling = sampling
        self.clock = clock
        self.rows, self.device = sampling.rows, sampling.rows.device
        self.features = tuple(features)
        states = () if self.rows.states is None else (StatePlan(self.rows.states, self.rows),)
        works = [feature.work for feature in features if feature.work is not None]
        step_model = StepModel(model, works, self.rows)
        self.parts = StepParts(step_model, states, backend, sampling, generates)
        self.slabs = SlabSteps(self.parts, max_tokens)
        self.graphs: Graphs | None = None  # set once captured
        self._pending: deque[Step] = deque()
        self._lowest_draft = -1 if any(isinstance(feature, Proposer) for feature in features) else 0

    @torch.inference_mode()
    def submit(self, batch: Batch) -> Step:
        """Enqueue a step; for a late one, only the model.

        Raises `DovetailError` if it doesn't match the rows' state.
        """
        step = self._begin(batch)
        graph = None if self.graphs is None else self._whole_graph(step, self.graphs)
        if batch.drafts is not None and step.notes:  # some features sample before the model
            self.sampling.tell(step)
        if batch.drafts is not None and graph is None:
            # those of recorded steps come with their inputs
            self.rows.put_drafts(batch.rows, batch.drafts)
        for feature, note in step.notes.items():
            feature.before_inputs(step, note, self.graphs)
        if graph is not None:
            self._replay(graph, step)
        else:
            self._run_model(step)
            self.sampling.tell(step)  # while the device computes
        if batch.drafts is None:  # otherwise `collect` does
            self.rows.computed[batch.rows] += batch.num_tokens
        if not batch.late:
            self._finish(step)
        self._pending.append(step)
        return step

    @torch.inference_mode()
    def sample(self, step: Step, masks: Masks) -> None:
        """Enqueue the sampling of a late step. Raises `DovetailError` if it isn't the only step in
        flight, or has been sampled."""
        if step.outputs is None or [*self._pending] != [step]:
            raise DovetailError(
                f"step {step.number} can't be sampled: it must be late, sampled once, and the only "
                "one in flight"
            )
        self.sampling.mask(step, masks)
        self._finish(step)

    @torch.inference_mode()
    def apply(self, batch: Batch) -> None:
        """Let rows come and go as `batch` says, and compute nothing. No step is in flight."""
        self.sampling.tell(self._begin(batch))

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launch the step kernel by kernel."""
        graphs = self.graphs
        self.graphs = None
        try:
            yield
        finally:
            self.graphs = graphs

    def _begin(self, batch: Batch) -> Step:
        """Apply the batch's changes of rows and pages."""
        started = self.clock.now()
        span = DeviceSpan(self.device) if self.device.type == "cuda" else None
        self._check_drafts(batch)
        self.rows.update(batch)
        self.rows.check(batch)
        ids = self.rows.request_ids
        lines = HostLines.of(batch)
        step = Step(batch, ids, lines, started, span)
        step.in_slabs = self.rows.are_deterministic(batch.rows)
        step.apart = step.in_slabs.repeat(batch.num_lines)
        step.is_plain_decode = len(lines.rows) == batch.num_tokens.sum() and not batch.checkpoints
        if step.in_slabs.any():
            step.is_plain_decode = False
        if batch.copies:
            self.pool.copy(batch.copies)
        if batch.parts:
            self._check_parts(batch)
        for feature in self.features:
            if feature.asking is not None and not feature.asking and not batch.parts:
                continue
            if (note := feature.begin(step)) is not None:
                step.notes[feature] = note
        if step.notes:
            axes = {feature.axis for feature in step.notes}
            step.axes = frozenset(axis for axis in axes if axis is not None)
            if any(feature.reads_states for feature in step.notes):
                step.is_plain_decode = False
        if batch.shared_prefix_blocks and not step.axes:
            step.shared_blocks = self._worth_sharing(batch)
        return step

    def _check_parts(self, batch: Batch) -> None:
        """Raise `DovetailError` if the batch has a part that no feature of this device reads."""
        for part in batch.parts:
            if not any(type(part) is feature.part for feature in self.features):
                raise DovetailError(
                    f"step {batch.step} has {type(part).__name__}, which this executor can't use"
                )

    def _check_drafts(self, batch: Batch) -> None:
        """Raise `DovetailError` if the batch has unknown token ids as drafts, or a step with drafts
        wouldn't be alone in flight."""
        last = self._pending[-1] if self._pending else None
        if last is not None and (batch.drafts is not None or last.batch.drafts is not None):
            raise DovetailError(
                f"step {batch.step} can't be submitted while step {last.number} is in flight: one "
                "of them has drafts"
            )
        if batch.drafts is None:
            return
        ids = batch.drafts.token_ids
        size = self.sampling.vocab_size
        if ((ids < self._lowest_draft) | (ids >= size)).any():
            there = "a" if self._lowest_draft < 0 else "no"
            raise DovetailError(
                f"step {batch.step} has drafts that aren't in the vocabulary of {size} tokens; "
                f"there is {there} draft model"
            )

    def _whole_graph(self, step: Step, graphs: Graphs) -> Graph | None:
        """Return the recording that computes the step, or if it is late its model; None if none
        does. The sampler must know all rows before it is asked what it can replay."""
        if not step.is_plain_decode:
            return None
        self.sampling.tell(step)
        return graphs.for_decode(
            step.lines.rows, step.graph_axes, late=step.batch.late, asks=step.asks
        )

    def _replay(self, graph: Graph, step: Step) -> None:
        """Replay with the longest rows first: kernels that compute a row in one program start with
        these, and short ones fill the gaps at the end."""
        assert self.graphs is not None
        # A row's lines stay neighbours.
        order = np.argsort(-self.rows.known[step.lines.rows], kind="stable")
        lines = step.lines.sorted(order)
        attention = graph.inputs.fill(lines, step.shared_blocks)
        outputs = self.graphs.replay(graph, attention)
        for states in self.parts.states:
            states.replayed(step, lines, graph.inputs)
        if step.batch.late:
            step.outputs, step.line_places, step.key = outputs, np.argsort(order), graph.key
        else:
            self.sampling.fetch(outputs, step, order)

    def _run_model(self, step: Step) -> None:
        """Run the model for any step: deterministic rows in slabs, the others as usual."""
        host = HostInputs.of(step.batch, self.rows)
        wanted = WantedStates(host.line_ends, host.line_ends)
        if step.notes:
            wanted.ask(step, host, self.rows.max_lines)
        if step.in_slabs.any():
            outputs = self._run_in_slabs(step, host, wanted)
        else:
            outputs, _ = self._run_as_usual(step, host, wanted)
        for feature, note in step.notes.items():
            places = wanted.places(wanted.of.get(feature, slice(0, 0)))
            states = FinalStates(outputs.hidden, places, partial(self._logits_of_row, step))
            feature.after_model(step, note, states)
        step.outputs = outputs
        step.line_places = wanted.lines if wanted.every else np.arange(len(wanted.lines))

    def _run_in_slabs(self, step: Step, host: HostInputs, wanted: WantedStates) -> ModelOutputs:
        """Run the model for a step with deterministic rows. The other rows run first, as usual;
        all rows do where features add inputs to the step, or work follows all of them.

        Returns the states of `wanted.tokens`, in their order."""
        whole = self.parts.model.every_row or wanted.needs_whole_step
        usual = ~step.in_slabs | whole
        outputs = ModelOutputs(torch.empty(0, device=self.device))
        found: list[tuple[Int64, torch.Tensor]] = []
        attention = None
        step.key = GraphKey("mixed", axes=step.axes)
        if usual.any():
            others, kept = host.of_rows(usual)
            apart = step.in_slabs.repeat(step.batch.num_tokens)
            mine = np.flatnonzero(~apart[wanted.tokens])
            of_others = replace(wanted, tokens=np.searchsorted(kept, wanted.tokens[mine]))
            outputs, attention = self._run_as_usual(step, others, of_others)
            places = of_others.places(slice(0, len(mine)))
            found.append((mine, outputs.hidden.index_select(0, to_device(places, self.device))))
        found += self.slabs.run(step, host, wanted.tokens, self.graphs)
        if whole and attention is not None:  # for what follows the sampling
            self.backend.plan(attention)
        wanted.every = False
        if not len(wanted.tokens):
            return outputs
        order = np.argsort(np.concatenate([indices for indices, _ in found]))
        states = torch.cat([states for _, states in found])
        return outputs._replace(hidden=states.index_select(0, to_device(order, self.device)))

    def _run_as_usual(
        self, step: Step, host: HostInputs, wanted: WantedStates
    ) -> tuple[ModelOutputs, AttentionBatch]:
        """Run the model on `host`, the step or some of its rows, with a recording or launched
        kernel by kernel. Sets `wanted.every` if the outputs have the states of all tokens. Returns
        the planned attention, too."""
        shared = step.shared_blocks
        graph = None
        num_tokens = len(host.token_indices)
        if self.graphs is not None and not wanted.inputs and wanted.seen is None:
            graph = self.graphs.for_model(num_tokens, step.graph_axes, all_states=wanted.every)
        if self.graphs is not None and graph is not None:
            inputs = graph.inputs.fill(host, wanted.tokens)
            whole = graph.whole
            attention = host.attention_batch(self.rows, inputs, shared, mixed_graph=whole)
            outputs: ModelOutputs = self.graphs.replay(graph, attention)
            step.key = graph.key
            wanted.every = graph.inputs.all_states
            return outputs.without_padding(num_tokens), attention
        step.key = GraphKey("model" if step.is_plain_decode else "mixed", axes=step.axes)
        inputs = host.to_device(self.rows)
        if wanted.both_ways is None:
            attention = host.attention_batch(self.rows, inputs, shared, seen=wanted.seen)
        else:
            divided = host.divided(wanted.both_ways)
            attention = divided.attention_batch(self.rows, divided.to_device(self.rows))
        self.backend.plan(attention)
        for planned in self.parts.states:
            planned.plan(step, host, inputs)
        wanted.every |= len(wanted.tokens) == num_tokens
        return self._launch_model(step.key, inputs, wanted), attention

    def _launch_model(
        self, key: GraphKey, inputs: DeviceInputs, wanted: WantedStates
    ) -> ModelOutputs:
        ids = self.rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        tokens: Int64 | None = wanted.tokens
        if wanted.every:
            tokens = None
        elif not len(wanted.tokens):  # models require at least one token
            tokens = np.array([len(ids) - 1])
        device_tokens = None if tokens is None else to_device(tokens, self.device)
        of_model = ModelInputs(
            token_ids=ids,
            positions=inputs.positions,
            wanted=device_tokens,
            **wanted.inputs,
        )
        step_tokens = StepTokens(of_model, self.rows.row_width, inputs.token_indices)
        return self.parts.model.run(step_tokens, key)

    def _finish(self, step: Step) -> None:
        """Sample the step, unless it was replayed as a whole, and enqueue what follows."""
        outputs = step.outputs
        step.outputs = None
        if outputs is not None:
            if len(step.lines.rows):
                self._sample(step, outputs.hidden)
            if self.parts.model.works:
                self.parts.model.after_growth(outputs, step.key)
        if step.batch.drafts is None:  # how many tokens rows with drafts get is known to `collect`
            self.rows.known[step.lines.rows] += 1
        if self.graphs is not None:
            step.replayed = self.graphs.take_replayed()
        for states in self.parts.states:
            states.settle(step)
        if step.span is not None:
            step.span.close()
        else:
            step.ended = self.clock.now()

    def _sample(self, step: Step, hidden: torch.Tensor) -> None:
        """Sample for the step's lines [n], whose states are hidden[line_places], and extend their
        rows."""
        lines = step.lines
        around = self._around_logits(step, lines.rows) if step.notes else []
        graph = None
        if self.graphs is not None and not around and not step.apart.any():
            masked = step.masked is not None
            graph = self.graphs.for_sampling(lines.rows, masked=masked, asks=step.asks)
        assert step.line_places is not None
        if self.graphs is not None and graph is not None:
            graph.inputs.fill(hidden, step.line_places, lines, step.masked)
            self.sampling.fetch(self.graphs.replay(graph), step)
            return
        rows, ahead, places = all_to_device(
            [lines.rows, lines.ahead, step.line_places], self.device
        )
        last = hidden.index_select(0, places)  # [n, hidden]
        parts = self.sampling.parts_of_lines(step, self._changes_logits)
        logits_of = partial(self._logits_of, step, last, rows)
        recorded = partial(self._replay_part, step, last)
        self.sampling.draw(step, parts, logits_of, recorded, Lines(rows=rows, ahead=ahead), last)

    def _replay_part(self, step: Step, last: torch.Tensor, part: LinePart) -> SampledTokens | None:
        """Sample a part of the step's lines with a recording; None: there is none."""
        if self.graphs is None or part.capture is None or part.size != self.rows.fixed_lines:
            return None
        lines = step.lines.sorted(part.lines)
        return self.slabs.sample(last, part.lines, lines, part.capture, self.graphs)

    def _logits_of(
        self, step: Step, last: torch.Tensor, rows: torch.Tensor, part: LinePart
    ) -> torch.Tensor:
        """Return the logits of a part of the step's lines."""
        around = self._around_logits(step, step.lines.rows[part.lines])
        if part.is_whole(len(rows)):
            return self.parts.model.logits(last, rows, around)
        index = to_device(part.padded, self.device)
        return self.parts.model.logits(last[index], rows[index], around)

    def _changes_logits(self, step: Step, row: int) -> bool:
        """Return True if the row's logits have work of features around them."""
        return bool(step.notes and self._around_logits(step, np.array([row])))

    def _around_logits(self, step: Step, host_rows: Int64) -> list[DeviceWork]:
        """Return the work that changes the output layer for any of these rows."""
        return [
            feature.work
            for feature in step.notes
            if feature.work is not None and feature.changes_logits(host_rows)
        ]

    def _logits_of_row(self, step: Step, hidden: torch.Tensor, row: int) -> torch.Tensor:
        around = self._around_logits(step, np.array([row]))
        rows = torch.full((len(hidden),), row, dtype=torch.int64, device=self.device)
        return self.parts.model.logits(hidden, rows, around)

    def _worth_sharing(self, batch: Batch) -> int:
        """Return the number of leading blocks that attention reads once for all rows; 0 if that
        would save too little. Work of features isn't recorded with it."""
        tokens = batch.shared_prefix_blocks * self.rows.layout.groups[0].block_tokens
        return batch.shared_prefix_blocks if tokens * (len(batch.rows) - 1) >= SHARING_WORTH else 0

    def collect(self, step: Step) -> Result:
        """Wait for the oldest submitted step. Raises `DovetailError` if `step` is another one."""
        self._check_oldest(step)
        started, ended = self._wait(self._pending.popleft())
        yielded = Yielded.of(step)
        if step.batch.drafts is not None:
            self._count_drafts(step, yielded)
        failed: dict[int, str] = {}
        for place in np.flatnonzero(yielded.broken).tolist():
            flags = int(yielded.broken[place])
            line = int(yielded.lines[place])
            failed[int(yielded.rows[place])] = self.sampling.why_broken(step, flags, line)
        parts: list[Any] = []
        for feature, note in step.notes.items():
            if (part := feature.collect(step, note, failed)) is not None:
                parts.append(part)
        if step.refused:
            self.sampling.keep_refused(step)
            for index, row in enumerate(step.batch.rows.tolist()):
                if row in step.refused:
                    failed[index] = step.refused[row]
        return Result(
            step=step.batch.step,
            token_ids=yielded.token_ids_of_rows,
            started=started,
            ended=ended,
            logprobs=yielded.logprobs,
            failed=failed,
            counts=yielded.counts,
            graphs=step.replayed,
            parts=tuple(parts),
        )

    def _check_oldest(self, step: Step) -> None:
        if not self._pending or self._pending[0] is not step:
            oldest = "none is in flight"
            if self._pending:
                oldest = f"step {self._pending[0].number} is the oldest"
            raise DovetailError(f"step {step.number} was collected, but {oldest}")
        if step.outputs is not None:
            raise DovetailError(
                f"step {step.number} was collected, but it is late and wasn't sampled"
            )

    def _wait(self, step: Step) -> tuple[float, float]:
        """Wait until the step is computed. Returns its start and end times."""
        if step.ended is not None or step.span is None:
            return step.started, step.ended or step.started
        step.span.wait()
        ended = self.clock.now()
        return ended - step.span.seconds, ended

    def _count_drafts(self, step: Step, yielded: Yielded) -> None:
        """Update the host's counts of rows, now that the accepted drafts are known."""
        batch = step.batch
        counts = yielded.counts
        assert batch.drafts is not None
        assert counts is not None
        self.rows.known[batch.rows] += counts
        checked = batch.drafts.counts > 0
        self.rows.computed[batch.rows] += np.where(checked, counts, batch.num_tokens)
