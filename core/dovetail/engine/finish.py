"""The start and end of a request. A `Gate` holds an arrived one back from the policy, while a sibling computes its prompt or its grammar is compiled;
once all gates are open the policy sees it, at its own arrival time. `Finish` is the reason why it ended, and a `TokenWatcher` may end it at a
token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.request import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_reason: int | str | None = None
    keeps_token: bool = (
        False  # for "stop": the last token is part of the text, as it isn't if it is a stop token
    )


class TokenWatcher(Protocol):
    """Sees each token of one request as it arrives, but for one that ended it already: stop strings, a grammar that is complete."""

    def see(self, token: int) -> Finish | None:
        """Take the next token. Return the request's `Finish`, or None if it continues."""
        ...


class Gate(Protocol):
    """One reason to hold requests back; requests may share it."""

    def closed(self) -> bool:
        """Return True if its requests must still be held back. Changes nothing."""
        ...


class Preparation(Gate, Protocol):
    """A gate that is opened outside of the engine, such as by a compiling thread: the core polls it. `on_arrival` comes after it."""

    def failed(self) -> str | None:
        """Return why the preparation failed, once it is open; None if it didn't. Only its own requests end with that reason."""
        ...
