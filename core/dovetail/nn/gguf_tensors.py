"""`GgufTensors`: the tensors of a GGUF file as a safetensors file has them: by the names of an
ordinary checkpoint, dequantized to float32, of which only the asked rows are read."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from dovetail.errors import MissingExtraError, ModelLoadError, shown
from dovetail.gguf.config import ROPE_FACTORS, Family, checkpoint_name, family_of
from dovetail.gguf.header import Header, Tensor, read_header

_AT_ONCE = 1 << 22  # numbers that are dequantized at once: bounds temporary memory
_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
_TURNED = ("attn_q", "attn_k")


class GgufTensors:
    """Open file. Its methods are those of `safetensors.safe_open` that the loader calls."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelLoadError` for a file that can't be used, or has tensors that its family
        hasn't, and `UnsupportedError` for another family."""
        header = read_header(path)
        family = family_of(header)
        data = np.memmap(path, np.uint8, mode="r")
        self._slices: dict[str, GgufSlice] = {}
        for name, tensor in header.tensors.items():
            if name == ROPE_FACTORS:  # config.json says it
                continue
            known = checkpoint_name(name, family)
            if known is None:
                raise ModelLoadError(
                    f"{path}: the tensor {shown(name)} isn't known of {family.model_type}"
                )
            if known in self._slices:
                raise ModelLoadError(f"{path}: two tensors are {known}")
            if len(tensor.shape) == 1 and tensor.type.numbers > 1:
                raise ModelLoadError(f"{path}: the vector {shown(name)} is {tensor.type.name}")
            self._slices[known] = GgufSlice(data, tensor, family, _heads(header, tensor, family))

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._slices.clear()  # which unmaps the file

    def keys(self) -> list[str]:
        return list(self._slices)

    def get_slice(self, name: str) -> GgufSlice:
        return self._slices[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._slices[name][...]


def _heads(header: Header, tensor: Tensor, family: Family) -> int:
    """Return the heads whose rows are stored in pairs of the rotation; 0 if they aren't."""
    module = tensor.name.rpartition(".")[0].rpartition(".")[2]
    if not family.turned or module not in _TURNED:
        return 0
    architecture = header.metadata["general.architecture"]
    heads = header.metadata.get(f"{architecture}.attention.head_count")
    if module == "attn_k":
        heads = header.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    heads = heads[0] if isinstance(heads, list) and heads else heads  # one for each layer
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise ModelLoadError(
            f"{header.path}: {shown(tensor.name)} has {tensor.shape[0]} rows for {shown(heads)} "
            f"heads"
        )
    return heads


class GgufSlice:
    """A tensor of an open file, of which an index reads a part."""

    def __init__(self, data: np.ndarray, tensor: Tensor, family: Family, heads: int) -> None:
        self._tensor = tensor
        self._heads = heads
        self._shift = 1.0 if family.one_more and tensor.name.endswith("norm.weight") else 0.0
        size = tensor.rows * tensor.row_bytes
        rows = tensor.rows if len(tensor.shape) > 1 else tensor.shape[0]  # of a vector its numbers
        self._stored = data[tensor.start : tensor.start + size].reshape(rows, -1)  # bytes
        self._row_numbers = tensor.shape[-1] if len(tensor.shape) > 1 else 1

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """As headers of safetensors name it: the dtype in which it is read."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return numbers in float32, of a part as numpy's basic indices name it."""
        index = index if isinstance(index, tuple) else (index,)
        first = index[0] if index else ...
        shape = self._tensor.shape
        if isinstance(first, slice) and len(shape) <= 2:
            rows = np.arange(*first.indices(shape[0]))
            values = self._read(rows)
            return values[(slice(None), *index[1:])]
        return self._read(np.arange(len(self._stored))).reshape(shape)[index]

    def _read(self, rows: np.ndarray) -> torch.Tensor:
        """Return rows, dequantized: [rows, numbers], or [rows] of a vector."""
        if self._heads:
            rows = _stored_rows(rows, len(self._stored), self._heads)
        at_once = max(1, _AT_ONCE // self._row_numbers)
        values = torch.empty((len(rows), self._row_numbers), dtype=torch.float32)
        for at in range(0, len(rows), at_once):
            some = self._dequantized(self._stored[rows[at : at + at_once]])
            values[at : at + at_once] = torch.from_numpy(some)
        if len(self._tensor.shape) == 1:
            values = values.reshape(-1)
        return values.sub_(self._shift) if self._shift else values

    def _dequantized(self, stored: np.ndarray) -> np.ndarray:
        """Return the numbers of rows [rows, bytes] uint8."""
        kind = self._tensor.type.name
        if kind == "BF16":
            widened: np.ndarray = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            return widened
        if kind in _PLAIN:
            plain: np.ndarray = stored.view(_PLAIN[kind]).astype(np.float32)
            return plain
        try:
            from gguf import GGMLQuantizationType, quants
        except ImportError as error:
            raise MissingExtraError.naming("gguf", "a quantized GGUF file needs gguf") from error
        values: np.ndarray = quants.dequantize(stored, GGMLQuantizationType[kind])
        return values


def _stored_rows(rows: np.ndarray, total: int, heads: int) -> np.ndarray:
    """Return where rows of Q or K are stored. A head's rows are (x0, x1, ..., y0, y1, ...) in a
    checkpoint, where x and y are rotated together, and (x0, y0, x1, y1, ...) in a GGUF file."""
    size = total // heads
    head, inner = np.divmod(rows, size)
    half, pair = np.divmod(inner, size // 2)
    stored: np.ndarray = head * size + 2 * pair + half
    return stored
