"""Eight 4-bit integers packed into an int32, as in checkpoints; slicing a rank's share of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

PACKED = 8
IN_ORDER = tuple(range(PACKED))


def unpacked(packed: torch.Tensor, dim: int, order: Sequence[int] = IN_ORDER) -> torch.Tensor:
    """Unpack [a, b] int32 -> uint8 [8 a, b] (dim 0) or [a, 8 b] (dim 1), values from 0 to 15. Of
    the eight values in an integer, the one in the lowest four bits goes to position order[0], the
    next to order[1] and so on. Raises `ModelLoadError` for another dtype."""
    if packed.dtype != torch.int32:
        raise ModelLoadError(f"expected int32, found {str(packed.dtype).removeprefix('torch.')}")
    shifts = torch.empty(PACKED, dtype=torch.int32, device=packed.device)
    for nibble, place in enumerate(order):
        shifts[place] = 4 * nibble
    if dim == 1:
        return ((packed[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)
    return ((packed[:, None, :] >> shifts[None, :, None]) & 15).to(torch.uint8).flatten(0, 1)


def share_of(
    part: Part,
    shape: tuple[int, int],
    dims: tuple[int, int],
    per_index: tuple[int, int],
    optional: bool = False,
) -> TensorShape:
    """Return a tensor of `shape` that belongs to a part [outputs, inputs], and this rank's share of
    it: outputs are along dims[0], inputs along dims[1], `per_index` of them per index. Raises
    `UnsupportedError` if the rank's share begins or ends within an index."""
    size = per_index[part.dim]
    if shape[dims[part.dim]] == 1 and part.dim == 1:
        return TensorShape((shape,), optional=optional)  # one index for all inputs
    if part.start % size or part.size % size:
        what = ("outputs", "inputs")[part.dim]
        total = part.source_shape[part.dim]
        raise UnsupportedError(
            f"a rank's share of {total} {what} is {part.size}, no multiple of the {size} that are "
            f"stored together: use fewer ranks"
        )
    return TensorShape((shape,), dims[part.dim], part.start // size, part.size // size, optional)
