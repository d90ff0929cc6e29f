"""Published ways of storing quantized weights: small checkpoints in each, and the values that its
definition gives these weights, written down once more apart from the product.

python -m tests.models.checkpoint_formats    # tries all, and writes the table in docs/quantization.md

A tiny Qwen3 of random weights in a format is named to `LLM`, and compared with transformers in
float32 on these values.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.api.executor import QuantizationRef
from dovetail.errors import UnsupportedError
from dovetail.gguf.header import TYPES
from dovetail_executors.runtime.quantization import choose_quantization
from dovetail_models import dovetail_quantizations
from tests.models.model_types import PROMPTS, greedy, served_tokens
from tests.models.tiny_configs import random_model, tiny

QUANTIZATIONS = tuple(
    QuantizationRef(f"dovetail:{spec.name}", spec.name, spec.target, spec.quantizes)
    for spec in dovetail_quantizations()
)
Tensors = dict[str, Tensor]
Pack = Callable[[int, int, torch.Generator], Tensors]
Values = Callable[[Tensors], Tensor]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 64


@dataclass(frozen=True, slots=True)
class Format:
    """One way of storing weights: its `quantization_config`, random tensors of a linear module
    [outputs, inputs] by the last components of their names, and the values [outputs, inputs] that
    they mean. `elsewhere`: the config is in `hf_quant_config.json`. `named`: keys of the config that
    list all quantized modules, and what they say of each."""

    name: str
    config: Mapping[str, Any]
    pack: Pack
    values: Values
    elsewhere: bool = False
    named: Mapping[str, Any] = field(default_factory=dict)


def random_bytes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def scales(generator: torch.Generator, *shape: int, size: float = 0.02) -> Tensor:
    return torch.rand(shape, generator=generator) * size + size / 10


def words(values: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned numbers of so many bits along a dimension, the first one lowest."""
    count = 32 // bits
    turned = (values.t() if dim == 0 else values).long()
    turned = torch.nn.functional.pad(turned, (0, -turned.shape[1] % count))
    parts = turned.unflatten(1, (-1, count)) << (torch.arange(count) * bits)
    packed = parts.sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return (packed.t() if dim == 0 else packed).contiguous()


