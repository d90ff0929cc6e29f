"""What the layers of a model read in a step, planned for all layers of a kind at once."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.api.attention import AttentionBackend, AttentionBatch
from dovetail.runtime.step import Step
from dovetail.runtime.step_inputs import DecodeInputs, DeviceInputs, HostInputs, HostLines


class LayerPlan:
    """What layers of one kind read in a step: attention's, or that of recurrent layers. The base
    class does nothing."""

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
