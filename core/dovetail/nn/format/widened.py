"""`WidenedFormat`: formats without kernels of their own. Weights stay as small as stored, and are
widened to the inputs' dtype before each product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.nn.activation import silu_mul
from dovetail.nn.format.base import kept
from dovetail.nn.format.stored import StoredFormat, StoredWeight
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part
from dovetail.nn.residual import Residual, normed_input


class WidenedFormat(StoredFormat):
    """A format that multiplies by torch's products, in the inputs' dtype."""

    def columns(
        self,
        weight: Any,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = normed_input(x, norm)
        y = F.linear(x, self.dequantized(weight).to(x.dtype), bias)
        return kept(silu_mul(y) if gated else y, into)


def places(weight: StoredWeight, part: Part, first: int, rows: int) -> Iterator[slice]:
    """Yield the outputs of a layer to which `rows` rows of a part go, from its row `first` on: one
    slice for each copy."""
    copies = part.copies if part.dim == 0 else 1
    for copy in range(copies):
        at = first + (part.at + copy * part.size if part.dim == 0 else 0)
        yield slice(at, at + rows)


def own_inputs(part: Part, rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's inputs of whole rows of a plain checkpoint, in float32."""
    own = rows[:, part.start : part.start + part.size] if part.dim == 1 else rows
    return own.float()
