"""`read_header`: the metadata and the tensor table of a GGUF file, which is untrusted.

Every count, length, type and offset is checked against a bound and the file's size before anything
is allocated for it. The layout is GGUF's specification, versions 2 and 3, little-endian:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dovetail.errors import ModelLoadError, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_ENTRIES = 4_000_000  # of all arrays together: 262,000 tokens have three, and 515,000 merges
MAX_TEXT = 16 << 20  # bytes of a string: the longest is a chat template
MAX_TEXTS = 256 << 20  # bytes of all strings together
MAX_NAME = 1 << 16  # bytes of a key's or a tensor's name
MAX_DIMS = 4
MAX_SIZE = 1 << 40  # numbers in a tensor

# struct's letters of plain values, by type number
_PLAIN = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors: rows consist of blocks of `numbers` numbers in `size` bytes."""

    name: str
    numbers: int
    size: int


# by ggml's numbers; of 256 numbers in a block are the "K" types
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's entry. `shape`: as torch has it, the row's length last; `start`: where its bytes
    begin in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.numbers * self.type.size

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata by key, and tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_header(path: Path) -> Header:
    """Raises `ModelLoadError` for a file that isn't a whole GGUF file within the bounds above."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file: it doesn't begin with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error.strerror or error}") from None


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = len(MAGIC)
        self._entries = 0  # of arrays, so far
        self._texts = 0  # bytes of strings, so far

    def header(self) -> Header:
        version = self._number("I")
        if version not in VERSIONS:
            raise self._wrong(
                f"version {version} isn't read, only 2 and 3 in little-endian byte order"
            )
        tensors = self._count("tensors", MAX_TENSORS)
        keys = self._count("keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string(MAX_NAME, "a key")
            if key in metadata:
                raise self._wrong(f"the key {shown(key)} occurs twice")
            metadata[key] = self._value(key, self._number("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            raise self._wrong(
                f"general.alignment is {shown(alignment)}, expected a multiple of 8 up to 1 MiB"
            )
        entries = [self._tensor() for _ in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        placed: dict[str, Tensor] = {}
        for name, kind, shape, offset in entries:
            if name in placed:
                raise self._wrong(f"the tensor {shown(name)} occurs twice")
            placed[name] = self._placed(name, kind, shape, begin, offset)
        return Header(self._path, metadata, placed)

    def _wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: not a whole GGUF file: {what}")

    def _take(self, size: int) -> int:
        """Return where the next `size` bytes begin, and pass over them."""
        at = self._at
        if size > len(self._data) - at:
            raise self._wrong(f"the header ends within {size} bytes from byte {at} on")
        self._at = at + size
        return at

    def _number(self, letter: str) -> Any:
        form = f"<{letter}"
        return struct.unpack_from(form, self._data, self._take(struct.calcsize(form)))[0]

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("Q")
        if count > most:
            raise self._wrong(f"{count} {what}; no model has more than {most}")
        return count

    def _string(self, most: int, what: str) -> str:
        size: int = self._number("Q")
        if size > most:
            raise self._wrong(f"{what} of {size} bytes; at most {most} are read")
        self._texts += size
        if self._texts > MAX_TEXTS:
            raise self._wrong(f"strings of more than {MAX_TEXTS} bytes together")
        at = self._take(size)
        # tokens of old files may be parts of characters
        return self._data[at : at + size].decode(errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(MAX_TEXT, shown(key))
        if kind != _ARRAY:
            return self._number(self._letter(key, kind))
        kind = self._number("I")
        count: int = self._number("Q")
        self._entries += count
        if self._entries > MAX_ENTRIES:
            raise self._wrong(
                f"{shown(key)} has {count} entries; at most {MAX_ENTRIES} are read, of all keys "
                f"together"
            )
        if kind == _STRING:
            return [self._string(MAX_TEXT, shown(key)) for _ in range(count)]
        form = f"<{count}{self._letter(key, kind)}"
        return list(struct.unpack_from(form, self._data, self._take(struct.calcsize(form))))

    def _letter(self, key: str, kind: int) -> str:
        if kind not in _PLAIN:
            raise self._wrong(f"{shown(key)} has a value of type {kind}, which isn't read")
        return _PLAIN[kind]

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._string(MAX_NAME, "a tensor's name")
        dims: int = self._number("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self._wrong(f"the tensor {shown(name)} has {dims} dimensions, expected 1 to 4")
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))
        if not 0 < prod(shape) <= MAX_SIZE:
            raise self._wrong(f"the tensor {shown(name)} has the shape {list(shape)}")
        number: int = self._number("I")
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(one.name for one in TYPES.values())
            raise ModelLoadError(
                f"{self._path}: the tensor {shown(name)} is of ggml's type {number}, which isn't "
                f"read (only {known})"
            )
        if shape[-1] % kind.numbers:
            raise self._wrong(
                f"the tensor {shown(name)} has rows of {shape[-1]} numbers, no multiple of the "
                f"{kind.numbers} in a block of {kind.name}"
            )
        return name, kind, shape, self._number("Q")

    def _placed(
        self, name: str, kind: TensorType, shape: tuple[int, ...], begin: int, offset: int
    ) -> Tensor:
        tensor = Tensor(name, kind, shape, begin + offset)
        size = tensor.rows * tensor.row_bytes
        if tensor.start + size > len(self._data):
            raise self._wrong(
                f"the tensor {shown(name)} would end at byte {tensor.start + size} of "
                f"{len(self._data)}"
            )
        return tensor
