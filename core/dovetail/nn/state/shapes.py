"""Sizes of recurrent layers on one rank, and the states that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.api.state import StateSpec, StateTensor
from dovetail.errors import UnsupportedError

NORM_EPS = 1e-6  # of the squared lengths of q and k in a Gated DeltaNet
LARGEST = 256  # numbers of a row of a state: what kernels were made for


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a Gated DeltaNet. v heads [i * v_heads / k_heads, (i + 1) * v_heads / k_heads) use q
    and k of head i. `kernel`: tokens that the convolution sees.

    Raises `UnsupportedError` for sizes that aren't implemented.
    """

    k_heads: int
    v_heads: int
    k_size: int
    v_size: int
    kernel: int

    def __post_init__(self) -> None:
        _check(
            "Gated DeltaNet",
            "key head size",
            self.k_size,
            "value heads",
            self.v_heads,
            "key heads",
            self.k_heads,
            self.kernel,
        )
        if not 0 < self.v_size <= LARGEST:
            raise UnsupportedError(
                f"Gated DeltaNet: a value head size of {self.v_size} is not implemented: at most "
                f"{LARGEST}"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.k_heads * self.k_size + self.v_heads * self.v_size

    def spec(self, index: int) -> StateSpec:
        """Return the state of layer `index`: the convolution's inputs, and each v head's matrix
        [v_size, k_size]."""
        matrices = StateTensor(
            rows=self.v_heads * self.v_size,
            row_size=self.k_size,
            heads=self.v_heads,
            keys=self.k_heads,
        )
        inputs = _inputs(self.conv_channels, self.kernel)
        return StateSpec(index=index, tensors=(inputs, matrices), drafts=True)


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Sizes of a Mamba2 mixer. Heads [i * heads / groups, (i + 1) * heads / groups) use B and C of
    group i. `kernel`: tokens that the convolution sees.

    Raises `UnsupportedError` for sizes that aren't implemented.
    """

    heads: int
    head_size: int
    state_size: int
    groups: int
    kernel: int

    def __post_init__(self) -> None:
        _check(
            "Mamba2",
            "state size",
            self.state_size,
            "heads",
            self.heads,
            "groups",
            self.groups,
            self.kernel,
        )
        if not 0 < self.head_size <= LARGEST:
            raise UnsupportedError(
                f"Mamba2: a head size of {self.head_size} is not implemented: at most {LARGEST}"
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.heads * self.head_size + 2 * self.groups * self.state_size

    def spec(self, index: int) -> StateSpec:
        """Return the state of layer `index`: the convolution's inputs, and each head's matrix
        [head_size, state_size]."""
        matrices = StateTensor(
            rows=self.heads * self.head_size,
            row_size=self.state_size,
            heads=self.heads,
            keys=self.groups,
        )
        inputs = _inputs(self.conv_channels, self.kernel)
        return StateSpec(index=index, tensors=(inputs, matrices), drafts=True)


def _inputs(channels: int, kernel: int) -> StateTensor:
    return StateTensor(rows=channels, row_size=kernel - 1, keeps_inputs=True)


def _check(
    layer: str,
    row: str,
    row_size: int,
    heads_name: str,
    heads: int,
    groups_name: str,
    groups: int,
    kernel: int,
) -> None:
    if not 0 < row_size <= LARGEST or row_size & (row_size - 1):
        raise UnsupportedError(
            f"{layer}: a {row} of {row_size} is not implemented: it must be a power of two, at "
            f"most {LARGEST}"
        )
    if groups < 1 or heads < 1 or heads % groups:
        raise UnsupportedError(
            f"{layer}: {heads} {heads_name} can't be shared by {groups} {groups_name}"
        )
    if kernel < 2:
        raise UnsupportedError(
            f"{layer}: a convolution over {kernel} tokens is not implemented: at least 2"
        )
