"""The model of a step, with the device work of features around it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import torch

from dovetail.api.model import ModelInputs
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.media_positions import POSITION_OFFSET, model_positions
from dovetail_executors.runtime.model_io import GraphKey, ModelOutputs, StepTokens, TappedStates
from dovetail_executors.runtime.row_state import RowState


class StepModel:
    """Device work only, at fixed addresses: launched, or recorded and replayed."""

    def __init__(self, model: Any, works: Sequence[DeviceWork], rows: RowState) -> None:
        """`model`: a `CausalLM`. One of `works` at most has taps."""
        self.model, self.works, self._rows = model, tuple(works), rows
        self._offsets = rows.columns.get(POSITION_OFFSET)
        self.axes = tuple(dict.fromkeys(work.axis for work in works if work.axis is not None))
        self._taps = next((work.taps for work in works if work.taps), ())

    @property
    def every_row(self) -> bool:
        """True if some work follows all rows of a step."""
        return any(work.every_row for work in self.works)

    def run(self, tokens: StepTokens, key: GraphKey) -> ModelOutputs:
        """Run the model on a step's tokens. `key`: of the step, which says what work runs."""
        if not self.works:
            return self._outputs(tokens)
        works = self._of(key)
        with _around(works, tokens):
            outputs = self._outputs(tokens)
        for work in works:
            work.after_model(tokens, outputs)
        return outputs

    def states(self, tokens: StepTokens, works: Sequence[DeviceWork]) -> torch.Tensor:
        """Return the final states [tokens, hidden], or of the wanted tokens, with only `works`
        around the model."""
        with _around(works, tokens):
            return cast(torch.Tensor, self.model(self._inputs(tokens)))

    def _inputs(self, tokens: StepTokens) -> ModelInputs:
        """Return the inputs, with positions as the model counts them in rows with images."""
        inputs = tokens.inputs
        if self._offsets is None or inputs.axes is not None:
            return inputs
        positions = model_positions(inputs.positions, self._offsets, tokens.rows)
        return replace(inputs, positions=positions)

    def _outputs(self, tokens: StepTokens) -> ModelOutputs:
        inputs = self._inputs(tokens)
        axes = inputs.axes
        if self._offsets is not None and axes is None:
            axes = inputs.positions.expand(3, -1)
        if not self._taps:
            return ModelOutputs(self.model(inputs))
        hidden, states = self.model.forward_tapped(inputs, self._taps)
        indices = tokens.token_indices
        tapped = TappedStates(indices, tokens.inputs.positions, states, axes=axes)
        return ModelOutputs(hidden, tapped)

    def logits(
        self, hidden: torch.Tensor, rows: torch.Tensor, works: Sequence[DeviceWork] = ()
    ) -> torch.Tensor:
        """Return logits for hidden states [n, hidden] of rows [n] int64. `works`: those that change
        the output layer."""
        if not works:
            return cast(torch.Tensor, self.model.logits(hidden))
        no_inputs = ModelInputs(token_ids=rows, positions=rows)  # the output layer has none
        with _around(works, StepTokens(no_inputs, self._rows.row_width, line_rows=rows)):
            return cast(torch.Tensor, self.model.logits(hidden))

    def works_with_axes(self, key: GraphKey) -> list[DeviceWork]:
        """Return the work that steps with this key have, and others of its part don't."""
        return [work for work in self.works if work.axis in key.axes]

    def after_growth(self, outputs: ModelOutputs, key: GraphKey) -> None:
        """Run what follows the sampling."""
        for work in self._of(key):
            work.after_growth(outputs)

    def _of(self, key: GraphKey) -> list[DeviceWork]:
        """Return the work that steps with this key have."""
        axes = {None, *key.axes}
        return [work for work in self.works if key.part in work.parts and work.axis in axes]


def _around(works: Sequence[DeviceWork], tokens: StepTokens) -> ExitStack:
    """Enter the contexts of `works`. Returns the stack that leaves them."""
    with ExitStack() as entered:
        for work in works:
            if (context := work.around(tokens)) is not None:
                entered.enter_context(context)
        return entered.pop_all()
