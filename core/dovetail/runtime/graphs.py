"""CUDA graphs of a model's steps: one table of recordings by kind and size.

A step is replayed with the smallest recording that fits; the rest of its inputs is padding. To add a kind: name it (`Kind`), write its `Builder`
(inputs of a size, and the device work on them), add it in `Graphs.of`, and have the runner `find`, fill and `replay` it.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.api.sampler import Capture, Lines, Sampler
from dovetail.errors import UnsupportedError
from dovetail.nn.adapters import StepAdapters
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import compiling_ahead, is_compiling_ahead
from dovetail.nn.token_masks import mask_tokens
from dovetail.runtime.decode_rows import append, last_tokens, put_drafts
from dovetail.runtime.logits import Asks, LogitsProcessors
from dovetail.runtime.mask_buffer import MaskBuffer
from dovetail.runtime.recording import LayerSplitter, Recording, record
from dovetail.runtime.row_state import RowState
from dovetail.runtime.sampled import Sampled
from dovetail.runtime.step_inputs import DecodeInputs, HostLines, MixedInputs, SamplingInputs
from dovetail.runtime.token_sizes import (
    half_of,
    most_recorded,
    padded_sizes,
    row_sizes,
    sharing_row_sizes,
    sharing_token_sizes,
    typical,
)

log = logging.getLogger("dovetail")

Int64 = NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # task, number done, total

NO_LINES = HostLines(np.zeros(0, np.int64), np.zeros(0, np.int32))
MOST_THREADS = 16  # for compilation; more don't help, since its Python part is serialized


class Kind(Enum):
    """Kinds of recordings, by what they compute. Separate kinds keep steps from paying for features that they don't need."""

    MIXED = auto()  # the model, for any step: everything that depends only on the number of tokens
    MIXED_SHARING = auto()  # the same; attention reads a prefix that all rows share once
    DECODE = (
        auto()
    )  # a whole decode step, with or without drafts: model, `Capture.TOKENS`, growth of the rows
    DECODE_SHARING = auto()  # the same; attention reads a prefix that all rows share once
    DECODE_FULL = auto()  # the same with `Capture.FULL`
    DECODE_PROCESSED = auto()  # the same with logits processors
    MODEL = auto()  # the model of a decode step whose sampling waits for masks
    SAMPLING = (
        auto()
    )  # the rest of a step whose model ran before: masks, `Capture.TOKENS`, growth of the rows
    SAMPLING_FULL = auto()  # the same with `Capture.FULL`
    SAMPLING_PROCESSED = auto()  # the same with logits processors
    DRAFT_FIRST = auto()  # the draft model's K and V of the last two known tokens of rows, and their first draft, with `Capture.TOKENS`
    DRAFT_NEXT = auto()  # the draft model's next draft of rows
    DRAFT_FIRST_FULL = auto()  # the same two with `Capture.FULL`
    DRAFT_NEXT_FULL = auto()
    HEAD = auto()  # a draft of each of some rows by the draft head, with `Capture.TOKENS`
    HEAD_FULL = auto()  # the same with `Capture.FULL`
    ADAPTED_MIXED = auto()  # steps in which any token has an adapter
    ADAPTED_DECODE = auto()
    ADAPTED_DECODE_FULL = auto()
    ADAPTED_DECODE_PROCESSED = auto()
    ADAPTED_MODEL = auto()


DECODE_KINDS = {Capture.TOKENS: Kind.DECODE, Capture.FULL: Kind.DECODE_FULL}
DRAFT_KINDS = {
    Capture.TOKENS: (Kind.DRAFT_FIRST, Kind.DRAFT_NEXT),
    Capture.FULL: (Kind.DRAFT_FIRST_FULL, Kind.DRAFT_NEXT_FULL),
}
HEAD_KINDS = {Capture.TOKENS: Kind.HEAD, Capture.FULL: Kind.HEAD_FULL}
ADAPTED_KINDS = {
    Kind.MIXED: Kind.ADAPTED_MIXED,
    Kind.DECODE: Kind.ADAPTED_DECODE,
    Kind.DECODE_FULL: Kind.ADAPTED_DECODE_FULL,
    Kind.DECODE_PROCESSED: Kind.ADAPTED_DECODE_PROCESSED,
    Kind.MODEL: Kind.ADAPTED_MODEL,
}
SAMPLING_KINDS = {Capture.TOKENS: Kind.SAMPLING, Capture.FULL: Kind.SAMPLING_FULL}


