"""Tokens and outputs of the model in a step, and the key of a step's recording."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from dovetail.api.model import ModelInputs
from dovetail.api.sampler import Capture

PartOfStep = Literal["mixed", "model", "decode", "sampling", "draft", "slabs", "lines"]
MODEL_PARTS: frozenset[PartOfStep] = frozenset({"mixed", "model", "decode"})


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Key of a recording: names the work that it contains. A step without a recording of its key is
    launched kernel by kernel.

    `part`: "mixed" is the model, for any step; "decode" a whole decode step, with or without
    drafts: model, sampling, growth of the rows; "model" the model of a decode step; "sampling" the
    rest of a step after its model; "draft" a draft of each of some rows; "slabs" the model of some
    deterministic tokens; "lines" logits and tokens of some deterministic lines. `capture`: how
    tokens are sampled; None: they aren't. `axes`: names of device work that the recording contains
    and others of its part don't: "shared" (attention reads a prefix of all rows once), "processed"
    (by logits processors), "first" (of a row's drafts), and those of features.
    """

    part: PartOfStep
    capture: Capture | None = None
    axes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        full = ["full"] if self.capture is Capture.FULL and "processed" not in self.axes else []
        return "_".join([self.part, *full, *sorted(self.axes)])


MIXED = GraphKey("mixed")
DECODE = GraphKey("decode", Capture.TOKENS)
MODEL = GraphKey("model")
SLABS = GraphKey("slabs")
SHARED: frozenset[str] = frozenset({"shared"})
PROCESSED: frozenset[str] = frozenset({"processed"})


@dataclass(frozen=True)
class StepTokens:
    """Tokens that the model, or its output layer, computes, on the device: its inputs, and where
    they are in the rows. What only some device work reads is computed when it is first read."""

    inputs: ModelInputs
    row_width: int  # see `RowState`
    indices: torch.Tensor | None = None  # [tokens] int64: see `HostInputs.token_indices`
    line_rows: torch.Tensor | None = None  # [tokens] int64, if `indices` is None

    @cached_property
    def token_indices(self) -> torch.Tensor:
        """[tokens] int64: see `HostInputs`."""
        if self.indices is not None:
            return self.indices
        assert self.line_rows is not None
        return self.line_rows * self.row_width + self.inputs.positions

    @cached_property
    def rows(self) -> torch.Tensor:
        """[tokens] int64 the tokens' rows."""
        if self.line_rows is not None:
            return self.line_rows
        return self.token_indices // self.row_width


class TappedStates(NamedTuple):
    """States of a step's tokens, which may be padded: see `dovetail.api.model.Tapped`."""

    token_indices: torch.Tensor  # [tokens] int64: see `HostInputs`
    positions: torch.Tensor  # [tokens] int64
    states: torch.Tensor  # [tokens, taps * hidden]
    num_tokens: int | None = None  # without padding; None: padding is of the row `max_rows`
    axes: torch.Tensor | None = None  # see `dovetail.api.draft_head.HeadInputs`


class ModelOutputs(NamedTuple):
    """Results of the model in a step."""

    hidden: torch.Tensor  # final states [any, hidden]
    tapped: TappedStates | None = None  # of all tokens, if any device work reads them

    def without_padding(self, num_tokens: int) -> ModelOutputs:
        """Return the outputs of a step of `num_tokens` tokens, whose padding is of no row."""
        if self.tapped is None:
            return self
        return ModelOutputs(self.hidden, self.tapped._replace(num_tokens=num_tokens))
