"""Triton's interpreter, mended where it doesn't suit today's numpy, and in another order than its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float


def _patch_and_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy >= 2.4: int() of an array [1] is an error


def _convert_by_torch(numbers: Any, input_type: Any, output_type: Any, rounding: Any) -> Any:
    if str(output_type) != "fp8e4nv":
        return _convert(numbers, input_type, output_type, rounding)
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def mend() -> None:
    """Triton 3.6 turns arrays of one number into an index with int(), which numpy 2.4 refuses; and what it rounds up to e4m3 lacks the carry."""
    interpreter._patch_lang_tensor = _patch_and_index
    interpreter._convert_float = _convert_by_torch


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Programs that differ in their second index run in some order, as those of a GPU end in any."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def set_another(x: int, y: int, z: int) -> None:
        set_grid_idx(x, int(np.random.default_rng(seed).permutation(builder.grid_dim[1])[y]), z)

    with patch.object(builder, "set_grid_idx", set_another):
        yield
