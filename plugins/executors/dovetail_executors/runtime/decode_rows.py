"""Functions that read a decode step's lines before the model and extend their rows after the sampler, on the device, so that a CUDA graph can record
them (`graphs`).

Each is a single kernel where kernels run (`decode_rows_kernels`), instead of some ten torch operations dominated by launch time.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.sampler import Lines
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail_executors.runtime.row_state import RowState


def last_tokens(
    state: RowState, lines: Lines, drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the last tokens of lines [n], which may be padding, and the positions of these, [n] int64 each. `drafts` [n] int32: those of
    0 and above are the ids, and are written to the rows first."""
    if use_kernels(*lines):
        from dovetail_executors.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.last_tokens(state, lines, drafts)
    positions = state.history.lengths(lines).long() - 1
    ids, places = state.token_ids.view(-1), lines.rows * state.row_width + positions
    if drafts is not None:
        ids[places] = torch.where(drafts >= 0, drafts, ids[places])
    return ids[places].long(), positions


def put_drafts(
    state: RowState, lines: Lines, positions: torch.Tensor, token_ids: torch.Tensor, vocab_size: int
) -> None:
    """Write token_ids [n] int64 as the drafts that follow lines [n], whose last tokens are at `positions` [n] int64. Unlike `append` it leaves the
    number of known tokens as it is. Ids sampled from NaN may be any; drafts are in the vocabulary."""
    places = lines.rows * state.row_width + positions + 1
    state.token_ids.view(-1)[places] = token_ids.clamp(0, vocab_size - 1).to(torch.int32)


def append(
    state: RowState,
    lines: Lines,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Append to each row the token_ids [n] int64 of its lines [n] up to the first that differs from its draft, that one included. The lines' last
    tokens are at `positions` [n] int64. All lines of a row are neighbours; the padding row may occur repeatedly, keeps its length of 1, and is
    undefined after that. The caller updates the host's counts.

    Returns [3, n] int64: the ids; whether `hidden` [n, hidden] holds NaN in that line; and how many tokens its row got, 0 except in its first line.
    """
    if use_kernels(*lines, positions, token_ids, hidden):
        from dovetail_executors.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.append(state, lines, positions, token_ids, hidden)
    ids, places = state.token_ids.view(-1), lines.rows * state.row_width + positions + 1
    followed = torch.zeros_like(token_ids, dtype=torch.bool)  # by another line of its row
    followed[:-1] = lines.ahead[1:] > 0
    ends = (~followed | (ids[places] != token_ids)).long()  # its row gets nothing of later lines
    before = ends.cumsum(0) - ends
    first = torch.arange(len(ends), device=ends.device) - lines.ahead
    reached = before == before[first]
    counts = torch.zeros_like(token_ids).index_add_(0, first, reached.long())
    ids[places] = torch.where(reached, token_ids, ids[places].long()).to(torch.int32)
    state.num_tokens[lines.rows] = (positions + 1 + counts)[first].to(torch.int32)
    state.num_tokens[state.max_rows :].fill_(1)
    return torch.stack((token_ids, hidden.isnan().any(dim=1).long(), counts))
