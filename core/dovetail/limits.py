"""`Limits`: how far one request may go, so that it can't harm the others: the keys below `limits` in `engine.yaml`, which the front checks."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Bounds of what one request may ask for. Each refusal names the limit and its value."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    max_n: Annotated[int, Field(gt=0)] = 1024
    """The most samples of one request (`n`)."""
