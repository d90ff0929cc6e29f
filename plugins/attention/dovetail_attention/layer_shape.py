"""The key by which layers of a model share a step's plan, schedule and buffers."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.api.attention import LayerSpec


class LayerShape(NamedTuple):
    """The properties of a layer on which the work of a step depends: all but its index and scale."""

    heads: int
    kv_heads: int
    head_size: int
    window: int | None  # how many tokens a query sees, itself included; None: all before it

    @classmethod
    def of(cls, spec: LayerSpec) -> LayerShape:
        return cls(spec.heads, spec.kv_heads, spec.head_size, spec.window)

    @property
    def group(self) -> int:
        """Number of query heads that share a K and V head."""
        return self.heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        return _power_of_two(self.group)

    @property
    def padded_size(self) -> int:
        """Numbers of a head that a Triton kernel computes with: a power of two, 16 at least."""
        return max(16, _power_of_two(self.head_size))


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least this."""
    return 1 << (least - 1).bit_length()
