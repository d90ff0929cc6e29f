"""The recurrent layers' part of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Batch
from dovetail.errors import DovetailError
from dovetail.nn.state.states import CheckedDrafts, States
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import DecodeInputs, DeviceInputs, HostInputs, HostLines


@dataclass(frozen=True)
class StatePlan:
    """Plans steps for the states of the rows: the inputs that all recurrent layers share."""

    states: States
    rows: RowState

    def plan(self, step: Step, host: HostInputs, inputs: DeviceInputs) -> None:
        """Plan a step that is launched."""
        batch = step.batch
        states = self.states
        checkpoint_at = self._checkpoints(batch)
        planned = states.batch(
            inputs.rows, inputs.query_starts, inputs.kv_lens, batch.num_tokens, checkpoint_at
        )
        if batch.drafts is not None:
            planned, step.checked = states.with_drafts(
                planned, host.rows, host.kv_lens, batch.num_lines, batch.drafts.counts
            )
        states.steps.plan(planned)

    def _checkpoints(self, batch: Batch) -> NDArray[np.int32]:
        """Return after how many of its tokens each row's state is copied, and enqueue where to; 0:
        it isn't. Raises `DovetailError` for a checkpoint that the step can't write."""
        checkpoint_at = np.zeros(len(batch.rows), np.int32)
        most = batch.num_tokens
        if not batch.checkpoints:
            return checkpoint_at
        if batch.drafts is not None:
            most = np.where(batch.drafts.counts > 0, 0, most)
        index = {row: index for index, row in enumerate(batch.rows.tolist())}
        at = [index[checkpoint.row] for checkpoint in batch.checkpoints]
        checkpoint_at[at] = [
            checkpoint.tokens - self.rows.computed[checkpoint.row]
            for checkpoint in batch.checkpoints
        ]
        if ((checkpoint_at[at] < 1) | (checkpoint_at[at] > most[at])).any():
            raise DovetailError(
                f"step {batch.step} can't write a checkpoint of tokens that it doesn't compute, or "
                "of a row with drafts"
            )
        places = [self.states.max_rows + 1 + row for row in at]
        self.states.put(places, [checkpoint.pages for checkpoint in batch.checkpoints])
        return checkpoint_at

    def plan_recorded(self, inputs: DecodeInputs) -> None:
        """Plan a decode step of padding, to be recorded."""
        self.states.steps.plan(inputs.states)

    def replayed(self, step: Step, lines: HostLines, inputs: DecodeInputs) -> None:
        """Take note that the step of these lines is replayed with these inputs."""
        step.checked = CheckedDrafts.of(inputs.states, lines.ahead)

    def settle(self, step: Step) -> None:
        """Enqueue what follows the sampling."""
        if step.checked is not None:
            self.states.accept(step.checked, self.rows.num_tokens)
