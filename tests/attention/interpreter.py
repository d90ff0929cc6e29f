"""Triton's interpreter, mended where it doesn't suit today's numpy, without its repeated work, and
in another order than its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_patch_all = interpreter._patch_lang
_convert = interpreter._convert_float
_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalars = cache(_np_dtype)  # otherwise a table is built for each number
_unwrap = tl.core._unwrap_if_constexpr
_make_block_type = tl.block_type.__init__
_check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl


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


def _unwrap_sooner(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind is int or kind is tl.dtype or kind is tl.tensor else _unwrap(value)


@cache
def _known_block_type(shape: tuple[int, ...]) -> tl.block_type:
    known = object.__new__(tl.block_type)
    _make_block_type(known, tl.void, list(shape))
    return known


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Check and wrap a shape once, rather than for each tensor."""
    known = _known_block_type(tuple(map(_unwrap_sooner, shape)))
    self.element_ty = element_ty
    self.shape = known.shape
    self.numel = known.numel
    self.name = f"<{known.shape}, {element_ty}>"


@cache
def _wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `numel` and `shape`."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _wrapped(tuple(type.shape) if type.is_block() else ())


def _check_overflow_to_tell_it(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Leave out a check whose result only a debugger's option asks for."""
    if self.builder.options.debug:
        _check_overflow(self, lhs, rhs, binary_op)


@cache
def _patch_once() -> Any:
    """Patch all of Triton's language for good."""
    _patch_all(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    return interpreter._LangPatchScope()  # with nothing to restore


def mend() -> None:
    """Triton 3.6 turns arrays of one number into an index with int(), which numpy 2.4 refuses; and
    what it rounds up to e4m3 lacks the carry.

    It also patches its language for each call of a function, nested ones included, which takes half
    of the time: here once is enough, as nothing is compiled in this process. Half of the rest goes
    into types and shapes of tensors, which are few.
    """
    interpreter._patch_lang_tensor = _patch_and_index
    interpreter._convert_float = _convert_by_torch
    interpreter._patch_lang = lambda function: _patch_once()
    interpreter._get_np_dtype = _get_np_dtype
    tl.core._unwrap_if_constexpr = _unwrap_sooner
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow_to_tell_it


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
