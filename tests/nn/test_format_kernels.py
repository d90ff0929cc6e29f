# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The kernels of each weight format compute the same as dequantizing and multiplying, with any
fused operations around the layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from dovetail.nn import residual as residual_module
from dovetail.nn.format import DENSE, WeightFormat, float8, int4, int8
from dovetail.nn.format.compressed_int8 import PackedInt8, PlainInt8
from dovetail.nn.format.compressed_tensors import PackedInt4
from dovetail.nn.format.float8 import Float8
from dovetail.nn.kernels import (
    available,
    float8_products,
    launch,
    one_row_float8,
    one_row_int4,
    rms_norm,
    streamed,
)
from dovetail.nn.kernels.digits import add_products_of_bytes, digits, raised, scale_of
from dovetail.nn.kernels.widening import float8_to_16_bits, pairs_to_16_bits
from dovetail.nn.norm import LayerNorm, RMSNorm
from dovetail.nn.residual import Residual
from tests.kernels import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    assert_close,
    runs_kernels,
    take_kernels,
)
from tests.models.oracle import context
from tests.nn.formats import bound_of_narrow_inputs, product, stored
from tests.support import FULL, examples

some = examples(quick=60 if ON_GPU else 5, full=600 if ON_GPU else 100)
seeds = st.integers(0, 2**31)
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter rounds bfloat16 wrongly
FORMATS: list[WeightFormat] = [
    Float8("computed"),
    Float8("block", (128, 128), "weight_scale_inv"),
    Float8("block", (32, 64), "weight_scale_inv"),
    PackedInt4(32, False),
    PackedInt4(64, True),
    PackedInt4(128, False),
    PackedInt4(None, True),
    PlainInt8(None, True),
    PackedInt8(32, True),
    PackedInt8(128, True),
]


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels(monkeypatch, float8, int4, int8, residual_module)
    monkeypatch.setattr(float8, "has_many_rows", lambda device: False)  # which rounds inputs: below
    # a kernel that fails does so here, and its twin doesn't stand in for it
    monkeypatch.setattr(launch, "_why_unavailable", lambda *asked: None)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPE).to(DEVICE)


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, context())
    norm.weight.load(torch.rand(size) + 0.5)
    return norm.to(DTYPE).to(DEVICE)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(
    form=st.sampled_from(FORMATS),
    rows=st.sampled_from([1, 2, 7, 16, 17, 40]),
    inputs=st.sampled_from([128, 384, 640]),
    outputs=st.sampled_from([16, 48, 80]),
    gated=st.booleans(),
    normed=st.booleans(),
    biased=st.booleans(),
    seed=seeds,
)
@some
def test_columns_are_those_of_the_dequantized_weight(
    form: WeightFormat,
    rows: int,
    inputs: int,
    outputs: int,
    gated: bool,
    normed: bool,
    biased: bool,
    seed: int,
) -> None:
    weight = stored(form, (outputs, outputs) if gated else (outputs,), inputs, DTYPE, DEVICE, seed)
    x, bias = randn(rows, inputs), randn(len(weight)) if biased else None
    norm = norm_of(inputs) if normed else None
    y = form.columns(weight, x, bias, norm, gated=gated)
    assert_close(y, product(x if norm is None else norm(x), form.dequantized(weight), bias, gated))


