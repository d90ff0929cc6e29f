"""`quant_method: quark`: FP8 and MXFP4 checkpoints of AMD's Quark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.module_names import MARK, ModuleNames
from dovetail.nn.format.mxfp4 import GROUP, PackedMxfp4
from dovetail.nn.format.reading import WHERE, keys_and_values, names, within
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

_MAKING = NoEffect("how the scales were computed")
_CACHE = NoEffect("how K and V were rounded; they keep the cache's dtype")
_OUTPUTS = "output_tensors"
KEYS = FileKeys(
    "quark",
    {
        "quant_method": Used("the format"),
        "global_quant_config": Used("how weights and inputs are quantized, below"),
        "exclude": Used("modules that aren't quantized, as names or patterns"),
        "export": Used("how tensors are stored, below"),
        "layer_quant_config": Used("only layers whose outputs, K and V, are quantized, too"),
        "layer_type_quant_config": Refused("formats by the class of a layer", ({},)),
        "softmax_quant_spec": Refused("quantized attention"),
        **dict.fromkeys(("kv_cache_quant_config", "kv_cache_post_rope"), _CACHE),
        "algo_config": NoEffect("how the weights were computed"),
        "quant_mode": NoEffect("how the weights were computed"),
        "version": NoEffect("the version that wrote the file"),
    },
)
LAYER_KEYS = FileKeys(
    "quark: global_quant_config",
    {
        "weight": Used("how weights are stored, below"),
        "input_tensors": Used(
            "how inputs were quantized; they keep 16 bits, or the FP8 of kernels"
        ),
        _OUTPUTS: Refused("quantized outputs"),
        "bias": Refused("quantized biases"),
        "target_device": NoEffect("a hint for other programs"),
    },
)
NUMBER_KEYS = FileKeys(
    "quark: weight and input_tensors",
    {
        "dtype": Used("fp8_e4m3 or fp4"),
        "qscheme": Used("of FP8 per_tensor or per_channel, of FP4 per_group"),
        "group_size": Used("32 of FP4"),
        "ch_axis": Used("0 of FP8, -1 of FP4: along which scales differ"),
        "scale_format": Used("e8m0 of FP4"),
        "is_dynamic": Used("whether scales of inputs are computed"),
        "symmetric": NoEffect("floats have no zero points"),
        "is_scale_quant": Refused("quantized scales", (False,)),
        "mx_element_dtype": Refused("another type within a group"),
        **dict.fromkeys(("observer_cls", "round_method", "scale_type", "zero_point_type"), _MAKING),
        "scale_calculation_mode": _MAKING,
    },
)
EXPORT_KEYS = FileKeys(
    "quark: export",
    {
        "weight_format": Refused(
            "weights that are rounded, but stored in 16 bits", ("real_quantized",)
        ),
        "pack_method": Used("reorder or order, which are the same for these formats"),
        "kv_cache_group": NoEffect("names of the modules that compute K and V"),
        "min_kv_scale": _MAKING,
        "weight_merge_groups": NoEffect("a hint for other programs"),
    },
)


@dataclass(frozen=True, slots=True)
class Float8OfQuark(Float8):
    """FP8, perhaps with a scale of the outputs of layers that compute K and V."""

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        scale = TensorShape(((), (1,)), optional=True)
        return {**Float8.tensors(self, part), "output_scale": scale}


@dataclass(frozen=True, slots=True)
class Mxfp4OfQuark(PackedMxfp4):
    """MXFP4, two numbers in a byte, even inputs in the low half."""

    packed: str = "weight"


class Quark(Quantization):
    """Quantizes all linear layers except those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        EXPORT_KEYS.check(_keys(config, "export"), f"{WHERE}: export")
        where = f"{WHERE}: global_quant_config"
        layer = _keys(config, "global_quant_config")
        LAYER_KEYS.check(layer, where)
        self.format = _format_of(f"{where}.weight", _numbers(layer, "weight", where))
        _numbers(layer, "input_tensors", where)
        for name, own in _keys(config, "layer_quant_config").items():
            own = keys_and_values(own, f"{WHERE}: layer_quant_config.{name}")
            if {**own, _OUTPUTS: None} != {**layer, _OUTPUTS: None}:
                raise UnsupportedError(
                    f"{WHERE}: layer_quant_config.{name} is not implemented (only the settings of "
                    f"global_quant_config, with other {_OUTPUTS})"
                )
        left_out = names(config, "exclude")
        self._left_out = tuple(name for name in left_out if not name.startswith(MARK))
        self._expressions = ModuleNames(name for name in left_out if name.startswith(MARK))

    def of_module(self, name: str) -> WeightFormat:
        is_left_out = name in self._expressions or any(
            within(name, one) or fnmatchcase(name, one) for one in self._left_out
        )
        return DENSE if is_left_out else self.format

    def __str__(self) -> str:
        return str(self.format)


def _keys(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return keys_and_values(config.get(key) or {}, f"{WHERE}: {key}")


def _numbers(layer: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    numbers = keys_and_values(layer.get(key) or {}, f"{where}.{key}")
    NUMBER_KEYS.check(numbers, f"{where}.{key}")
    return numbers


def _format_of(where: str, weight: Mapping[str, Any]) -> WeightFormat:
    found = weight.get("dtype"), weight.get("qscheme")
    if found == ("fp8_e4m3", "per_tensor"):
        return Float8OfQuark("tensor", static=True)
    if found == ("fp8_e4m3", "per_channel") and weight.get("ch_axis") in (0, None):
        return Float8OfQuark("channel", static=True)
    is_mx = weight.get("group_size") == GROUP and weight.get("scale_format") == "e8m0"
    if found == ("fp4", "per_group") and is_mx and weight.get("ch_axis") in (-1, None):
        return Mxfp4OfQuark()
    raise UnsupportedError(
        f"{where}: {shown(dict(weight))} is not implemented (only fp8_e4m3 with per_tensor or "
        f"per_channel, and fp4 with per_group, group_size {GROUP} and scale_format e8m0)"
    )
