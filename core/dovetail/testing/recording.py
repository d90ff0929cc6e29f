"""CUDA graphs simulated on the CPU: `Recording` records and replays operations; `nothing_asked`
finds operations that synchronize with the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN: Any = torch.ops.aten
ASKING = {
    getattr(ATEN, name)
    for name in (
        "item",
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_consecutive",
    )
}
INDEXING = {
    getattr(ATEN, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_")
}


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, imports its compiler, which takes seconds


class Recording(_Mode):  # type: ignore[no-untyped-call]
    """Records every operation while active, with the tensors that it reads and writes. A replay
    runs the operations on the same tensors again, so it depends only on their present content;
    numbers on the host stay as recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            overwrite(outputs, func(*args, **kwargs))


def overwrite(kept: Any, new: Any) -> None:
    """Copy new results of an operation to where later operations read them. Views, and tensors
    changed in place, have them already."""
    if isinstance(kept, torch.Tensor):
        if kept.data_ptr() != new.data_ptr():
            kept.copy_(new)
    elif isinstance(kept, tuple | list):  # named ones, too
        for old, fresh in zip(kept, new, strict=True):
            overwrite(old, fresh)


class nothing_asked(_Mode):  # type: ignore[no-untyped-call] # noqa: N801 (read as a statement: `with nothing_asked():`)
    """While it is active, raises `AssertionError` for operations that make the host wait for a
    value on the device: `.item()`, `int()` and `bool()` of a tensor, a number on the device as an
    index, a mask as an index, `nonzero` and similar ones. Reads of the CPU's memory, `.tolist()`
    and `.numpy()`, aren't noticed."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        operation = func.overloadpacket
        asks = operation in ASKING
        asks |= operation in INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        asks |= (
            func in (ATEN.repeat_interleave.Tensor, ATEN.repeat_interleave.self_Tensor)
            and given.get("output_size") is None
        )
        if asks:
            raise AssertionError(f"{operation} makes the host wait for the device")
        return func(*args, **given)
