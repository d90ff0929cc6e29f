"""`quant_method: modelopt`: FP8 and NVFP4 checkpoints of NVIDIA's ModelOpt. The config is in
`config.json`, or beside it in `hf_quant_config.json`, in a layout of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.dequantized import Dequantized
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.nvfp4 import Nvfp4
from dovetail.nn.format.reading import WHERE, keys_and_values, names, within
from dovetail.nn.format.stored import TensorShape, checked_scales

_CACHE = Used("scales of K and V, read if `kv_cache_dtype` is fp8")
KEYS = FileKeys(
    "modelopt",
    {
        "quant_method": Used("the format"),
        "quant_algo": Used(
            "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, W4A16_NVFP4 or "
            "MIXED_PRECISION"
        ),
        "group_size": Used("16 of NVFP4, 32 of MXFP8; others are refused"),
        "ignore": Used("modules that aren't quantized, as names or patterns"),
        "exclude_modules": Used("the same in hf_quant_config.json"),
        "kv_cache_quant_algo": _CACHE,
        "kv_cache_scheme": _CACHE,
        "config_groups": NoEffect("`quant_algo` says it"),
        "producer": NoEffect("the program that wrote the file"),
        "quantized_layers": Used("the formats of single layers, of MIXED_PRECISION"),
        "has_zero_point": Refused("asymmetric weights", (False,)),
        "pre_quant_scale": Refused("scaled inputs", (False,)),
    },
)


@dataclass(frozen=True, slots=True)
class Float8InBlocks(Dequantized):
    """FP8 with a scale in four dimensions for each `block` of outputs and inputs, or, of `powers`,
    an exponent of two for each."""

    block: tuple[int, int]
    powers: bool

    def __str__(self) -> str:
        return f"fp8 ({self.block[0]} x {self.block[1]}), dequantized at load"

    def whole(self, outputs: int, inputs: int) -> Mapping[str, TensorShape]:
        across = ceil(outputs / self.block[0])
        along = ceil(inputs / self.block[1])
        shape = (across, along) if self.powers else (across, 1, along, 1)
        return {
            "weight": TensorShape(((outputs, inputs),)),
            "weight_scale": TensorShape((shape,)),
            "input_scale": TensorShape(((), (1,)), optional=True),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = tensors["weight"]
        if weight.dtype != torch.float8_e4m3fn:
            raise ModelLoadError(
                f"expected float8_e4m3fn, found {str(weight.dtype).removeprefix('torch.')}"
            )
        scales = tensors["weight_scale"]
        if not self.powers:
            scales = checked_scales(scales)
        elif scales.dtype == torch.uint8:
            scales = 2.0 ** (scales.float() - 127)
        else:
            raise ModelLoadError("weight_scale: expected uint8")
        scales = scales.reshape(len(scales), -1)
        spread = scales.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": Float8("tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8("channel", static=True),
    "NVFP4": Nvfp4("weight", "weight_scale_2", divides=False),
    "W4A16_NVFP4": Nvfp4("weight", "weight_scale_2", divides=False),
    "FP8_PB_WO": Float8InBlocks((128, 128), powers=False),
    "MXFP8": Float8InBlocks((1, 32), powers=True),
}
_MIXED = "MIXED_PRECISION"
_GROUPS = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}  # inputs per scale


class ModelOpt(Quantization):
    """Quantizes all linear layers except those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        self._layers: dict[str, WeightFormat] | None = None
        if config.get("quant_algo") == _MIXED:
            self._layers = {
                name: _format_of(keys_and_values(own, f"{WHERE}: quantized_layers.{name}"))
                for name, own in _layers(config).items()
            }
            self._told = " and ".join(dict.fromkeys(map(str, self._layers.values())))
        else:
            self.format = _format_of(config)
            self._told = str(self.format)
        self._left_out = names(config, "ignore") + names(config, "exclude_modules")

    def of_module(self, name: str) -> WeightFormat:
        for pattern in self._left_out:
            if within(name, pattern) or fnmatchcase(name, pattern):
                return DENSE
        return self.format if self._layers is None else self._layers.get(name, DENSE)

    def __str__(self) -> str:
        return self._told


def _layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of single layers. Raises `ModelLoadError` if there are none."""
    layers = keys_and_values(config.get("quantized_layers"), f"{WHERE}: quantized_layers")
    if not layers:
        raise ModelLoadError(f"{WHERE}: quantized_layers is empty, with quant_algo {_MIXED}")
    return layers


def _format_of(config: Mapping[str, Any]) -> WeightFormat:
    algorithm: Any = config.get("quant_algo")
    if algorithm not in tuple(_FORMATS):
        raise UnsupportedError(
            f"{WHERE}: quant_algo = {shown(algorithm)} is not implemented (only "
            f"{', '.join(_FORMATS)} and {_MIXED}): those of AWQ scale inputs, too"
        )
    if algorithm in _GROUPS and config.get("group_size") not in (None, _GROUPS[algorithm]):
        raise UnsupportedError(
            f"{WHERE}: group_size = {shown(config['group_size'])} is not implemented (only "
            f"{_GROUPS[algorithm]})"
        )
    return _FORMATS[algorithm]
