"""Right samplers and logits processors in styles that a suite might take for wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import LogitsProcessor, LogitsProcessorContext, ProcessedRow
from dovetail.api.sampler import (
    Lines,
    SampledTokens,
    SampleInputs,
)
from dovetail_samplers.default import DefaultSampler


class OneBuffer(DefaultSampler):
    """Returns views of one array, which the next call overwrites, and ruins the logits."""

    capabilities = replace(DefaultSampler.capabilities, cuda_graph=GraphSupport.NONE)

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        self.buffer = np.empty((max_rows * (1 + self.context.max_drafts), 2), np.int64)

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        result = super().sample(inputs)
        ids = self.buffer[: len(result.token_ids), 1]
        ids[:] = result.token_ids.cpu().numpy()
        inputs.logits.fill_(torch.nan)
        return replace(result, token_ids=torch.from_numpy(ids).to(result.token_ids.device))


class Lowering(BaseModel):
    """Arguments of the processors here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, strict=True)


class Slotted(LogitsProcessor):
    """Has slots, keeps numpy's numbers in a dict by row, and changes the logits number by
    number. Lowers the last token."""

    __slots__ = ("amounts",)
    Arguments = Lowering

    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.amounts = dict[np.int64, np.float32]()

    def prepare(self, max_rows: int) -> None:
        self.amounts.clear()

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.amounts.pop(np.int64(row), None)
        for one in added:
            arguments: Any = one.arguments
            self.amounts[np.int64(one.row)] = np.float32(arguments.by)

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        lengths = self.context.history.lengths(lines).cpu().numpy()
        for line, row in enumerate(lines.rows.cpu().numpy()):
            if row in self.amounts:
                last = int(self.context.history.token_ids[row, lengths[line] - 1])
                if last < logits.shape[1]:
                    logits[line, last] -= float(self.amounts[row])


class OnTheHost(Slotted):
    """Computes on a copy in the host's memory, and writes back the lines that ask."""

    __slots__ = ()

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        asking = [at for at, row in enumerate(lines.rows.tolist()) if row in self.amounts]
        index = torch.tensor(asking, dtype=torch.int64, device=logits.device)
        copy = logits.index_select(0, index).cpu().clone()
        super().apply(copy, lines.take(index))
        logits.index_copy_(0, index, copy.to(logits.device))
