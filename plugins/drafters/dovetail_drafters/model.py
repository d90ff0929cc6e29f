"""`NamedModel`: drafts with a small model of the same vocabulary, which the executor runs beside
the large one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.drafter import ModelDrafter


class ModelOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        min_length=1,
        description="The draft model: a bundled one, a local directory, or a Hugging Face hub id.",
    )


class NamedModel(ModelDrafter):
    """Names the draft model that `engine.yaml` chooses."""

    options: ModelOptions

    @property
    def model(self) -> str:
        return self.options.model
