"""Residual stream of a decoder."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.model import ParallelGroup
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parallel import RankShares, shares_of


class Residual:
    """Stream [tokens, hidden] that layers read through a norm, and add to.

    A product computed in parts, or in shares by several ranks, isn't added immediately: the kernel
    that norms the stream for the next layer adds them up on the way.
    """

    def __init__(self, x: torch.Tensor) -> None:
        """`x` [tokens, hidden] is modified in place by additions."""
        self._x = x
        self._parts: torch.Tensor | None = None
        self._shared: RankShares | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._x)

    @property
    def is_shared(self) -> bool:
        """True if shares of several ranks are still to be added."""
        return self._shared is not None

    @property
    def is_pending(self) -> bool:
        """True if anything is still to be added."""
        return self._shared is not None or self._parts is not None

    def summed(self) -> torch.Tensor:
        """Add everything that is still to be added, and return the stream [tokens, hidden] itself:
        changing it in place changes the stream."""
        if self._shared is not None:
            self._add_shares(None)
        if self._parts is not None:
            parts = self._parts
            self._x.add_(parts[0] if len(parts) == 1 else parts.sum(0))
            self._parts = None
        return self._x

    def keep(self, indices: torch.Tensor) -> None:
        """Reduce the stream to the tokens at `indices` [n] int64."""
        self._x = self.summed().index_select(0, indices)

    def add_parts(self, parts: torch.Tensor) -> None:
        """Add the sum over the first dimension of parts [parts, tokens, hidden], float32 or of the
        stream's dtype, deferred until the stream is read at the latest."""
        self._parts = (
            parts if self._parts is None else torch.cat((self._parts.float(), parts.float()))
        )

    def place_of_share(self, group: ParallelGroup) -> torch.Tensor | None:
        """Return memory [tokens, hidden] for this rank's share of a sum over `group`, to be filled
        by the caller: the sum is added to the stream when it is read, at the latest. None, on all
        ranks, if the group has no such memory: then the caller sums."""
        x = self.summed()
        shares = shares_of(group)
        place = None if shares is None else shares.place(len(x), x.shape[1], x.dtype)
        if place is not None:
            self._shared = shares
        return place

    def read(self, norm: Norm | None) -> torch.Tensor:
        """Return the stream [tokens, hidden] itself, or in new memory its norm if `norm` is
        given."""
        return self.summed() if norm is None else self.normed(norm)

    def normed(self, norm: Norm) -> torch.Tensor:
        """Return the norm of the stream [tokens, hidden], in new memory."""
        if not isinstance(norm, RMSNorm):
            return norm(self.summed())
        if self._shared is not None:
            return self._add_shares(norm)
        if self._parts is not None and use_kernels(self._x):
            from dovetail.nn.kernels import rms_norm as kernels

            with suppress(KernelUnavailable):
                normed = kernels.add_and_norm(self._x, self._parts, norm.weight, norm.eps)
                self._parts = None
                return normed
        return norm(self.summed())

    def normed_in_float8(self, norm: Norm, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm [tokens, hidden] float8 and its multipliers, like
        `kernels.float8_products.narrowed`. Raises `KernelUnavailable`."""
        from dovetail.nn.kernels import float8_products

        if self._shared is not None or not isinstance(norm, RMSNorm):
            return float8_products.narrowed(self.normed(norm), group)
        narrowed = float8_products.normed_and_narrowed(
            self._x, self._parts, norm.weight, norm.eps, group
        )
        self._parts = None
        return narrowed

    def _add_shares(self, norm: RMSNorm | None) -> torch.Tensor:
        """Add the ranks' shares; return the stream's norm if `norm` is given, otherwise the
        stream."""
        shares = self._shared
        self._shared = None
        assert shares is not None
        normed = shares.add(self._x, None if norm is None else (norm.weight, norm.eps))
        return self._x if normed is None else normed


def normed_input(x: torch.Tensor | Residual, norm: Norm | None) -> torch.Tensor:
    """Return x [tokens, n], or a residual stream [tokens, hidden], normed if `norm` is given."""
    if isinstance(x, Residual):
        return x.read(norm)
    return x if norm is None else norm(x)


def with_fusable_norm(
    x: torch.Tensor | Residual, norm: Norm | None
) -> tuple[Residual, RMSNorm | None]:
    """Return x [tokens, hidden] as a stream, and the norm that a kernel may compute as it reads it.
    Any other norm has been applied."""
    stream = x if isinstance(x, Residual) else Residual(x.contiguous())
    if norm is None or isinstance(norm, RMSNorm):
        return stream, norm
    return Residual(stream.normed(norm)), None
