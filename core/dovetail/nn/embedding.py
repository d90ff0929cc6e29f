"""Embedding and output layers, with the vocabulary split over the ranks of a group.

Each rank holds ceil(vocab / size) rows; rows past the end of the vocabulary are zeros and never
used.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F

from dovetail.api.model import BuildContext
from dovetail.nn.adapters import LayerAdapters
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.linear import linear
from dovetail.nn.parameter import Part, Weight, whole


def vocab_weight(vocab_size: int, hidden_size: int, context: BuildContext) -> Weight:
    """Return this rank's rows [ceil(vocab / size), hidden] of a matrix with one row per id."""
    rows = -(-vocab_size // context.parallel.size)
    start = min(context.parallel.rank * rows, vocab_size)
    part = Part((vocab_size, hidden_size), 0, start, min(rows, vocab_size - start))
    return Weight((rows, hidden_size), {None: part}, context)


def embed(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows [tokens, hidden] of weight [rows, hidden] at token_ids [tokens] int64."""
    if use_kernels(token_ids, weight):
        from dovetail.nn.kernels import embedding as kernels

        with suppress(KernelUnavailable):
            return kernels.embed(token_ids, weight)
    return F.embedding(token_ids, weight)


class VocabParallelEmbedding(Layer):
    """token_ids [tokens] int64 -> [tokens, hidden], the same on every rank."""

    def __init__(self, vocab_size: int, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.group = context.parallel
        self.vocab_size = vocab_size
        self.weight = vocab_weight(vocab_size, hidden_size, context)
        self.rows = self.weight.shape[0]
        self.start = self.group.rank * self.rows

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return embed(token_ids, self.weight)
        local = token_ids - self.start
        absent = (local < 0) | (local >= self.rows)
        hidden = embed(local.masked_fill(absent, 0), self.weight)
        return self.group.all_reduce(hidden.masked_fill_(absent[:, None], 0))


class ScaledEmbedding(VocabParallelEmbedding):
    """Embedding times `scale`: token_ids [tokens] int64 -> [tokens, hidden]."""

    def __init__(
        self, vocab_size: int, hidden_size: int, context: BuildContext, *, scale: float
    ) -> None:
        super().__init__(vocab_size, hidden_size, context)
        self.scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids).mul_(self.scale)


class Table(Layer):
    """indices [tokens] int64 -> their rows [tokens, hidden] of a small table, which every rank
    holds whole: of positions, of token types."""

    def __init__(self, rows: int, hidden_size: int, context: BuildContext) -> None:
        super().__init__()
        self.weight = whole((rows, hidden_size), context)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return embed(indices, self.weight)


class LMHead(Layer):
    """hidden [n, hidden] -> logits [n, vocab], the same on every rank. `tied`: the embedding to
    share the weight with, but no adapters."""

    adapters: LayerAdapters | None = None  # None: it has no bank

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        context: BuildContext,
        *,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.group = context.parallel
        self.vocab_size = vocab_size
        self.weight = (
            tied.weight if tied is not None else vocab_weight(vocab_size, hidden_size, context)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, self.weight)
        if self.adapters is not None and self.adapters.active:
            logits = self._adapted(self.adapters, logits, hidden)
        if self.group.size == 1:
            return logits
        return self.group.all_gather(logits, dim=-1)[:, : self.vocab_size]

    def _adapted(
        self, adapters: LayerAdapters, logits: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return this rank's logits with what adapters add. The last rank may have rows past the
        end of the vocabulary."""
        own = adapters.b.shape[1]
        if own == logits.shape[1]:
            return adapters.added_to(logits, hidden)
        return torch.cat(
            (adapters.added_to(logits[:, :own].contiguous(), hidden), logits[:, own:]), dim=1
        )
