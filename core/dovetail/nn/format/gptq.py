"""`quant_method: gptq`: INT4 and INT8 checkpoints of GPTQ (arXiv:2210.17323), in the layout of
AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.int4 import MIDDLE, Int4, Unpacked
from dovetail.nn.format.int8 import MIDDLE as MIDDLE_OF_BYTES
from dovetail.nn.format.int8 import Int8, signed
from dovetail.nn.format.int8 import Unpacked as UnpackedBytes
from dovetail.nn.format.packing import (
    BYTES,
    PACKED,
    bytes_of,
    contiguous_groups,
    share_of,
    unpacked,
)
from dovetail.nn.format.reading import WHERE, group_size, within
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

MAKING = NoEffect("how the weights were computed")
KERNELS = NoEffect("a hint for the kernels of other engines")
FILES = NoEffect("names of other files")
KEYS = FileKeys(
    "gptq",
    {
        "quant_method": Used("the format"),
        "bits": Used("4 or 8; others are refused"),
        "group_size": Used("inputs per scale"),
        "sym": Used("whether all zero points are the middle"),
        "checkpoint_format": Used(
            "gptq stores zero points minus 1, gptq_v2 as they are; others are refused"
        ),
        "format": Used("the same, where `checkpoint_format` is missing"),
        "modules_in_block_to_quantize": Used("the quantized modules; all if it is missing"),
        "desc_act": Refused("groups of inputs must be contiguous", (False,)),
        "dynamic": Refused("settings of single modules", ({},)),
        "is_marlin_format": Refused("weights in the order of one kernel", (False,)),
        "lm_head": Refused("a quantized output layer", (False,)),
        **dict.fromkeys(("batch_size", "block_name_to_quantize", "cache_block_outputs"), MAKING),
        **dict.fromkeys(
            ("act_group_aware", "damp_auto_increment", "damp_percent", "dataset"), MAKING
        ),
        **dict.fromkeys(
            ("model_seqlen", "module_name_preceding_first_block", "mse", "offload_to_disk"), MAKING
        ),
        **dict.fromkeys(("pad_token_id", "quantizer", "static_groups", "tokenizer"), MAKING),
        **dict.fromkeys(("true_sequential", "v2", "v2_alpha", "meta"), MAKING),
        **dict.fromkeys(
            ("backend", "disable_exllama", "exllama_config", "max_input_length"), KERNELS
        ),
        **dict.fromkeys(("pack_dtype", "use_cuda_fp16", "use_exllama"), KERNELS),
        **dict.fromkeys(("model_file_base_name", "model_name_or_path"), FILES),
    },
)


def _tensors(part: Part, groups: int, group: int | None, packed: int) -> Mapping[str, TensorShape]:
    """Return the tensors of a part, transposed, with `packed` numbers in an int32. `group`: inputs
    that share a scale; None: all."""
    outputs, inputs = part.source_shape
    of_group = group or inputs
    return {
        "qweight": share_of(part, (inputs // packed, outputs), (1, 0), (1, packed)),
        "qzeros": share_of(part, (groups, outputs // packed), (1, 0), (packed, of_group)),
        "scales": share_of(part, (groups, outputs), (1, 0), (1, of_group)),
        "g_idx": TensorShape(((inputs,),), optional=True),
    }


@dataclass(frozen=True, slots=True)
class GptqInt4(Int4):
    """Transposed: weights [inputs / 8, outputs], packed along the inputs, zero points [groups,
    outputs / 8]. `less_one`: zero points are stored minus 1."""

    less_one: bool = True

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        return _tensors(part, self._groups(part.source_shape[1]), self.group, PACKED)

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        contiguous_groups(tensors, self.group)
        values = unpacked(tensors["qweight"], 0).t()
        stored = unpacked(tensors["qzeros"], 1).t()
        # Some writers label one version as the other; if all zero points are the middle, the values
        # tell which it is.
        is_middle = any(bool((stored == value).all()) for value in (MIDDLE, MIDDLE - 1))
        if self.symmetric and not is_middle:
            raise ModelLoadError(
                f"qzeros: a zero point isn't {MIDDLE}, although the config says sym"
            )
        zeros = stored + self.less_one
        return Unpacked(values, tensors["scales"].t(), None if self.symmetric else zeros)


@dataclass(frozen=True, slots=True)
class GptqInt8(Int8):
    """GPTQ's layout, transposed: see `GptqInt4`."""

    less_one: bool = True

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        return _tensors(part, self._groups(part.source_shape[1]), self.group, BYTES)

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> UnpackedBytes:
        contiguous_groups(tensors, self.group)
        values = signed(bytes_of(tensors["qweight"], 0).t())
        stored = bytes_of(tensors["qzeros"], 1).t().to(torch.int16)
        if self.symmetric and not any(
            bool((stored == value).all()) for value in (MIDDLE_OF_BYTES, MIDDLE_OF_BYTES - 1)
        ):
            raise ModelLoadError(
                f"qzeros: a zero point isn't {MIDDLE_OF_BYTES}, although the config says sym"
            )
        zeros = None if self.symmetric else stored + self.less_one - MIDDLE_OF_BYTES
        return UnpackedBytes(values, tensors["scales"].t(), zeros)


class Gptq(Quantization):
    """Quantizes all linear layers except the head, or only those that the config lists."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        bits = config.get("bits")
        if bits not in (4, 8):
            raise UnsupportedError(
                f"quantization_config: bits = {shown(bits)} is not implemented (only 4, 8)"
            )
        packing = config.get("checkpoint_format") or config.get("format") or "gptq"
        if packing not in ("gptq", "gptq_v2"):
            raise UnsupportedError(
                f"quantization_config: checkpoint_format = {shown(packing)} is not implemented "
                f"(only gptq, gptq_v2)"
            )
        made = GptqInt4 if bits == 4 else GptqInt8
        symmetric = bool(config.get("sym", True))
        self.format: GptqInt4 | GptqInt8 = made(
            group_size(config, "group_size"), symmetric, packing == "gptq"
        )
        self._quantized = tuple(
            str(name) for some in config.get("modules_in_block_to_quantize") or () for name in some
        )

    def of_module(self, name: str) -> WeightFormat:
        return (
            self.format
            if not self._quantized or any(within(name, listed) for listed in self._quantized)
            else DENSE
        )

    def __str__(self) -> str:
        return str(self.format)
