"""Scales and zero points that can't be what a format stores are refused, not computed with."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dovetail.errors import DovetailError, ModelLoadError, UnsupportedError
from dovetail.nn.format.bitsandbytes import Codes, RowInt8
from dovetail.nn.format.compressed_int8 import PackedInt8, PlainInt8
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.format.gptq import GptqInt8
from dovetail.nn.format.nvfp4 import Nvfp4
from dovetail_executors.runtime.quantization import choose_quantization
from tests.models.checkpoint_formats import FORMATS as FORMATS_OF_CHECKPOINTS
from tests.models.checkpoint_formats import QUANTIZATIONS
from tests.models.oracle import CPU
from tests.nn.formats import plain_weight

OUTPUTS = 8
INPUTS = 128
PAIRS = torch.ones(OUTPUTS, INPUTS // 2, dtype=torch.uint8)
BYTES = torch.ones(OUTPUTS, INPUTS, dtype=torch.int8)
WORDS = torch.ones(OUTPUTS, INPUTS // 4, dtype=torch.int32)
ONES = torch.ones(OUTPUTS, 1)
FLOATS = torch.ones(OUTPUTS, INPUTS).to(torch.float8_e4m3fn)


def nf4(nested: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    form = Codes("nf4", nested)
    state: dict[str, Any] = {"blocksize": 64, "quant_type": "nf4", "shape": [OUTPUTS, INPUTS]}
    tensors = {"weight": PAIRS.reshape(-1, 1), "weight.absmax": torch.ones(OUTPUTS * INPUTS // 64)}
    if nested:
        state |= {"nested_offset": 0.5, "nested_blocksize": 256}
        tensors["weight.absmax"] = tensors["weight.absmax"].to(torch.uint8)
        tensors["weight.nested_absmax"] = torch.ones(1)
        tensors["weight.nested_quant_map"] = torch.ones(256)
    weight: Any = form.allocate(plain_weight((OUTPUTS,), INPUTS, torch.bfloat16, CPU), CPU)
    tensors["weight.quant_map"] = weight.zeros
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*text], dtype=torch.uint8)
    return form, tensors


def nvfp4(divides: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    scales = torch.ones(OUTPUTS, INPUTS // 16).to(torch.float8_e4m3fn)
    tensors = {"weight": PAIRS, "weight_scale": scales, "whole": torch.tensor(2.0)}
    return Nvfp4("weight", "whole", divides), tensors


FORMATS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "nvfp4": nvfp4(divides=False),
    "nvfp4 divided": nvfp4(divides=True),
    "nf4": nf4(nested=False),
    "nf4 nested": nf4(nested=True),
    "bitsandbytes int8": (RowInt8(), {"weight": BYTES, "SCB": ONES[:, 0]}),
    "int8": (PlainInt8(None, True), {"weight": BYTES, "weight_scale": ONES}),
    "int8 asymmetric": (
        PlainInt8(None, False),
        {"weight": BYTES, "weight_scale": ONES, "weight_zero_point": BYTES[:, :1]},
    ),
    "int8 packed": (PackedInt8(), {"weight_packed": WORDS, "weight_scale": ONES}),
    "int8 gptq": (
        GptqInt8(128, False),
        {"qweight": WORDS.t(), "qzeros": WORDS[:1, :2], "scales": ONES.t()},
    ),
    "int4": (PackedInt4(128, True), {"weight_packed": WORDS[:, :16], "weight_scale": ONES}),
    "fp8": (Float8("tensor"), {"weight": FLOATS, "weight_scale": torch.tensor(1.0)}),
    "fp8 blocks": (
        Float8("block", (8, 128), "weight_scale_inv"),
        {"weight": FLOATS, "weight_scale_inv": ONES[:1]},
    ),
}
SCALES = {
    **dict.fromkeys(("nvfp4", "nvfp4 divided"), "whole"),
    "nf4": "weight.absmax",
    "nf4 nested": "weight.nested_absmax",
    "bitsandbytes int8": "SCB",
    "int8 gptq": "scales",
    "fp8 blocks": "weight_scale_inv",
}


def loaded(name: str, **others: torch.Tensor) -> torch.Tensor:
    """Return the weight of a checkpoint's tensors, some of which are others."""
    form, tensors = FORMATS[name]
    weight = form.allocate(plain_weight((OUTPUTS,), INPUTS, torch.bfloat16, CPU), CPU)
    pieces = dict(weight.tensors("0"))
    tensors = tensors | others
    for each in tensors:
        pieces[each].expected.add("0")
    for each, tensor in tensors.items():
        pieces[each].load(tensor, "0", None)
    found: torch.Tensor = form.dequantized(weight)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_scales_must_be_finite_numbers(name: str) -> None:
    assert torch.isfinite(loaded(name)).all()
    scales = SCALES.get(name, "weight_scale")
    right = FORMATS[name][1][scales]
    for dtype in (torch.uint8, torch.int32, torch.bool):
        with pytest.raises(ModelLoadError, match="expected floating-point numbers, found"):
            loaded(name, **{scales: right.to(dtype)})
    for value in (math.nan, -math.inf):
        with pytest.raises(ModelLoadError, match="scales must be finite"):
            loaded(name, **{scales: torch.full_like(right, value)})


@pytest.mark.parametrize("name", ["nvfp4", "int8", "int8 packed", "int8 gptq", "int4", "fp8"])
def test_products_with_scales_must_be_finite(name: str) -> None:
    scales = SCALES.get(name, "weight_scale")
    with pytest.raises(ModelLoadError, match="must be finite, and so must weights"):
        loaded(name, **{scales: FORMATS[name][1][scales] * 3e38})


