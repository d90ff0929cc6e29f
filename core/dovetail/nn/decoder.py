"""Decoder composed of parts: embedding, blocks, norm, output layer.

A family of models composes its own block of norms, attention and feed-forward: `Block`, or a class
with the same methods where the order differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from dovetail.api.model import ModelInputs, WeightRule
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.layer import LayerList
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.rehearsal import Rehearsal
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rope, RotaryEmbedding, Rotation

AddTo = Callable[[Residual, Rotation, torch.Tensor | None], None]  # `Block.add_to`


class Mixer(Protocol):
    """Part of a block that mixes the tokens of a row: a `torch.nn.Module`, such as `Attention`."""

    name: str  # of the module in a checkpoint

    def add_to(
        self, residual: Residual, norm: Norm, rotation: Rotation, wanted: torch.Tensor | None
    ) -> None:
        """See `Attention.add_to`. `wanted` [n] int64, or None for all."""

    def weights(self, prefix: str) -> Iterable[WeightRule]:
        """Return the rules for tensors whose names begin with `prefix`."""


M = TypeVar("M", bound=Mixer)


class FeedForward(Protocol):
    """Part of a block that computes on tokens individually: a `torch.nn.Module`."""

    def add_to(self, residual: Residual, norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""

    def weights(self, prefix: str) -> Iterable[WeightRule]:
        """Return the rules for tensors whose names begin with `prefix`."""


class Block(nn.Module, Generic[M]):
    """Pre-norm block: attention, then feed-forward; each reads the stream through a norm and adds
    to it."""

    mixes = True  # tokens of a row

    def __init__(self, input_norm: Norm, attention: M, mlp_norm: Norm, mlp: FeedForward) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        """Add the block to the stream [tokens, hidden]. `wanted` [n] int64: reduce the stream to
        these tokens once they are mixed."""
        self.attention.add_to(residual, self.input_norm, rotation, wanted)
        self.mlp.add_to(residual, self.mlp_norm)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`."""
        yield from weight_rules(
            prefix,
            {"input_layernorm": self.input_norm, "post_attention_layernorm": self.mlp_norm},
        )
        yield from self.attention.weights(f"{prefix}{self.attention.name}.")
        yield from self.mlp.weights(f"{prefix}mlp.")


class AnyBlock(Protocol):
    """Interface of the blocks of a `Decoder`, which are `torch.nn.Module`s. `Block` implements it."""

    mixes: bool

    def add_to(
        self, residual: Residual, rotation: Rotation, wanted: torch.Tensor | None = None
    ) -> None:
        """See `Block.add_to`. `wanted` [n] int64, or None for all."""

    def weights(self, prefix: str) -> Iterable[WeightRule]:
        """Return the rules for tensors whose names begin with `prefix`."""


class _DeepRows:
    """Adds rows of images to one step's residual stream, each level after its layer: see
    `ModelInputs.rows`."""

    def __init__(self, rows: torch.Tensor, is_row: torch.Tensor) -> None:
        self._rows = rows
        self._is_text = ~is_row[:, None]
        self._kept: torch.Tensor | None = None  # indices of the tokens that the stream still has

    def after(self, added: Sequence[AddTo]) -> list[AddTo]:
        """Return `added` with the addition of rows after the layers that are followed by some."""
        levels = len(self._rows)
        deep = [
            partial(self._add, level, each) for level, each in enumerate(added[: levels - 1], 1)
        ]
        return [*deep, *added[levels - 1 :]]

    def _add(
        self,
        level: int,
        add_to: AddTo,
        residual: Residual,
        rotation: Rotation,
        wanted: torch.Tensor | None,
    ) -> None:
        add_to(residual, rotation, wanted)
        if wanted is not None:
            self._kept = wanted
        rows = self._rows[level].masked_fill(self._is_text, 0)
        residual.summed().add_(rows if self._kept is None else rows.index_select(0, self._kept))


