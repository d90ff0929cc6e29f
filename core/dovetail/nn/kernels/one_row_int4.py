# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: N803 (constants are upper case)
"""Linear layer for one row with 4-bit weights: like `one_row`, but reading weights as 32-bit words
of eight. Twin: `dequantized` of the format in `dovetail.nn.format.int4`.

Unpacking weights and multiplying each by a float takes more instructions than there is time for
while memory delivers them. So inputs become integers, since a GPU accumulates four byte products in
one instruction (dp4a): the 32 inputs of four words (a chunk) share a power of two as their scale,
with which the largest has 22 bits, in three bytes. Sums of integers are exact. An input is rounded
only if it is less than 2**-14 of the largest of its chunk (float16: 2**-11), and then by at most
2**-22 of that one.

    word  ┌ bytes 0 to 3 & 15 = weights of inputs first + 0 … 3  ┐     bytes of these integers: high (signed), middle, low
          └ bytes 0 to 3 >> 4 = weights of inputs first + 64 … 67 ┘ ×  sums = (high × 256 + middle) × 256 + low - zero point × sum of the integers
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.digits import ITS_BITS, add_products_of_bytes, digits, raised, scale_of
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.streamed import Stored

WARPS = 4
TILE = 128  # chunks per iteration of a program: one per thread of four warps
# per program: with fewer, inputs are converted more often than needed; with more, registers run out
MOST_CHUNKS = 3584
# like MOST_CHUNKS, chosen by counting instructions
# (`bench.instructions`), confirmed by `bench.formats --only one-row`
MOST_OUTPUTS = 16


@triton.jit
def _quarters(words):
    """Split [N, 4 * CHUNKS] into four [N, CHUNKS]: the first words of chunks, the second words,
    …"""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _first_input(chunk):
    """Return the first input of a chunk, which has 16 inputs from there and 16 more from 64 inputs
    later."""
    return chunk // 4 * 128 + chunk % 4 * 16


@triton.jit
def _load_inputs(values, chunk, at: tl.constexpr, INPUTS: tl.constexpr):
    """Load [CHUNKS, 8] float32: 8 inputs of each chunk, at offset `at`. A thread reads 16 bytes at
    once, so it gets the inputs of the chunk whose weights it also reads."""
    i = _first_input(chunk)[:, None] + at + tl.arange(0, 8)[None, :]
    return tl.load(values + i, mask=i < INPUTS, other=0.0).to(tl.float32)


@triton.jit
def _load_of_groups(
    values, n, real, chunk, at: tl.constexpr, outputs, INPUTS: tl.constexpr, GROUP: tl.constexpr
):
    """Load [N, CHUNKS]: scales or zero points of the inputs at offset `at` of each chunk."""
    i = _first_input(chunk) + at
    return tl.load(
        values + (i // GROUP)[None, :] * outputs + n[:, None],
        mask=real[:, None] & (i < INPUTS)[None, :],
        other=0,
    )


@triton.jit
def _load(
    weight,
    scales,
    zeros,
    n,
    real,
    tile: tl.constexpr,
    outputs,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):
    """Load the weights of outputs n in one tile: words [N, 4 * CHUNKS], then scales and zero points
    of their low and of their high halves."""
    chunk = tile * CHUNKS + tl.arange(0, CHUNKS)
    w = tile * CHUNKS * 4 + tl.arange(0, CHUNKS * 4)
    words = tl.load(
        weight + n.to(tl.int64)[:, None] * WORDS + w[None, :],
        mask=real[:, None] & (w < WORDS)[None, :],
        other=0,
    )
    low_scale = _load_of_groups(scales, n, real, chunk, 0, outputs, INPUTS, GROUP)
    high_scale = (
        low_scale
        if GROUP >= 128
        else _load_of_groups(scales, n, real, chunk, 64, outputs, INPUTS, GROUP)
    )
    if ASYMMETRIC:
        low_zero = _load_of_groups(zeros, n, real, chunk, 0, outputs, INPUTS, GROUP)
        high_zero = (
            low_zero
            if GROUP >= 128
            else _load_of_groups(zeros, n, real, chunk, 64, outputs, INPUTS, GROUP)
        )
    else:
        low_zero = 8
        high_zero = 8
    return words, low_scale, high_scale, low_zero, high_zero


@triton.jit
def _words(numbers, factor):
    """Convert [CHUNKS, 8] to integers: two words [CHUNKS] each of their low, middle and high bytes;
    and their sums [CHUNKS]."""
    integers = raised(numbers, factor[:, None])
    even, odd = tl.split(tl.reshape(integers, (integers.shape[0], 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    low, middle, high = digits(a, b, c, d)
    return tl.split(low), tl.split(middle), tl.split(high), tl.sum(integers - ITS_BITS, 1)


@triton.jit
def _integers(first, second, factor):
    """Convert 16 inputs of each chunk to integers: three tuples of bytes, high first, with four
    words [CHUNKS] each; and their sums [CHUNKS]."""
    low, middle, high, sums = _words(first, factor)
    more_low, more_middle, more_high, more_sums = _words(second, factor)
    return (high + more_high, middle + more_middle, low + more_low), sums + more_sums


@triton.jit
def _largest_bits(numbers):
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _add(sums, halves, bytes_of_inputs, SIGNED: tl.constexpr):
    for quarter in tl.static_range(4):
        sums = add_products_of_bytes(
            sums, halves[quarter], bytes_of_inputs[quarter][None, :], SIGNED
        )
    return sums


@triton.jit
def _sums(stored, integers, GROUP: tl.constexpr):
    """Return the scaled sums [N, CHUNKS] float32."""
    words, low_scale, high_scale, low_zero, high_zero = stored
    low_bytes, low_sum, high_bytes, high_sum, scale = integers
    quarters = _quarters(words)
    low_halves = ()
    high_halves = ()
    for quarter in tl.static_range(4):
        low_halves += (quarters[quarter] & 0x0F0F0F0F,)
        high_halves += (quarters[quarter] >> 4 & 0x0F0F0F0F,)
    low = tl.zeros(quarters[0].shape, tl.int32)
    high = tl.zeros(quarters[0].shape, tl.int32)
    for place in tl.static_range(3):
        if place == 2:
            low = low * 256 - (low_sum + high_sum if GROUP >= 128 else low_sum)[None, :] * low_zero
            high = high * 256 - high_sum[None, :] * high_zero
        elif place == 1:
            low *= 256
            high *= 256
        low = _add(low, low_halves, low_bytes[place], place == 0)
        if GROUP >= 128:  # one sum, since there is one scale
            low = _add(low, high_halves, high_bytes[place], place == 0)
        else:
            high = _add(high, high_halves, high_bytes[place], place == 0)
    if GROUP >= 128:
        return low.to(tl.float32) * (low_scale.to(tl.float32) * scale[None, :])
    return (
        low.to(tl.float32) * low_scale.to(tl.float32)
        + high.to(tl.float32) * high_scale.to(tl.float32)
    ) * scale[None, :]


@triton.jit
def _linear_int4(
    x,  # [INPUTS]
    weight,  # [outputs, WORDS] int32; GATED: gates, then ups
    scales,  # [groups, outputs]; GATED: likewise
    zeros,  # likewise
    bias,  # [outputs]; GATED: likewise
    norm,  # [INPUTS]
    out,  # [outputs]; ADDS: accumulated into
    outputs,  # GATED: pairs
    eps,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNKS: tl.constexpr,  # per tile
    TILES: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    chunk = tl.arange(0, CHUNKS)
    real = n < outputs
    stored_outputs = outputs * 2 if GATED else outputs
    let_next_begin(PDL)
    stored = ()
    stored_ups = ()
    for tile in tl.static_range(TILES):
        stored += (
            _load(
                weight,
                scales,
                zeros,
                n,
                real,
                tile,
                stored_outputs,
                INPUTS,
                WORDS,
                CHUNKS,
                GROUP,
                ASYMMETRIC,
            ),
        )
        if GATED:
            stored_ups += (
                _load(
                    weight,
                    scales,
                    zeros,
                    n + outputs,
                    real,
                    tile,
                    stored_outputs,
                    INPUTS,
                    WORDS,
                    CHUNKS,
                    GROUP,
                    ASYMMETRIC,
                ),
            )
    wait(PDL)
    inputs = ()
    squares = tl.zeros([CHUNKS, 8], tl.float32)
    for tile in tl.static_range(TILES):
        own = ()
        for part in tl.static_range(4):
            values = _load_inputs(x, chunk + tile * CHUNKS, part // 2 * 64 + part % 2 * 8, INPUTS)
            squares += values * values
            own += (values,)
        inputs += (own,)
    scale = tl.rsqrt(tl.sum(squares) / INPUTS + eps) if NORMED else 1.0
    sums = tl.zeros([N, CHUNKS], tl.float32)
    ups = tl.zeros([N, CHUNKS], tl.float32)
    for tile in tl.static_range(TILES):
        own = ()
        largest = tl.zeros([CHUNKS], tl.int32)
        for part in tl.static_range(4):
            values = inputs[tile][part]
            if NORMED:
                values = (
                    values
                    * scale
                    * _load_inputs(
                        norm, chunk + tile * CHUNKS, part // 2 * 64 + part % 2 * 8, INPUTS
                    )
                )
                values = values.to(x.dtype.element_ty).to(tl.float32)  # round as the twin does
            largest = tl.maximum(largest, _largest_bits(values))
            own += (values,)
        factor, of_chunk = scale_of(largest)
        low_bytes, low_sum = _integers(own[0], own[1], factor)
        high_bytes, high_sum = _integers(own[2], own[3], factor)
        integers = low_bytes, low_sum, high_bytes, high_sum, of_chunk
        sums += _sums(stored[tile], integers, GROUP)
        if GATED:
            ups += _sums(stored_ups[tile], integers, GROUP)
    result = tl.sum(sums, 1)
    if BIASED:
        result += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(ups, 1)
        if BIASED:
            up += tl.load(bias + outputs + n, mask=real, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * up
    if ADDS:
        result += tl.load(out + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=real)


def linear(
    x: torch.Tensor,
    weight: Stored,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    at_once: int | None = None,
    warps: int | None = None,
) -> torch.Tensor:
    """Multiply x [1, inputs], contiguous, by a 4-bit weight -> [1, outputs] in x's dtype;
    multiplies integers and accumulates in float32.

    `norm`, `gated`, `out`, `into`: see `one_row.linear`. `at_once` and `warps`: outputs and warps
    per program, instead of the best ones measured.
    """
    words = weight.values.view(torch.int32)
    outputs = len(words) // (2 if gated else 1)
    adds = out is not None
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if into is None else into
    norm_weight, eps = norm or (weight.scales, 0.0)
    chunks = min(TILE, triton.next_power_of_2(words.shape[1] // 4))
    tiles = triton.cdiv(words.shape[1] // 4, chunks)
    at_once = at_once or outputs_at_once(chunks * tiles * (2 if gated else 1))
    launch(_linear_int4, (triton.cdiv(outputs, at_once),))(
        x,
        words,
        weight.scales,
        weight.values if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        norm_weight,
        out,
        outputs,
        eps,
        INPUTS=weight.inputs,
        WORDS=words.shape[1],
        CHUNKS=chunks,
        TILES=tiles,
        N=at_once,
        GROUP=weight.group,
        ASYMMETRIC=weight.zeros is not None,
        NORMED=norm is not None,
        GATED=gated,
        ADDS=adds,
        BIASED=bias is not None,
        num_warps=warps or WARPS,
        **pdl_options(x.device),
    )
    return out


def outputs_at_once(chunks: int) -> int:
    """Return the number of outputs per program, a power of two, for outputs of `chunks` chunks
    each."""
    return max(2, min(MOST_OUTPUTS, 1 << (MOST_CHUNKS // chunks).bit_length() >> 1))
