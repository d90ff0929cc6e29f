"""`quant_method: compressed-tensors`: checkpoints of llm-compressor in FP8, INT8, INT4 and FP4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.compressed_int8 import PackedInt8, PlainInt8
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.dequantized import Dequantized
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.int4 import Int4, Unpacked
from dovetail.nn.format.module_names import ModuleNames
from dovetail.nn.format.mxfp4 import PackedMxfp4
from dovetail.nn.format.nvfp4 import Nvfp4
from dovetail.nn.format.packing import (
    PACKED,
    checked_groups,
    numbers_of,
    share_of,
    unpacked,
)
from dovetail.nn.format.reading import (
    DEQUANTIZE,
    WHERE,
    block_size,
    group_size,
    keys_and_values,
    names,
)
from dovetail.nn.format.stored import TensorShape, checked_scales
from dovetail.nn.parameter import Part

_MAKING = NoEffect("how the scales were computed")
_STORED = NoEffect("the tensors say it")
KEYS = FileKeys(
    "compressed-tensors",
    {
        "quant_method": Used("the format"),
        "config_groups": Used("which layers are stored how, below"),
        "format": Used("the packing of groups that name none"),
        "ignore": Used("modules that aren't quantized"),
        "kv_cache_scheme": Used("scales of K and V, read if `kv_cache_dtype` is fp8"),
        "quantization_status": Refused("weights that aren't compressed", ("compressed", "frozen")),
        "sparsity_config": Refused("sparse weights", ({},)),
        "transform_config": Refused("transformed weights", ({},)),
        "moe_sparsity_config": Refused("sparse experts"),
        "dequantize": DEQUANTIZE,
        "run_compressed": NoEffect("a hint for transformers"),
        "use_optimized_inference": NoEffect("a hint for transformers"),
        "global_compression_ratio": NoEffect("a figure about the file"),
        "version": NoEffect("the version that wrote the file"),
    },
)
GROUP_KEYS = FileKeys(
    "compressed-tensors: config_groups",
    {
        "targets": Used("names of layers, or Linear"),
        "weights": Used("how weights are stored, below"),
        "input_activations": Used("how inputs are quantized, below"),
        "format": Used("float-, naive-, int-, pack-, nvfp4-pack- or mxfp4-pack-quantized"),
        "output_activations": Refused("quantized outputs"),
    },
)
NUMBER_KEYS = FileKeys(
    "compressed-tensors: weights and input_activations",
    {
        "num_bits": Used("8 or 4"),
        "type": Used("float or int"),
        "strategy": Used(
            "of FP8 tensor, channel or block; of integers group or channel; of FP4 its own"
        ),
        "group_size": Used("inputs per scale"),
        "block_structure": Used("outputs and inputs per scale"),
        "symmetric": Used("whether there are zero points; only of integers"),
        "dynamic": Used("whether scales of inputs are computed"),
        "actorder": Used("group, weight or static; others are refused"),
        "observer": _MAKING,
        "observer_kwargs": _MAKING,
        "scale_dtype": _STORED,
        "zp_dtype": _STORED,
    },
)
_LINEAR = "Linear"  # class name of all layers that can be quantized


@dataclass(frozen=True, slots=True)
class PackedInt4(Int4):
    """`pack-quantized`: weights packed along the inputs, zero points along the outputs. Both are
    stored with an offset of 8."""

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        groups = self._groups(inputs)
        tensors = {
            "weight_packed": share_of(part, (outputs, -(-inputs // PACKED)), (0, 1), (1, PACKED)),
            "weight_scale": share_of(part, (outputs, groups), (0, 1), (1, self.group or inputs)),
            "weight_shape": TensorShape(((2,),), optional=True),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = share_of(
                part, (-(-outputs // PACKED), groups), (0, 1), (PACKED, self.group or inputs)
            )
        return tensors

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        zeros = None if self.symmetric else unpacked(tensors["weight_zero_point"], 0)
        return Unpacked(unpacked(tensors["weight_packed"], 1), tensors["weight_scale"], zeros)


@dataclass(frozen=True, slots=True)
class PackedInAnyOrder(Dequantized):
    """`pack-quantized` of 4 or 8 bits with groups of inputs in any order (`actorder: group`)."""

    bits: int
    group: int
    symmetric: bool = True

    def __str__(self) -> str:
        return f"int{self.bits}, dequantized at load"

    def whole(self, outputs: int, inputs: int) -> Mapping[str, TensorShape]:
        packed = 32 // self.bits
        groups = -(-inputs // self.group)
        tensors = {
            "weight_packed": TensorShape(((outputs, -(-inputs // packed)),)),
            "weight_scale": TensorShape(((outputs, groups),)),
            "weight_shape": TensorShape(((2,),), optional=True),
            "weight_g_idx": TensorShape(((inputs,),)),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = TensorShape(((-(-outputs // packed), groups),))
        return tensors

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        scales = checked_scales(tensors["weight_scale"], 2.0**self.bits)
        index = checked_groups(tensors["weight_g_idx"], scales.shape[1])
        codes = numbers_of(tensors["weight_packed"], self.bits, 1)[:, : len(index)].float()
        if self.symmetric:
            zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        else:
            stored = numbers_of(tensors["weight_zero_point"], self.bits, 0)
            zeros = stored[: len(scales)].float()
        return (codes - zeros[:, index]) * scales[:, index]


class CompressedTensors(Quantization):
    """Quantizes the linear layers that match a group's targets, except those to ignore."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        self._ignored = ModuleNames(names(config, "ignore"))
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not groups:
            raise ModelLoadError(
                f"quantization_config: config_groups must map names to groups, got {shown(groups)}"
            )
        self._groups = [
            (_targets(name, group), _format_of(name, group, config.get("format")))
            for name, group in groups.items()
        ]

    def of_module(self, name: str) -> WeightFormat:
        if _LINEAR in self._ignored.names or name in self._ignored:
            return DENSE
        for targets, form in self._groups:
            if name in targets:
                return form
        return next((form for targets, form in self._groups if _LINEAR in targets.names), DENSE)

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(str(form) for _, form in self._groups))


