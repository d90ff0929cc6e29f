"""`quant_method: aqlm`: sums of vectors from codebooks (AQLM, arXiv:2401.06118)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.dequantized import Dequantized
from dovetail.nn.format.reading import WHERE, names, within
from dovetail.nn.format.stored import TensorShape, checked_scales

KEYS = FileKeys(
    "aqlm",
    {
        "quant_method": Used("the format"),
        "in_group_size": Used("inputs of a vector"),
        "out_group_size": Used("outputs of a vector"),
        "num_codebooks": Used("vectors that are added"),
        "nbits_per_codebook": Used("bits of a code, up to 16"),
        "linear_weights_not_to_quantize": Used("weights that aren't quantized"),
    },
)
MOST_BITS = 16  # of a code: 65,536 vectors
MOST = 64  # codebooks, and inputs or outputs of a vector


@dataclass(frozen=True, slots=True)
class Codebooks(Dequantized):
    """Codes are stored as signed integers of 8 or 16 bits, whose lowest `bits` count."""

    inputs: int  # of a vector
    outputs: int
    count: int
    bits: int

    def __str__(self) -> str:
        return f"aqlm ({self.count} x {self.bits} bits), dequantized at load"

    def whole(self, outputs: int, inputs: int) -> Mapping[str, TensorShape]:
        if outputs % self.outputs or inputs % self.inputs:
            raise UnsupportedError(
                f"[{outputs}, {inputs}] aren't whole vectors of [{self.outputs}, {self.inputs}]"
            )
        rows = outputs // self.outputs
        books = (self.count, 2**self.bits, self.outputs, self.inputs)
        return {
            "codes": TensorShape(((rows, inputs // self.inputs, self.count),)),
            "codebooks": TensorShape((books,)),
            "scales": TensorShape(((rows, 1, 1, 1),)),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = tensors["codes"]
        if codes.dtype not in (torch.int8, torch.int16):
            raise ModelLoadError(
                f"codes: expected int8 or int16, found {str(codes.dtype).removeprefix('torch.')}"
            )
        books = checked_scales(tensors["codebooks"], name="codebooks")
        scales = checked_scales(tensors["scales"])
        total = torch.zeros((*codes.shape[:2], *books.shape[2:]), device=codes.device)
        for index, book in enumerate(books):
            total += book[codes[:, :, index].long() % 2**self.bits]
        return (total * scales).transpose(1, 2).flatten(2).flatten(0, 1)


class Aqlm(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        sizes = [
            _size(config, key, most)
            for key, most in (
                ("in_group_size", MOST),
                ("out_group_size", MOST),
                ("num_codebooks", MOST),
                ("nbits_per_codebook", MOST_BITS),
            )
        ]
        self.format = Codebooks(*sizes)
        left_out = names(config, "linear_weights_not_to_quantize")
        self._left_out = ("lm_head", *(name.removesuffix(".weight") for name in left_out))

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(within(name, other) for other in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)


def _size(config: Mapping[str, Any], key: str, most: int) -> int:
    size = config.get(key)
    if type(size) is not int or not 0 < size <= most:
        raise ModelLoadError(f"{WHERE}: {key} must be from 1 to {most}, got {shown(size)}")
    return size
