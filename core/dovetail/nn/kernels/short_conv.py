# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803 (constants are upper case)
"""Short causal convolution. One kernel computes a step of single tokens, another one of known
tokens and drafts; of other steps, one computes outputs, by chunks of tokens, and then another
replaces past inputs, which programs of the first may still read. Twin: `dovetail.nn.state.conv`."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from dovetail.api.state import StateLayer
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.states import (
    by_rows,
    empty_outputs,
    lines_of,
    per_unit,
    row_of_chunk,
    rows_at,
    sigmoid,
    state_strides,
    step_tensors,
)

# of a program
STEP_CHANNELS = 512
STEP_WARPS = 4
CHANNELS_AT_ONCE = 128
TOKENS_AT_ONCE = 16
WARPS = 4


@triton.jit
def _activated(y, SILU: tl.constexpr):
    return y * sigmoid(y) if SILU else y


@triton.jit
def _conv_step(
    x,
    weight,
    bias,
    memory,
    units,
    places,
    kv_lens,
    out,
    x_stride,
    unit_stride,
    place_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some channels of one row's token, and shift its past inputs."""
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < CHANNELS
    let_next_begin(PDL)
    weights = ()
    for i in tl.static_range(KERNEL):
        weights += (tl.load(weight + c * KERNEL + i, mask=real, other=0.0).to(tl.float32),)
    y = (
        tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
        if BIASED
        else tl.zeros([BLOCK], tl.float32)
    )
    wait(PDL)
    held = real & (tl.load(kv_lens + row) > 1)
    at = rows_at(
        memory,
        units,
        unit_stride,
        place_stride,
        tl.load(places + row),
        c,
        real,
        PER_UNIT,
        KERNEL - 1,
    )
    token = tl.load(x + row.to(tl.int64) * x_stride + c, mask=real, other=0.0)
    past = ()
    for i in tl.static_range(KERNEL - 1):
        past += (tl.load(at + i, mask=held, other=0.0),)
        y += past[i].to(tl.float32) * weights[i]
    y += token.to(tl.float32) * weights[KERNEL - 1]
    tl.store(
        out + row.to(tl.int64) * CHANNELS + c,
        _activated(y, SILU).to(out.dtype.element_ty),
        mask=real,
    )
    tl.debug_barrier()  # nothing is replaced that another thread still reads
    for i in tl.static_range(KERNEL - 2):
        tl.store(at + i, past[i + 1], mask=real)
    tl.store(at + KERNEL - 2, token.to(memory.dtype.element_ty), mask=real)


