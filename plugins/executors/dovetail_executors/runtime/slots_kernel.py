# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: N803 (constants are upper case)
"""Slots of a step's tokens in the caches of all groups, in one kernel. Twin, with documentation:
`RowState.put_slots`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.nn.kernels.launch import launch

TOKENS = 128  # of a program


@triton.jit(do_not_specialize=["count", "n", "waste_page"])
def _put_slots(
    token_indices,  # [n] int64
    tables,  # [tables, TABLE_SIZE] int32
    block_tokens,  # [tables] int64
    slots,  # [tables, n] int64
    count,
    n,
    waste_page,
    ROW_WIDTH: tl.constexpr,
    TABLE_SIZE: tl.constexpr,  # of all rows
    MAX_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    table = tl.program_id(1).to(tl.int64)
    index = tl.load(token_indices + token, mask=token < count, other=0)
    row = index // ROW_WIDTH
    position = index % ROW_WIDTH
    size = tl.load(block_tokens + table)
    page = tl.load(
        tables + table * TABLE_SIZE + row * MAX_BLOCKS + position // size,
        mask=token < count,
        other=0,
    ).to(tl.int64)
    slot = tl.where(token < count, page * size + position % size, waste_page * size)
    tl.store(slots + table * n + token, slot, mask=token < n)


def put_slots(
    token_indices: torch.Tensor,
    tables: torch.Tensor,
    block_tokens: torch.Tensor,
    slots: torch.Tensor,
    count: int,
    waste_page: int,
    row_width: int,
) -> None:
    num_tables, n = slots.shape
    sizes = {
        "ROW_WIDTH": row_width,
        "TABLE_SIZE": tables.stride(0),
        "MAX_BLOCKS": tables.stride(1),
        "TOKENS": TOKENS,
    }
    launch(_put_slots, (triton.cdiv(n, TOKENS), num_tables))(
        token_indices, tables, block_tokens, slots, count, n, waste_page, num_warps=4, **sizes
    )
