"""`quant_method: bitsandbytes`: checkpoints of bitsandbytes in NF4, FP4 (arXiv:2305.14314) and INT8
(arXiv:2208.07339).

A 4-bit number is an index into a table; the numbers of a matrix, row by row, are cut into blocks
that share a scale. These scales may be bytes themselves, indices into a second table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.base.bounded_json import JsonBounds, WrongJsonError, read_json
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.int8 import LARGEST, Int8, Unpacked
from dovetail.nn.format.packing import share_of
from dovetail.nn.format.reading import WHERE, names, within
from dovetail.nn.format.stored import StoredWeight, TensorShape, checked_scales
from dovetail.nn.format.widened import WidenedFormat, own_inputs, places
from dovetail.nn.parameter import Part, Weight

_THRESHOLD = NoEffect("inputs keep 16 bits, so that none is an outlier")
_COMPUTING = NoEffect("`dtype` says in which numbers are computed")
KEYS = FileKeys(
    "bitsandbytes",
    {
        "quant_method": Used("the format"),
        "load_in_4bit": Used("NF4 or FP4"),
        "load_in_8bit": Used("INT8"),
        "_load_in_4bit": Used("the same"),
        "_load_in_8bit": Used("the same"),
        "bnb_4bit_quant_type": Used("nf4 or fp4"),
        "bnb_4bit_use_double_quant": Used("whether scales are bytes"),
        "bnb_4bit_quant_storage": Used("the dtype that the bytes are stored as"),
        "bnb_4bit_compute_dtype": _COMPUTING,
        "llm_int8_skip_modules": Used("modules that aren't quantized"),
        "llm_int8_threshold": _THRESHOLD,
        "llm_int8_has_fp16_weight": Refused("weights of 16 bits", (False,)),
        "llm_int8_enable_fp32_cpu_offload": NoEffect("where transformers computes"),
    },
)
# tables of numbers by kind: NF4's are quantiles of a normal distribution, in the paper's appendix E
_TABLES = {
    "nf4": torch.tensor(
        (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        )
    ),
    "fp4": torch.tensor(
        [
            sign * value
            for sign in (1, -1)
            for value in (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
        ]
    ),
}
_STORAGES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
BLOCK = 64  # numbers per scale; transformers has no setting for it
NESTED = 256  # scales per scale of scales
_STATE = JsonBounds(parts=1_000, depth=5)
_MAX_STATE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class Codes(WidenedFormat):
    """`kind`: nf4 or fp4. `nested`: scales are bytes. Kept as codes [outputs, inputs / 2], even
    inputs in the high half of a byte, with scales in float32; the table is a `zeros`."""

    kind: str
    nested: bool
    storage: str = "uint8"  # a key in `_STORAGES`

    def __str__(self) -> str:
        return self.kind

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        for part in weight.parts.values():
            whole = part.source_shape[1]
            if whole % BLOCK or (part.dim == 1 and (part.start % BLOCK or part.size % BLOCK)):
                raise UnsupportedError(
                    f"a rank's share of {whole} inputs is {part.size}, no multiple of the {BLOCK} "
                    f"that share a scale"
                )
        values = torch.zeros((outputs, inputs // 2), dtype=torch.uint8, device=device)
        scales = torch.ones((outputs, inputs // BLOCK), device=device)
        return StoredWeight(self, weight, values, scales, _TABLES[self.kind].to(device))

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        outputs, inputs = weight.layer_shape
        assert weight.zeros is not None
        codes = torch.stack((weight.data >> 4, weight.data & 15), -1).view(outputs, -1, BLOCK)
        return (weight.zeros[codes.long()] * weight.scales[:, :, None]).view(outputs, inputs)

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        numbers = outputs * inputs
        blocks = numbers // BLOCK
        stored = numbers // 2 // _STORAGES[self.storage].itemsize
        tensors = {
            "weight": TensorShape(((stored, 1), (1, stored))),
            "weight.absmax": TensorShape(((blocks,),)),
            "weight.quant_map": TensorShape(((16,),)),
        }
        if self.nested:
            tensors["weight.nested_absmax"] = TensorShape(((-(-blocks // NESTED),),))
            tensors["weight.nested_quant_map"] = TensorShape(((256,),))
        # JSON, of any length
        tensors[f"weight.quant_state.bitsandbytes__{self.kind}"] = _Text(())
        return tensors

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        outputs, inputs = part.source_shape
        state = _state_of(tensors[f"weight.quant_state.bitsandbytes__{self.kind}"])
        for name, expected in (("blocksize", BLOCK), ("quant_type", self.kind)):
            if state.get(name) != expected:
                raise ModelLoadError(
                    f"quant_state: {name} = {shown(state.get(name))} is not implemented (only "
                    f"{expected})"
                )
        if state.get("shape") != [outputs, inputs]:
            raise ModelLoadError(f"quant_state: the shape is {shown(state.get('shape'))}")
        values = tensors["weight"]
        if values.dtype != _STORAGES[self.storage]:
            raise ModelLoadError(
                f"expected {self.storage}, found {str(values.dtype).removeprefix('torch.')}"
            )
        values = values.flatten().contiguous().view(torch.uint8)
        table = tensors["weight.quant_map"].float()
        assert weight.zeros is not None
        if not torch.allclose(table, weight.zeros, atol=1e-6):
            raise ModelLoadError(f"weight.quant_map isn't the table of {self.kind}")
        scales = checked_scales(self._scales(tensors, state)).view(outputs, -1)
        self._place(weight, part, values.reshape(outputs, -1), scales)

    def _scales(
        self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the scales [blocks]."""
        scales = tensors["weight.absmax"]
        if not self.nested:
            return scales
        offset: Any = state.get("nested_offset")
        if scales.dtype != torch.uint8 or type(offset) not in (int, float):
            raise ModelLoadError("weight.absmax: expected uint8, and nested_offset in quant_state")
        if state.get("nested_blocksize", NESTED) != NESTED:
            raise ModelLoadError(f"quant_state: nested_blocksize isn't {NESTED}")
        steps, table = (
            checked_scales(tensors[f"weight.{name}"], name=f"weight.{name}")
            for name in ("nested_absmax", "nested_quant_map")
        )
        steps = steps.repeat_interleave(NESTED)[: len(scales)]
        found: torch.Tensor = table[scales.long()] * steps + offset
        return found

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        assert weight.zeros is not None
        own = own_inputs(part, rows)
        groups = own.reshape(len(own), -1, BLOCK)
        scales = groups.abs().amax(2)
        steps = scales.masked_fill(scales == 0, 1.0)
        order = weight.zeros.argsort()
        table = weight.zeros[order]
        codes = order[torch.bucketize(groups / steps[:, :, None], (table[1:] + table[:-1]) / 2)]
        codes = codes.to(torch.uint8).flatten(1)
        for at in places(weight, part, first, len(own)):
            weight.data[at] = (codes[:, ::2] << 4) | codes[:, 1::2]
            weight.scales[at] = scales

    def _place(
        self, weight: StoredWeight, part: Part, values: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Write this rank's share of a whole tensor."""
        start, size = part.start, part.size
        if part.dim == 0:
            rows = slice(start, start + size * part.stride, part.stride)
            values, scales = values[rows], scales[rows]
        else:
            values = values[:, start // 2 : (start + size) // 2]
            scales = scales[:, start // BLOCK : (start + size) // BLOCK]
        for at in places(weight, part, 0, len(values)):
            weight.data[at] = values
            weight.scales[at] = scales


@dataclass(frozen=True, slots=True)
class RowInt8(Int8):
    """LLM.int8(): a largest number for each output, which is stored as 127."""

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        outputs, inputs = part.source_shape
        dim, start, size = (0, part.start, part.size) if part.dim == 0 else (None, 0, 0)
        return {
            "weight": share_of(part, (outputs, inputs), (0, 1), (1, 1)),
            "SCB": TensorShape(((outputs,),), dim, start, size, stride=part.stride),
            "weight_format": TensorShape(((), (1,)), optional=True),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Unpacked:
        values = tensors["weight"]
        if values.dtype != torch.int8:
            raise ModelLoadError(f"expected int8, found {str(values.dtype).removeprefix('torch.')}")
        order = tensors.get("weight_format")
        if order is not None and bool((order.float() != 0).any()):
            raise ModelLoadError("weight_format: only the order of rows is implemented (0)")
        return Unpacked(values, checked_scales(tensors["SCB"], name="SCB")[:, None] / LARGEST)


@dataclass(frozen=True, slots=True)
class _Text(TensorShape):
    """Bytes of any number, up to `_MAX_STATE`."""

    def read(self, source: Any) -> torch.Tensor:
        found: torch.Tensor = source if isinstance(source, torch.Tensor) else source[...]
        if found.dtype != torch.uint8 or found.ndim != 1 or len(found) > _MAX_STATE:
            raise ModelLoadError("expected a text of bytes")
        return found


class BitsAndBytes(Quantization):
    """Quantizes all linear layers except the head and those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        in_4, in_8 = (
            bool(config.get(f"load_in_{bits}bit") or config.get(f"_load_in_{bits}bit"))
            for bits in (4, 8)
        )
        if in_4 == in_8:
            raise ModelLoadError(f"{WHERE}: exactly one of load_in_4bit and load_in_8bit is true")
        kind: Any = config.get("bnb_4bit_quant_type", "fp4")
        if in_4 and kind not in tuple(_TABLES):
            raise UnsupportedError(
                f"{WHERE}: bnb_4bit_quant_type = {shown(kind)} is not implemented (only "
                f"{', '.join(_TABLES)})"
            )
        nested = bool(config.get("bnb_4bit_use_double_quant", False))
        storage: Any = config.get("bnb_4bit_quant_storage") or "uint8"
        if in_4 and storage not in tuple(_STORAGES):
            raise UnsupportedError(
                f"{WHERE}: bnb_4bit_quant_storage = {shown(storage)} is not implemented (only "
                f"{', '.join(_STORAGES)})"
            )
        self.format: WeightFormat = Codes(kind, nested, storage) if in_4 else RowInt8()
        self._left_out = names(config, "llm_int8_skip_modules") or ("lm_head",)

    def of_module(self, name: str) -> WeightFormat:
        return DENSE if any(within(name, other) for other in self._left_out) else self.format

    def __str__(self) -> str:
        return str(self.format)


def _state_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Return the settings that bitsandbytes stores as JSON in a tensor."""
    try:
        state = read_json(bytes(tensor.cpu().tolist()), _STATE)
    except WrongJsonError as error:
        raise ModelLoadError(f"quant_state: {error}") from None
    if not isinstance(state, dict):
        raise ModelLoadError(f"quant_state: expected an object, got {shown(state)}")
    return state
