"""Device work of features around the model of a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from dovetail_executors.runtime.model_io import MODEL_PARTS, ModelOutputs, PartOfStep, StepTokens


class DeviceWork:
    """Device work of a feature, around the model of a step. The base class does nothing."""

    parts: frozenset[PartOfStep] = MODEL_PARTS  # in which it runs
    axis: str | None = None  # as the feature's
    # it follows all rows of a step: the model runs over deterministic ones as usual, too
    every_row = False
    taps: Sequence[int] = ()  # layers after which it reads states: `CausalLM.forward_tapped`

    def around(self, tokens: StepTokens) -> AbstractContextManager[None] | None:
        """Return a context in which the model, or its output layer, runs on these tokens."""
        return None

    def after_model(self, tokens: StepTokens, outputs: ModelOutputs) -> None:
        """Run after the model, on the same tokens."""

    def after_growth(self, outputs: ModelOutputs) -> None:
        """Run once the step's tokens are in the rows; the plan of attention is still valid."""
