"""Bridges: each takes a component's class, written for an older version of its interface, and
returns a subclass for the next one.

`dovetail.registry.api_changes` names them. They are imported where such a component is used, also
in workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.api.attention import AttentionContext, LayerSpec
    from dovetail.api.executor import Capacity


def attention_0_4(cls: Any) -> Any:
    """Reject layers of encoders, which a `reasons_against` written for 0.4 doesn't know."""

    class Bridged(cls):  # type: ignore[misc]
        @classmethod
        def reasons_against(
            cls, context: AttentionContext, layers: Sequence[LayerSpec]
        ) -> list[str]:
            reasons: list[str] = super().reasons_against(context, layers)
            if not reasons and not all(layer.causal for layer in layers):
                reasons = [
                    "attention to later tokens (an encoder's) isn't supported: the backend is "
                    "written for attention api 0.4"
                ]
            return reasons

    return Bridged


def executor_0_6(cls: Any) -> Any:
    """Disable drafts for models with recurrent states: 0.6 didn't define these states in steps with
    drafts."""

    class Bridged(cls):  # type: ignore[misc]
        def start(self) -> Capacity:
            capacity: Capacity = super().start()
            return replace(capacity, max_lines=0) if capacity.layout.recurrent else capacity

    return Bridged
