"""`AlikeLayers`: recurrent layers whose states a kernel changes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.api.state import Changes, StateLayer


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers of equal states, which a kernel changes at once. `units` [places, any] int32: the
    table of all states, in which a layer's units of `layers[i].units[tensor]` begin at column
    `firsts[tensor][i]`, int32. `changes[tensor]`: as in `StateLayer`, with a dimension for the
    layer before the others."""

    layers: Sequence[StateLayer]
    units: torch.Tensor
    firsts: tuple[torch.Tensor, ...]
    changes: tuple[torch.Tensor | Changes, ...]
