"""Numbers on their way between host and device: without waiting on a GPU, without copying where both are one memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on the device, with its dtype. On a GPU by way of pinned memory, which torch keeps until the copy has run; on the CPU the tensor
    shares the array's memory, so neither may be changed later."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor's present value on its way to the host. `value` may be read once the device has passed the point where it was made."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._tensor.copy_(tensor, non_blocking=True)

    @property
    def value(self) -> NDArray[Any]:
        return self._tensor.numpy()
