"""Triton's interpreter, mended where it doesn't suit today's numpy."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_and_index(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy >= 2.4: int() of an array [1] is an error


def mend() -> None:
    """Triton 3.6 turns arrays of one number into an index with int(), which numpy 2.4 refuses."""
    interpreter._patch_lang_tensor = _patch_and_index
