"""Triton's interpreter, mended where it doesn't suit today's numpy, without its repeated work, and
in another order than its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_patch_all = interpreter._patch_lang
_convert = interpreter._convert_float
_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalars = cache(_np_dtype)  # otherwise a table is built for each number


def _patch_and_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    # numpy >= 2.4: int() of an array [1] is an error
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _convert_by_torch(numbers: Any, input_type: Any, output_type: Any, rounding: Any) -> Any:
    if str(output_type) != "fp8e4nv":
        return _convert(numbers, input_type, output_type, rounding)
    return (
        torch.from_numpy(np.ascontiguousarray(numbers))
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
        .numpy()
    )


def _get_np_dtype(of: Any) -> np.dtype[Any]:
    return _np_dtype_of_scalars(of) if type(of) is tl.dtype else _np_dtype(of)


@cache
def _patch_once() -> Any:
    """Patch all of Triton's language for good."""
    _patch_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    return interpreter._LangPatchScope()  # with nothing to restore


def mend() -> None:
    """Triton 3.6 turns arrays of one number into an index with int(), which numpy 2.4 refuses; and
    what it rounds up to e4m3 lacks the carry.

    It also patches its language for each call of a function, nested ones included, which takes half
    of the time: here once is enough, as nothing is compiled in this process.
    """
    interpreter._patch_lang_tensor = _patch_and_index
    interpreter._convert_float = _convert_by_torch
    interpreter._patch_lang = lambda function: _patch_once()
    interpreter._get_np_dtype = _get_np_dtype


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Programs that differ in their second index run in some order, as those of a GPU end in
    any."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx

    def set_another(x: int, y: int, z: int) -> None:
        set_grid_idx(x, int(np.random.default_rng(seed).permutation(builder.grid_dim[1])[y]), z)

    with patch.object(builder, "set_grid_idx", set_another):
        yield