def test_a_scale_that_divides_must_not_be_zero() -> None:
    with pytest.raises(ModelLoadError, match="scales must be finite"):
        loaded("nvfp4 divided", whole=torch.tensor(0.0))


@pytest.mark.parametrize("name", ["int8", "int8 packed", "int4", "fp8"])
def test_scales_of_any_floating_dtype_are_read(name: str) -> None:
    scales = FORMATS[name][1]["weight_scale"]
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float16, torch.float64):
        assert torch.equal(loaded(name, weight_scale=scales.to(dtype)), loaded(name))


@pytest.mark.parametrize(
    ("zero", "why"),
    [
        (torch.tensor(math.nan), "zero points: expected integers, found float32"),
        (torch.tensor(2.0), "zero points: expected integers, found float32"),
        (torch.tensor(True), "zero points: expected integers, found bool"),
        (torch.tensor(70_000), "zero points must be numbers of 8 bits"),
    ],
)
def test_zero_points_must_be_integers_of_8_bits(zero: torch.Tensor, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        loaded("int8 asymmetric", weight_zero_point=zero.expand(OUTPUTS, 1))


def test_a_block_larger_than_the_weight_takes_no_memory() -> None:
    form = Float8("block", (8, 1 << 40), "weight_scale_inv")
    weight: Any = form.allocate(plain_weight((OUTPUTS,), INPUTS, torch.bfloat16, CPU), CPU)
    weight.data.copy_(FLOATS)
    assert torch.equal(form.dequantized(weight), FLOATS.float())


def at_load(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A format of the table of published ones, and a module's tensors in it."""
    form = next(form for form in FORMATS_OF_CHECKPOINTS if form.name == name)
    made = choose_quantization(None, form.config, QUANTIZATIONS, "")
    assert made is not None
    tensors = form.pack(64, 128, torch.Generator().manual_seed(0))
    return made.of_module("model.layers.0.mlp.down_proj"), tensors


@pytest.mark.parametrize(
    ("name", "tensor", "change", "why"),
    [
        ("GPTQ INT3", "g_idx", lambda one: one + 1, "g_idx: groups must be from 0 to 1"),
        ("GPTQ INT3", "g_idx", lambda one: one - 9, "g_idx: groups must be from 0 to 1"),
        ("GPTQ INT3", "g_idx", lambda one: one.float(), "g_idx: expected integers"),
        ("GPTQ INT3", "qweight", lambda one: one.short(), "expected int32, found int16"),
        ("GPTQ INT3", "scales", lambda one: one.int(), "expected floating-point numbers"),
        ("GPTQ INT3", "scales", lambda one: one * math.inf, "scales must be finite"),
        ("AQLM, two codebooks", "codes", lambda one: one.int(), "expected int8 or int16"),
        ("AQLM, two codebooks", "codebooks", lambda one: one.int(), "expected floating-point"),
        ("ModelOpt MXFP8", "weight_scale", lambda one: one.float(), "expected uint8"),
        ("ModelOpt MXFP8", "weight_scale", lambda one: one * 0 + 255, "must be finite"),
        ("ModelOpt MXFP8", "weight", lambda one: one.float(), "expected float8_e4m3fn"),
        (
            "compressed-tensors W4A16, inputs in any order",
            "weight_g_idx",
            lambda one: one * 1000,
            "g_idx: groups must be from 0 to 1",
        ),
    ],
)
def test_what_is_dequantized_at_load_is_checked(
    name: str, tensor: str, change: Any, why: str
) -> None:
    form, tensors = at_load(name)
    form.values(tensors)
    weight = form.allocate(plain_weight((64,), 128, torch.float32, CPU), CPU)
    with pytest.raises(ModelLoadError, match=why):
        form.store(weight, weight.parts["0"], {**tensors, tensor: change(tensors[tensor])})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("AQLM, two codebooks", {"nbits_per_codebook": 60}),
        ("AQLM, two codebooks", {"num_codebooks": 1 << 40}),
        ("AQLM, two codebooks", {"in_group_size": 0}),
        ("AQLM, two codebooks", {"out_group_size": -1}),
        ("GPTQ INT3", {"group_size": 0}),
        ("GPTQ INT3", {"bits": 1 << 70}),
        ("GPTQ INT3", {"dynamic": {"+:(a*)*b": {"bits": 4}}}),
        ("ModelOpt, formats of single layers", {"quantized_layers": {}}),
        ("ModelOpt, formats of single layers", {"quantized_layers": {"a": {"quant_algo": "X"}}}),
        ("Quark FP8", {"global_quant_config": {"weight": {"dtype": "fp8_e5m2"}}}),
        ("Quark FP8", {"export": {"weight_format": "fake_quantized"}}),
    ],
)
def test_sizes_in_a_config_are_bounded_before_anything_is_read(
    name: str, changes: dict[str, Any]
) -> None:
    form = next(form for form in FORMATS_OF_CHECKPOINTS if form.name == name)
    with pytest.raises(DovetailError):
        choose_quantization(None, {**form.config, **changes}, QUANTIZATIONS, "")


def test_a_size_that_is_no_whole_number_of_vectors_is_refused_with_the_numbers() -> None:
    for name, outputs, inputs in (
        ("AQLM, two codebooks", 64, 129),
        ("GPTQ INT3", 64, 48),
        ("GPTQ INT3", 40, 64),
    ):
        form, _ = at_load(name)
        with pytest.raises(UnsupportedError, match=str(inputs if outputs == 64 else outputs)):
            form.allocate(plain_weight((outputs,), inputs, torch.float32, CPU), CPU)
