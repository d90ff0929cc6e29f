"""`quant_method: compressed-tensors`: FP8 and INT4 checkpoints of llm-compressor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.int4 import Int4, Unpacked
from dovetail.nn.format.packing import PACKED, share_of, unpacked
from dovetail.nn.format.reading import (
    DEQUANTIZE,
    WHERE,
    block_size,
    group_size,
    keys_and_values,
    matches,
    names,
)
from dovetail.nn.format.stored import TensorShape
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
        "format": Used("float-quantized, naive-quantized or pack-quantized"),
        "output_activations": Refused("quantized outputs"),
    },
)
NUMBER_KEYS = FileKeys(
    "compressed-tensors: weights and input_activations",
    {
        "num_bits": Used("8, or 4 of weights"),
        "type": Used("float of 8 bits, int of 4"),
        "strategy": Used("tensor, channel or block of 8 bits; group or channel of 4"),
        "group_size": Used("inputs per scale"),
        "block_structure": Used("outputs and inputs per scale"),
        "symmetric": Used("whether there are zero points; only of 4 bits"),
        "dynamic": Used("whether scales of inputs are computed"),
        "actorder": Used("weight or static; others are refused"),
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


class CompressedTensors(Quantization):
    """Quantizes the linear layers that match a group's targets, except those to ignore."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        self._ignored = names(config, "ignore")
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not groups:
            raise ModelLoadError(
                f"quantization_config: config_groups must map names to groups, got {shown(groups)}"
            )
        self._groups = [
            (_targets(name, group), _format_of(name, group, config.get("format")))
            for name, group in groups.items()
        ]
        for pattern in (
            *self._ignored,
            *(target for targets, _ in self._groups for target in targets),
        ):
            matches("", pattern)  # reject an invalid pattern here

    def of_module(self, name: str) -> WeightFormat:
        if any(pattern == _LINEAR or matches(name, pattern) for pattern in self._ignored):
            return DENSE
        for targets, form in self._groups:
            if any(matches(name, target) for target in targets):
                return form
        return next((form for targets, form in self._groups if _LINEAR in targets), DENSE)

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(str(form) for _, form in self._groups))


def _targets(name: str, group: Any) -> tuple[str, ...]:
    return names(keys_and_values(group, f"quantization_config: config_groups.{name}"), "targets")


def _format_of(name: str, group: Mapping[str, Any], fallback: Any) -> WeightFormat:
    where = f"quantization_config: config_groups.{name}"
    GROUP_KEYS.check(group, where)
    weights = keys_and_values(group.get("weights") or {}, f"{where}.weights")
    inputs = group.get("input_activations")
    packing = group.get("format") or fallback
    NUMBER_KEYS.check(weights, f"{where}.weights")
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind == ("float", 8) and packing in ("float-quantized", "naive-quantized"):
        return _float8(where, weights, inputs)
    if kind == ("int", 4) and packing == "pack-quantized" and inputs is None:
        return _int4(where, weights)
    what = (
        f"weights of type {shown(kind[0])} and {shown(kind[1])} bits, {shown(packing)}, "
        f"{'with' if inputs else 'without'} input_activations"
    )
    raise UnsupportedError(
        f"{where}: {what}, are not implemented (only float of 8 bits, float-quantized; int of 4 "
        f"bits, pack-quantized, without)"
    )


def _float8(where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Float8:
    if inputs is not None:
        NUMBER_KEYS.check(
            keys_and_values(inputs, f"{where}.input_activations"), f"{where}.input_activations"
        )
        if (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
            raise UnsupportedError(
                f"{where}.input_activations: {shown(dict(inputs))} is not implemented (only float "
                f"of 8 bits)"
            )
    for kind, numbers in (("weights", weights), ("input_activations", inputs or {})):
        if numbers.get("symmetric") is False:
            raise UnsupportedError(
                f"{where}.{kind}: symmetric = False is not implemented for 8 bits (only True)"
            )
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


def _int4(where: str, weights: Mapping[str, Any]) -> PackedInt4:
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise UnsupportedError(
            f"{where}.weights: actorder = {shown(weights['actorder'])} is not implemented (only "
            f"weight)"
        )
    if (strategy := weights.get("strategy")) not in ("group", "channel"):
        raise UnsupportedError(
            f"{where}.weights: strategy = {shown(strategy)} is not implemented for 4 bits (only "
            f"group, channel)"
        )
    group = group_size(weights, "group_size", f"{where}.weights") if strategy == "group" else None
    return PackedInt4(group, bool(weights.get("symmetric", True)))
