"""CUDA graphs of a model's steps: one list of recordings by key and size.

A step is replayed with the smallest recording that fits; the rest of its inputs is padding. To add
a kind: name its key, write its `Builder` (inputs of a size, and the device work on them), add it to
the list in `Graphs.of` or to a feature's `DeviceWork.recordings`, and have the runner or the
feature `find`, fill and `replay` it.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.graphs import GraphSupport
from dovetail.api.model import ModelInputs
from dovetail.api.sampler import Capture
from dovetail.api.token_sizes import (
    half_of,
    most_recorded,
    padded_sizes,
    row_sizes,
    sharing_row_sizes,
    sharing_token_sizes,
    typical,
)
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail_executors.runtime.logits import Asks
from dovetail_executors.runtime.model_io import (
    DECODE,
    MIXED,
    MODEL,
    MODEL_PARTS,
    PROCESSED,
    SHARED,
    GraphKey,
    ModelOutputs,
    PartOfStep,
    StepTokens,
)
from dovetail_executors.runtime.recording import ALONE, LayerSplitter, Pool, Recording, record
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

log = logging.getLogger("dovetail")

Int64 = NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # task, number done, total
Agree = Callable[[bool], bool]  # True if all ranks call it with True; waits for all

# Keys of which more than the largest size is recorded at the start: those of the first requests
FIRST_KEYS = (DECODE, GraphKey("sampling", Capture.TOKENS))
MOST_FIRST = 8  # the largest of these sizes but one
OUTPUTS = (
    "outputs"  # pool of recordings whose outputs must outlive the replay that samples from them
)
NO_LINES = HostLines(np.zeros(0, np.int64), np.zeros(0, np.int32))
IDLE_S = 0.1  # an idle engine waits for another one that starts
MOST_THREADS = 16  # for compilation; more don't help, since its Python part is serialized


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


def first_sizes(builder: Builder) -> tuple[int, ...]:
    """Return the sizes of a key that are recorded before the first step, in ascending order, unless
    all are."""
    most = builder.sizes[-1]
    if builder.key not in FIRST_KEYS:
        return (most,)
    return tuple(size for size in builder.sizes if size <= MOST_FIRST or size == most)


@dataclass(frozen=True, slots=True)
class Graph:
    """A recording of one key and size."""

    key: GraphKey
    size: int  # lines or tokens of its inputs, including padding
    inputs: Any  # from its builder: fill it, then replay
    recording: Recording[Any]

    @property
    def whole(self) -> bool:
        """True if attention is recorded, too: mixed steps are then planned with
        `AttentionBatch.mixed_graph`."""
        return len(self.recording.pieces) == 1


@dataclass(slots=True)
class Recorded:
    """Recordings of one key by size; None where one failed, and steps are launched instead."""

    builder: Builder
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    @property
    def missing(self) -> Iterator[int]:
        """Sizes to record while the engine is idle, in ascending order."""
        sizes = () if self.builder.on_demand else self.builder.sizes
        return (size for size in sizes if size not in self.graphs)


class Graphs:
    """Table of recordings.

    Call `compile_ahead`, then `capture` once the KV pool is allocated, then `find` and `replay` for
    each step. Ranks of a group call these in the same order, and replay the same recordings: a sum
    waits for as many programs as a recording of its size has on the other ranks.
    """

    def __init__(
        self, builders: Sequence[Builder], parts: StepParts, agree: Agree | None = None
    ) -> None:
        """Keys are recorded in the order of `builders`. `agree`: of the group's ranks; None: there
        is one rank."""
        self._builders = tuple(builders)
        self._parts = parts
        self._agree = agree
        self._replayed: list[GraphKey] = []
        self._table: dict[GraphKey, Recorded] = {}  # without keys that can't be recorded
        self._pools: dict[str, Pool] = {}
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def of(
        cls,
        parts: StepParts,
        splitter: LayerSplitter,
        max_tokens: int,
        parameters: int,
        of_features: Sequence[OfFeature] = (),
        more: Sequence[Builder] = (),
        agree: Agree | None = None,
    ) -> Graphs:
        """Return graphs of all keys that the parts support, for steps of up to `max_tokens` tokens,
        and `more`. `parameters`: number of parameters that the model uses per token. The backend
        must support CUDA graphs. `agree`: of the group's ranks; None: there is one rank."""
        mixed: list[Builder] = []
        # The kernels of states have grids that depend on the rows of a step.
        if parts.rows.states is None:
            mixed = mixed_builders(parts, splitter, most_recorded(max_tokens, parameters))
        builders = [
            *mixed,
            *decode_builders(parts, min(parts.rows.max_lines, max_tokens), of_features),
            *more,
        ]
        return cls([*builders, *with_axes_of_features(builders, parts)], parts, agree)

    @property
    def keys(self) -> Iterator[tuple[GraphKey, tuple[int, ...]]]:
        """Keys of the recordings with their ascending sizes, in the order of recording."""
        return ((builder.key, builder.sizes) for builder in self._builders)

    @property
    def recorded(self) -> Iterator[tuple[GraphKey, tuple[int, ...]]]:
        """Keys of the recordings with the ascending sizes that are recorded by now."""
        for key, each in self._table.items():
            yield key, tuple(size for size in each.builder.sizes if each.graphs.get(size))

    def __str__(self) -> str:
        keys = {builder.key for builder in self._builders}
        return ", ".join(key.part for key in (DECODE, MIXED) if key in keys) or "none"

    def compile_ahead(self, prepare: Callable[[], None], progress: Progress | None = None) -> None:
        """Compile what recording will launch, many kernels in parallel.

        `prepare` prepares the backend, for a pool of any size.
        """
        if not has_triton():
            return
        tell = None if progress is None else partial(progress, "compiling kernels")
        try:
            with compiling_ahead(
                self._parts.rows.device, min(MOST_THREADS, os.cpu_count() or 1), tell
            ):
                prepare()
                self.rehearse()
        except Exception as error:  # actual errors surface on launch
            log.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run what will be recorded once for each typical size, while kernels are only compiled."""
        for builder in self._builders:
            for size in typical(builder.sizes) if builder.warm_ups else ():
                builder.rehearse(builder.inputs(size))

    def capture(self, progress: Progress | None = None, *, all_sizes: bool = True) -> None:
        """Record the sizes of every key. The KV pool must be allocated.

        Unless `all_sizes`, only each key's largest, whose memory the others share, and those in
        `first_sizes`; `find` and `record_next` record the others.
        """
        names = {builder.pool for builder in self._builders}
        self._pools = {name: Pool() for name in names}
        self._stream = torch.cuda.Stream(self._parts.rows.device)  # type: ignore[no-untyped-call]
        sizes = {
            builder.key: builder.sizes if all_sizes else first_sizes(builder)
            for builder in self._builders
            if not builder.on_demand
        }
        done = 0
        total = sum(map(len, sizes.values()))
        for builder in self._builders:
            self._table[builder.key] = recorded = Recorded(builder)
            try:
                for size in reversed(sizes.get(builder.key, ())):
                    torch.cuda.empty_cache()
                    if all_sizes or size == builder.sizes[-1]:
                        graph = self._record(builder, size, builder.warm_ups)
                    else:
                        graph = self._record_at_once(builder, size)
                    recorded.graphs[size] = graph
                    done += 1
                    if progress is not None:
                        progress("capturing CUDA graphs", done, total)
            except UnsupportedError as error:
                if not builder.optional:
                    raise
                log.info("steps of kind %s aren't recorded: %s", builder.key, error)
                del self._table[builder.key]

    @property
    def _missing(self) -> Iterator[tuple[Recorded, int]]:
        return ((each, size) for each in self._table.values() for size in each.missing)

    @property
    def is_complete(self) -> bool:
        """True if `record_next` has nothing to record."""
        return next(self._missing, None) is None

    def record_next(self) -> bool:
        """Record a size that is missing, if there is one. Returns True if more are missing."""
        found = next(self._missing, None)
        if found is not None:
            self._record_late(*found, IDLE_S)
        return not self.is_complete

    def find(self, key: GraphKey, size: int) -> Graph | None:
        """Return the smallest recording of the key for `size` lines or tokens, which is recorded
        now if it hasn't been; None if there is none. One with all features' work also serves steps
        with the work of some."""
        for each in (key, replace(key, axes=key.axes.union(self._parts.model.axes))):
            recorded = self._table.get(each)
            sizes = () if recorded is None else recorded.builder.sizes
            index = bisect_left(sizes, size)
            if recorded is not None and index < len(sizes):
                if sizes[index] not in recorded.graphs:
                    self._record_late(recorded, sizes[index])
                return recorded.graphs.get(sizes[index])
            if not key.axes.intersection(self._parts.model.axes):
                return None  # steps without such work don't pay for it
        return None

    def _record_late(self, recorded: Recorded, size: int, wait_s: float = 0.0) -> None:
        """Record a size while serving, unless another engine starts for longer than `wait_s`, in
        the process of any rank; if that fails, its steps are launched kernel by kernel."""
        alone = ALONE.acquire(timeout=wait_s)
        builder = recorded.builder
        try:
            if self._on_all(alone):
                recorded.graphs[size] = None
                recorded.graphs[size] = self._record_at_once(builder, size)
        except Exception as error:  # of memory, mostly; one of the device will show in the step
            log.warning(
                "steps of kind %s and size %d aren't recorded: %s: %s",
                builder.key,
                size,
                type(error).__name__,
                error,
            )
        finally:
            if alone:
                ALONE.release()

    def _record_at_once(self, builder: Builder, size: int) -> Graph:
        """Record a size without running it first, as the key's largest has run; after running it if
        that fails: there is no memory, or a backend does something when the size first runs. It
        isn't run if memory ran out on one of several ranks: the others' sums would wait for its."""
        try:
            return self._record_on_all(builder, size, 0)
        except UnsupportedError:
            raise
        except Exception as error:
            log.debug("%s of size %d is recorded once more: %s", builder.key, size, error)
            torch.cuda.empty_cache()
            lacks = self._agree is not None and isinstance(error, torch.OutOfMemoryError)
            graph = self._record_on_all(builder, size, 1 if self._on_all(not lacks) else 0)
            torch.cuda.empty_cache()  # of the stream that it ran on
            return graph

    def _record_on_all(self, builder: Builder, size: int, warm_ups: int) -> Graph:
        """Record a size as `_record` does. Raises `DovetailError` if another rank can't; what every
        rank finds to be unsupported is raised at once."""
        failure: Exception | None = None
        try:
            graph = self._record(builder, size, warm_ups)
        except UnsupportedError:
            raise
        except Exception as error:
            failure = error
        on_all = self._on_all(failure is None)
        if failure is not None:
            raise failure
        if not on_all:
            raise DovetailError("another rank can't record it")
        return graph

    def _on_all(self, fine: bool) -> bool:
        """Return True if all ranks call it with True."""
        return fine if self._agree is None else self._agree(fine)

    @torch.inference_mode()
    def _record(self, builder: Builder, size: int, warm_ups: int) -> Graph:
        """Record a size of a key. `capture` has made the pools."""
        inputs = builder.inputs(size)
        recording = record(
            partial(builder.run, inputs),
            self._pools[builder.pool],
            self._stream,
            warm_ups,
            builder.splitter,
        )
        return Graph(builder.key, size, inputs, recording)

    def replay(self, graph: Graph, batch: AttentionBatch | None = None) -> Any:
        """Enqueue the step in the graph's inputs. `batch`, if given, is planned in the attention
        backend first. Returns the result of the builder's `run`; the next replay may overwrite
        it."""
        self._replayed.append(graph.key)
        if batch is not None:
            self._parts.backend.plan(batch)
        return graph.recording.replay()

    def take_replayed(self) -> tuple[str, ...]:
        """Return the keys of what was replayed since the last call, in order: "decode"."""
        keys = tuple(map(str, self._replayed))
        self._replayed.clear()
        return keys

    def for_model(self, num_tokens: int, axes: frozenset[str], *, all_states: bool) -> Graph | None:
        """Return the graph for the model of any step.

        `axes`: of its features, and "shared". None if the step is too large, or needs `all_states`
        but only wanted ones are computed.
        """
        if self._parts.backend.capabilities.cuda_graph is not GraphSupport.ALL:
            axes -= SHARED
        graph = self.find(GraphKey("mixed", axes=axes), num_tokens)
        return None if graph is None or (all_states and not graph.inputs.all_states) else graph

    def for_decode(
        self, host_rows: Int64, axes: frozenset[str], *, late: bool, asks: Asks | None = None
    ) -> Graph | None:
        """Return the graph for a decode step of lines of these rows; for a `late` one, only of its
        model. `axes`: as for `for_model`. `asks`: see `LogitsProcessors.asked_by`. None if no graph
        supports everything that they need."""
        if not self._parts.backend.capabilities.shared_prefix:
            axes -= SHARED
        if late:
            return self.find(GraphKey("model", axes=axes), len(host_rows))
        return self._sampling("decode", host_rows, axes, asks)

    def for_sampling(
        self, host_rows: Int64, *, masked: bool, asks: Asks | None = None
    ) -> Graph | None:
        """Return the graph that samples for lines of these rows, some of which may be `masked`.

        None if no graph supports everything that they need: e.g. log-probabilities are of raw
        logits, which a graph with masks doesn't keep.
        """
        if masked and (self._parts.rows.logprobs[host_rows] >= 0).any():
            return None
        return self._sampling("sampling", host_rows, frozenset(), asks)

    def for_drafts(self, host_rows: Int64, axes: frozenset[str] = frozenset()) -> Graph | None:
        """Return the graph of a draft for each of these rows. `axes`: which one."""
        capture = self._parts.sampling.sampler.capture_for(host_rows)
        key = GraphKey("draft", capture, axes)
        return None if capture is None else self.find(key, len(host_rows))

    def _sampling(
        self, part: PartOfStep, host_rows: Int64, axes: frozenset[str], asks: Asks | None
    ) -> Graph | None:
        capture = self._parts.sampling.capture_for(host_rows, asks)
        if capture is None:
            return None
        if asks is not None:
            capture = Capture.FULL
            axes = axes | PROCESSED
        return self.find(GraphKey(part, capture, axes), len(host_rows))
