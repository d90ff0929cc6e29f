"""Carries the states of a batch's rows through its tokens, in plain torch operations: the twin of what the kernels do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dovetail.api.state import CHUNK, StateBatch, StateLayer
from dovetail.errors import DovetailError

# (states [n, rows, row_size] float32, inputs [n, length, ...] each) -> (outputs [n, length, ...], the states after these tokens). All inputs of
# tokens that are missing are 0, which must leave a state as it is.
Compute = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [begin, end) of a step, which are of `row`. `kept`: the state after them is a checkpoint."""

    row: int
    begin: int
    end: int
    kept: bool


def scan(state: StateLayer, tensor: int, inputs: Sequence[torch.Tensor], compute: Compute) -> torch.Tensor:
    """Return the outputs [tokens, ...] for inputs [tokens, ...] of a step, 0 for padding; replace the states of its rows and write its
    checkpoints."""
    batch = state.batch
    if batch.decodes:
        lines = batch.lines[: len(inputs[0])]
        outputs, after = compute(live_states(state, tensor, lines, batch.kv_lens[: len(lines)] <= 1), tuple(x[:, None] for x in inputs))
        state.write(tensor, lines, after)
        return outputs[:, 0]
    lines = batch.lines[: batch.num_rows]
    held = live_states(state, tensor, lines, fresh(batch))
    result: torch.Tensor | None = None
    for pieces in _rounds(batch):
        rows, begins, lengths = torch.tensor([(p.row, p.begin, p.end - p.begin) for p in pieces], device=lines.device).unbind(1)
        steps = torch.arange(int(max(p.end - p.begin for p in pieces)), device=lines.device)
        inside = steps < lengths[:, None]
        tokens = (begins[:, None] + steps).clamp_(max=batch.num_tokens - 1)
        parts = tuple(x[tokens].masked_fill_(~inside.view(*inside.shape, *[1] * (x.ndim - 1)), 0) for x in inputs)
        outputs, after = compute(held[rows], parts)
        held[rows] = after
        if result is None:
            result = outputs.new_zeros(len(inputs[0]), *outputs.shape[2:])
        result[tokens[inside]] = outputs[inside]
        if (kept := [i for i, piece in enumerate(pieces) if piece.kept]) and batch.checkpoint_lines is not None:
            state.write(tensor, batch.checkpoint_lines[rows[kept]], after[kept])
    state.write(tensor, lines, held)
    if result is None:
        raise DovetailError(f"state layer {state.spec.index} has a step without tokens")
    return result


def fresh(batch: StateBatch) -> torch.Tensor:
    """Return which rows [num_rows] of a step start from zero."""
    starts = batch.query_starts[: batch.num_rows + 1]
    return batch.kv_lens[: batch.num_rows] <= starts.diff()


def live_states(state: StateLayer, tensor: int, lines: torch.Tensor, from_zero: torch.Tensor) -> torch.Tensor:
    """Return the states of `lines` [n, rows, row_size] float32, 0 where `from_zero` [n], whatever the memory holds."""
    return state.read(tensor, lines).float().masked_fill_(from_zero[:, None, None], 0)


def _rounds(batch: StateBatch) -> Iterator[list[Piece]]:
    """Yield the tokens of a step in pieces of at most CHUNK, of each row at most one at a time. Single tokens aren't padded to the length of
    others."""
    if batch.host_checkpoint_at is None:
        raise DovetailError("a step of several tokens a row has no chunks")
    rows, begin = list[list[Piece]](), 0
    for row, (length, at) in enumerate(zip(batch.host_query_lens.tolist(), batch.host_checkpoint_at.tolist(), strict=True)):
        pieces = []
        for first, last in ((0, at), (at, length)):
            pieces += [
                Piece(row, begin + i, begin + min(i + CHUNK, last), kept=last == at and min(i + CHUNK, last) == at) for i in range(first, last, CHUNK)
            ]
        rows.append(pieces)
        begin += length
    for index in range(max(map(len, rows), default=0)):
        turn = [pieces[index] for pieces in rows if index < len(pieces)]
        for single in (True, False):
            if alike := [piece for piece in turn if (piece.end - piece.begin == 1) == single]:
                yield alike


def by_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return x [..., channels] as [..., heads, size]."""
    return x.view(*x.shape[:-1], heads, -1)
