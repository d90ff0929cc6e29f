"""States of transformers' recurrent modules in the page pool.

Such a module reads and writes its states (past inputs of a convolution, what a recurrence has
accumulated) through transformers' cache. `find_states` traces which these are. `bind_states` gives
each module a `StateLayer`: it then computes pieces of rows, with a `RowStates` as its cache.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from dovetail.api.state import StateBatch, StateLayer, StateSpec, StateTensor
from dovetail.nn.state.scan import fresh

# of transformers' `Cache`, and of MiniMax's
_GETTERS = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
_FROM_ZERO = {"mamba_selective_scan"}  # functions that have no argument for an earlier state
_ARGUMENTS = ("cache_params", "past_key_values")  # names of the cache in `forward`

Key = tuple[str, int]  # ("conv" or "recurrent", number of the state in its layer)


class RowStates:
    """States of n rows in the place of transformers' `Cache`, for one module's forward pass. Without
    any, it begins as an empty cache and keeps what the module writes."""

    def __init__(self, states: Mapping[Key, torch.Tensor] | None = None) -> None:
        self.states = dict(states or {})

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append inputs [n, channels, tokens], and return all that are known."""
        past = self.states.get(("conv", state_idx))
        if past is None:
            size = conv_kernel_size or conv_states.shape[-1]
            past = conv_states.new_zeros(*conv_states.shape[:-1], size)
            known = conv_states
        else:
            known = torch.cat([past, conv_states], dim=-1)
        kept = torch.cat([past, conv_states], dim=-1)[..., -past.shape[-1] :]
        self.states["conv", state_idx] = kept
        return known

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int = 0) -> torch.Tensor | None:
        return self.get_recurrent_state()

    def set_linear_cache(self, layer_idx: int, cache: torch.Tensor) -> None:
        self.update_recurrent_state(cache)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class StateCall:
    """A module that keeps states, recorded by `find_states`."""

    module: str  # its name in the model
    argument: str  # of its `forward`: the cache
    shapes: tuple[tuple[Key, tuple[int, ...]], ...]  # of each state of one row
    by_token: bool  # of several tokens at once, it begins at zero whatever the states

    def spec(self, index: int) -> StateSpec:
        """Return the state of layer `index`. What a draft changes isn't known of modules that
        replace their states, so drafts aren't taken."""
        tensors = tuple(
            StateTensor(rows=prod(shape[:-1]), row_size=shape[-1], keeps_inputs=kind == "conv")
            for (kind, _), shape in self.shapes
        )
        return StateSpec(index=index, tensors=tensors)


def state_specs_of(calls: Sequence[StateCall], after: int) -> list[StateSpec]:
    """Return the states of `calls`, as layers with indices from `after` on."""
    return [call.spec(after + index) for index, call in enumerate(calls)]


@contextmanager
def recording_states(base: nn.Module) -> Iterator[list[StateCall]]:
    """Context in which modules of `base` that keep states record them when called."""
    calls = list[StateCall]()
    found = {name: module for name, module in base.named_modules() if _argument_of(module)}
    for name, module in found.items():
        module.forward = _Recorder(name, module, calls)
    try:
        yield calls
    finally:
        for module in found.values():
            del module.forward


def bind_states(base: nn.Module, calls: Sequence[StateCall], layers: Sequence[StateLayer]) -> None:
    """Make each module of `calls` compute on the rows' states of its layer."""
    for call, layer in zip(calls, layers, strict=True):
        module = base.get_submodule(call.module)
        module.forward = _OfRows(module, call, layer)


def _argument_of(module: nn.Module) -> str | None:
    """Return the name of the cache in the `forward` of a module that reads states from it."""
    if not _names_in(module) & _GETTERS:
        return None
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return next((name for name in _ARGUMENTS if name in parameters), None)


def attends(module: nn.Module) -> bool:
    """Return True for modules that call transformers' attention functions."""
    return "ALL_ATTENTION_FUNCTIONS" in _names_in(module)