def numbers_of(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Undo `words`."""
    turned = (packed.t() if dim == 0 else packed).long()
    values = (turned[:, :, None] >> (torch.arange(32 // bits) * bits)) & (2**bits - 1)
    values = values.flatten(1)
    return values.t() if dim == 0 else values


def spread(one: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat numbers over blocks."""
    return one.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


# FP8


def fp8(*, blocks: tuple[int, int] | None, name: str, per: str = "tensor", also: Tensors | None = None) -> tuple[Pack, Values]:  # fmt: skip
    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        numbers = torch.randn((outputs, inputs), generator=generator) * 50
        shape: tuple[int, ...] = (outputs, 1) if per == "output" else ()
        if blocks is not None:
            shape = (math.ceil(outputs / blocks[0]), math.ceil(inputs / blocks[1]))
        found = scales(generator, *shape, size=0.002)
        return {"weight": numbers.to(torch.float8_e4m3fn), name: found, **(also or {})}

    def values(tensors: Tensors) -> Tensor:
        weight = tensors["weight"].float()
        if blocks is None:
            return weight * tensors[name]
        outputs, inputs = weight.shape
        return weight * spread(tensors[name], *blocks)[:outputs, :inputs]

    return pack, values


# Integers


def gptq(bits: int, *, minus: int, symmetric: bool, order: bool = False, group: int = GROUP) -> tuple[Pack, Values]:  # fmt: skip
    """`minus`: what zero points are stored less. `order`: groups of inputs in any order."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        size = inputs if group == -1 else group
        groups = inputs // size
        values = torch.randint(0, 2**bits, (inputs, outputs), generator=generator)
        zeros = torch.randint(1, 2**bits, (groups, outputs), generator=generator)
        if symmetric:
            zeros.fill_(2 ** (bits - 1))
        index = torch.arange(inputs, dtype=torch.int32) // size
        if order:
            index = index[torch.randperm(inputs, generator=generator)]
        return {
            "qweight": in_words(values, bits, 0),
            "qzeros": in_words(zeros - minus, bits, 1),
            "scales": scales(generator, groups, outputs, size=0.2 / 2**bits),
            "g_idx": index,
        }

    def values(tensors: Tensors) -> Tensor:
        index = tensors["g_idx"].long()
        zeros = out_of_words(tensors["qzeros"], bits, 1) + minus
        codes = out_of_words(tensors["qweight"], bits, 0)
        return ((codes - zeros[index]) * tensors["scales"].float()[index]).t()

    return pack, values


def in_words(values: Tensor, bits: int, dim: int) -> Tensor:
    """Pack numbers as GPTQ does: those of 3 bits run on from one int32 to the next."""
    if 32 % bits == 0:
        return words(values, bits, dim)
    turned = values.t() if dim == 0 else values
    ones = (turned[:, :, None] >> torch.arange(bits)) & 1  # bits, the lowest first
    packed = words(ones.flatten(1), 1, 1)
    return (packed.t() if dim == 0 else packed).contiguous()


def out_of_words(packed: Tensor, bits: int, dim: int) -> Tensor:
    if 32 % bits == 0:
        return numbers_of(packed, bits, dim)
    ones = numbers_of(packed.t() if dim == 0 else packed, 1, 1).unflatten(1, (-1, bits))
    values = (ones << torch.arange(bits)).sum(2)
    return values.t() if dim == 0 else values


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq() -> tuple[Pack, Values]:
    def turned(values: Tensor) -> Tensor:  # the places of neighbours within 32 bits
        return values.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)

    def back(values: Tensor) -> Tensor:
        found = torch.empty_like(values).unflatten(1, (-1, 8))
        found[:, :, list(AWQ_ORDER)] = values.unflatten(1, (-1, 8))
        return found.flatten(1)

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        groups = inputs // GROUP
        values, zeros = (
            torch.randint(0, 16, (rows, outputs), generator=generator) for rows in (inputs, groups)
        )
        return {
            "qweight": words(turned(values), 4, 1),
            "qzeros": words(turned(zeros), 4, 1),
            "scales": scales(generator, groups, outputs),
        }

    def values(tensors: Tensors) -> Tensor:
        codes, zeros = (back(numbers_of(tensors[name], 4, 1)) for name in ("qweight", "qzeros"))
        spread_zeros, spread_scales = (
            one.repeat_interleave(GROUP, 0) for one in (zeros, tensors["scales"].float())
        )
        return ((codes - spread_zeros) * spread_scales).t()

    return pack, values


def packed_integers(bits: int, *, symmetric: bool, group: int | None = GROUP, order: bool = False) -> tuple[Pack, Values]:  # fmt: skip
    """`pack-quantized` of compressed-tensors."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        groups = 1 if group is None else inputs // group
        values = torch.randint(0, 2**bits, (outputs, inputs), generator=generator)
        found = {
            "weight_packed": words(values, bits, 1),
            "weight_scale": scales(generator, outputs, groups, size=0.2 / 2**bits),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            zeros = torch.randint(0, 2**bits, (outputs, groups), generator=generator)
            found["weight_zero_point"] = words(zeros, bits, 0)
        if order:
            index = torch.arange(inputs, dtype=torch.int32) // (group or inputs)
            found["weight_g_idx"] = index[torch.randperm(inputs, generator=generator)]
        return found

    def values(tensors: Tensors) -> Tensor:
        codes = numbers_of(tensors["weight_packed"], bits, 1)
        inputs = codes.shape[1]
        index = torch.arange(inputs) // (group or inputs)
        if order:
            index = tensors["weight_g_idx"].long()
        zeros = torch.full(tensors["weight_scale"].shape, 2 ** (bits - 1))
        if not symmetric:
            zeros = numbers_of(tensors["weight_zero_point"], bits, 0)
        return (codes - zeros[:, index]) * tensors["weight_scale"][:, index]

    return pack, values


def whole_bytes(*, static: bool = False) -> tuple[Pack, Values]:
    """`int-quantized` of compressed-tensors."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        found = {
            "weight": random_bytes(generator, outputs, inputs).view(torch.int8),
            "weight_scale": scales(generator, outputs, 1, size=0.001),
        }
        if static:
            found |= {"input_scale": torch.tensor([0.1]), "input_zero_point": torch.tensor([0])}
        return found

    return pack, lambda tensors: tensors["weight"].float() * tensors["weight_scale"]


def row_bytes() -> tuple[Pack, Values]:
    """LLM.int8()."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        return {
            "weight": random_bytes(generator, outputs, inputs).view(torch.int8),
            "SCB": scales(generator, outputs, size=0.1),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    return pack, lambda tensors: tensors["weight"].float() * tensors["SCB"][:, None] / 127


# Four-bit floats


def e2m1(packed: Tensor) -> Tensor:
    table = torch.cat((E2M1, -E2M1))
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]


def nvfp4(values_name: str, whole_name: str, *, divides: bool) -> tuple[Pack, Values]:
    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        small = torch.rand((outputs, inputs // 16), generator=generator) * 100 + 1
        whole = torch.tensor(0.0005)
        found = {
            values_name: random_bytes(generator, outputs, inputs // 2),
            "weight_scale": small.to(torch.float8_e4m3fn),
            whole_name: 1 / whole if divides else whole,
        }
        if not divides:
            found["input_scale"] = torch.tensor(0.1)
        return found

    def values(tensors: Tensors) -> Tensor:
        whole = tensors[whole_name]
        small = spread(tensors["weight_scale"], 1, 16)
        return e2m1(tensors[values_name]) * small * (1 / whole if divides else whole)

    return pack, values


def mxfp4(name: str) -> tuple[Pack, Values]:
    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        exponents = torch.randint(118, 123, (outputs, inputs // 32), generator=generator)
        return {
            name: random_bytes(generator, outputs, inputs // 2),
            "weight_scale": exponents.to(torch.uint8),
        }

    def values(tensors: Tensors) -> Tensor:
        return e2m1(tensors[name]) * spread(2.0 ** (tensors["weight_scale"].float() - 127), 1, 32)

    return pack, values


NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0]
)  # fmt: skip
FP4 = torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])


def codes_of_a_table(
    kind: str, *, nested: bool, storage: torch.dtype = torch.uint8
) -> tuple[Pack, Values]:
    table = NF4 if kind == "nf4" else torch.cat((FP4, -FP4))

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        numbers = outputs * inputs
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "shape": [outputs, inputs],
            "dtype": "float32",
        }
        found = {
            "weight": random_bytes(generator, numbers // 2).view(storage)[:, None],
            "weight.absmax": scales(generator, numbers // 64, size=0.2),
            "weight.quant_map": table,
        }
        if nested:
            state |= {"nested_offset": 0.1, "nested_blocksize": 256, "nested_dtype": "float32"}
            found |= {
                "weight.absmax": random_bytes(generator, numbers // 64),
                "weight.nested_absmax": scales(generator, math.ceil(numbers / 64 / 256), size=0.1),
                "weight.nested_quant_map": torch.linspace(-1, 1, 256),
            }
        text = json.dumps(state).encode()
        found[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*text]).to(torch.uint8)
        return found

    def values(tensors: Tensors) -> Tensor:
        packed = tensors["weight"].flatten().view(torch.uint8)
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
        state = json.loads(bytes(tensors[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))
        found = tensors["weight.absmax"]
        if nested:
            steps = tensors["weight.nested_absmax"].repeat_interleave(256)[: len(found)]
            found = tensors["weight.nested_quant_map"][found.long()] * steps + 0.1
        return (table[codes] * found.repeat_interleave(64)).view(state["shape"])

    return pack, values


def exponents(group: int) -> tuple[Pack, Values]:
    """MXFP8: FP8 with a power of two for each group."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        numbers = torch.randn((outputs, inputs), generator=generator) * 50
        powers = torch.randint(115, 119, (outputs, inputs // group), generator=generator)
        return {
            "weight": numbers.to(torch.float8_e4m3fn),
            "weight_scale": powers.to(torch.uint8),
        }

    def values(tensors: Tensors) -> Tensor:
        powers = spread(2.0 ** (tensors["weight_scale"].float() - 127), 1, group)
        return tensors["weight"].float() * powers

    return pack, values


def four_dimensions() -> tuple[Pack, Values]:
    """ModelOpt's FP8_PB_WO."""
    pack, values = fp8(blocks=(128, 128), name="weight_scale")

    def packed(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        found = pack(outputs, inputs, generator)
        return found | {"weight_scale": found["weight_scale"][:, None, :, None].contiguous()}

    def unpacked(tensors: Tensors) -> Tensor:
        return values(tensors | {"weight_scale": tensors["weight_scale"][:, 0, :, 0]})

    return packed, unpacked


def codebooks(count: int, bits: int, outputs_of: int = 1) -> tuple[Pack, Values]:
    """AQLM, with vectors of 8 inputs."""

    def pack(outputs: int, inputs: int, generator: torch.Generator) -> Tensors:
        shape = (outputs // outputs_of, inputs // 8, count)
        codes = torch.randint(0, 2**bits, shape, generator=generator)
        kind = torch.int8 if bits <= 8 else torch.int16
        books = torch.randn((count, 2**bits, outputs_of, 8), generator=generator)
        return {
            "codes": codes.to(kind),  # which wraps around
            "codebooks": books,
            "scales": scales(generator, outputs // outputs_of, 1, 1, 1, size=0.1),
        }

    def values(tensors: Tensors) -> Tensor:
        unsigned = tensors["codes"].numpy().view("u1" if bits <= 8 else "u2").astype("i8")
        rows, columns, _ = unsigned.shape
        found = torch.zeros(rows * outputs_of, columns * 8)
        for index in range(count):
            vectors = tensors["codebooks"][index][torch.from_numpy(unsigned[:, :, index])]
            found += vectors.permute(0, 2, 1, 3).reshape(found.shape)
        return found * spread(tensors["scales"][:, :, 0, 0], outputs_of, 1)

    return pack, values


# Configs


def of_group(weights: Mapping[str, Any], kind: str, inputs: Any = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": kind,
        "ignore": ["lm_head", "re:.*gate$"],
        "quantization_status": "compressed",
    }


def float8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def integer(bits: int, strategy: str = "group", *, symmetric: bool = True, **more: Any) -> dict[str, Any]:  # fmt: skip
    size = {"group_size": GROUP} if strategy == "group" else {}
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric} | size | more  # fmt: skip


def of_gptq(bits: int, **more: Any) -> dict[str, Any]:
    fixed = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True}
    return fixed | {"desc_act": False} | more


def of_auto_round(bits: int, layout: str, **more: Any) -> dict[str, Any]:
    fixed = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": True}
    return fixed | {"data_type": "int", "packing_format": layout, "iters": 200} | more


def of_bitsandbytes(**more: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "gate"], **more}


def of_quark(weight: Mapping[str, Any], inputs: Any = None) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None},
        "exclude": ["lm_head", "re:.*gate$"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "quant_mode": "eager_mode",
    }


def of_aqlm(count: int, bits: int, outputs: int = 1) -> dict[str, Any]:
    return {
        "quant_method": "aqlm",
        "in_group_size": 8,
        "out_group_size": outputs,
        "num_codebooks": count,
        "nbits_per_codebook": bits,
        "linear_weights_not_to_quantize": ["lm_head.weight", "gate.weight"],
    }


def of_modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*gate"],
        **more,
    }


FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "gate"]}
_INPUT = {"input_scale": torch.tensor(0.1)}
_CT_FP8: dict[str, Any] = {"blocks": None, "name": "weight_scale"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
_QUARK_MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "ch_axis": -1,
    "group_size": 32,
    "scale_format": "e8m0",
}
_TOKEN8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_PACKED = ("weight_packed", "weight_global_scale")

FORMATS: Sequence[Format] = (
    Format(
        "FP8, a scale per block",
        FP8 | {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        *fp8(blocks=(128, 128), name="weight_scale_inv"),
    ),
    Format(
        "FP8, a scale per block, powers of two",
        FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        *fp8(blocks=(128, 128), name="weight_scale_inv"),
    ),
    Format(
        "FP8, a scale per tensor, static",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "gate"],
        },
        *fp8(blocks=None, name="weight_scale", also=_INPUT),
    ),
    Format(
        "FP8, a scale per tensor",
        FP8 | {"activation_scheme": "dynamic"},
        *fp8(blocks=None, name="weight_scale"),
    ),
    Format(
        "Meta's FP8",
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "gate"]},
        *fp8(**_CT_FP8, per="output"),
    ),
    Format(
        "compressed-tensors FP8, static",
        of_group(float8("tensor"), "float-quantized", float8("tensor")),
        *fp8(**_CT_FP8, also=_INPUT),
    ),
    Format(
        "compressed-tensors FP8, dynamic",
        of_group(float8("channel"), "float-quantized", float8("token", dynamic=True)),
        *fp8(**_CT_FP8, per="output"),
    ),
    Format(
        "compressed-tensors FP8, blocks",
        of_group(float8("block", block_structure=[128, 128]), "float-quantized"),
        *fp8(blocks=(128, 128), name="weight_scale"),
    ),
    Format(
        "compressed-tensors FP8, naive",
        of_group(float8("tensor"), "naive-quantized"),
        *fp8(**_CT_FP8),
    ),
    Format("ModelOpt FP8", of_modelopt("FP8"), *fp8(**_CT_FP8, also=_INPUT)),
    Format(
        "ModelOpt FP8 in hf_quant_config.json",
        {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*gate"]},
        *fp8(**_CT_FP8, also=_INPUT),
        elsewhere=True,
    ),
    Format(
        "ModelOpt FP8, a scale per output",
        of_modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        *fp8(**_CT_FP8, per="output"),
    ),
    Format(
        "ModelOpt NVFP4",
        of_modelopt("NVFP4", group_size=16),
        *nvfp4("weight", "weight_scale_2", divides=False),
    ),
    Format(
        "compressed-tensors NVFP4",
        of_group(_NVFP4, "nvfp4-pack-quantized", _NVFP4),
        *nvfp4(*_PACKED, divides=True),
    ),
    Format(
        "compressed-tensors NVFP4, inputs of 16 bits",
        of_group(_NVFP4, "nvfp4-pack-quantized"),
        *nvfp4(*_PACKED, divides=True),
    ),
    Format(
        "compressed-tensors MXFP4",
        of_group(_MXFP4, "mxfp4-pack-quantized"),
        *mxfp4("weight_packed"),
    ),
    Format(
        "compressed-tensors W4A16",
        of_group(integer(4), "pack-quantized"),
        *packed_integers(4, symmetric=True),
    ),
    Format(
        "compressed-tensors W4A16, asymmetric",
        of_group(integer(4, symmetric=False), "pack-quantized"),
        *packed_integers(4, symmetric=False),
    ),
    Format(
        "compressed-tensors W4A16, a scale per output",
        of_group(integer(4, "channel"), "pack-quantized"),
        *packed_integers(4, symmetric=True, group=None),
    ),
    Format(
        "compressed-tensors W4A16, inputs in any order",
        of_group(integer(4, actorder="group"), "pack-quantized"),
        *packed_integers(4, symmetric=True, order=True),
    ),
    Format(
        "compressed-tensors W8A16, inputs in any order",
        of_group(integer(8, symmetric=False, actorder="group"), "pack-quantized"),
        *packed_integers(8, symmetric=False, order=True),
    ),
    Format(
        "compressed-tensors W4A8",
        of_group(integer(4), "pack-quantized", _TOKEN8),
        *packed_integers(4, symmetric=True),
    ),
    Format(
        "compressed-tensors W4AFP8",
        of_group(integer(4), "pack-quantized", float8("token", dynamic=True)),
        *packed_integers(4, symmetric=True),
    ),
    Format(
        "compressed-tensors W8A16",
        of_group(integer(8, "channel"), "pack-quantized"),
        *packed_integers(8, symmetric=True, group=None),
    ),
    Format(
        "compressed-tensors W8A16, asymmetric",
        of_group(integer(8, symmetric=False), "pack-quantized"),
        *packed_integers(8, symmetric=False),
    ),
    Format(
        "compressed-tensors W8A8, dynamic",
        of_group(integer(8, "channel"), "int-quantized", _TOKEN8),
        *whole_bytes(),
    ),
    Format(
        "compressed-tensors W8A8, static",
        of_group(integer(8, "channel"), "int-quantized", integer(8, "tensor")),
        *whole_bytes(static=True),
    ),
    Format("GPTQ INT4", of_gptq(4), *gptq(4, minus=1, symmetric=True)),
    Format("GPTQ INT4, asymmetric", of_gptq(4, sym=False), *gptq(4, minus=1, symmetric=False)),
    Format(
        "GPTQ INT4, version 2",
        of_gptq(4, sym=False, checkpoint_format="gptq_v2"),
        *gptq(4, minus=0, symmetric=False),
    ),
    Format(
        "GPTQ INT4, a scale per output",
        of_gptq(4, group_size=-1),
        *gptq(4, minus=1, symmetric=True, group=-1),
    ),
    Format("GPTQ INT8", of_gptq(8), *gptq(8, minus=1, symmetric=True)),
    *(
        Format(f"GPTQ INT{bits}", of_gptq(bits), *gptq(bits, minus=1, symmetric=False))
        for bits in (2, 3)
    ),
    Format(
        "GPTQ INT4, inputs in any order",
        of_gptq(4, desc_act=True),
        *gptq(4, minus=1, symmetric=True, order=True),
    ),
    Format(
        "GPTQ INT4, modules of other bits",
        of_gptq(8, dynamic={"+:.*": {"bits": 4}, "-:.*gate": {}}),
        *gptq(4, minus=1, symmetric=True),
    ),
    Format(
        "AWQ",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head", ".gate."],
        },
        *awq(),
    ),
    Format(
        "AutoRound INT4 in GPTQ's layout",
        of_auto_round(4, "auto_round:auto_gptq"),
        *gptq(4, minus=1, symmetric=True),
    ),
    Format(
        "AutoRound INT4 in its own layout",
        of_auto_round(4, "auto_round", sym=False),
        *gptq(4, minus=0, symmetric=False),
    ),
    Format(
        "AutoRound INT4 in AWQ's layout",
        of_auto_round(4, "auto_round:auto_awq", sym=False),
        *awq(),
    ),
    Format(
        "AutoRound INT8",
        of_auto_round(8, "auto_round:auto_gptq"),
        *gptq(8, minus=1, symmetric=True),
    ),
    Format(
        "AutoRound INT2",
        of_auto_round(2, "auto_round:auto_gptq"),
        *gptq(2, minus=1, symmetric=True),
    ),
    Format(
        "bitsandbytes NF4",
        of_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        *codes_of_a_table("nf4", nested=False),
    ),
    Format(
        "bitsandbytes NF4, nested",
        of_bitsandbytes(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        *codes_of_a_table("nf4", nested=True),
    ),
    Format(
        "bitsandbytes FP4",
        of_bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        *codes_of_a_table("fp4", nested=False),
    ),
    Format(
        "bitsandbytes NF4, stored as bfloat16",
        of_bitsandbytes(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage="bfloat16"
        ),
        *codes_of_a_table("nf4", nested=False, storage=torch.bfloat16),
    ),
    Format("bitsandbytes INT8", of_bitsandbytes(load_in_8bit=True), *row_bytes()),
    Format("ModelOpt FP8, blocks", of_modelopt("FP8_PB_WO"), *four_dimensions()),
    Format("ModelOpt MXFP8", of_modelopt("MXFP8"), *exponents(32)),
    Format(
        "ModelOpt, formats of single layers",
        of_modelopt("MIXED_PRECISION"),
        *fp8(**_CT_FP8, also=_INPUT),
        named={"quantized_layers": {"quant_algo": "FP8"}},
    ),
    Format(
        "Quark FP8",
        of_quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3"}),
        *fp8(**_CT_FP8, also=_INPUT),
    ),
    Format(
        "Quark FP8, K and V in FP8",
        of_quark(_QUARK_FP8)
        | {
            "layer_quant_config": {
                "*k_proj": {
                    "weight": _QUARK_FP8,
                    "input_tensors": None,
                    "output_tensors": _QUARK_FP8,
                }
            }
        },
        *fp8(**_CT_FP8, also={"output_scale": torch.tensor(0.1)}),
    ),
    Format(
        "Quark FP8, a scale per output",
        of_quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}),
        *fp8(**_CT_FP8, per="output"),
    ),
    Format("Quark MXFP4", of_quark(_QUARK_MXFP4), *mxfp4("weight")),
    Format("AQLM, one codebook", of_aqlm(1, 10), *codebooks(1, 10)),
    Format("AQLM, two codebooks", of_aqlm(2, 8), *codebooks(2, 8)),
    Format("AQLM, vectors of several outputs", of_aqlm(2, 8, 4), *codebooks(2, 8, 4)),
)

