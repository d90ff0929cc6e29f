"""States of recurrent layers, such as Gated DeltaNet and Mamba2: what a layer keeps for a request
in place of K and V.

A state has a fixed size. It lies in pages of the KV pool, in pieces of equal size called *units*: a
unit holds some rows of one of the layer's tensors. The executor owns the memory and tells layers
where the units of each row of a batch are; the kernels of `dovetail.nn.state` read and replace
states in place, and write checkpoints on the way.

With speculative decoding a step also computes drafts, of which the later ones may be rejected. It
leaves a row's live state as it is after the row's known tokens, and notes what each draft changes;
when it is known how many drafts count, the executor applies their changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    import numpy as np
    import torch

CHUNK = 64  # most tokens of a chunk in `StateBatch.chunks`


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A matrix of a layer's state, [rows, row_size]. Units hold whole rows. `keeps_inputs`: it
    holds past inputs of the layer, in the model's dtype; otherwise it is accumulated, in the
    engine's `state_dtype`.

    What a token changes: past inputs move by one, and the token's is the last of them. An
    accumulated tensor has `heads` heads of equal size. The token multiplies each of them by a
    decay, and adds the outer product of a change [head size] and a key [row_size]; head i has key
    i * keys // heads. With 0 heads a token changes it in another way."""

    rows: int
    row_size: int
    keeps_inputs: bool = False
    heads: int = 0
    keys: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """State of one recurrent layer on this rank. `drafts`: the layer computes steps with drafts, as
    `StateBatch.ahead` and `StateBatch.drafted` say. Without it, speculation with the model is
    refused at load.

    Raises `DovetailError` if `drafts` is declared with an accumulated tensor without heads, whose
    drafts can't be applied later.
    """

    index: int  # of the layer; attention layers of the same model have other indices
    tensors: tuple[StateTensor, ...]
    drafts: bool = False

    def __post_init__(self) -> None:
        if self.drafts and not all(each.keeps_inputs or each.heads for each in self.tensors):
            raise DovetailError(
                f"state layer {self.index} declares drafts, but has a tensor that neither keeps "
                "inputs nor has heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes that tokens make to an accumulated tensor, in float32: see `StateTensor`."""

    decay: torch.Tensor  # [n, heads]
    change: torch.Tensor  # [n, rows]
    key: torch.Tensor  # [n, keys, row_size]

    def take(self, index: torch.Tensor | int) -> Changes:
        """Return the changes at an index of the first dimension."""
        return Changes(decay=self.decay[index], change=self.change[index], key=self.key[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The part of a step that checks drafts."""

    tokens: torch.Tensor  # [n] int64: which of the step's tokens these are
    batch: StateBatch  # they alone, each a row: with `ahead`


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """Inputs of one step that concern states. Tensors are on the device; numpy arrays are host
    copies. Row i has tokens [query_starts[i], query_starts[i + 1]) of the step. `places` and
    `checkpoint_places` are indices of `StateLayer.units`.

    Rows from `num_rows` on, and tokens from `num_tokens` on, are padding; places of padding rows
    lead to the waste page.
    """

    num_rows: int
    num_tokens: int
    places: torch.Tensor  # [rows] int64: where a row's live state is
    query_starts: torch.Tensor  # [rows + 1] int32
    # [rows] int32: tokens including this step's; the state is zero at first where they are all this
    # step's
    kv_lens: torch.Tensor
    host_query_lens: np.ndarray  # [num_rows] int32
    # each row has one token, and there are no checkpoints: all fields below but `ahead` are None
    decodes: bool
    # [rows] int32: number of this step's tokens after which the state is copied; 0: it isn't
    checkpoint_at: torch.Tensor | None = None
    # [rows] int64: where to; any place if it isn't
    checkpoint_places: torch.Tensor | None = None
    # [chunks, 2] int32: token ranges of at most CHUNK tokens; rows and checkpoints begin a new one
    chunks: torch.Tensor | None = None
    # [rows + 1] int32: row i has chunks [chunk_starts[i], chunk_starts[i + 1])
    chunk_starts: torch.Tensor | None = None
    host_checkpoint_at: np.ndarray | None = None  # [num_rows] int32
    # [rows] int32, if a row of `decodes` may be a draft: how many drafts it is after its request's
    # last known token, 0 for that itself. A request's rows are neighbours and share a live state,
    # which becomes that after the known token; the changes of its drafts go to `StateLayer.changes`
    ahead: torch.Tensor | None = None
    # what is computed apart in other steps: the results above of these tokens, whose places lead
    # to the waste page
    drafted: Drafted | None = None


class StateLayer:
    """One layer's states. `memory[i]`, [units of the pool, rows of a unit, row_size], has the dtype
    of tensor i of the spec; `units[i]`, [places, units of the tensor] int32, names for each place
    the units that hold rows 0, 1, … of it. The last unit may be filled in part. Several layers
    share the pool, each with its own units. The rows of a unit are a power of two.

    `changes[i]`, if steps may have drafts, is where drafts note what they change, at their index in
    the step: in past inputs the new ones [tokens, rows], in an accumulated tensor `Changes`."""

    def __init__(self, spec: StateSpec, planned: Callable[[], StateBatch | None]) -> None:
        """`planned`: returns the step that all layers compute; None before the first."""
        self.spec = spec
        self._planned = planned
        self._replaced: StateBatch | None = None
        self.memory: tuple[torch.Tensor, ...] = ()
        self.units: tuple[torch.Tensor, ...] = ()
        self.changes: tuple[torch.Tensor | Changes, ...] = ()

    def bind(self, memory: tuple[torch.Tensor, ...], units: tuple[torch.Tensor, ...]) -> None:
        """Keep the pool's memory, in place of an earlier one, and the table of units."""
        self.memory = memory
        self.units = units

    @contextmanager
    def computing(self, batch: StateBatch) -> Iterator[None]:
        """Replace the layer's step to compute until the context ends."""
        before = self._replaced
        self._replaced = batch
        try:
            yield
        finally:
            self._replaced = before

    @property
    def batch(self) -> StateBatch:
        """The step to compute."""
        batch = self._planned() if self._replaced is None else self._replaced
        if batch is None:
            raise DovetailError(f"state layer {self.spec.index} runs before a step was planned")
        return batch

    def read(self, tensor: int, places: torch.Tensor) -> torch.Tensor:
        """Return a copy of the states at `places` [n] int64: [n, rows, row_size]."""
        shape = self.spec.tensors[tensor]
        # [n, units, rows of a unit, row_size]
        held = self.memory[tensor][self.units[tensor][places].long()]
        return held.flatten(1, 2)[:, : shape.rows]

    def write(self, tensor: int, places: torch.Tensor, values: torch.Tensor) -> None:
        """Store values [n, rows, row_size] as the states at distinct `places` [n] int64."""
        memory = self.memory[tensor]
        units = self.units[tensor][places].long()
        whole = memory.new_zeros(len(places), units.shape[1] * memory.shape[1], memory.shape[2])
        whole[:, : values.shape[1]] = values
        memory[units] = whole.view(len(places), units.shape[1], *memory.shape[1:])
