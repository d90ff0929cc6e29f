# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Start and end of a decode step as one kernel each, with one program per row. Twins, with documentation: `dovetail.runtime.decode_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row
from dovetail.runtime.row_state import RowState


@triton.jit
def _last_tokens(
    rows,
    known,  # [max_rows + 1, width] int32
    num_known,  # [max_rows + 1] int32
    width,
    token_ids,
    positions,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    i = tl.program_id(0)
    wait(PDL)
    row = tl.load(rows + i)
    position = tl.load(num_known + row).to(tl.int64) - 1
    tl.store(positions + i, position)
    tl.store(token_ids + i, tl.load(known + row * width + position).to(tl.int64))


@triton.jit
def _append(
    rows,
    positions,
    token_ids,
    hidden,
    known,  # [max_rows + 1, width] int32
    num_known,  # [max_rows + 1] int32
    width,
    nobody,
    outputs,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    i = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    wait(PDL)
    values = tl.load(hidden + i.to(tl.int64) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    row, end, token_id = tl.load(rows + i), tl.load(positions + i) + 1, tl.load(token_ids + i)
    tl.store(known + row * width + end, token_id.to(tl.int32))
    tl.store(num_known + row, tl.where(row == nobody, 1, end + 1).to(tl.int32))
    tl.store(outputs + i, token_id)
    tl.store(outputs + tl.num_programs(0) + i, tl.max((values != values).to(tl.int32), 0).to(tl.int64))


def last_tokens(state: RowState, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, positions = torch.empty_like(rows), torch.empty_like(rows)
    if len(rows):
        launch(_last_tokens, (len(rows),))(
            rows, state.token_ids, state.num_tokens, state.row_width, token_ids, positions, num_warps=1, **pdl_options(rows.device)
        )
    return token_ids, positions


def append(state: RowState, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    n, size = hidden.shape
    outputs = torch.empty((2, n), dtype=torch.int64, device=hidden.device)
    block = triton.next_power_of_2(size)
    if n:
        launch(_append, (n,))(
            rows,
            positions,
            token_ids,
            hidden,
            state.token_ids,
            state.num_tokens,
            state.row_width,
            state.max_rows,
            outputs,
            SIZE=size,
            BLOCK=block,
            num_warps=warps_of_row(block),
            **pdl_options(hidden.device),
        )
    return outputs
