"""Functions that read a decode step's rows before the model and extend them after the sampler, on the device, so that a CUDA graph can record them
(`graphs`).

Each is a single kernel where kernels run (`decode_rows_kernels`), instead of some ten torch operations dominated by launch time.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.runtime.row_state import RowState


def last_tokens(state: RowState, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the last known tokens of rows [n] int64, which may be padding, and the positions of these, [n] int64 each."""
    if use_kernels(rows):
        from dovetail.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.last_tokens(state, rows)
    positions = state.num_tokens[rows].long() - 1
    return state.token_ids.view(-1)[rows * state.row_width + positions].long(), positions


def append(state: RowState, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Append token_ids [n] int64 to rows [n] int64, whose last known tokens are at `positions` [n] int64. Rows are distinct except for the padding
    row, which may occur repeatedly, keeps its length of 1, and is undefined after that. The caller updates the host's counts.

    Returns [2, n] int64: the ids, and whether `hidden` [n, hidden] holds NaN in that row.
    """
    if use_kernels(rows, positions, token_ids, hidden):
        from dovetail.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.append(state, rows, positions, token_ids, hidden)
    state.token_ids.view(-1)[rows * state.row_width + positions + 1] = token_ids.to(torch.int32)
    state.num_tokens[rows] = (positions + 2).to(torch.int32)
    state.num_tokens[state.max_rows :].fill_(1)
    return torch.stack((token_ids, hidden.isnan().any(dim=1).long()))
