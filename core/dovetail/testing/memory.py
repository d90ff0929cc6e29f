"""Memory for attention layers outside of an engine: what its executor does between `make_layer` and `prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.api.attention import AttentionBackend, AttentionLayer, LayerCache


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a layer's cache. Layers of different groups, or of different pages of a block, may have the same tensors."""

    group: int = 0
    page: int = 0  # of a block
    block_size: int | None = None  # tokens; None: that of the backend's context
    first: int | None = None  # index of its first tensor; None: those after the earlier layers'


def bind_layers(backend: AttentionBackend, layers: Sequence[AttentionLayer], num_pages: int, places: Sequence[Place] = ()) -> list[torch.Tensor]:
    """Allocate a pool of `num_pages` pages and the waste page, zeroed, and bind the layers to it, each at its place: by default all in one group of
    one page, with tensors of their own. A layer that shares another's cache is bound to that. Returns the pool's tensors [num_pages + 1, bytes]."""
    sizes: list[int] = []  # bytes of a page, in each tensor
    found: dict[int, tuple[slice, Place, int]] = {}  # by the layer's index: its tensors, place and block size
    for layer, place in zip(layers, places or [Place()] * len(layers), strict=True):
        if layer.spec.shares is not None:
            found[layer.spec.index] = found[layer.spec.shares]
            continue
        block_size = place.block_size or backend.context.block_size
        own = backend.tensor_bytes(layer.spec, block_size)
        first = len(sizes) if place.first is None else place.first
        sizes += [0] * (first + len(own) - len(sizes))
        for index, size in enumerate(own, first):
            sizes[index] = max(sizes[index], size)
        found[layer.spec.index] = slice(first, first + len(own)), place, block_size
    pool = [torch.zeros((num_pages + 1, size), dtype=torch.uint8, device=backend.context.device) for size in sizes]
    for layer in layers:
        tensors, place, block_size = found[layer.spec.index]
        layer.bind(LayerCache(tuple(pool[tensors]), block_size, place.group, place.page))
    return pool