def _names_in(module: nn.Module) -> frozenset[str]:
    """Return the names that the code of a module's `forward` reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return frozenset(() if code is None else code.co_names)


def _of_hidden_states(module: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of a module with None for whatever it needs beside hidden states."""
    _, *others = inspect.signature(module.forward).parameters.values()
    needed = [
        one.name
        for one in others
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return partial(module.forward, **dict.fromkeys(needed))


class _Recorder:
    def __init__(self, name: str, module: nn.Module, calls: list[StateCall]) -> None:
        self._name = name
        self._argument = str(_argument_of(module))
        self._by_token = bool(_names_in(module) & _FROM_ZERO)
        self._forward = _of_hidden_states(module)
        self._calls = calls

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        cache = RowStates()
        result = self._forward(hidden_states, **{self._argument: cache})
        shapes = tuple((key, tuple(state.shape[1:])) for key, state in cache.states.items())
        self._calls.append(StateCall(self._name, self._argument, shapes, self._by_token))
        return result


class _Piece(NamedTuple):
    """Tokens [begin, end) of a step, which are of `row`. `first`: of the row's in this step.
    `kept`: the state after them is a checkpoint."""

    row: int
    begin: int
    end: int
    first: bool
    kept: bool


class _OfRows:
    """`forward` of a module for the tokens of a step."""

    def __init__(self, module: nn.Module, call: StateCall, layer: StateLayer) -> None:
        self._forward = _of_hidden_states(module)
        self._argument = call.argument
        self._shapes = call.shapes
        self._by_token = call.by_token
        self._layer = layer
        self._returns_tuple = False

    def __call__(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """hidden_states [1, tokens, hidden] -> what the module returns, of all tokens."""
        batch = self._layer.batch
        x = hidden_states[0]
        if batch.decodes:
            places = batch.places[: len(x)]
            outs = self._compute(x[:, None], places, batch.kv_lens[: len(x)] <= 1)
            return self._given([None if out is None else out.transpose(0, 1) for out in outs])
        results: list[torch.Tensor | None] = []
        is_new = fresh(batch)
        ends = _ends(batch, is_new.tolist() if self._by_token else None)
        for pieces in _alike_pieces(batch, ends):
            rows, begins = torch.tensor([piece[:2] for piece in pieces], device=x.device).unbind(1)
            length = pieces[0].end - pieces[0].begin
            tokens = begins[:, None] + torch.arange(length, device=x.device)
            starts = is_new[rows] if pieces[0].first else torch.zeros_like(is_new[rows])
            outs = self._compute(x[tokens], batch.places[rows], starts)
            if not results:
                results = [
                    None if out is None else out.new_zeros(1, len(x), *out.shape[2:])
                    for out in outs
                ]
            for result, out in zip(results, outs, strict=True):
                if result is not None and out is not None:
                    result[0, tokens] = out
            self._keep(batch, pieces)
        return self._given(results)

    def _given(self, results: Sequence[torch.Tensor | None]) -> Any:
        """Return `results` as the module returns them."""
        return tuple(results) if self._returns_tuple else results[0]

    def _compute(
        self, x: torch.Tensor, places: torch.Tensor, is_new: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Compute x [n, tokens, hidden] of rows with live states at `places`, which begin at zero
        where `is_new`, and replace these states. Returns what the module returns: tensors [n,
        tokens, ...], and None for anything else."""
        states = dict[Key, torch.Tensor]()
        for index, (key, shape) in enumerate(self._shapes):
            held = self._layer.read(index, places).masked_fill_(is_new[:, None, None], 0)
            held = held if key[0] == "conv" else held.float()
            states[key] = held.view(len(places), *shape)
        cache = RowStates(states)
        result = self._forward(x, **{self._argument: cache})
        for index, (key, _) in enumerate(self._shapes):
            spec = self._layer.spec.tensors[index]
            state = cache.states[key].reshape(len(places), spec.rows, spec.row_size)
            self._layer.write(index, places, state)
        self._returns_tuple = isinstance(result, tuple)
        return [
            one if isinstance(one, torch.Tensor) and one.shape[:2] == x.shape[:2] else None
            for one in (result if isinstance(result, tuple) else (result,))
        ]

    def _keep(self, batch: StateBatch, pieces: Sequence[_Piece]) -> None:
        """Copy the live states of rows to their checkpoints, after pieces that end at one."""
        rows = [piece.row for piece in pieces if piece.kept]
        if rows and batch.checkpoint_places is not None:
            for index in range(len(self._shapes)):
                held = self._layer.read(index, batch.places[rows])
                self._layer.write(index, batch.checkpoint_places[rows], held)


def _alike_pieces(batch: StateBatch, ends: Sequence[Sequence[int]]) -> Iterator[list[_Piece]]:
    """Yield the tokens of a step in pieces of rows that end at `ends`, of each row in order; those
    of equal length together."""
    rows = list[list[_Piece]]()
    begin = 0
    for row, own in enumerate(ends):
        pieces = list[_Piece]()
        start = 0
        for end in own:
            kept = batch.host_checkpoint_at is not None and end == batch.host_checkpoint_at[row]
            pieces.append(_Piece(row, begin + start, begin + end, first=not start, kept=kept))
            start = end
        rows.append(pieces)
        begin += start
    for turn in range(max(map(len, rows), default=0)):
        alike = defaultdict[int, list[_Piece]](list)
        for pieces in rows:
            if turn < len(pieces):
                alike[pieces[turn].end - pieces[turn].begin].append(pieces[turn])
        yield from alike.values()


def _ends(batch: StateBatch, new: Sequence[bool] | None) -> list[list[int]]:
    """Return where pieces of each row end: at its checkpoint, and at the last of its tokens in this
    step. `new`: each token ends one but those of the first piece of a row that is new; None: no
    others."""
    result = list[list[int]]()
    for row, length in enumerate(batch.host_query_lens.tolist()):
        at = 0 if batch.host_checkpoint_at is None else int(batch.host_checkpoint_at[row])
        ends = [at, length] if 0 < at < length else [length]
        if new is not None:
            ends = [*range(ends[0] if new[row] else 1, length + 1)]
        result.append(ends)
    return result
