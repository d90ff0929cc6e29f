"""K and V in a cache of a smaller dtype, in plain torch: used by the `torch` backend, and the
oracle of other backends' kernels."""

from __future__ import annotations

import torch

from dovetail.api.attention import KVScales

CACHE_DTYPES = ("float8_e4m3fn",)  # supported besides the activations' dtype
ONE = KVScales(torch.ones(()), torch.ones(()))


def stored(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert K or V to a cache's `dtype`: divided by `scale` [] float32, saturated, rounded. NaN
    stays NaN."""
    if values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    return (values.float() / scale).clamp(-largest, largest).to(dtype)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache in a dtype that torch can gather and scatter on every device."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
