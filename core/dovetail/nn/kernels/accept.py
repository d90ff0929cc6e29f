# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: N803 (constants are upper case)
"""Changes of accepted drafts, of all layers with equal states at once. Twin:
`dovetail.nn.state.accept`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dovetail.api.state import Changes, StateBatch
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.states import per_unit, rows_at, state_strides

if TYPE_CHECKING:
    from dovetail.nn.state.alike import AlikeLayers

# of a program
NUMBERS = 4096
WARPS = 4


@triton.jit
def _accept_changes(
    memory,
    units,
    firsts,
    places,
    kv_lens,
    num_tokens,
    known,
    decay,
    change,
    key,
    unit_stride,
    place_stride,
    noted,  # tokens whose changes there is memory for, in a layer
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    N: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Change some rows of one layer's state of one request."""
    layer = tl.program_id(1).to(tl.int64)
    token = tl.load(known + tl.program_id(2))
    place = tl.load(places + token)
    yielded = tl.load(num_tokens + place) - tl.load(kv_lens + token)
    if yielded < 2:
        return
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    real = r < HEADS * SIZE
    whole = real[:, None] & (i < N)[None, :]
    head = r // SIZE
    at = (
        rows_at(
            memory,
            units + tl.load(firsts + layer),
            unit_stride,
            place_stride,
            place,
            r,
            real,
            PER_UNIT,
            N,
        )[:, None]
        + i[None, :]
    )
    state = tl.load(at, mask=whole, other=0.0).to(tl.float32)
    for draft in range(1, yielded):
        t = layer * noted + token + draft
        kept = tl.load(decay + t * HEADS + head, mask=real, other=0.0)
        added = tl.load(change + t * (HEADS * SIZE) + r, mask=real, other=0.0)
        at_key = tl.load(
            key + (t * KEYS + head // (HEADS // KEYS))[:, None] * N + i[None, :],
            mask=whole,
            other=0.0,
        )
        state *= kept[:, None]
        state += added[:, None] * at_key
        state = state.to(memory.dtype.element_ty).to(tl.float32)
    tl.store(at, state.to(memory.dtype.element_ty), mask=whole)


@triton.jit
def _accept_inputs(
    memory,
    units,
    firsts,
    places,
    kv_lens,
    num_tokens,
    known,
    inputs,
    unit_stride,
    place_stride,
    noted,
    CHANNELS: tl.constexpr,
    PAST: tl.constexpr,
    PER_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the past inputs of some channels of one layer and one request."""
    layer = tl.program_id(1).to(tl.int64)
    token = tl.load(known + tl.program_id(2))
    place = tl.load(places + token)
    moved = tl.load(num_tokens + place) - tl.load(kv_lens + token) - 1
    if moved < 1:
        return
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < CHANNELS
    at = rows_at(
        memory,
        units + tl.load(firsts + layer),
        unit_stride,
        place_stride,
        place,
        c,
        real,
        PER_UNIT,
        PAST,
    )
    last = inputs + (layer * noted + token + moved) * CHANNELS + c
    after = ()
    for i in tl.static_range(PAST):
        new = tl.load(last - (PAST - 1 - i) * CHANNELS, mask=real & (moved + i >= PAST), other=0.0)
        old = tl.load(at + moved + i, mask=real & (moved + i < PAST), other=0.0)
        after += (tl.where(moved + i < PAST, old, new),)
    tl.debug_barrier()  # nothing is replaced that another thread still reads
    for i in tl.static_range(PAST):
        tl.store(at + i, after[i], mask=real)


def accept_drafts(
    alike: AlikeLayers,
    tensor: int,
    batch: StateBatch,
    known: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    state = alike.layers[0]
    changes = alike.changes[tensor]
    shape, (unit_stride, place_stride) = state.spec.tensors[tensor], state_strides(state, tensor)
    where = (
        state.memory[tensor],
        alike.units,
        alike.firsts[tensor],
        batch.places,
        batch.kv_lens,
        num_tokens,
        known,
    )
    layers = len(alike.layers)
    requests = len(known)
    if isinstance(changes, Changes):
        block = triton.next_power_of_2(shape.row_size)
        rows = max(1, NUMBERS // block)
        launch(_accept_changes, (triton.cdiv(shape.rows, rows), layers, requests))(
            *where,
            changes.decay,
            changes.change,
            changes.key,
            unit_stride,
            place_stride,
            changes.decay.shape[1],
            HEADS=shape.heads,
            SIZE=shape.rows // shape.heads,
            KEYS=shape.keys,
            N=shape.row_size,
            PER_UNIT=per_unit(state, tensor),
            ROWS=rows,
            BLOCK=block,
            num_warps=WARPS,
        )
        return
    channels = min(1024, triton.next_power_of_2(shape.rows))
    launch(_accept_inputs, (triton.cdiv(shape.rows, channels), layers, requests))(
        *where,
        changes,
        unit_stride,
        place_stride,
        changes.shape[1],
        CHANNELS=shape.rows,
        PAST=shape.row_size,
        PER_UNIT=per_unit(state, tensor),
        BLOCK=channels,
        num_warps=WARPS,
    )
