"""The residual stream of a decoder."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.model import ParallelGroup
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import RMSNorm


class Residual:
    """A stream [tokens, hidden] that layers read through a norm, and add to.

    A product that was computed in parts, or in shares by several ranks, isn't added at once: the kernel that norms the stream for the next layer adds
    them up on the way.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """`x` [tokens, hidden] is changed in place by what is added."""
        self._x = x
        self._parts: torch.Tensor | None = None
        self._shared: ParallelGroup | None = None

    def __len__(self) -> int:
        """Tokens."""
        return len(self._x)

    @property
    def is_shared(self) -> bool:
        """True if what several ranks have computed is still to be added."""
        return self._shared is not None

    @property
    def x(self) -> torch.Tensor:
        """[tokens, hidden], with all that was added. Whoever changes it in place adds to the stream."""
        if self._shared is not None:
            self._add_shares(None)
        if self._parts is not None:
            self._x.add_(self._parts.sum(0))
            self._parts = None
        return self._x

    def keep(self, indices: torch.Tensor) -> None:
        """Reduce the stream to the tokens at `indices` [n] int64."""
        self._x = self.x.index_select(0, indices)

    def add_parts(self, parts: torch.Tensor) -> None:
        """The stream gets the sum over the first dimension of parts [parts, tokens, hidden], float32 or of the stream's dtype, at the latest when it
        is read."""
        self._parts = parts if self._parts is None else torch.cat((self._parts.float(), parts.float()))

    def place_of_share(self, group: ParallelGroup) -> torch.Tensor | None:
        """Return memory for this rank's share of a sum over `group`, which the caller fills [tokens, hidden]: the stream gets the sum, at the latest
        when it is read. None, on all ranks, if the group has none: then the caller sums."""
        x = self.x
        place = None if group.shares is None else group.shares.place(len(x), x.shape[1], x.dtype)
        if place is not None:
            self._shared = group
        return place

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """-> [tokens, hidden], memory of its own."""
        if self._shared is not None:
            return self._add_shares(norm)
        if self._parts is not None and use_kernels(self._x):
            from dovetail.nn.kernels import rms_norm as kernels

            with suppress(KernelUnavailable):
                normed = kernels.add_and_norm(self._x, self._parts, norm.weight, norm.eps)
                self._parts = None
                return normed
        return norm(self.x)

    def normed_in_float8(self, norm: RMSNorm, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the norm [tokens, hidden] float8, and what it is to be multiplied by, as `kernels.float8_products.narrowed` returns them. Raises
        `KernelUnavailable`."""
        from dovetail.nn.kernels import float8_products

        if self._shared is not None:
            return float8_products.narrowed(self._add_shares(norm), group)
        narrowed = float8_products.normed_and_narrowed(self._x, self._parts, norm.weight, norm.eps, group)
        self._parts = None
        return narrowed

    def _add_shares(self, norm: RMSNorm | None) -> torch.Tensor:
        """-> the stream's norm, if there is one, or else the stream."""
        group, self._shared = self._shared, None
        assert group is not None
        assert group.shares is not None
        normed = group.shares.add(self._x, None if norm is None else (norm.weight, norm.eps))
        return self._x if normed is None else normed
