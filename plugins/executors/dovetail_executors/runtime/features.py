"""Features of a step, each in its own place: adapters, pooling, prompt log-probabilities, drafts.

A feature's host side (`StepFeature`) runs once a step, whether the step is replayed or launched.
Its device work (`DeviceWork`) runs at a launch and while a step is recorded, never in a replay: it
gets tensors at fixed addresses, and no step. Before any weights are read, a feature is a
`FeaturePlan`.

Sampling, attention, recurrent states, and drafts as the geometry of a step aren't features: every
step has them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerSpec
from dovetail.api.executor import Batch, Drafts, ExecutorConfig
from dovetail.api.model import ParallelGroup
from dovetail_executors.runtime.attention_choice import ChosenAttention
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.loading import ModelPlan, num_parameters
from dovetail_executors.runtime.recorded_steps import Builder, StepParts
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.sampling import Sampling
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import HostInputs

Int64 = NDArray[np.int64]
Note = TypeVar("Note")  # what a feature remembers of one step: two may be in flight


class Wanted(NamedTuple):
    """Final states that a feature reads of a step, decided before a recording is chosen."""

    tokens: Int64  # ascending indices among the step's tokens
    every: bool = False  # better compute the states of all tokens
    # Fields of `ModelInputs`, on the device. Steps that have any aren't replayed. At most one
    # feature gives a field.
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({})
    # [tokens] bool: those that attend in both directions. Only with `inputs`, and from at most one
    # feature
    both_ways: NDArray[np.bool_] | None = None
    # [rows] int32, see `AttentionBatch.host_seen`. Such steps aren't replayed. From at most one
    # feature
    seen: NDArray[np.int32] | None = None


class FinalStates(NamedTuple):
    """The final states that a feature wanted: hidden[places]."""

    hidden: torch.Tensor  # [any, hidden]
    places: Int64  # [n], as `Wanted.tokens`
    # Returns logits [m, vocab] of hidden states [m, hidden] of one row.
    logits: Callable[[torch.Tensor, int], torch.Tensor]


class StepFeature(ABC, Generic[Note]):
    """The host's side of a feature.

    Its methods are called with the steps for which `begin` returned a note, in the order of
    features. Decisions depend on batches and rows alone, so that all ranks decide alike.
    """

    part: type | None = None  # of a batch, that it reads; None: it reads none
    # Rows that ask for it, which it may keep: while there are none, it needn't see batches without
    # parts. None: it sees all
    asking: Collection[Any] | None = None
    axis: str | None = None  # its device work is only in recordings with this name
    reads_states: bool = False  # True: no step with a note is replayed as a whole
    work: DeviceWork | None = None  # None: nothing for the device
    # to which `Wanted.both_ways` divides a step's rows, more than there are sequences
    more_rows: int = 0

    @abstractmethod
    def begin(self, step: Step) -> Note | None:
        """Take note of rows that came and went, and of what the step asks. None: it doesn't concern
        this feature. Raises `DovetailError` if the batch doesn't fit."""

    def before_inputs(self, step: Step, note: Note, graphs: Graphs | None) -> None:
        """Enqueue work before the step's inputs. It may plan attention; nothing after it may.
        `graphs`: recordings that it may replay."""

    def wants(self, step: Step, note: Note, host: HostInputs) -> Wanted | None:
        """Return which final states `after_model` reads; None: none."""
        return None

    def after_model(self, step: Step, note: Note, states: FinalStates) -> None:
        """Enqueue work on the states that it wanted. `step.key` says what device work has run. Not
        called after a whole decode step was replayed."""

    def changes_logits(self, rows: NDArray[Any]) -> bool:
        """Return True if the logits of any of these rows need its device work around them."""
        return False

    def collect(self, step: Step, note: Note, failed: dict[int, str]) -> Any | None:
        """Return a part of the result, once the device has passed the step; None: there is none.

        May add rows to `failed`, index in the batch -> reason.
        """
        return None

    def recordings(self, parts: StepParts, most_lines: int) -> Sequence[Builder]:
        """Return builders of recordings of its own, for steps of up to `most_lines` lines. The
        sampler can be captured."""
        return ()

    def biggest(self, batch: Batch) -> Iterator[Batch]:
        """Yield steps of the largest memory, made of the plain one, to be measured at start."""
        yield from ()

    @property
    def capacity(self) -> Mapping[str, Any]:
        """Fields of `dovetail.api.executor.Capacity`."""
        return {}

    @property
    def details(self) -> Mapping[str, str]:
        """Entries of `Capacity.details`."""
        return {}


class Proposer(StepFeature[Literal[True]]):
    """A feature that proposes drafts: those that a batch has as -1. It concerns each step."""

    model: Any  # what drafts
    name: str  # of its checkpoint, for humans

    @property
    def details(self) -> Mapping[str, str]:
        return {"draft_model": f"{self.name}, {num_parameters(self.model) / 1e6:.1f}M"}

    def before_inputs(self, step: Step, note: Literal[True], graphs: Graphs | None) -> None:
        if step.batch.drafts is not None:
            self.propose(step.batch.drafts, step.rows, graphs)

    @abstractmethod
    def propose(self, drafts: Drafts, rows: NDArray[np.int32], graphs: Graphs | None) -> None:
        """Enqueue the computation of the drafts of `rows` [b] that are -1, and write them after the
        rows' known tokens. No step is in flight, and the sampler knows all rows."""


@dataclass(frozen=True)
class Loaded:
    """Objects that `FeaturePlan.build` gets: the loaded model, and what runs it."""

    plan: ModelPlan
    config: ExecutorConfig
    model: torch.nn.Module  # a CausalLM
    backend: AttentionBackend
    sampling: Sampling
    rows: RowState
    make_layer: Callable[[LayerSpec], AttentionLayer]  # bound to the pool
    splitter: LayerSplitter | None  # wraps layers at which recordings are split; None: none is made
    group: ParallelGroup
    device: torch.device
    progress: Callable[[str, int, int], None] | None
    environment: str  # in words, for errors


class FeaturePlan(ABC):
    """Decisions about a feature, made before any weights are read. Making one may refuse."""

    layers: Sequence[LayerSpec] = ()  # of its own, beside the model's
    reads_next: bool = False  # as of `KVLayout`
    # int32 of each row, on the device, by name: the values of a batch's new rows
    columns: Mapping[str, Callable[[Batch], Sequence[int]]] = {}

    def is_served_by(self, attention: ChosenAttention) -> bool:
        """Return False if the feature is left out with this backend, which the plan logs."""
        return True

    @abstractmethod
    def build(self, loaded: Loaded) -> StepFeature[Any]:
        """Return the feature. Raises `ModelLoadError` or `UnsupportedError` if it can't be."""