@triton.jit
def _conv_lines(
    x,
    weight,
    bias,
    memory,
    units,
    places,
    kv_lens,
    ahead,
    inputs,
    out,
    x_stride,
    unit_stride,
    place_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some channels of a request's known token and its drafts, note the drafts' inputs, and
    shift the past inputs by the known token."""
    first = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < CHANNELS
    let_next_begin(PDL)
    weights = ()
    for i in tl.static_range(KERNEL):
        weights += (tl.load(weight + c * KERNEL + i, mask=real, other=0.0).to(tl.float32),)
    offset = (
        tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
        if BIASED
        else tl.zeros([BLOCK], tl.float32)
    )
    wait(PDL)
    if tl.load(ahead + first) > 0:
        return  # the program of the known token before it does it
    held = real & (tl.load(kv_lens + first) > 1)
    at = rows_at(
        memory,
        units,
        unit_stride,
        place_stride,
        tl.load(places + first),
        c,
        real,
        PER_UNIT,
        KERNEL - 1,
    )
    for draft in range(lines_of(ahead, first, tl.num_programs(1))):
        t = (first + draft).to(tl.int64)
        y = offset
        for i in tl.static_range(KERNEL):
            before = KERNEL - 1 - i
            new = tl.load(x + (t - before) * x_stride + c, mask=real & (before <= draft), other=0.0)
            seen = new.to(tl.float32)
            if i < KERNEL - 1:
                seen += tl.load(at + draft + i, mask=held & (before > draft), other=0.0).to(
                    tl.float32
                )
            y += seen * weights[i]
        tl.store(out + t * CHANNELS + c, _activated(y, SILU).to(out.dtype.element_ty), mask=real)
        if draft > 0:
            tl.store(
                inputs + t * CHANNELS + c,
                tl.load(x + t * x_stride + c, mask=real).to(inputs.dtype.element_ty),
                mask=real,
            )
    past = _last_inputs(x, at, c, real, first, 1, held, x_stride, KERNEL)
    tl.debug_barrier()  # nothing is replaced that another thread still reads
    for i in tl.static_range(KERNEL - 1):
        tl.store(at + i, past[i], mask=real)


@triton.jit(do_not_specialize=["rows"])
def _conv_chunk(
    x,
    weight,
    bias,
    memory,
    units,
    places,
    kv_lens,
    query_starts,
    chunks,
    chunk_starts,
    out,
    x_stride,
    unit_stride,
    place_stride,
    rows,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some channels of a chunk."""
    chunk = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = (c < CHANNELS)[None, :]
    let_next_begin(PDL)
    weights = ()
    for i in tl.static_range(KERNEL):
        weights += (tl.load(weight + c * KERNEL + i, mask=c < CHANNELS, other=0.0).to(tl.float32),)
    offset = (
        tl.load(bias + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :] if BIASED else 0.0
    )
    wait(PDL)
    begin = tl.load(chunks + 2 * chunk)
    end = tl.load(chunks + 2 * chunk + 1)
    if begin == end:
        return  # padding
    row = row_of_chunk(chunk, chunk_starts, rows)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    held = (tl.load(kv_lens + row) > length) & (begin - first < KERNEL - 1)
    at = rows_at(
        memory,
        units,
        unit_stride,
        place_stride,
        tl.load(places + row),
        c,
        c < CHANNELS,
        PER_UNIT,
        KERNEL - 1,
    )[None, :]
    for start in range(begin, end, TOKENS):
        t = start + tl.arange(0, TOKENS)[:, None]
        y = tl.zeros([TOKENS, BLOCK], tl.float32) + offset
        for i in tl.static_range(KERNEL):
            source = t - (KERNEL - 1) + i
            seen = tl.load(
                x + source.to(tl.int64) * x_stride + c[None, :],
                mask=real & (source >= first) & (t < end),
                other=0.0,
            )
            y += seen.to(tl.float32) * weights[i][None, :]
        if held:
            for i in tl.static_range(KERNEL - 1):
                input = t - first + i
                y += (
                    tl.load(at + input, mask=real & (input < KERNEL - 1) & (t < end), other=0.0).to(
                        tl.float32
                    )
                    * weights[i][None, :]
                )
        tl.store(
            out + t.to(tl.int64) * CHANNELS + c[None, :],
            _activated(y, SILU).to(out.dtype.element_ty),
            mask=real & (t < end),
        )


@triton.jit
def _last_inputs(x, at, c, real, first, length, held, x_stride, KERNEL: tl.constexpr):
    """The past inputs after `length` tokens of a row that begins at `first`."""
    inputs = ()
    for i in tl.static_range(KERNEL - 1):
        offset = length - (KERNEL - 1) + i
        new = tl.load(
            x + (first + offset).to(tl.int64) * x_stride + c, mask=real & (offset >= 0), other=0.0
        )
        old = tl.load(at + length + i, mask=real & (offset < 0) & held, other=0.0)
        inputs += (tl.where(offset >= 0, new.to(old.dtype), old),)
    return inputs


@triton.jit
def _keep_inputs(
    x,
    memory,
    units,
    places,
    kv_lens,
    query_starts,
    checkpoint_at,
    checkpoint_places,
    x_stride,
    unit_stride,
    place_stride,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replace a row's past inputs, and write its checkpoint, for some channels."""
    row = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < CHANNELS
    let_next_begin(PDL)
    wait(PDL)
    first = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    kept = tl.load(checkpoint_at + row)
    held = tl.load(kv_lens + row) > length
    at = rows_at(
        memory,
        units,
        unit_stride,
        place_stride,
        tl.load(places + row),
        c,
        real,
        PER_UNIT,
        KERNEL - 1,
    )
    if kept > 0:
        inputs = _last_inputs(x, at, c, real, first, kept, held, x_stride, KERNEL)
        to = rows_at(
            memory,
            units,
            unit_stride,
            place_stride,
            tl.load(checkpoint_places + row),
            c,
            real,
            PER_UNIT,
            KERNEL - 1,
        )
        for i in tl.static_range(KERNEL - 1):
            tl.store(to + i, inputs[i], mask=real)
    inputs = _last_inputs(x, at, c, real, first, length, held, x_stride, KERNEL)
    tl.debug_barrier()  # nothing is replaced that another thread still reads
    for i in tl.static_range(KERNEL - 1):
        tl.store(at + i, inputs[i], mask=real)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: StateLayer,
    tensor: int,
    activation: Literal["silu"] | None,
) -> torch.Tensor:
    """See `dovetail.nn.state.short_conv`; weight and bias are contiguous."""
    batch, (channels, kernel) = state.batch, weight.shape
    x = by_rows(x)
    out = empty_outputs(state, x, channels)
    memory = state.memory[tensor]
    units = state.units[tensor]
    unit_stride, place_stride = state_strides(state, tensor)
    constants = {
        "CHANNELS": channels,
        "KERNEL": kernel,
        "PER_UNIT": per_unit(state, tensor),
        **pdl_options(x.device),
    }
    biases = x if bias is None else bias
    biased = bias is not None
    silu = activation is not None
    if batch.ahead is not None:
        launch(_conv_lines, (triton.cdiv(channels, STEP_CHANNELS), len(x)))(
            x,
            weight,
            biases,
            memory,
            units,
            batch.places,
            batch.kv_lens,
            batch.ahead,
            state.changes[tensor],
            out,
            x.stride(0),
            unit_stride,
            place_stride,
            BIASED=biased,
            SILU=silu,
            BLOCK=STEP_CHANNELS,
            num_warps=STEP_WARPS,
            **constants,
        )
        return out
    if batch.decodes:
        launch(_conv_step, (triton.cdiv(channels, STEP_CHANNELS), len(x)))(
            x,
            weight,
            biases,
            memory,
            units,
            batch.places,
            batch.kv_lens,
            out,
            x.stride(0),
            unit_stride,
            place_stride,
            BIASED=biased,
            SILU=silu,
            BLOCK=STEP_CHANNELS,
            num_warps=STEP_WARPS,
            **constants,
        )
        return out
    assert batch.chunks is not None
    launch(_conv_chunk, (triton.cdiv(channels, CHANNELS_AT_ONCE), len(batch.chunks)))(
        x,
        weight,
        biases,
        memory,
        units,
        batch.places,
        batch.kv_lens,
        batch.query_starts,
        batch.chunks,
        batch.chunk_starts,
        out,
        x.stride(0),
        unit_stride,
        place_stride,
        len(batch.places),
        BIASED=biased,
        SILU=silu,
        TOKENS=TOKENS_AT_ONCE,
        BLOCK=CHANNELS_AT_ONCE,
        num_warps=WARPS,
        **constants,
    )
    launch(_keep_inputs, (triton.cdiv(channels, STEP_CHANNELS), len(batch.places)))(
        x,
        *step_tensors(state, tensor),
        x.stride(0),
        unit_stride,
        place_stride,
        BLOCK=STEP_CHANNELS,
        num_warps=STEP_WARPS,
        **constants,
    )
    return out
