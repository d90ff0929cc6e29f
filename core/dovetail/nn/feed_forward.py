"""Dense feed-forward of a decoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.linear import GateUpParallelLinear, RowParallelLinear
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        context: BuildContext,
        *,
        bias: bool = False,
        activation: str = "silu",
        stacked: bool = False,
    ) -> None:
        """`activation`, `stacked`: see `GateUpParallelLinear`."""
        super().__init__()
        self.gate_up_proj = GateUpParallelLinear(
            hidden, inner, context, bias=bias, activation=activation, stacked=stacked
        )
        self.down_proj = RowParallelLinear(inner, hidden, context, bias=bias)

    def add_to(
        self, residual: Residual, norm: Norm | None, output_norm: Norm | None = None
    ) -> None:
        """Add the feed-forward of the stream, read through `norm` if given, to the stream, through
        `output_norm` if given."""
        self.down_proj.add_to(residual, self.inner(residual, norm), norm=output_norm)

    def inner(self, x: torch.Tensor | Residual, norm: Norm | None = None) -> torch.Tensor:
        """Return the input of `down_proj` [tokens, inner / size], for x [tokens, hidden]."""
        return self.gate_up_proj(x, norm)

    def weights(
        self, prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
    ) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`. `gate` and `up` may be one
        module, if it is `stacked`."""
        yield from weight_rules(prefix, {gate: (self.gate_up_proj, "gate")})
        yield from weight_rules(prefix, {up: (self.gate_up_proj, "up"), down: self.down_proj})
