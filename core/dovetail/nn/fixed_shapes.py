"""Operations whose shapes don't depend on values: a computation within `fixed_shapes` has the same
operations, of the same shapes, for all tokens and weights of one number.

Then the bits of a token's numbers depend on the token alone: matrix products choose their order of
addition by shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FIXED = ContextVar("fixed", default=False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Let layers compute with shapes that depend on the number of tokens only."""
    token = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(token)


def shapes_are_fixed() -> bool:
    """Return True within `fixed_shapes`."""
    return _FIXED.get()
