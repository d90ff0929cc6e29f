"""The drafter: it guesses the next tokens of requests. A wrong guess changes no token, but costs time; the engine measures how many are right."""

from collections.abc import Sequence

from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.request import Request
from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    match: int = Field(2, ge=1, description="Tokens that must have occurred before.")


class AcmeDrafter(Drafter):
    """A drafter that looks up where a request's last tokens occurred before in its own text, and proposes what came next."""

    options: AcmeOptions

    def __init__(self, options: AcmeOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._texts: dict[str, AcmeText] = {}  # by the request's id

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, limit in zip(requests, most, strict=True):
            text = self._texts.setdefault(request.id, AcmeText(self.options.match))
            text.read(request)
            drafts.append(text.draft(limit))
        return drafts

    def on_finished(self, request: Request) -> None:
        self._texts.pop(request.id, None)  # the id may come again, for another request


class AcmeText:
    """The tokens of a request, and where each run of `match` tokens last ended. It grows with the request: a call costs only the new tokens."""

    def __init__(self, match: int) -> None:
        self.match = match
        self.tokens: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}  # run -> index of the token after it
        self.place: int | None = None  # the same for the last run, but where it occurred before

    def read(self, request: Request) -> None:
        known = len(self.tokens)
        if known < request.prompt_tokens:
            new = [*request.prompt_token_ids[known:], *request.output_token_ids]
        else:
            new = list(request.output_token_ids[known - request.prompt_tokens :])
        for token in new:
            self.tokens.append(token)
            run = tuple(self.tokens[-self.match :])
            self.place = self.after.get(run)
            self.after[run] = len(self.tokens)

    def draft(self, most: int) -> list[int]:
        return [] if self.place is None else self.tokens[self.place : self.place + most]
