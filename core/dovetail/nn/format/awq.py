"""`quant_method: awq`: INT4 checkpoints of AWQ (arXiv:2306.00978) in AutoAWQ's version "gemm"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.gptq import KERNELS
from dovetail.nn.format.gptq import KEYS as GPTQ_KEYS
from dovetail.nn.format.int4 import Int4, Unpacked
from dovetail.nn.format.packing import PACKED, share_of, unpacked
from dovetail.nn.format.reading import WHERE, group_size, names
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

KEYS = FileKeys(
    "awq",
    {
        "quant_method": Used("the format"),
        "bits": Used("4; others are refused"),
        "w_bit": Used("the same in older files"),
        "group_size": Used("inputs per scale"),
        "q_group_size": Used("the same in older files"),
        "version": Used("gemm; others are refused"),
        "format": Used("the same, where `version` is missing"),
        "modules_to_not_convert": Used("modules that aren't quantized"),
        "zero_point": Refused("symmetric weights", (True,)),
        "desc_act": Refused("groups of inputs must be contiguous", (False,)),
        "sym": NoEffect("AWQ stores zero points"),
        **{name: rule for name, rule in GPTQ_KEYS.keys.items() if isinstance(rule, NoEffect)},
        **dict.fromkeys(("do_fuse", "fuse_max_seq_len", "modules_to_fuse"), KERNELS),
    },
)
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of outputs within 32 bits, see `packing.unpacked`


@dataclass(frozen=True, slots=True)
class AwqInt4(Int4):
    """Transposed: weights [inputs, outputs / 8] and zero points [groups, outputs / 8], packed along
    the outputs, even before odd ones."""

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        groups = self._groups(inputs)
        of_group = self.group or inputs
        return {
            "qweight": share_of(part, (inputs, outputs // PACKED), (1, 0), (PACKED, 1)),
            "qzeros": share_of(part, (groups, outputs // PACKED), (1, 0), (PACKED, of_group)),
            "scales": share_of(part, (groups, outputs), (1, 0), (1, of_group)),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        values, zeros = (unpacked(tensors[name], 1, _ORDER).t() for name in ("qweight", "qzeros"))
        return Unpacked(values, tensors["scales"].t(), zeros)


class Awq(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes, by any
    substring of their name."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        if (bits := config.get("bits", config.get("w_bit"))) != 4:
            raise UnsupportedError(
                f"quantization_config: bits = {shown(bits)} is not implemented (only 4)"
            )
        version = config.get("version") or config.get("format") or "gemm"
        if str(version).lower() != "gemm":
            raise UnsupportedError(
                f"quantization_config: version = {shown(version)} is not implemented (only gemm): other "
                f"layouts are made for one kernel"
            )
        self.format = AwqInt4(
            group_size(config, "group_size" if "group_size" in config else "q_group_size"),
            symmetric=False,
        )
        self._left_out = names(config, "modules_to_not_convert")

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(piece in name for piece in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)
