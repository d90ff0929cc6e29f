# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Start and end of a decode step as one kernel each, with one program per line. Twins, with
documentation: `dovetail_executors.runtime.decode_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.api.sampler import Lines
from dovetail.nn.kernels.dependent_launch import let_next_begin, pdl_options, wait
from dovetail.nn.kernels.launch import launch
from dovetail.nn.kernels.row import warps_of_row
from dovetail_executors.runtime.row_state import RowState


@triton.jit
def _last_tokens(
    rows,
    ahead,
    known,  # [max_rows + 1, width] int32
    num_known,  # [max_rows + 1] int32
    width,
    drafts,  # [n] int32, with DRAFTS
    token_ids,
    positions,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    i = tl.program_id(0)
    wait(PDL)
    row = tl.load(rows + i)
    position = (tl.load(num_known + row) + tl.load(ahead + i)).to(tl.int64) - 1
    tl.store(positions + i, position)
    token = tl.load(known + row * width + position)
    if DRAFTS:
        draft = tl.load(drafts + i)
        tl.store(known + row * width + position, draft, mask=draft >= 0)
        token = tl.where(draft >= 0, draft, token)
    tl.store(token_ids + i, token.to(tl.int64))


@triton.jit
def _append(
    rows,
    ahead,
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
    n = tl.num_programs(0)
    row = tl.load(rows + i)
    token_id = tl.load(token_ids + i)
    tl.store(outputs + i, token_id)
    tl.store(outputs + n + i, tl.max((values != values).to(tl.int32), 0).to(tl.int64))
    # a row's first line extends it
    count = tl.full((), 0, tl.int32)
    last = token_id
    goes_on = tl.load(ahead + i) == 0
    if goes_on:
        end = known + row * width + tl.load(positions + i) + 1
        while goes_on:
            last = tl.load(token_ids + i + count)
            followed = tl.load(ahead + i + count + 1, mask=i + count + 1 < n, other=0) > 0
            goes_on = followed & (tl.load(end + count, mask=followed, other=-1) == last)
            count += 1
        tl.store(end + count - 1, last.to(tl.int32))
        tl.store(
            num_known + row,
            tl.where(row == nobody, 1, tl.load(positions + i) + 1 + count).to(tl.int32),
        )
    tl.store(outputs + 2 * n + i, count.to(tl.int64))


def last_tokens(
    state: RowState, lines: Lines, drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    n = len(lines.rows)
    device = lines.rows.device
    token_ids = torch.empty_like(lines.rows)
    positions = torch.empty_like(lines.rows)
    if n:
        launch(_last_tokens, (n,))(
            lines.rows,
            lines.ahead,
            state.token_ids,
            state.num_tokens,
            state.row_width,
            lines.ahead if drafts is None else drafts,
            token_ids,
            positions,
            DRAFTS=drafts is not None,
            num_warps=1,
            **pdl_options(device),
        )
    return token_ids, positions


def append(
    state: RowState,
    lines: Lines,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    n, size = hidden.shape
    outputs = torch.empty((3, n), dtype=torch.int64, device=hidden.device)
    block = triton.next_power_of_2(size)
    if n:
        launch(_append, (n,))(
            lines.rows,
            lines.ahead,
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
