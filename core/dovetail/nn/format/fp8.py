"""`quant_method: fp8`: checkpoints of DeepSeek and Qwen (one scale per block of weights), checkpoints with one scale per tensor, and plain
checkpoints that are quantized while loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.checks import shown
from dovetail.errors import UnsupportedError
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.reading import block_size, names, refuse_others, within

_READ = {
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "is_checkpoint_fp8_serialized",
    "scale_fmt",
}


class Fp8(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        self._left_out: tuple[str, ...] = ()
        self.format = Float8("computed")
        if config is None:
            return
        refuse_others(config, _READ)
        if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedError(f"quantization_config: fmt = {shown(config['fmt'])} is not implemented (only e4m3)")
        if config.get("is_checkpoint_fp8_serialized") is False:
            raise UnsupportedError("quantization_config: is_checkpoint_fp8_serialized = False: remove it and set quantization: fp8")
        if (scheme := config.get("activation_scheme", "dynamic")) not in ("dynamic", "static"):
            raise UnsupportedError(f"quantization_config: activation_scheme = {shown(scheme)} is not implemented (only dynamic, static)")
        self._left_out = names(config, "modules_to_not_convert") + names(config, "ignored_layers")
        if config.get("weight_block_size") is None:
            self.format = Float8("tensor", static=scheme == "static")
            return
        self.format = Float8("block", block_size(config, "weight_block_size"), "weight_scale_inv", static=scheme == "static")

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(within(name, other) for other in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)