class TappedStates(NamedTuple):
    """States of a step's tokens [tokens], which may be padded, that a draft head reads (see `dovetail.api.model.Tapped`)."""

    token_indices: torch.Tensor  # [tokens] int64: see `HostInputs`
    positions: torch.Tensor  # [tokens] int64
    states: torch.Tensor  # [tokens, taps * hidden]


class ModelOutputs(NamedTuple):
    """Results of the model in a step."""

    hidden: torch.Tensor  # final states [any, hidden]
    tapped: TappedStates | None = None  # of all tokens, if there is a draft head


@dataclass(frozen=True, slots=True)
class StepParts:
    """Objects that compute steps."""

    model: Any  # a CausalLM
    backend: AttentionBackend
    sampler: Sampler
    rows: RowState
    masks: MaskBuffer
    draft: Any = None  # the draft model, a CausalLM; None: there is none
    head: Any = None  # the `RunningHead`; None: there is none
    generates: bool = True  # some steps sample
    adapters: StepAdapters | None = None  # of the model's layers; None: they have no bank
    processors: LogitsProcessors | None = None  # None: the engine has none

    def run(
        self,
        token_ids: torch.Tensor,
        token_indices: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        adapted: torch.Tensor | None = None,
        types: torch.Tensor | None = None,
    ) -> ModelOutputs:
        """Run the model. The arguments are those of `CausalLM.forward`, and `token_indices` [tokens] as of `HostInputs`. `adapted` [tokens] int64:
        the rows of the tokens, of a step with adapters. `types`: for models that read them."""
        if adapted is None or self.adapters is None:
            return self._outputs(token_ids, token_indices, positions, wanted, types)
        with self.adapters.of_tokens(self.rows.device_adapters.index_select(0, adapted), wanted):
            return self._outputs(token_ids, token_indices, positions, wanted, types)

    def _outputs(
        self,
        token_ids: torch.Tensor,
        token_indices: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        types: torch.Tensor | None,
    ) -> ModelOutputs:
        if types is not None:
            return ModelOutputs(self.model(token_ids, positions, wanted, types))
        if self.head is None:
            return ModelOutputs(self.model(token_ids, positions, wanted))
        hidden, states = self.model.forward_tapped(token_ids, positions, wanted, self.head.taps)
        return ModelOutputs(hidden, TappedStates(token_indices, positions, states))

    def logits(self, hidden: torch.Tensor, adapted: torch.Tensor | None = None) -> torch.Tensor:
        """Return the model's logits for hidden states [n, hidden]. `adapted` [n] int64: their rows, if adapters may change the output layer."""
        if adapted is None or self.adapters is None:
            return cast(torch.Tensor, self.model.logits(hidden))
        with self.adapters.of_tokens(self.rows.device_adapters.index_select(0, adapted)):
            return cast(torch.Tensor, self.model.logits(hidden))

    def sample(
        self,
        lines: Lines,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        capture: Capture,
        masked: torch.Tensor | None = None,
        processors: LogitsProcessors | None = None,
        *,
        adapted: bool = False,
    ) -> Sampled:
        """Sample a token for each of `lines` [n] and extend their rows. `positions` [n] int64 and `hidden` [n, hidden]:
        position and hidden state of the line's last token. `masked` [n] int64: index of the line's mask, or -1.
        `processors`: those to apply, which need `Capture.FULL`. `adapted`: adapters may change the output layer."""
        logits = self.logits(hidden, lines.rows if adapted else None)
        if masked is not None:
            mask_tokens(logits, masked, self.masks.words)
        if processors is None:
            sampled = self.sampler.sample_captured(settled(logits), lines, capture)
        else:
            process = processors.process_captured(lines, masked, self.masks.words)
            sampled = self.sampler.sample_processed_captured(settled(logits), lines, process)
        tokens = append(self.rows, lines, positions, sampled.token_ids, hidden)
        if processors is not None:
            processors.add_wrong(tokens)
        return (
            Sampled(tokens) if sampled.logprobs is None else Sampled.pack(tokens, sampled.logprobs)
        )


