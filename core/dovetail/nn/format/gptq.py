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
from dovetail.nn.format.dequantized import Dequantized
from dovetail.nn.format.int4 import MIDDLE, Int4, Unpacked
from dovetail.nn.format.int8 import MIDDLE as MIDDLE_OF_BYTES
from dovetail.nn.format.int8 import Int8, signed
from dovetail.nn.format.int8 import Unpacked as UnpackedBytes
from dovetail.nn.format.module_names import MARK, ModuleNames
from dovetail.nn.format.packing import (
    BYTES,
    PACKED,
    bytes_of,
    checked_groups,
    contiguous_groups,
    numbers_of,
    share_of,
    unpacked,
)
from dovetail.nn.format.reading import WHERE, group_size, keys_and_values, within
from dovetail.nn.format.stored import TensorShape, checked_scales
from dovetail.nn.parameter import Part

MAKING = NoEffect("how the weights were computed")
KERNELS = NoEffect("a hint for the kernels of other engines")
FILES = NoEffect("names of other files")
KEYS = FileKeys(
    "gptq",
    {
        "quant_method": Used("the format"),
        "bits": Used("2 to 8; others are refused"),
        "group_size": Used("inputs per scale"),
        "sym": Used("whether all zero points are the middle"),
        "checkpoint_format": Used(
            "gptq stores zero points minus 1, gptq_v2 as they are; others are refused"
        ),
        "format": Used("the same, where `checkpoint_format` is missing"),
        "modules_in_block_to_quantize": Used("the quantized modules; all if it is missing"),
        "desc_act": Used("whether groups of inputs are in any order, by `g_idx`"),
        "dynamic": Used('settings of modules whose names match; "-:" leaves them plain'),
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


_OF_MODULES = frozenset(("bits", "group_size", "sym", "desc_act"))  # in `dynamic`


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


@dataclass(frozen=True, slots=True)
class GptqAtLoad(Dequantized):
    """GPTQ's layout with inputs in any order of groups (`desc_act`), or of other than 4 or 8 bits."""

    bits: int
    group: int | None
    less_one: bool = True

    def __str__(self) -> str:
        return f"int{self.bits}, dequantized at load"

    def whole(self, outputs: int, inputs: int) -> Mapping[str, TensorShape]:
        group = self.group or inputs
        period = 32 if 32 % self.bits else 32 // self.bits  # numbers in whole integers
        if inputs % period or outputs % period:
            raise UnsupportedError(
                f"{outputs} outputs or {inputs} inputs are no multiple of the {period} that are "
                "stored together"
            )
        groups = -(-inputs // group)
        return {
            "qweight": TensorShape(((inputs * self.bits // 32, outputs),)),
            "qzeros": TensorShape(((groups, outputs * self.bits // 32),)),
            "scales": TensorShape(((groups, outputs),)),
            "g_idx": TensorShape(((inputs,),), optional=True),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = numbers_of(tensors["qweight"], self.bits, 0)
        scales = checked_scales(tensors["scales"], 2.0**self.bits)
        index = tensors.get("g_idx")
        if index is None:
            index = torch.arange(len(codes), device=codes.device) // (self.group or len(codes))
        index = checked_groups(index, len(scales))
        zeros = numbers_of(tensors["qzeros"], self.bits, 1).float() + self.less_one
        return ((codes.float() - zeros[index]) * scales[index]).t()


def format_of(
    bits: Any, group: int | None, symmetric: bool, *, less_one: bool, ordered: bool = False
) -> WeightFormat:
    """Return the format of GPTQ's layout. `ordered`: groups of inputs may be in any order. Raises
    `UnsupportedError` for other than 2 to 8 bits."""
    if type(bits) is not int or not 2 <= bits <= 8:
        raise UnsupportedError(f"{WHERE}: bits = {shown(bits)} is not implemented (only 2 to 8)")
    if ordered or bits not in (4, 8):
        return GptqAtLoad(bits, group, less_one)
    made = GptqInt4 if bits == 4 else GptqInt8
    return made(group, symmetric, less_one)


class Gptq(Quantization):
    """Quantizes all linear layers except the head, or only those that the config lists."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        packing = config.get("checkpoint_format") or config.get("format") or "gptq"
        if packing not in ("gptq", "gptq_v2"):
            raise UnsupportedError(
                f"quantization_config: checkpoint_format = {shown(packing)} is not implemented "
                f"(only gptq, gptq_v2): other layouts are made for one kernel"
            )
        self._less_one = packing == "gptq"
        self.format = self._format(config)
        self._quantized = tuple(
            str(name) for some in config.get("modules_in_block_to_quantize") or () for name in some
        )
        self._own = self._of_single_modules(config)

    def _format(self, config: Mapping[str, Any]) -> WeightFormat:
        return format_of(
            config.get("bits"),
            group_size(config, "group_size"),
            bool(config.get("sym", True)),
            less_one=self._less_one,
            ordered=bool(config.get("desc_act")),
        )

    def _of_single_modules(
        self, config: Mapping[str, Any]
    ) -> list[tuple[ModuleNames, WeightFormat]]:
        """Return the formats of modules with settings of their own."""
        found: list[tuple[ModuleNames, WeightFormat]] = []
        where = f"{WHERE}: dynamic"
        for name, settings in keys_and_values(config.get("dynamic") or {}, where).items():
            own = keys_and_values(settings, f"{where}.{name}")
            if unknown := set(own) - _OF_MODULES:
                raise UnsupportedError(f"{where}.{name}: {', '.join(sorted(unknown))} is unknown")
            is_plain = str(name).startswith("-:")
            form = DENSE if is_plain else self._format({**config, **own})
            found.append(
                (ModuleNames([f"{MARK}{str(name).removeprefix('-:').removeprefix('+:')}"]), form)
            )
        return found

    def of_module(self, name: str) -> WeightFormat:
        if self._quantized and not any(within(name, listed) for listed in self._quantized):
            return DENSE
        return next((form for names, form in self._own if name in names), self.format)

    def __str__(self) -> str:
        return str(self.format)
