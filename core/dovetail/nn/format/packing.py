"""Eight 4-bit integers, or four bytes, packed into an int32, as in checkpoints; slicing a rank's
share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

PACKED = 8
BYTES = 4
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


def bytes_of(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Unpack [a, b] int32 -> uint8 [4 a, b] (dim 0) or [a, 4 b] (dim 1), the lowest byte first.
    Raises `ModelLoadError` for another dtype."""
    if packed.dtype != torch.int32:
        raise ModelLoadError(f"expected int32, found {str(packed.dtype).removeprefix('torch.')}")
    turned = packed.t() if dim == 0 else packed
    values = turned.contiguous().view(torch.uint8)
    return values.t() if dim == 0 else values


def numbers_of(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack [a, b] int32 -> uint8 [32 a / bits, b] (dim 0) or [a, 32 b / bits] (dim 1), the lowest
    bits first. Numbers of 3 bits run on from one integer to the next, of which there must be a
    multiple of 3. Raises `ModelLoadError` for another dtype."""
    if packed.dtype != torch.int32:
        raise ModelLoadError(f"expected int32, found {str(packed.dtype).removeprefix('torch.')}")
    turned = packed.t() if dim == 0 else packed
    period = 1 if 32 % bits == 0 else bits  # integers after which a number begins with one again
    groups = turned.reshape(len(turned), -1, period).long() & (2**32 - 1)
    found = []
    for number in range(32 * period // bits):
        word, shift = divmod(number * bits, 32)
        value = groups[:, :, word] >> shift
        if shift + bits > 32:
            value = value | (groups[:, :, word + 1] << (32 - shift))
        found.append((value & (2**bits - 1)).to(torch.uint8))
    values = torch.stack(found, 2).flatten(1)
    return values.t() if dim == 0 else values


def checked_groups(index: torch.Tensor, groups: int) -> torch.Tensor:
    """Return `g_idx`, the group of each input, as int64. Raises `ModelLoadError` for other than
    numbers of `groups` groups."""
    if index.is_floating_point() or index.dtype == torch.bool:
        raise ModelLoadError("g_idx: expected integers")
    index = index.long()
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise ModelLoadError(f"g_idx: groups must be from 0 to {groups - 1}")
    return index


def contiguous_groups(tensors: Mapping[str, torch.Tensor], group: int | None) -> None:
    """Raise `ModelLoadError` unless `g_idx`, if there is one, says that each group of inputs is
    consecutive."""
    groups = tensors.get("g_idx")
    if groups is None:
        return
    size = group or len(groups)
    if not torch.equal(groups.long().cpu(), torch.arange(len(groups)) // size):
        raise ModelLoadError(
            "g_idx: groups of non-contiguous inputs (desc_act) are not implemented"
        )


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
    if part.stride != 1 and size != 1:
        raise UnsupportedError(
            f"outputs that alternate in the checkpoint can't be told apart: {size} are stored "
            f"together"
        )
    if shape[dims[part.dim]] == 1 and part.dim == 1:
        return TensorShape((shape,), optional=optional)  # one index for all inputs
    if part.start % size or part.size % size:
        what = ("outputs", "inputs")[part.dim]
        total = part.source_shape[part.dim]
        raise UnsupportedError(
            f"a rank's share of {total} {what} is {part.size}, no multiple of the {size} that are "
            f"stored together: use fewer ranks"
        )
    first = part.start // size
    count = part.size // size
    return TensorShape((shape,), dims[part.dim], first, count, optional, stride=part.stride)
