"""Small checkpoints in published ways of storing quantized weights, and the values that the
definition of each gives these weights, written down once more apart from the product."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.model_types import PROMPTS, greedy
from tests.models.tiny_configs import random_model, tiny

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
    they mean. `elsewhere`: the config is in `hf_quant_config.json`."""

    name: str
    config: Mapping[str, Any]
    pack: Pack
    values: Values
    elsewhere: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)


def random_bytes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def scales(generator: torch.Generator, *shape: int, size: float = 0.02) -> Tensor:
    return torch.rand(shape, generator=generator) * size + size / 10


def words(values: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned numbers of so many bits along a dimension, the first one lowest."""
    count = 32 // bits
    turned = (values.t() if dim == 0 else values).long()
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


def codes_of_a_table(kind: str, *, nested: bool) -> tuple[Pack, Values]:
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
            "weight": random_bytes(generator, numbers // 2, 1),
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
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
        state = json.loads(bytes(tensors[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))
        found = tensors["weight.absmax"]
        if nested:
            steps = tensors["weight.nested_absmax"].repeat_interleave(256)[: len(found)]
            found = tensors["weight.nested_quant_map"][found.long()] * steps + 0.1
        return (table[codes] * found.repeat_interleave(64)).view(state["shape"])

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
    Format("bitsandbytes INT8", of_bitsandbytes(load_in_8bit=True), *row_bytes()),
)


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
    if form.elsewhere:
        said = {"producer": {"name": "modelopt"}, "quantization": form.config}
        (directory / "hf_quant_config.json").write_text(json.dumps(said))
    else:
        file.write_text(json.dumps(fields | {"quantization_config": form.config}))
    return reference


def expected_tokens(reference: Any) -> Tensor:
    with torch.no_grad():
        found = [greedy(reference, prompt) for prompt in PROMPTS]
    return torch.tensor(found, dtype=torch.float64)
