"""Carries the states of a batch's rows through its tokens, in plain torch operations: the twin of
what the kernels do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dovetail.api.state import CHUNK, Changes, StateBatch, StateLayer
from dovetail.errors import DovetailError

# (states [n, rows, row_size] float32, inputs [n, length, ...] each) -> (outputs [n, length, ...],
# the states after these tokens). All inputs of tokens that are missing are 0, which must leave a
# state as it is.
Tensors = tuple[torch.Tensor, ...]
Compute = Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One token of a recurrence, for inputs [n, ...]. `decay` [n, heads]: factors of the states.
    `change`: from states times these, [n, heads, size, row_size], (change [n, heads, size], key [n,
    keys, row_size]), see `dovetail.api.state.StateTensor`. `outputs` [n, heads, size]: from the
    states after the token."""

    decay: Callable[[Tensors], torch.Tensor]
    change: Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, torch.Tensor]]
    outputs: Callable[[torch.Tensor, Tensors], torch.Tensor]

    def token(
        self, states: torch.Tensor, inputs: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, Changes]:
        """Return (outputs of a token, the states [n, rows, row_size] after it, what it changes)."""
        decay = self.decay(inputs)
        held = _decayed(states, decay)
        change, key = self.change(held, inputs)
        held = held + change[..., None] * shared(key, held.shape[1])
        return (
            self.outputs(held, inputs),
            held.flatten(1, 2),
            Changes(decay=decay, change=change.flatten(1), key=key),
        )

    def token_by_token(
        self, states: torch.Tensor, inputs: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence itself; see `Compute`."""
        outputs = []
        for token in zip(*(x.unbind(1) for x in inputs), strict=True):
            output, states, _ = self.token(states, token)
            outputs.append(output)
        return torch.stack(outputs, 1), states


def changed(states: torch.Tensor, changes: Changes) -> torch.Tensor:
    """Return the states [n, rows, row_size] float32 after the changes of a token."""
    held = _decayed(states, changes.decay)
    return (
        held + changes.change.view(held.shape[:3])[..., None] * shared(changes.key, held.shape[1])
    ).flatten(1, 2)


def _decayed(states: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Return states [n, rows, row_size] times decay [n, heads]: [n, heads, size, row_size]."""
    return states.view(len(states), decay.shape[1], -1, states.shape[2]) * decay[..., None, None]


def shared(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return x [n, groups, size] for each head, which heads share in order: [n, heads, 1, size]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)[:, :, None]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [begin, end) of a step, which are of `row`. `kept`: the state after them is a
    checkpoint."""

    row: int
    begin: int
    end: int
    kept: bool


def scan(
    state: StateLayer, tensor: int, inputs: Sequence[torch.Tensor], compute: Compute, rule: Rule
) -> torch.Tensor:
    """Return the outputs [tokens, ...] for inputs [tokens, ...] of a step, 0 for padding; replace
    the states of its rows, write its checkpoints, and note the changes of drafts. `compute` and
    `rule` are the same recurrence."""
    batch = state.batch
    if batch.ahead is not None:
        return _scan_lines(state, tensor, tuple(inputs), rule)
    if batch.decodes:
        places = batch.places[: len(inputs[0])]
        outputs, after = compute(
            live_states(state, tensor, places, batch.kv_lens[: len(places)] <= 1),
            tuple(x[:, None] for x in inputs),
        )
        state.write(tensor, places, after)
        return outputs[:, 0]
    places = batch.places[: batch.num_rows]
    held = live_states(state, tensor, places, fresh(batch))
    result: torch.Tensor | None = None
    for pieces in _rounds(batch):
        rows, begins, lengths = torch.tensor(
            [(p.row, p.begin, p.end - p.begin) for p in pieces], device=places.device
        ).unbind(1)
        steps = torch.arange(int(max(p.end - p.begin for p in pieces)), device=places.device)
        inside = steps < lengths[:, None]
        tokens = (begins[:, None] + steps).clamp_(max=batch.num_tokens - 1)
        parts = tuple(
            x[tokens].masked_fill_(~inside.view(*inside.shape, *[1] * (x.ndim - 1)), 0)
            for x in inputs
        )
        outputs, after = compute(held[rows], parts)
        held[rows] = after
        if result is None:
            result = outputs.new_zeros(len(inputs[0]), *outputs.shape[2:])
        result[tokens[inside]] = outputs[inside]
        if (
            kept := [i for i, piece in enumerate(pieces) if piece.kept]
        ) and batch.checkpoint_places is not None:
            state.write(tensor, batch.checkpoint_places[rows[kept]], after[kept])
    state.write(tensor, places, held)
    if result is None:
        raise DovetailError(f"state layer {state.spec.index} has a step without tokens")
    return result


def _scan_lines(state: StateLayer, tensor: int, inputs: Tensors, rule: Rule) -> torch.Tensor:
    """`scan` of single tokens that may be drafts: each sees the states after those before it, in
    the memory's dtype, as if they were steps."""
    batch = state.batch
    noted = state.changes[tensor]
    assert isinstance(noted, Changes)
    held = torch.empty(0)
    result = torch.empty(0)
    for ahead, tokens, row in lines_in_turn(batch, len(inputs[0])):
        if not ahead:
            held = live_states(state, tensor, batch.places[tokens], batch.kv_lens[tokens] <= 1)
        outputs, after, changes = rule.token(held[row], tuple(x[tokens] for x in inputs))
        after = after.to(state.memory[tensor].dtype)
        held[row] = after.float()
        if not ahead:
            state.write(tensor, batch.places[tokens], after)
            result = outputs.new_empty(len(inputs[0]), *outputs.shape[1:])
        else:
            noted.decay[tokens] = changes.decay
            noted.change[tokens] = changes.change
            noted.key[tokens] = changes.key
        result[tokens] = outputs
    return result


def lines_in_turn(
    batch: StateBatch, count: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield the `count` tokens of a step with `StateBatch.ahead` such that all that a token follows
    are before it: (drafts before each, the tokens [n], the indices of their requests among those of
    the step [n])."""
    ahead = (
        batch.ahead[:count]
        if batch.ahead is not None
        else torch.zeros(count, dtype=torch.int32, device=batch.places.device)
    )
    request = (ahead == 0).cumsum(0) - 1
    for drafts in range(int(ahead.max()) + 1):
        tokens = (ahead == drafts).nonzero()[:, 0]
        yield drafts, tokens, request[tokens]


def with_drafts(
    state: StateLayer, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> torch.Tensor:
    """Return compute(*inputs) [tokens, ...] of a layer's planned step, for inputs [tokens, ...]; of
    tokens that are computed apart (`StateBatch.drafted`) from them alone."""
    outputs = compute(*inputs)
    if (drafted := state.batch.drafted) is not None:
        with state.computing(drafted.batch):
            outputs[drafted.tokens] = compute(*(x[drafted.tokens] for x in inputs))
    return outputs


def fresh(batch: StateBatch) -> torch.Tensor:
    """Return which rows [num_rows] of a step start from zero."""
    starts = batch.query_starts[: batch.num_rows + 1]
    return batch.kv_lens[: batch.num_rows] <= starts.diff()


def live_states(
    state: StateLayer, tensor: int, places: torch.Tensor, from_zero: torch.Tensor
) -> torch.Tensor:
    """Return the states at `places` [n, rows, row_size] float32, 0 where `from_zero` [n], whatever
    the memory holds."""
    return state.read(tensor, places).float().masked_fill_(from_zero[:, None, None], 0)


def _rounds(batch: StateBatch) -> Iterator[list[Piece]]:
    """Yield the tokens of a step in pieces of at most CHUNK, of each row at most one at a time.
    Single tokens aren't padded to the length of others."""
    if batch.host_checkpoint_at is None:
        raise DovetailError("a step of several tokens a row has no chunks")
    rows = list[list[Piece]]()
    begin = 0
    for row, (length, at) in enumerate(
        zip(batch.host_query_lens.tolist(), batch.host_checkpoint_at.tolist(), strict=True)
    ):
        pieces = []
        for first, last in ((0, at), (at, length)):
            pieces += [
                Piece(
                    row,
                    begin + i,
                    begin + min(i + CHUNK, last),
                    kept=last == at and min(i + CHUNK, last) == at,
                )
                for i in range(first, last, CHUNK)
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
