"""Drafter `simulated`: leaves drafts to the executor `simulated`, which accepts them by chance (its
option `acceptance`)."""

from __future__ import annotations

from dovetail.api.drafter import ModelDrafter


class SimulatedDrafter(ModelDrafter):
    """A drafter whose model is simulated, too."""

    @property
    def model(self) -> str:
        return "simulated"
