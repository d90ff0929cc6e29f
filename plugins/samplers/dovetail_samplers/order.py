"""Largest values of each row, with separate code for the CPU.

There numpy sorts and searches: it uses vector instructions, torch doesn't and is 10 times slower. And there results can be inspected to skip work;
on a device that would synchronize.
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
    """values [n, m] of any float dtype -> [n] int64: index of the largest, the lowest on ties."""
    if not on_cpu(values):
        return values.argmax(dim=-1)
    return torch.from_numpy(values.to(torch.float32).numpy().argmax(-1))
