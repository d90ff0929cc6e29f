"""`quant_method: fbgemm_fp8`: FP8 checkpoints of Meta (Llama-3.1-405B-Instruct-FP8), with a scale
per output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Used
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.reading import WHERE, names, within

KEYS = FileKeys(
    "fbgemm_fp8",
    {
        "quant_method": Used("the format"),
        "modules_to_not_convert": Used("modules that aren't quantized"),
        "activation_scale_ub": NoEffect("no input is cut: scales of inputs follow the largest"),
    },
)


class FbgemmFp8(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        self.format = Float8("channel", static=True)
        self._left_out = names(config, "modules_to_not_convert") or ("lm_head",)

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(within(name, other) for other in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)
