"""`MatchOptions`: the options of drafters that search for earlier occurrences of a request's last
tokens."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_MATCH = 64  # tokens: a longer match tells no more


class MatchOptions(BaseModel):
    """Lengths of matches. A drafter declares its own `max_match`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_match: int = Field(
        2, ge=1, le=MAX_MATCH, description="Fewest tokens that must have occurred before."
    )
    max_match: int

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match must be at least min_match ({self.min_match}), got {self.max_match}"
            )
        return self
