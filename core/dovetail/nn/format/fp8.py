"""`quant_method: fp8`: checkpoints of DeepSeek and Qwen (one scale per block of weights),
checkpoints with one scale per tensor, and plain checkpoints that are quantized while loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.reading import DEQUANTIZE, WHERE, block_size, names, within

KEYS = FileKeys(
    "fp8",
    {
        "quant_method": Used("the format"),
        "activation_scheme": Used("dynamic or static; others are refused"),
        "weight_block_size": Used(
            "outputs and inputs per scale; a scale per tensor if it is missing"
        ),
        "modules_to_not_convert": Used("modules that aren't quantized"),
        "ignored_layers": Used("the same by another name"),
        "fmt": Refused("another type of weights", ("e4m3", "float8_e4m3fn")),
        "is_checkpoint_fp8_serialized": Refused(
            "plain weights; remove it and set quantization: fp8", (True,)
        ),
        "scale_fmt": NoEffect(
            "how scales are stored and rounded: weights' are read as they are, activations' aren't "
            "rounded"
        ),
        "dequantize": DEQUANTIZE,
        "modules_to_convert": Refused("quantized layers that aren't linear", ([],)),
        "expert_dtype": Refused("experts in FP4", ("fp8",)),
    },
)


class Fp8(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        self._left_out: tuple[str, ...] = ()
        self.format = Float8("computed")
        if config is None:
            return
        KEYS.check(config, WHERE)
        if (scheme := config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
            raise UnsupportedError(
                f"quantization_config: activation_scheme = {shown(scheme)} is not implemented "
                f"(only dynamic, static)"
            )
        self._left_out = names(config, "modules_to_not_convert") + names(config, "ignored_layers")
        if config.get("weight_block_size") is None:
            self.format = Float8("tensor", static=scheme == "static")
            return
        self.format = Float8(
            "block",
            block_size(config, "weight_block_size"),
            "weight_scale_inv",
            static=scheme == "static",
        )

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(within(name, other) for other in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)
