"""The largest values of each row, and what is different on the CPU.

There numpy sorts and searches: it uses vector instructions, torch doesn't and is 10 times as slow. And there a result may be looked at freely,
so that work can be cut to what it turns out to need; on a device that would wait for all that is enqueued.
"""

from __future__ import annotations

import numpy as np
import torch


def on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """values [n, m] float32 -> the k largest of each row, descending: [n, k]."""
    size = values.shape[1]
    if not on_cpu(values):
        return values.topk(k, dim=-1).values if k < size else values.sort(dim=-1, descending=True).values
    array = values.numpy()
    if k < size:
        array = np.partition(array, size - k, axis=-1)[:, size - k :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """values [n, m] of any float dtype -> [n] int64: where the largest is, the lowest index on ties."""
    if not on_cpu(values):
        return values.argmax(dim=-1)
    return torch.from_numpy(values.to(torch.float32).numpy().argmax(-1))