# which no format reads -> a config of one
REFUSED: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors, rotated weights": of_group(integer(4), "pack-quantized")
    | {"transform_config": {"config_groups": {"R1": {}}}},
    "compressed-tensors, sparse weights": of_group(float8("channel"), "float-quantized")
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "GPTQ in Marlin's order": of_gptq(4, checkpoint_format="marlin"),
    "AWQ for one kernel": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "AutoRound MXFP4": of_auto_round(4, "auto_round:llm_compressor", data_type="mx_fp"),
    "ModelOpt AWQ": of_modelopt("W4A16_AWQ"),
    "HQQ": {"quant_method": "hqq"},
    "torchao": {"quant_method": "torchao"},
    "Quanto": {"quant_method": "quanto"},
    "EETQ": {"quant_method": "eetq"},
    "BitNet": {"quant_method": "bitnet"},
    "VPTQ": {"quant_method": "vptq"},
    "HIGGS": {"quant_method": "higgs"},
    "SpQR": {"quant_method": "spqr"},
    "FP-Quant": {"quant_method": "fp_quant"},
    "SINQ": {"quant_method": "sinq"},
}


# Checkpoints


def is_quantized(name: str) -> bool:
    """Return True for weights of linear layers but for routers and the head."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return name.endswith(".weight") and (
        module.endswith("_proj") or (".experts." in name and module[0] == "w")
    )


def save_in(
    form: Format, model_type: str, directory: Path, *, leave_out: str = "no module", **sizes: Any
) -> Any:
    """Save a small checkpoint of a type, in a format. Returns transformers' model with the values
    that it has. `leave_out`: a part of the names of modules that stay plain."""
    config = tiny(model_type)
    for name, value in {**SIZES, **sizes}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    reference = random_model(config)
    reference.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not is_quantized(name) or leave_out in name:
            stored[name] = tensor
            continue
        packed = form.pack(*tensor.shape, generator)
        tensors[name] = form.values(packed).float().contiguous()
        module = name.removesuffix("weight")
        stored |= {f"{module}{word}": one.clone().contiguous() for word, one in packed.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    reference = type(reference).from_pretrained(directory, dtype=torch.float32)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    file = directory / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    modules = [name.removesuffix(".weight") for name in tensors if is_quantized(name)]
    lists = {key: dict.fromkeys(modules, own) for key, own in form.named.items()}
    if form.elsewhere:
        said = {"producer": {"name": "modelopt"}, "quantization": form.config}
        (directory / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        file.write_text(json.dumps(fields | {"quantization_config": {**form.config, **lists}}))
    return reference


def expected_tokens(reference: Any) -> Tensor:
    with torch.no_grad():
        found = [greedy(reference, prompt) for prompt in PROMPTS]
    return torch.tensor(found, dtype=torch.float64)


def is_exact(form: Format) -> bool:
    """Return True if a checkpoint in a format gives the tokens and log-probabilities of its
    values."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache"),
    ):
        directory = Path(folder) / "model"
        directory.mkdir()
        expected = expected_tokens(save_in(form, "qwen3", directory))
        return bool(torch.allclose(served_tokens(directory), expected, atol=1e-3))


