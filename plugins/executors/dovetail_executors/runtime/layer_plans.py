"""Plans of a step: inputs that all attention layers, or all recurrent layers, share in a step."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import DecodeInputs, DeviceInputs, HostInputs, HostLines


class LayerPlan:
    """Prepares the inputs of a step that all layers of one kind share. The base class does nothing."""

    def plan(
        self, step: Step, host: HostInputs, inputs: DeviceInputs, attention: AttentionBatch
    ) -> None:
        """Plan a step that is launched."""

    def plan_recorded(self, inputs: DecodeInputs, attention: AttentionBatch) -> None:
        """Plan a decode step of padding, to be recorded."""

    def replayed(self, step: Step, lines: HostLines, inputs: DecodeInputs) -> None:
        """Take note that the step of these lines is replayed with these inputs."""

    def settle(self, step: Step) -> None:
        """Enqueue what follows the sampling."""


@dataclass(frozen=True)
class AttentionPlan(LayerPlan):
    """Attention's part. Replays plan it themselves."""

    backend: AttentionBackend

    def plan(
        self, step: Step, host: HostInputs, inputs: DeviceInputs, attention: AttentionBatch
    ) -> None:
        self.backend.plan(attention)

    def plan_recorded(self, inputs: DecodeInputs, attention: AttentionBatch) -> None:
        self.backend.plan(attention)
