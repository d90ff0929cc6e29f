"""`quant_method: gptq`: INT4 checkpoints of GPTQ (arXiv:2210.17323), in the layout of AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.checks import shown
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.int4 import MIDDLE, Int4, Unpacked
from dovetail.nn.format.packing import PACKED, share_of, unpacked
from dovetail.nn.format.reading import group_size, refuse_others, within
from dovetail.nn.format.stored import TensorShape
from dovetail.nn.parameter import Part

_READ = {"quant_method", "bits", "group_size", "sym", "checkpoint_format", "modules_in_block_to_quantize"}
_OF_MAKING = {  # how the weights were computed, and hints for other engines' kernels: no effect on values
    *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset"),
    *("disable_exllama", "exllama_config", "max_input_length", "meta", "model_file_base_name", "model_name_or_path", "model_seqlen"),
    *("module_name_preceding_first_block", "mse", "pack_dtype", "pad_token_id", "quantizer", "static_groups", "tokenizer"),
    *("true_sequential", "use_cuda_fp16", "use_exllama"),
}


@dataclass(frozen=True, slots=True)
class GptqInt4(Int4):
    """Transposed: weights [inputs / 8, outputs], packed along the inputs, zero points [groups, outputs / 8]. `less_one`: zero points are stored
    minus 1."""

    less_one: bool = True

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        groups, of_group = self._groups(inputs), self.group or inputs
        return {
            "qweight": share_of(part, (inputs // PACKED, outputs), (1, 0), (1, PACKED)),
            "qzeros": share_of(part, (groups, outputs // PACKED), (1, 0), (PACKED, of_group)),
            "scales": share_of(part, (groups, outputs), (1, 0), (1, of_group)),
            "g_idx": TensorShape(((inputs,),), optional=True),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        values = unpacked(tensors["qweight"], 0).t()
        if (groups := tensors.get("g_idx")) is not None:
            size = self.group or len(groups)
            if not torch.equal(groups.long().cpu(), torch.arange(len(groups)) // size):
                raise ModelLoadError("g_idx: groups of non-contiguous inputs (desc_act) are not implemented")
        zeros = unpacked(tensors["qzeros"], 1).t() + self.less_one
        if self.symmetric and not bool((zeros == MIDDLE).all()):
            raise ModelLoadError(f"qzeros: a zero point isn't {MIDDLE}, although the config says sym")
        return Unpacked(values, tensors["scales"].t(), None if self.symmetric else zeros)


class Gptq(Quantization):
    """Quantizes all linear layers except the head, or only those that the config lists."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        if config.get("desc_act"):
            raise UnsupportedError("quantization_config: desc_act = True is not implemented: groups of inputs must be contiguous")
        refuse_others(config, _READ | _OF_MAKING)
        if config.get("bits") != 4:
            raise UnsupportedError(f"quantization_config: bits = {shown(config.get('bits'))} is not implemented (only 4)")
        if (packing := config.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            raise UnsupportedError(f"quantization_config: checkpoint_format = {shown(packing)} is not implemented (only gptq, gptq_v2)")
        self.format = GptqInt4(group_size(config, "group_size"), bool(config.get("sym", True)), packing == "gptq")
        self._quantized = tuple(str(name) for some in config.get("modules_in_block_to_quantize") or () for name in some)

    def of_module(self, name: str) -> WeightFormat:
        return self.format if not self._quantized or any(within(name, listed) for listed in self._quantized) else DENSE

    def __str__(self) -> str:
        return str(self.format)