def why_refused(config: Mapping[str, Any]) -> str:
    """Return the reason for which a checkpoint with a config is refused."""
    try:
        choose_quantization(None, config, QUANTIZATIONS, "")
    except UnsupportedError as error:
        reason = str(error).removeprefix("config.json: quantization_config: ")
        return re.sub(r"; (served|known) are .*| \(only .*\)(?=$|:)", "", reason).replace("|", "/")
    raise AssertionError(f"served: {config}")


# The table

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
BEGIN = "<!-- python -m tests.models.checkpoint_formats -->"
END = "<!-- end of formats -->"


def table() -> str:
    """Return the text of the page, for formats that `is_exact` says are served."""
    types = [one.name for one in TYPES.values() if one.name not in ("F64", "F32", "F16", "BF16")]
    served = len(FORMATS)
    rows = [
        f"| {form.name} | `{form.config.get('quant_method', 'modelopt')}` |" for form in FORMATS
    ]
    refused = [f"| {name} | {why_refused(config)} |" for name, config in REFUSED.items()]
    lines = [
        f"Of {served + len(REFUSED)} published ways of storing quantized weights in safetensors "
        f"files, {served} are served, and of the",
        f"types of GGUF files {len(types)}: {', '.join(types)}.",
        "",
        "| served | `quant_method` |",
        "|---|---|",
        *rows,
        "",
        "| refused | because |",
        "|---|---|",
        *refused,
    ]
    return "\n".join(lines)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wrong = [form.name for form in FORMATS if not is_exact(form)]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
