"""`Finish`, the reason why a request ended, and `TokenWatcher`, which may end one at a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.request import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_reason: int | str | None = None
    keeps_token: bool = False  # for "stop": the last token is part of the text, as it isn't if it is a stop token


class TokenWatcher(Protocol):
    """Sees each token of one request as it arrives, but for one that ended it already: stop strings, a grammar that is complete."""

    def see(self, token: int) -> Finish | None:
        """Take the next token. Return the request's `Finish`, or None if it continues."""
        ...
