"""`quant_method: modelopt`: FP8 and NVFP4 checkpoints of NVIDIA's ModelOpt. The config is in
`config.json`, or beside it in `hf_quant_config.json`, in a layout of its own."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.nvfp4 import Nvfp4
from dovetail.nn.format.reading import WHERE, names, within

_CACHE = Used("scales of K and V, read if `kv_cache_dtype` is fp8")
KEYS = FileKeys(
    "modelopt",
    {
        "quant_method": Used("the format"),
        "quant_algo": Used("FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 or W4A16_NVFP4"),
        "group_size": Used("16 of NVFP4; others are refused"),
        "ignore": Used("modules that aren't quantized, as names or patterns"),
        "exclude_modules": Used("the same in hf_quant_config.json"),
        "kv_cache_quant_algo": _CACHE,
        "kv_cache_scheme": _CACHE,
        "config_groups": NoEffect("`quant_algo` says it"),
        "producer": NoEffect("the program that wrote the file"),
        "quantized_layers": Refused("formats of single layers", ({},)),
        "has_zero_point": Refused("asymmetric weights", (False,)),
        "pre_quant_scale": Refused("scaled inputs", (False,)),
    },
)
_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": Float8("tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8("channel", static=True),
    "NVFP4": Nvfp4("weight", "weight_scale_2", divides=False),
    "W4A16_NVFP4": Nvfp4("weight", "weight_scale_2", divides=False),
}


class ModelOpt(Quantization):
    """Quantizes all linear layers except those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        algorithm: Any = config.get("quant_algo")
        if algorithm not in tuple(_FORMATS):
            raise UnsupportedError(
                f"{WHERE}: quant_algo = {shown(algorithm)} is not implemented (only "
                f"{', '.join(_FORMATS)})"
            )
        self.format = _FORMATS[algorithm]
        group = config.get("group_size")
        if isinstance(self.format, Nvfp4) and group not in (None, 16):
            raise UnsupportedError(
                f"{WHERE}: group_size = {shown(group)} is not implemented (only 16)"
            )
        self._left_out = names(config, "ignore") + names(config, "exclude_modules")

    def of_module(self, name: str) -> WeightFormat:
        for pattern in self._left_out:
            if within(name, pattern) or fnmatchcase(name, pattern):
                return DENSE
        return self.format

    def __str__(self) -> str:
        return str(self.format)