class Decoder(nn.Module):
    """The whole model, a `dovetail.api.model.Tapped`. Names of a checkpoint's tensors are those of
    most families in transformers."""

    embedding_name = "model.embed_tokens"
    layers_name = "model.layers"
    norm_name = "model.norm"

    def __init__(
        self,
        embedding: VocabParallelEmbedding,
        blocks: Iterable[AnyBlock],
        norm: Norm,
        head: LMHead,
        ropes: Sequence[Rope],
        max_len: int,
        skipped: Sequence[str] = (),
    ) -> None:
        """`ropes`: of each block. `max_len`: tokens of the longest sequence. `skipped`: tensors of
        a checkpoint that aren't loaded, as `WeightRule.source` names them."""
        super().__init__()
        self.embedding = embedding
        different = list(dict.fromkeys(ropes))
        self.rotaries = LayerList(
            RotaryEmbedding(rope, max_len, device=embedding.weight.device) for rope in different
        )
        self.blocks: Sequence[AnyBlock] = LayerList(blocks)  # type: ignore[assignment,type-var]
        self.norm = norm
        self.head = head
        self._rotary_of = [different.index(rope) for rope in ropes]
        self._last_mixer = max(index for index, block in enumerate(self.blocks) if block.mixes)
        self._rehearsal = Rehearsal(self.blocks, self._last_mixer)
        self._skipped = skipped

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        return self.forward_tapped(inputs, ())[0]

    def forward_tapped(
        self, inputs: ModelInputs, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = inputs.wanted
        x = self.embed(inputs.token_ids)
        if inputs.rows is not None and inputs.is_row is not None:
            x = torch.where(inputs.is_row[:, None], inputs.rows[0], x)
        rotations = [rotary(inputs.positions, inputs.axes) for rotary in self.rotaries]
        added = self.added(inputs, x)
        if inputs.rows is not None and inputs.is_row is not None:
            added = _DeepRows(inputs.rows, inputs.is_row).after(added)
        residual = Residual(x)  # changes x
        tapped = dict[int, torch.Tensor]()
        taps_see_all = not taps or max(taps) <= self._last_mixer
        for index in self._rehearsal.indices(taps):
            if index in taps:
                tapped[index] = residual.summed().clone()
            reduces = taps_see_all and index == self._last_mixer
            added[index](residual, rotations[self._rotary_of[index]], wanted if reduces else None)
        hidden = residual.normed(self.norm)
        if not taps:
            return hidden, hidden
        tapped[len(self.blocks)] = hidden
        states = tapped[taps[0]]
        if len(taps) > 1:
            states = torch.cat([tapped[tap] for tap in taps], dim=1)
        if wanted is not None and not taps_see_all:
            hidden = hidden.index_select(0, wanted)
        return hidden, states

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Tapped.embed`: token_ids [tokens] -> [tokens, hidden]."""
        return self.embedding(token_ids)

    def added(self, inputs: ModelInputs, x: torch.Tensor) -> Sequence[AddTo]:
        """Return `add_to` of each block, for tokens with the embeddings x [tokens, hidden]. Models
        whose blocks read more than the stream override it."""
        return [block.add_to for block in self.blocks]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.logits`: hidden [n, hidden] -> [n, vocabulary]."""
        return self.head(hidden)

    def weights(self) -> Iterator[WeightRule]:
        """Yield the rules for tensors of a Hugging Face checkpoint. A tied head shares the
        embedding's weight, under either name or both."""
        yield from weight_rules("", {self.embedding_name: self.embedding})
        is_tied = self.head.weight is self.embedding.weight
        yield WeightRule("lm_head.weight", self.head.weight, optional=is_tied)
        yield from weight_rules("", {self.norm_name: self.norm})
        for index, block in enumerate(self.blocks):
            yield from block.weights(f"{self.layers_name}.{index}.")
        for name in self._skipped:
            yield WeightRule(name, None, optional=True)