@pytest.mark.skipif(
    not ON_GPU or not available.has_one_row_float8(DEVICE),
    reason="needs a Hopper: nothing interprets Gluon",
)
@pytest.mark.usefixtures("with_kernels")
@given(
    form=st.sampled_from(
        [
            Float8("computed"),
            Float8("block", (128, 128), "weight_scale_inv"),
            Float8("block", (8, 128), "weight_scale_inv"),
        ]
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    inputs=st.sampled_from([2560, 4096, 11008, 12288]),
    outputs=st.sampled_from([16, 48]),
    gated=st.booleans(),
    adds=st.booleans(),
    normed=st.booleans(),
    biased=st.booleans(),
    size=st.sampled_from([1.0, 1e-20, 1e4]),
    seed=seeds,
)
@examples(quick=20, full=200)  # each is compiled, for seconds
def test_one_row_of_float8_is_as_exact_on_matrix_units(
    form: Float8,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    gated: bool,
    adds: bool,
    normed: bool,
    biased: bool,
    size: float,
    seed: int,
) -> None:
    # what is gated is as small as its square
    size = 1.0 if dtype == torch.float16 or (gated and size < 1.0) else size
    weight = stored(form, (outputs, outputs) if gated else (outputs,), inputs, dtype, DEVICE, seed)
    assert one_row_float8.takes(weight, weight.scales, form.block[1], gated)
    torch.manual_seed(seed)
    x = (
        (torch.randn(1, inputs) * size * (1 + 100 * (torch.rand(1, inputs) > 0.99)))
        .to(dtype)
        .to(DEVICE)
    )
    bias = torch.randn(len(weight)).to(dtype).to(DEVICE) if biased and size == 1.0 else None
    norm = (
        (torch.rand(inputs).add(0.5).to(dtype).to(DEVICE), 1e-5) if normed and size >= 1.0 else None
    )
    before = torch.randn(1, outputs).to(dtype).to(DEVICE) if adds else None
    y = one_row_float8.linear(
        x,
        weight,
        bias,
        norm=norm,
        gated=gated,
        out=None if before is None else before.clone(),
        scales=weight.scales,
    )
    wide = x.double()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean() + norm[1]) * norm[0].double()
    exact = product(wide, form.dequantized(weight), bias, gated)
    exact = exact if before is None else exact + before.double()
    assert_close(y / exact.abs().max().to(dtype), exact / exact.abs().max().to(dtype))


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@given(
    form=st.sampled_from(FORMATS),
    rows=st.sampled_from([1, 3, 16, 33]),
    inputs=st.sampled_from([128, 512, 1024]),
    outputs=st.sampled_from([48, 80]),
    seed=seeds,
)
@some
def test_the_stream_gets_the_product_with_the_dequantized_weight(
    form: WeightFormat, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    weight = stored(form, (outputs,), inputs, DTYPE, DEVICE, seed)
    x, before = randn(rows, inputs), randn(rows, outputs)
    stream, norm = Residual(before.clone()), norm_of(outputs)
    form.add_to(weight, stream, x)
    expected = before.double() + product(x, form.dequantized(weight))
    assert_close(stream.normed(norm), norm(expected.to(DTYPE)).double())
    assert_close(stream.summed(), expected)


@runs_kernels
@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("form", [DENSE, *FORMATS], ids=str)
@pytest.mark.parametrize("rows", [1, 33])
def test_a_norm_that_kernels_dont_know_is_applied_as_it_is(form: WeightFormat, rows: int) -> None:
    """They compute RMS norms, from the same weight and epsilon that a layer norm has."""
    weight = stored(form, (16,), 128, DTYPE, DEVICE)
    norm = LayerNorm(128, 1e-5, context(), bias=False)
    norm.weight.load(torch.randn(128))
    norm = norm.to(DTYPE).to(DEVICE)
    x = randn(rows, 128) + 3  # whose mean a layer norm takes away
    parts = randn(2, rows, 128)
    stream = Residual(x.clone())
    stream.add_parts(parts)
    whole = x + parts.sum(0)
    assert_close(stream.normed(norm), norm(whole).double())
    exact = form.columns(weight, norm(whole))
    assert torch.equal(form.columns(weight, Residual(whole), None, norm), exact)
    assert torch.equal(form.columns(weight, whole, None, norm), exact)


def largest_of_chunks(x: torch.Tensor) -> torch.Tensor:
    """The largest size among the 32 inputs, 16 and 16 from 64 further on, that `one_row_int4` makes
    integers with the same scale; for each input."""
    inputs = x.shape[1]
    chunks = torch.nn.functional.pad(x.double().abs(), (0, -inputs % 128)).view(-1, 2, 4, 16)
    return chunks.amax((1, 3), keepdim=True).expand(chunks.shape).reshape(1, -1)[:, :inputs]


INT4 = [form for form in FORMATS if isinstance(form, PackedInt4)]
KINDS = ("as in models", "with outliers", "of one sign", "tiny")
OF_ONE_ROW = [(form, kind, inputs) for form in INT4 for kind in KINDS for inputs in (128, 640)]
# each pair once
A_FEW_OF_ONE_ROW = [
    (form, kind, (128, 640)[(i + j) % 2])
    for i, form in enumerate(INT4)
    for j, kind in enumerate(KINDS)
]


@runs_kernels
@pytest.mark.parametrize(
    ("form", "kind", "inputs"), OF_ONE_ROW if ON_GPU or FULL else A_FEW_OF_ONE_ROW
)
def test_the_sums_of_one_row_are_as_exact_as_those_of_float32(
    form: PackedInt4, kind: str, inputs: int
) -> None:
    """Left in float32, so that the rounding of the result hides nothing."""
    weight, x = stored(form, (12,), inputs, DTYPE, DEVICE), randn(1, inputs)
    if kind == "with outliers":
        x[0, ::37] *= 2000
    elif kind == "of one sign":
        x = x.abs() + 4
    elif kind == "tiny":
        x *= 2.0**-16
    y, numbers = torch.empty(1, 12, device=DEVICE), form.dequantized(weight)
    one_row_int4.linear(x, form._stored(weight), into=y)
    of_integers = 2.0**-22 * largest_of_chunks(x) @ numbers.double().abs().T
    of_sums = 2.0**-22 * x.double().abs() @ numbers.double().abs().T
    assert ((y.double() - product(x, numbers)).abs() <= of_integers + of_sums).all()


@runs_kernels
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_no_number_in_the_sums(wrong: float) -> None:
    form, x = PackedInt4(128, True), randn(1, 640)
    x[0, 300] = wrong
    assert (
        one_row_int4.linear(x, form._stored(stored(form, (3,), 640, DTYPE, DEVICE))).isnan().all()
    )


@runs_kernels
@given(
    inputs=st.sampled_from([4096, 11008, 12288, 16640]),
    outputs=st.sampled_from([3, 17]),
    gated=st.booleans(),
    adds=st.booleans(),
)
@example(inputs=5120, outputs=3, gated=True, adds=True)  # of two tiles, the second isn't full
@examples(quick=2 if ON_GPU else 1, full=10)
def test_one_row_of_many_inputs_goes_through_several_tiles(
    inputs: int, outputs: int, gated: bool, adds: bool
) -> None:
    form = PackedInt4(128, False)
    weight, x, norm = (
        stored(form, (outputs, outputs) if gated else (outputs,), inputs, DTYPE, DEVICE),
        randn(1, inputs),
        norm_of(inputs),
    )
    before = randn(1, outputs)
    out = before.clone() if adds else None
    y = one_row_int4.linear(
        x, form._stored(weight), norm=(norm.weight, norm.eps), gated=gated, out=out
    )
    assert_close(
        y,
        product(norm(x), form.dequantized(weight), None, gated) + (before.double() if adds else 0),
    )


@triton.jit
def _multiply_bytes(numbers, others, products, scales, N: tl.constexpr) -> None:  # noqa: N803 (constants are upper case)
    i = tl.arange(0, N)
    four = ()
    largest = tl.zeros([N], tl.int32)
    for at in tl.static_range(4):
        values = tl.load(numbers + i * 4 + at)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        four += (values,)
    factor, scale = scale_of(largest)
    low, middle, high = digits(
        raised(four[0], factor),
        raised(four[1], factor),
        raised(four[2], factor),
        raised(four[3], factor),
    )
    other = tl.load(others + i)
    sums = add_products_of_bytes(tl.zeros([N], tl.int32), other, high, True)
    sums = add_products_of_bytes(sums * 256, other, middle, False)
    sums = add_products_of_bytes(sums * 256, other, low, False)
    tl.store(products + i, sums)
    tl.store(scales + i, scale)


@runs_kernels
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_products_of_integers_and_bytes_are_exact(size: float) -> None:
    torch.manual_seed(0)
    numbers = (torch.randn(64, 4) * size).to(torch.bfloat16).float()
    numbers[0] = 0.0
    codes = torch.randint(0, 16, (64, 4), dtype=torch.uint8)
    products, scales = (
        torch.empty(64, dtype=torch.int32, device=DEVICE),
        torch.empty(64, device=DEVICE),
    )
    _multiply_bytes[(1,)](
        numbers.to(DEVICE), codes.view(torch.int32).flatten().to(DEVICE), products, scales, N=64
    )
    integers = numbers.double() / scales.cpu().double()[:, None]
    assert integers.abs().max() < 2**22
    assert (integers[1:].abs().amax(1) >= 2**21).all()
    assert torch.equal(products.cpu().double(), (integers.round() * codes.double()).sum(1))


@runs_kernels
@given(
    rows=st.integers(0, 5),
    size=st.sampled_from([48, 128, 300, 1024]),
    group=st.sampled_from([0, 64, 128]),
    magnitude=st.sampled_from([0.0, 1e-3, 50.0]),
)
@some
def test_inputs_are_narrowed_as_the_twin_does(
    rows: int, size: int, group: int, magnitude: float
) -> None:
    x = randn(rows, size) * magnitude
    ours, twin = (
        float8_products.narrowed(x, group),
        float8_products.twin_of_narrowed(x.cpu(), group),
    )
    assert torch.equal(ours[1].cpu(), twin[1])
    assert torch.equal(ours[0].cpu().float(), twin[0].float())


@runs_kernels
@pytest.mark.parametrize(
    ("rows", "size", "group", "parts"), [(3, 256, 0, 0), (5, 384, 128, 2), (2, 96, 0, 3)]
)
def test_norming_and_narrowing_at_once_is_as_one_after_the_other(
    rows: int, size: int, group: int, parts: int
) -> None:
    x, weight = (
        torch.randn(rows, size, device=DEVICE).half(),
        torch.rand(size, device=DEVICE).half(),
    )
    added = torch.randn(parts, rows, size, device=DEVICE) if parts else None
    stream = x.clone()
    normed = (
        rms_norm.rms_norm(stream, weight, 1e-6)
        if added is None
        else rms_norm.add_and_norm(stream, added, weight, 1e-6)
    )
    narrow, scales = float8_products.normed_and_narrowed(x, added, weight, 1e-6, group)
    expected, expected_scales = float8_products.narrowed(normed, group)
    assert torch.equal(x, stream)
    # a compiler may round the norm otherwise, in its last place
    torch.testing.assert_close(scales, expected_scales, rtol=2**-9, atol=0)
    differs = narrow.view(torch.uint8).int() - expected.view(torch.uint8).int()
    assert differs.abs().max() <= 1
    assert (differs != 0).float().mean() < 0.05


@runs_kernels
@given(
    rows=st.sampled_from([1, 5, 20]),
    inputs=st.sampled_from([128, 384]),
    gated=st.booleans(),
    block=st.booleans(),
    seed=seeds,
)
@some
def test_products_of_float8_are_within_the_rounding_of_their_inputs(
    rows: int, inputs: int, gated: bool, block: bool, seed: int
) -> None:
    form = Float8("block", (32, 128), "weight_scale_inv") if block else Float8("computed")
    weight = stored(form, (64, 64), inputs, DTYPE, DEVICE, seed)
    x, group = randn(rows, inputs), form.block[1]
    narrow, scales = float8_products.narrowed(x, group)
    y = streamed.linear(narrow, form._stored(weight), None, x_scales=scales, dtype=DTYPE)
    exact, numbers = product(x, form.dequantized(weight)), form.dequantized(weight)
    of_result = exact.abs() * 2.0**-8 + 2.0**-24 * inputs
    assert (
        (y.double() - exact).abs()
        <= bound_of_narrow_inputs(x, numbers, group) * (1 + 2.0**-8) + of_result
    ).all()
    parts = streamed.linear(narrow, form._stored(weight), None, x_scales=scales, in_parts=True)
    assert_close(parts.sum(0).to(DTYPE), y.double())
    wide = narrow.double() * (
        scales.double().repeat_interleave(group, 1)[:, :inputs]
        if group
        else scales.double()[:, None]
    )
    assert_close(
        streamed.linear(
            narrow, form._stored(weight), None, x_scales=scales, dtype=DTYPE, gated=gated
        ),
        product(wide, numbers, None, gated),
    )


@pytest.mark.skipif(INTERPRETED or not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("rows", [2, 16, 65, 300, 601])
@pytest.mark.parametrize("form", [form for form in FORMATS if isinstance(form, Float8)], ids=str)
def test_many_rows_are_within_the_rounding_of_their_inputs(form: Any, rows: int) -> None:
    weight = stored(form, (512,), 1024, DTYPE, DEVICE)
    x, numbers = randn(rows, 1024), form.dequantized(weight)
    exact = product(x, numbers)
    bound = (
        bound_of_narrow_inputs(x, numbers, form.block[1])
        + exact.abs() * 2.0**-7
        + exact.abs().max() * 2.0**-10
    )
    assert ((form.columns(weight, x).double() - exact).abs() <= bound).all()


@triton.jit
def _widen_all(narrow, pairs, of_narrow, low, high, N: tl.constexpr) -> None:  # noqa: N803 (constants are upper case)
    i = tl.arange(0, N)
    tl.store(of_narrow + i, float8_to_16_bits(tl.load(narrow + i), of_narrow.dtype.element_ty))
    lows, highs = pairs_to_16_bits(tl.load(pairs + i), low.dtype.element_ty)
    tl.store(low + i, lows)
    tl.store(high + i, highs)


@runs_kernels
def test_every_number_of_8_and_of_4_bits_is_widened_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    # but those that are no numbers
    narrow = torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)
    of_narrow, low, high = torch.empty(3, 256, dtype=DTYPE, device=DEVICE)
    _widen_all[(1,)](narrow, codes, of_narrow, low, high, N=256)
    assert torch.equal(of_narrow, narrow.to(DTYPE))
    first = 128 if torch.bfloat16 == DTYPE else 1024
    assert torch.equal(low - first, (codes & 15).to(DTYPE))
    assert torch.equal(high - first, (codes >> 4).to(DTYPE))
