"""Log-probabilities of prompt tokens: of the known token after each that a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.api.executor import PromptLogprobs
from dovetail.api.sampler import TopLogprobs
from dovetail.nn.logprobs import top_logprobs
from dovetail_executors.runtime.features import (
    FeaturePlan,
    FinalStates,
    Loaded,
    StepFeature,
    Wanted,
)
from dovetail_executors.runtime.row_state import RowState, ranges
from dovetail_executors.runtime.step import LogprobsCopy, Step
from dovetail_executors.runtime.step_inputs import HostInputs, Int64

LOGITS_AT_ONCE = 1 << 24  # numbers per slice in which they are computed


@dataclass(slots=True)
class Asked:
    """The rows of one step that ask."""

    indices: Int64  # [any] in the batch
    starts: Int64  # [any] the position of the first token that the step computes
    counts: Int64  # [any] tokens with a known one after them
    results: dict[int, LogprobsCopy] = field(default_factory=dict)  # by index in the batch


class RowsWithPromptLogprobs(StepFeature[Asked]):
    """Rows that ask for them, and their results."""

    reads_states = True

    def __init__(self, rows: RowState, vocab_size: int) -> None:
        self._rows = rows
        self.asking = rows.prompt_logprobs
        self._slice = max(1, LOGITS_AT_ONCE // vocab_size)  # positions computed at once

    def begin(self, step: Step) -> Asked | None:
        batch = step.batch
        starts = self._rows.computed[batch.rows]
        left = self._rows.known[batch.rows] - starts - 1
        asked = [row in self._rows.prompt_logprobs for row in batch.rows.tolist()]
        indices = np.flatnonzero(np.array(asked) & (left > 0))
        if not len(indices):
            return None
        counts = np.minimum(batch.num_tokens[indices], left[indices])
        return Asked(indices, starts[indices], counts)

    def wants(self, step: Step, note: Asked, host: HostInputs) -> Wanted:
        firsts = host.query_starts[note.indices].astype(np.int64)
        return Wanted(ranges(firsts, note.counts), every=True)

    def after_model(self, step: Step, note: Asked, states: FinalStates) -> None:
        end = 0
        for index, start, count in zip(
            note.indices.tolist(), note.starts.tolist(), note.counts.tolist(), strict=True
        ):
            row = int(step.batch.rows[index])
            first = int(states.places[end])
            end += count
            ids = self._rows.token_ids[row, start + 1 : start + 1 + count].long()
            copy = note.results[index] = LogprobsCopy()
            fixed = self._rows.fixed_lines if self._rows.deterministic[row] else 0
            for hidden, targets in zip(
                torch.split(states.hidden[first : first + count], fixed or self._slice),
                torch.split(ids, fixed or self._slice),
                strict=True,
            ):
                given = len(targets)
                repeated = torch.arange(fixed or given, device=ids.device).clamp_(max=given - 1)
                logits = states.logits(hidden[repeated], row)
                top = top_logprobs(logits, targets[repeated], self._rows.prompt_logprobs[row])
                copy.add(
                    TopLogprobs(top.token_ids[:given], top.logprobs[:given], top.ranks[:given])
                )

    def collect(self, step: Step, note: Asked, failed: dict[int, str]) -> PromptLogprobs:
        return PromptLogprobs({index: copy.value() for index, copy in note.results.items()})


class PromptLogprobsPlan(FeaturePlan):
    """Nothing to decide: any model that generates has them."""

    def build(self, loaded: Loaded) -> RowsWithPromptLogprobs:
        return RowsWithPromptLogprobs(loaded.rows, loaded.plan.vocab_size)
