"""The residual stream of a decoder."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import RMSNorm


class Residual:
    """A stream [tokens, hidden] that layers read through a norm, and add to.

    A product that was computed in parts isn't added at once: the kernel that norms the stream for the next layer adds them up on the way.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """`x` [tokens, hidden] is changed in place by what is added."""
        self._x = x
        self._parts: torch.Tensor | None = None

    def __len__(self) -> int:
        """Tokens."""
        return len(self._x)

    @property
    def x(self) -> torch.Tensor:
        """[tokens, hidden], with all that was added. Whoever changes it in place adds to the stream."""
        if self._parts is not None:
            self._x.add_(self._parts.sum(0))
            self._parts = None
        return self._x

    def keep(self, indices: torch.Tensor) -> None:
        """Reduce the stream to the tokens at `indices` [n] int64."""
        self._x = self.x.index_select(0, indices)

    def add_parts(self, parts: torch.Tensor) -> None:
        """The stream gets the sum over the first dimension of parts [parts, tokens, hidden] float32, at the latest when it is read."""
        self._parts = parts if self._parts is None else torch.cat((self._parts, parts))

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """-> [tokens, hidden], memory of its own."""
        if self._parts is not None and use_kernels(self._x):
            from dovetail.nn.kernels import rms_norm as kernels

            with suppress(KernelUnavailable):
                normed = kernels.add_and_norm(self._x, self._parts, norm.weight, norm.eps)
                self._parts = None
                return normed
        return norm(self.x)