def settled(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers`, zeroed while kernels are only compiled ahead, since they are then undefined and may be used as indices."""
    return numbers.zero_() if is_compiling_ahead() else numbers


class Builder(ABC):
    """One kind of recording: sizes, inputs of a size, and the device work on them."""

    pool = (
        "steps"  # recordings of one pool share memory: a replay may overwrite the outputs of others
    )
    warm_ups = 1  # runs before a recording. 0 if a kind recorded earlier launches the same kernels for each size
    optional = False  # True: skip the kind if recording raises `UnsupportedError`
    splitter: LayerSplitter | None = None  # set to record in pieces
    adapted = False  # True: of steps with adapters

    def __init__(self, kind: Enum, sizes: Sequence[int], parts: StepParts) -> None:
        """`sizes` are ascending. Larger ones are recorded first, so that smaller ones reuse their memory."""
        self.kind, self.sizes, self.parts = kind, tuple(sizes), parts

    def with_adapters(self) -> Builder:
        """Return the builder of the same steps with adapters, whose kind is in `ADAPTED_KINDS`."""
        other = copy(self)
        other.kind, other.adapted = ADAPTED_KINDS[Kind(self.kind)], True
        return other

    @abstractmethod
    def inputs(self, size: int) -> Any:
        """Create the inputs of a padding-only step, which reads and writes nothing, at the addresses that replays will read, and plan it in the
        attention backend."""

    @abstractmethod
    def run(self, inputs: Any) -> Any:
        """Run the work to record: device work only, at fixed addresses, without reading a result on the host. Returns what a replay overwrites.
        Results of kernels must pass through `settled` before torch uses them as indices."""

    def rehearse(self, inputs: Any) -> None:
        """Launch every kernel that such a step needs, while kernels are only compiled."""
        self.run(inputs)


class MixedSteps(Builder):
    """The model's part of any step, of `size` tokens."""

    pool = "mixed"  # separate: hidden states must outlive the replay that samples from them

    def __init__(
        self,
        kind: Enum,
        sizes: Sequence[int],
        parts: StepParts,
        splitter: LayerSplitter | None,
        *,
        shares: bool = False,
    ) -> None:
        """With a `splitter`, attention isn't part of the graphs."""
        super().__init__(kind, sizes, parts)
        self.splitter, self._shares = splitter, shares

    def inputs(self, size: int) -> MixedInputs:
        rows, nothing = self.parts.rows, np.zeros(0, np.int32)
        most_wanted = (
            rows.max_lines if size >= 2 * rows.max_lines else 0
        )  # large steps compute only wanted states, of at most half of the tokens
        inputs = MixedInputs(size, rows, most_wanted)
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
            shared_prefix_blocks=int(self._shares),
            mixed_graph=self.splitter is None,
        )
        self.parts.backend.plan(padding)
        return inputs

    def run(self, inputs: MixedInputs) -> ModelOutputs:
        """Return hidden states of all tokens [size, hidden], or of wanted ones [most_wanted, hidden]."""
        token_ids = self.parts.rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        wanted = None if inputs.all_states else inputs.wanted
        rows = inputs.token_indices // self.parts.rows.row_width if self.adapted else None
        outputs = self.parts.run(token_ids, inputs.token_indices, inputs.positions, wanted, rows)
        if self.parts.draft is not None:
            self.parts.draft(token_ids, inputs.positions, wanted)
        return outputs

    def rehearse(self, inputs: MixedInputs) -> None:
        outputs = self.run(inputs)
        if self.parts.head is not None:
            self.parts.head.follow(outputs.tapped, 0)  # isn't recorded, since it follows sampling


class DecodeSteps(Builder):
    """Decode steps of `size` lines, from their last tokens to the sampled ones; without a `capture`, only the model's part."""

    def __init__(
        self,
        kind: Enum,
        sizes: Sequence[int],
        parts: StepParts,
        capture: Capture | None,
        *,
        shares: bool = False,
        processed: bool = False,
    ) -> None:
        super().__init__(kind, sizes, parts)
        self._capture, self._shares, self._processors = (
            capture,
            shares,
            parts.processors if processed else None,
        )
        self.warm_ups = 0 if capture is None else 1
        self.optional = capture is Capture.FULL

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size, self.parts.rows)
        if self.parts.rows.states is not None:
            self.parts.rows.states.steps.plan(inputs.states)
        self.parts.backend.plan(inputs.fill(NO_LINES, int(self._shares)))
        return inputs

    def run(self, inputs: DecodeInputs) -> Any:
        """Return `Sampled`, or `ModelOutputs` with hidden states [size, hidden]."""
        parts, lines = self.parts, inputs.lines
        token_ids, positions = map(settled, last_tokens(parts.rows, lines, inputs.drafts))
        indices = (
            lines.rows * parts.rows.row_width + positions if parts.head is not None else positions
        )
        outputs = parts.run(
            token_ids, indices, positions, adapted=lines.rows if self.adapted else None
        )
        hidden = settled(outputs.hidden)
        if self._capture is None:
            return outputs
        sampled = parts.sample(
            lines,
            positions,
            hidden,
            self._capture,
            processors=self._processors,
            adapted=self.adapted,
        )
        if parts.head is not None:
            parts.head.follow(outputs.tapped)
        return sampled


class SamplingSteps(Builder):
    """The rest of a step after its model, for `size` sampled lines. Launching its kernels one by one takes longer than a small step."""

    def __init__(
        self,
        kind: Enum,
        sizes: Sequence[int],
        parts: StepParts,
        capture: Capture,
        model: DecodeSteps,
        *,
        processed: bool = False,
    ) -> None:
        super().__init__(kind, sizes, parts)
        self._capture, self._model, self._processors = (
            capture,
            model,
            parts.processors if processed else None,
        )
        self.optional = capture is Capture.FULL

    @cached_property
    def _states(self) -> torch.Tensor:
        """[1, hidden] hidden state of padding, for its width and dtype."""
        outputs: ModelOutputs = self._model.run(self._model.inputs(1))
        return outputs.hidden

    def inputs(self, size: int) -> SamplingInputs:
        return SamplingInputs(size, self.parts.rows.max_rows, self._states)

    def run(self, inputs: SamplingInputs) -> Sampled:
        positions = settled(last_tokens(self.parts.rows, inputs.lines)[1])
        return self.parts.sample(
            inputs.lines, positions, inputs.hidden, self._capture, inputs.masked, self._processors
        )


class DraftSteps(Builder):
    """One draft for each of `size` rows: the draft model, a sample, and its place after the row's tokens. Each row has `lines_per_row` neighbouring
    lines; the draft follows the last of them."""

    def __init__(
        self,
        kind: Enum,
        sizes: Sequence[int],
        parts: StepParts,
        capture: Capture,
        lines_per_row: int,
    ) -> None:
        super().__init__(kind, sizes, parts)
        self._capture, self._lines_per_row = capture, lines_per_row
        self.optional = capture is Capture.FULL

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size * self._lines_per_row, self.parts.rows)
        self.parts.backend.plan(inputs.fill(NO_LINES, 0))
        return inputs

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return the drafts [size] int64."""
        token_ids, positions = map(settled, last_tokens(self.parts.rows, inputs.lines))
        hidden = settled(self.parts.draft(token_ids, positions))
        last = slice(self._lines_per_row - 1, None, self._lines_per_row)
        lines = Lines(*(values[last].contiguous() for values in inputs.lines))
        logits = settled(self.parts.draft.logits(hidden[last].contiguous()))
        drafts = settled(self.parts.sampler.sample_captured(logits, lines, self._capture).token_ids)
        put_drafts(
            self.parts.rows, lines, positions[last], drafts, self.parts.sampler.context.vocab_size
        )
        return drafts


class HeadSteps(Builder):
    """One draft for each of `size` rows, by the draft head. A line of its inputs is one token short of the line that the draft follows: the head's
    last position is that of the last token but one."""

    def __init__(
        self, kind: Enum, sizes: Sequence[int], parts: StepParts, capture: Capture
    ) -> None:
        super().__init__(kind, sizes, parts)
        self._capture = capture
        self.optional = capture is Capture.FULL

    def inputs(self, size: int) -> DecodeInputs:
        inputs = DecodeInputs(size, self.parts.rows)
        self.parts.backend.plan(inputs.fill(NO_LINES, 0))
        return inputs

    def run(self, inputs: DecodeInputs) -> torch.Tensor:
        """Return the drafts [size] int64."""
        positions = settled(last_tokens(self.parts.rows, inputs.lines)[1])
        drafts: torch.Tensor = self.parts.head.draft(
            Lines(inputs.lines.rows, inputs.lines.ahead + 1), positions, self._sample
        )
        return drafts

    def _sample(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return settled(
            self.parts.sampler.sample_captured(settled(logits), lines, self._capture).token_ids
        )


def mixed_builders(parts: StepParts, splitter: LayerSplitter, most_tokens: int) -> list[Builder]:
    """Return the kinds for steps of up to `most_tokens` tokens. Only graphs that include attention support shared prefixes."""
    sizes = padded_sizes(most_tokens)
    if parts.backend.capabilities.cuda_graph != "mixed":
        return [MixedSteps(Kind.MIXED, sizes, parts, splitter)]
    builders: list[Builder] = [MixedSteps(Kind.MIXED, sizes, parts, None)]
    if parts.backend.capabilities.shared_prefix:
        builders.append(
            MixedSteps(Kind.MIXED_SHARING, sharing_token_sizes(sizes), parts, None, shares=True)
        )
    return builders


def decode_builders(parts: StepParts, most_lines: int) -> list[Builder]:
    """Return the kinds for decode steps of up to `most_lines` lines, and for sampling as many, if the sampler can be captured. The sampling kinds
    come after `MODEL` and read its states: later recordings in a pool don't reuse the memory of outputs that are kept."""
    can = parts.sampler.capabilities
    if not can.cuda_graph or not parts.generates:
        return []
    sizes = row_sizes(most_lines, with_drafts=parts.rows.max_lines > parts.rows.max_rows)
    few, processes = (
        half_of(sizes),
        can.cuda_graph_full and parts.processors is not None and parts.processors.captured,
    )
    model = DecodeSteps(Kind.MODEL, few, parts, None)
    builders: list[Builder] = [DecodeSteps(Kind.DECODE, sizes, parts, Capture.TOKENS)]
    if parts.backend.capabilities.shared_prefix:
        builders.append(
            DecodeSteps(
                Kind.DECODE_SHARING,
                sharing_row_sizes(most_lines),
                parts,
                Capture.TOKENS,
                shares=True,
            )
        )
    builders.append(model)
    if can.cuda_graph_full:
        builders.append(DecodeSteps(Kind.DECODE_FULL, few, parts, Capture.FULL))
    if processes:
        builders.append(
            DecodeSteps(Kind.DECODE_PROCESSED, few, parts, Capture.FULL, processed=True)
        )
    builders.append(SamplingSteps(Kind.SAMPLING, sizes, parts, Capture.TOKENS, model))
    if can.cuda_graph_full:
        builders.append(SamplingSteps(Kind.SAMPLING_FULL, few, parts, Capture.FULL, model))
    if processes:
        builders.append(
            SamplingSteps(Kind.SAMPLING_PROCESSED, few, parts, Capture.FULL, model, processed=True)
        )
    return [*builders, *draft_builders(parts, most_lines)]


def draft_builders(parts: StepParts, most_lines: int) -> list[Builder]:
    """Return the kinds of the draft model, or of the draft head, for as many rows as can check a draft in a step of `most_lines` lines; none without
    either. The sampler can be captured."""
    sizes = half_of(row_sizes(max(1, min(parts.rows.max_rows, most_lines // 2))))
    captures = [
        capture
        for capture in DRAFT_KINDS
        if capture is Capture.TOKENS or parts.sampler.capabilities.cuda_graph_full
    ]
    if parts.head is not None:
        return [HeadSteps(HEAD_KINDS[capture], sizes, parts, capture) for capture in captures]
    if parts.draft is None:
        return []
    return [
        DraftSteps(kind, sizes, parts, capture, lines)
        for capture in captures
        for kind, lines in zip(DRAFT_KINDS[capture], (2, 1), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Graph:
    """A recording of one kind and size."""

    kind: Enum
    size: int  # lines or tokens of its inputs, including padding
    inputs: Any  # from its builder: fill it, then replay
    recording: Recording[Any]

    @property
    def whole(self) -> bool:
        """True if attention is recorded, too: steps of mixed kinds are then planned with `AttentionBatch.mixed_graph`."""
        return len(self.recording.pieces) == 1


class Graphs:
    """Table of recordings. Call `compile_ahead`, then `capture` once the KV pool is allocated, then `find` and `replay` for each step."""

    def __init__(self, builders: Sequence[Builder], parts: StepParts) -> None:
        """Kinds are recorded in the order of `builders`."""
        self._builders, self._parts = tuple(builders), parts
        self._kinds: list[Enum] = []  # of replays
        self._table: dict[
            Enum, tuple[tuple[int, ...], list[Graph]]
        ] = {}  # of recorded kinds: ascending sizes, and the recording of each

    @classmethod
    def of(
        cls, parts: StepParts, splitter: LayerSplitter, max_tokens: int, parameters: int
    ) -> Graphs:
        """Return graphs of all kinds that the parts support, for steps of up to `max_tokens` tokens. `parameters`: number of parameters that the
        model uses per token. The backend must support CUDA graphs."""
        mixed: list[Builder] = []
        if (
            parts.rows.states is None
        ):  # the kernels of states have grids that depend on the rows of a step
            mixed = mixed_builders(parts, splitter, most_recorded(max_tokens, parameters))
        builders = [*mixed, *decode_builders(parts, min(parts.rows.max_lines, max_tokens))]
        adapted = (
            []
            if parts.adapters is None
            else [builder.with_adapters() for builder in builders if builder.kind in ADAPTED_KINDS]
        )
        return cls([*builders, *adapted], parts)

    def __str__(self) -> str:
        kinds = {builder.kind for builder in self._builders}
        return (
            ", ".join(
                name
                for kind, name in ((Kind.DECODE, "decode"), (Kind.MIXED, "mixed"))
                if kind in kinds
            )
            or "none"
        )

    def compile_ahead(self, prepare: Callable[[], None], progress: Progress | None = None) -> None:
        """Compile what recording will launch, many kernels in parallel. `prepare` prepares the backend, for a pool of any size."""
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

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Record every size of every kind. The KV pool must be allocated."""
        pools = {
            name: torch.cuda.graph_pool_handle()
            for name in {builder.pool for builder in self._builders}
        }
        done, total = 0, sum(len(builder.sizes) for builder in self._builders)
        stream = torch.cuda.Stream(self._parts.rows.device)  # type: ignore[no-untyped-call]
        for builder in self._builders:
            recorded = list[Graph]()
            try:
                for size in reversed(builder.sizes):
                    inputs = builder.inputs(size)
                    recording = record(
                        partial(builder.run, inputs),
                        pools[builder.pool],
                        stream,
                        builder.warm_ups,
                        builder.splitter,
                    )
                    recorded.append(Graph(builder.kind, size, inputs, recording))
                    done += 1
                    if progress is not None:
                        progress("capturing CUDA graphs", done, total)
            except UnsupportedError as error:
                if not builder.optional:
                    raise
                log.info("steps of kind %s aren't recorded: %s", builder.kind.name, error)
                continue
            self._table[builder.kind] = builder.sizes, recorded[::-1]

    def find(self, kind: Enum, size: int) -> Graph | None:
        """Return the smallest recording of the kind for `size` lines or tokens; None if there is none."""
        sizes, graphs = self._table.get(kind, ((), []))
        index = bisect_left(sizes, size)
        return None if index == len(sizes) else graphs[index]

    def replay(self, graph: Graph, batch: AttentionBatch | None = None) -> Any:
        """Enqueue the step in the graph's inputs. `batch`, if given, is planned in the attention backend first. Returns the result of the builder's
        `run`; the next replay may overwrite it."""
        self._kinds.append(graph.kind)
        if batch is not None:
            self._parts.backend.plan(batch)
        return graph.recording.replay()

    def take_kinds(self) -> tuple[str, ...]:
        """Return the kinds of what was replayed since the last call, in order: "decode"."""
        kinds = tuple([kind.name.lower() for kind in self._kinds])
        self._kinds.clear()
        return kinds

    def for_model(
        self, num_tokens: int, shared_prefix_blocks: int, *, all_states: bool, adapted: bool = False
    ) -> Graph | None:
        """Return the graph for the model of any step; if it is `adapted`, no prefix is shared. None if the step is too large, or needs `all_states`
        but only wanted ones are computed."""
        shares = shared_prefix_blocks > 0 and self._parts.backend.capabilities.cuda_graph == "mixed"
        graph = self.find(
            Kind.MIXED_SHARING if shares else _of_kind(Kind.MIXED, adapted), num_tokens
        )
        return None if graph is None or (all_states and not graph.inputs.all_states) else graph

    def for_decode(
        self,
        host_rows: Int64,
        shared_prefix_blocks: int,
        *,
        late: bool,
        adapted: bool = False,
        asks: Asks | None = None,
    ) -> Graph | None:
        """Return the graph for a decode step of lines of these rows; for a `late` one, only of its model; if it is `adapted`, no prefix is shared.
        `asks`: see `LogitsProcessors.asked_by`. None if no graph supports everything that they need."""
        shares = shared_prefix_blocks > 0 and self._parts.backend.capabilities.shared_prefix
        if late:
            return None if shares else self.find(_of_kind(Kind.MODEL, adapted), len(host_rows))
        capture = self._capture_for(host_rows, asks)
        if capture is None or (shares and (asks is not None or capture is not Capture.TOKENS)):
            return None
        kind = DECODE_KINDS[capture] if asks is None else Kind.DECODE_PROCESSED
        return self.find(Kind.DECODE_SHARING if shares else _of_kind(kind, adapted), len(host_rows))

    def for_sampling(
        self, host_rows: Int64, *, masked: bool, asks: Asks | None = None
    ) -> Graph | None:
        """Return the graph that samples for lines of these rows, some of which may be `masked`. None if no graph supports everything that they need:
        e.g. log-probabilities are of raw logits, which a graph with masks doesn't keep."""
        capture = self._capture_for(host_rows, asks)
        if capture is None or (masked and (self._parts.rows.logprobs[host_rows] >= 0).any()):
            return None
        return self.find(
            SAMPLING_KINDS[capture] if asks is None else Kind.SAMPLING_PROCESSED, len(host_rows)
        )

    def _capture_for(self, host_rows: Int64, asks: Asks | None) -> Capture | None:
        processors = self._parts.processors
        if asks is not None and (processors is None or not processors.can_capture(asks)):
            return None
        return self._parts.sampler.capture_for(host_rows)


def _of_kind(kind: Kind, adapted: bool) -> Kind:
    return ADAPTED_KINDS[kind] if adapted else kind
