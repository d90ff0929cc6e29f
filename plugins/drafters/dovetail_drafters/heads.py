"""Drafters whose drafts come from a head, a few layers that read the model's own hidden states."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.drafter import ModelDrafter


class MtpDrafter(ModelDrafter):
    """Chooses the multi-token-prediction head that is in the model's own checkpoint."""

    head = "dovetail_models.mtp:Mtp"

    @property
    def model(self) -> None:
        return None


class Eagle3Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        min_length=1,
        description="The head, in the format of `speculators`: a local directory, or a Hugging "
        "Face hub id.",
    )


class Eagle3Drafter(ModelDrafter):
    """Names the EAGLE-3 head that `engine.yaml` chooses."""

    options: Eagle3Options
    head = "dovetail_models.eagle3:Eagle3"

    @property
    def model(self) -> str:
        return self.options.model
