"""What a GPU would have to be waited for, found out on the CPU: `nothing_asked`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN: Any = torch.ops.aten
ASKING = {ATEN.item, ATEN._local_scalar_dense, ATEN.is_nonzero, ATEN.equal, ATEN.nonzero, ATEN.masked_select, ATEN._unique2, ATEN.unique_consecutive}
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}


class nothing_asked(TorchDispatchMode):  # noqa: N801 (read as a statement: `with nothing_asked():`)
    """While it is active, what makes the host wait for a number of the device's fails: `.item()`, `int()` and `bool()` of a tensor, a number on the
    device as an index, a mask as an index, `nonzero` and its like. What reads the CPU's memory, `.tolist()` and `.numpy()`, it doesn't see."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given, operation = kwargs or {}, func.overloadpacket
        asks = operation in ASKING
        asks |= operation in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        asks |= func in (ATEN.repeat_interleave.Tensor, ATEN.repeat_interleave.self_Tensor) and given.get("output_size") is None
        if asks:
            raise AssertionError(f"{operation} makes the host wait for the device")
        return func(*args, **given)
