"""Triton's interpreter, mended where it doesn't suit today's numpy, and in another order than its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_and_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy >= 2.4: int() of an array [1] is an error


def mend() -> None:
    """Triton 3.6 turns arrays of one number into an index with int(), which numpy 2.4 refuses."""
    interpreter._patch_lang_tensor = _patch_and_index


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Programs that differ in their second index run in some order, as those of a GPU end in any."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def set_another(x: int, y: int, z: int) -> None:
        set_grid_idx(x, int(np.random.default_rng(seed).permutation(builder.grid_dim[1])[y]), z)

    with patch.object(builder, "set_grid_idx", set_another):
        yield
