"""`NgramDrafter`: prompt lookup. Answers that repeat parts of their prompt (edits, summaries, code) are continued as the prompt was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.request import Request
from dovetail_drafters.own_text import OwnTexts, continued

MAX_MATCH = 64  # tokens: a longer match tells no more


class NgramOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    min_match: int = Field(2, ge=1, le=MAX_MATCH, description="Fewest tokens that must have occurred before.")
    max_match: int = Field(8, ge=1, le=MAX_MATCH, description="Most tokens that are compared: of several places the longest match up to this wins.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_match < self.min_match:
            raise ValueError(f"max_match must be at least min_match ({self.min_match}), got {self.max_match}")
        return self


class NgramDrafter(Drafter):
    """Finds where a request's last tokens occurred before in its own text, and proposes the tokens that came next. Of equally long matches the newest
    wins."""

    options: NgramOptions

    def __init__(self, options: NgramOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._own = OwnTexts(options.min_match)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for own, limit in zip(self._own.read(requests), most, strict=True):
            _, places = own.places_after(own.token_ids, self.options.max_match, 1) if own is not None else (0, [])
            drafts.append(continued(own.token_ids, places[0], limit) if own is not None and places else [])
        return drafts

    def on_finished(self, request: Request) -> None:
        self._own.forget(request)
