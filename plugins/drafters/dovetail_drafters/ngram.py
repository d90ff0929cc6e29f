"""`NgramDrafter`: prompt lookup. Answers that repeat parts of their prompt (edits, summaries, code)
are continued as the prompt was."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.request import Request
from dovetail_drafters.match_options import MAX_MATCH, MatchOptions
from dovetail_drafters.own_text import OwnTexts, continued


class NgramOptions(MatchOptions):
    max_match: int = Field(
        8,
        ge=1,
        le=MAX_MATCH,
        description="Most tokens that are compared: of several places the longest match up to this "
        "wins.",
    )


class NgramDrafter(Drafter):
    """Finds where a request's last tokens occurred before in its own text, and proposes the tokens
    that came next. Of equally long matches the newest wins."""

    options: NgramOptions

    def __init__(self, options: NgramOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._own = OwnTexts(options.min_match)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for own, limit in zip(self._own.read(requests), most, strict=True):
            _, places = (
                own.places_after(own.token_ids, self.options.max_match, 1)
                if own is not None
                else (0, [])
            )
            drafts.append(
                continued(own.token_ids, places[0], limit) if own is not None and places else []
            )
        return drafts

    def on_finished(self, request: Request) -> None:
        self._own.forget(request)
