"""Gates: reasons for which the policy isn't shown a request that has arrived, such as a sibling that computes its prompt. The books ask them when it
arrives and after each planning, and show it, at its own arrival time, once none is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dovetail.engine.request_group import RequestGroup


class Gate(Protocol):
    """One reason; requests may share it. A request's gates are asked until all were open at once, and then forgotten."""

    def closed(self) -> bool:
        """Whether its requests must be held back still. Changes nothing."""
        ...


class PromptGate:
    """Holds the samples of a prompt back while one of them, which the policy sees, computes it: the others will share its K and V."""

    __slots__ = ("_group",)

    def __init__(self, group: RequestGroup) -> None:
        self._group = group

    def closed(self) -> bool:
        return not self._group.prompt_is_computed() and self._group.is_shown()
