"""The key by which layers of a model share a step's plan, schedule and buffers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.errors import DovetailError

MOST_OF_LATENT = 32  # query heads computed together: that many sums of V's size fit into registers


class LayerShape(NamedTuple):
    """Properties of a layer that determine its plan for a step: everything except its index and
    values."""

    heads: int
    kv_heads: int
    head_size: int  # of V
    window: int | None  # tokens that a query attends to, itself included; None: all up to itself
    sinks: bool = False
    capped: bool = False  # scores have a softcap
    latent: bool = False  # V is the first `head_size` numbers of K
    rest: int = 0  # in a latent layer, numbers of K that follow
    both_ways: bool = False  # some rows of a step may attend in both directions
    top_k: int | None = None  # tokens that an indexer selects for each query; None: there is none

    @classmethod
    def of(cls, spec: LayerSpec) -> LayerShape:
        """Number of groups of heads. Many heads of a latent layer, which share one K, are split
        into several groups, each of which reads K."""
        kv_heads = spec.kv_heads
        if spec.v_in_k:
            group = spec.heads // spec.kv_heads
            kv_heads *= group // max(
                size for size in range(1, min(group, MOST_OF_LATENT) + 1) if group % size == 0
            )
        rest = spec.head_size - spec.out_size
        return cls(
            spec.heads,
            kv_heads,
            spec.out_size,
            spec.window,
            spec.sinks,
            spec.softcap is not None,
            spec.v_in_k,
            rest,
            spec.both_ways,
            None if spec.indexer is None else spec.indexer.top_k,
        )

    @property
    def group(self) -> int:
        """Number of query heads that share a K and V head."""
        return self.heads // self.kv_heads

    @property
    def padded_rest(self) -> int:
        return max(16, power_of_two(self.rest)) if self.rest else 0

    @property
    def padded_group(self) -> int:
        return power_of_two(self.group)

    @property
    def padded_size(self) -> int:
        """Padded head size of Triton kernels: a power of two, at least 16."""
        return max(16, power_of_two(self.head_size))


def sinks_of(layer: AttentionLayer) -> torch.Tensor | None:
    """Return the sinks of a layer's heads, None for a layer that has none. Raises `DovetailError`
    if they should have been bound."""
    if not layer.spec.sinks:
        return None
    if layer.sinks is None:
        raise DovetailError(
            f"attention layer {layer.spec.index} has sinks, and attend() was called before "
            f"bind_sinks()"
        )
    return layer.sinks


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least this."""
    return 1 << (least - 1).bit_length()
