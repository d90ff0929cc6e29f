"""A layer's K and V in the memory that the executor lends it: sizes, and views of its tensors.

memory of K    uint8 [num_pages + 1, row]    a page's row begins with the layer's K of a block, and may be longer than that: other layers
                                             use the same tensor for other pages
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.errors import DovetailError


def tensor_bytes(spec: LayerSpec, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the bytes of a block in each tensor of a layer's cache: K and V, or K if V is in
    it."""
    size = block_size * spec.kv_heads * spec.head_size * dtype.itemsize
    return (size,) if spec.v_in_k else (size, size)


def index_layer(spec: LayerSpec) -> LayerSpec:
    """Return a layer whose K is the index keys of a layer with an indexer."""
    assert spec.indexer is not None
    size = spec.indexer.size
    return LayerSpec(spec.index, 1, 1, size, 1.0, v_in_k=True, v_head_size=size)


def selects(spec: LayerSpec) -> bool:
    """Return True if a layer selects tokens, and stores index keys."""
    return spec.indexer is not None and spec.indexer.selects


def all_bytes(
    spec: LayerSpec, block_size: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the bytes of a block in each tensor of a layer's cache, index keys included."""
    sizes = tensor_bytes(spec, block_size, dtype)
    if selects(spec):
        sizes += tensor_bytes(index_layer(spec), block_size, index_dtype)
    return sizes


def without_index(cache: LayerCache, spec: LayerSpec) -> tuple[LayerCache, LayerCache]:
    """Return the tensors of K and V of a layer's cache, and the other ones: of index keys, or
    none."""
    own = 1 if spec.v_in_k else 2
    if not selects(spec):
        own = len(cache.memory)
    return replace(cache, memory=cache.memory[:own]), replace(cache, memory=cache.memory[own:])


def cache_of(layer: AttentionLayer) -> LayerCache:
    """Return the cache that a layer was bound to. Raises `DovetailError` if it wasn't."""
    if layer.cache is None:
        raise DovetailError(
            f"attention layer {layer.spec.index} has no cache: bind() was never called"
        )
    return layer.cache


def rows_of(cache: LayerCache, spec: LayerSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return views of the tensors of a layer's cache in `dtype`, [num_pages + 1, numbers of a row].
    Raises `DovetailError` if they don't fit."""
    sizes = tensor_bytes(spec, cache.block_size, dtype)
    shapes = {tuple(memory.shape) for memory in cache.memory}
    if len(cache.memory) != len(sizes) or len(shapes) != 1:
        raise DovetailError(
            f"attention layer {spec.index}: its cache has tensors of the shapes "
            f"{[list(memory.shape) for memory in cache.memory]}, "
            f"expected {len(sizes)} of one shape"
        )
    [(_, row)] = shapes
    if row < sizes[0] or row % dtype.itemsize:
        raise DovetailError(
            f"attention layer {spec.index}: a page has {row} bytes, expected a multiple of "
            f"{dtype.itemsize} from {sizes[0]} on"
        )
    return [memory.view(dtype) for memory in cache.memory]


def pages_of(
    cache: LayerCache, spec: LayerSpec, dtype: torch.dtype, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return views [num_pages + 1, *shape] of the tensors of a layer's cache. `shape`: of a block,
    contiguous. Raises like `rows_of`."""
    return [
        rows[:, : math.prod(shape)].view(len(rows), *shape) for rows in rows_of(cache, spec, dtype)
    ]
