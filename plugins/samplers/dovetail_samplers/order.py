"""The largest values of each row. On the CPU numpy does it: its sorts and searches use vector instructions, torch's don't (10 times as slow)."""

from __future__ import annotations

import numpy as np
import torch


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """values [n, m] float32 -> the k largest of each row, descending: [n, k]."""
    size = values.shape[1]
    if values.device.type != "cpu":
        return values.topk(k, dim=-1).values if k < size else values.sort(dim=-1, descending=True).values
    array = values.numpy()
    if k < size:
        array = np.partition(array, size - k, axis=-1)[:, size - k :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def first_argmax(values: torch.Tensor) -> torch.Tensor:
    """values [n, m] of any float dtype -> [n] int64: where the largest is, the lowest index on ties."""
    if values.device.type != "cpu":
        return values.argmax(dim=-1)
    return torch.from_numpy(values.to(torch.float32).numpy().argmax(-1))