def _targets(name: str, group: Any) -> ModuleNames:
    where = f"quantization_config: config_groups.{name}"
    return ModuleNames(names(keys_and_values(group, where), "targets"))


def _format_of(name: str, group: Mapping[str, Any], fallback: Any) -> WeightFormat:
    where = f"quantization_config: config_groups.{name}"
    GROUP_KEYS.check(group, where)
    weights = keys_and_values(group.get("weights") or {}, f"{where}.weights")
    inputs = group.get("input_activations")
    packing = group.get("format") or fallback
    NUMBER_KEYS.check(weights, f"{where}.weights")
    kind = (weights.get("type"), weights.get("num_bits"), packing)
    reader = next((one for known, one in _READERS.items() if known == kind), None)
    if reader is None:
        what = f"weights of type {shown(kind[0])} and {shown(kind[1])} bits, {shown(packing)}"
        known = "; ".join(f"{name} of {bits} bits, {form}" for name, bits, form in _READERS)
        raise UnsupportedError(f"{where}: {what}, are not implemented (only {known})")
    if inputs is not None:
        inputs = keys_and_values(inputs, f"{where}.input_activations")
        NUMBER_KEYS.check(inputs, f"{where}.input_activations")
    return reader(where, weights, inputs)


def _refuse_asymmetric(where: str, numbers: Mapping[str, Any]) -> None:
    if numbers.get("symmetric") is False:
        raise UnsupportedError(
            f"{where}: symmetric = False is not implemented for this type (only True)"
        )


def _float8(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Float8:
    if inputs is not None and (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        raise UnsupportedError(
            f"{where}.input_activations: {shown(dict(inputs))} is not implemented (only float of 8 "
            f"bits)"
        )
    _refuse_asymmetric(f"{where}.weights", weights)
    _refuse_asymmetric(f"{where}.input_activations", inputs or {})
    static = inputs is not None and not inputs.get("dynamic")
    bits = 16 if inputs is None else 8
    strategy = weights.get("strategy")
    if strategy == "block":
        return Float8(
            "block",
            block_size(weights, "block_structure", f"{where}.weights"),
            "weight_scale",
            static,
            bits,  # type: ignore[arg-type]
        )
    if strategy in ("tensor", "channel"):
        return Float8(strategy, static=static, inputs=bits)  # type: ignore[arg-type]
    raise UnsupportedError(
        f"{where}.weights: strategy = {shown(strategy)} is not implemented for 8 bits (only "
        f"tensor, channel, block)"
    )


def _int4(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> WeightFormat:
    return _in_any_order(where, weights, 4) or PackedInt4(*_groups(where, weights))


def _int8(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> PlainInt8:
    static = inputs is not None and not inputs.get("dynamic")
    return PlainInt8(*_groups(where, weights), static)


def _packed_int8(
    where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> WeightFormat:
    return _in_any_order(where, weights, 8) or PackedInt8(*_groups(where, weights))


def _in_any_order(where: str, weights: Mapping[str, Any], bits: int) -> WeightFormat | None:
    """Return the format of weights whose groups of inputs are in any order; None of others."""
    if weights.get("actorder") not in (True, "group") or weights.get("strategy") != "group":
        return None
    group = group_size(weights, "group_size", f"{where}.weights")
    symmetric = bool(weights.get("symmetric", True))
    return None if group is None else PackedInAnyOrder(bits, group, symmetric)


def _nvfp4(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Nvfp4:
    _refuse_asymmetric(f"{where}.weights", weights)
    _expect(where, weights, "tensor_group", 16)
    return Nvfp4("weight_packed", "weight_global_scale", divides=True)


def _mxfp4(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> PackedMxfp4:
    _refuse_asymmetric(f"{where}.weights", weights)
    _expect(where, weights, "group", 32)
    return PackedMxfp4()


def _expect(where: str, weights: Mapping[str, Any], strategy: str, group: int) -> None:
    found = weights.get("strategy"), weights.get("group_size")
    if found != (strategy, group):
        raise UnsupportedError(
            f"{where}.weights: strategy = {shown(found[0])} and group_size = {shown(found[1])} are "
            f"not implemented for 4-bit floats (only {strategy} and {group})"
        )


def _groups(where: str, weights: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the inputs per scale, None for all, and whether weights are symmetric."""
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedError(
            f"{where}.weights: actorder = {shown(weights['actorder'])} is not implemented (only "
            f"group, with strategy group, and weight)"
        )
    if (strategy := weights.get("strategy")) not in ("group", "channel"):
        raise UnsupportedError(
            f"{where}.weights: strategy = {shown(strategy)} is not implemented for integers "
            f"(only group, channel)"
        )
    group = group_size(weights, "group_size", f"{where}.weights") if strategy == "group" else None
    return group, bool(weights.get("symmetric", True))


# by type, bits and packing
_READERS: Mapping[tuple[Any, Any, Any], Callable[..., WeightFormat]] = {
    ("float", 8, "float-quantized"): _float8,
    ("float", 8, "naive-quantized"): _float8,
    ("float", 4, "nvfp4-pack-quantized"): _nvfp4,
    ("float", 4, "mxfp4-pack-quantized"): _mxfp4,
    ("int", 4, "pack-quantized"): _int4,
    ("int", 8, "pack-quantized"): _packed_int8,
    ("int", 8, "int-quantized"): _int8,
}
