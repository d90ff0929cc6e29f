"""The start and end of a request.

A `Gate` holds an arrived one back from the policy, while a sibling computes its prompt or its
grammar is compiled; once all gates are open the policy sees it, at its own arrival time. `Finish`
is the reason why it ended, and a `TokenWatcher` may end it at a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.end_reason import EndReason


@dataclass(frozen=True, slots=True)
class Finish:
    """Why one request ended."""

    reason: EndReason
    # the stop token or string that matched, or the details of a rejection or failure
    stop_reason: int | str | None = None
    # for `STOP`: the last token is part of the text, as it isn't if it is a stop token
    keeps_token: bool = False


class TokenWatcher(Protocol):
    """Sees each token of one request as it arrives, but for one that ended it already: stop
    strings, a grammar that is complete."""

    def see(self, token: int) -> Finish | None:
        """Take the next token. Return the request's `Finish`, or None if it continues."""
        ...


class Gate(Protocol):
    """One reason to hold requests back; requests may share it."""

    def closed(self) -> bool:
        """Return True if its requests must still be held back. Changes nothing."""
        ...


class Preparation(Gate, Protocol):
    """A gate that is opened outside of the engine, such as by a compiling thread: the core polls
    it. `on_arrived` comes after it."""

    def failed(self) -> Finish | None:
        """Return how its requests end if the preparation failed, once it is open; else None."""
        ...
