"""Short causal convolution of each channel, over the last few tokens of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.model import BuildContext, WeightRule
from dovetail.api.state import StateLayer
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.state.scan import fresh, lines_in_turn, live_states, with_drafts

ConvActivation = Literal["silu"]


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: StateLayer,
    tensor: int,
    *,
    activation: ConvActivation | None = "silu",
) -> torch.Tensor:
    """Return the causal convolution of x [tokens, channels] with weight [channels, kernel] and bias
    [channels], followed by the activation, if there is one: the last column weighs the token
    itself, those before it earlier tokens. Tensor `tensor` of the state, [channels, kernel - 1],
    has a row's last inputs. Computed in float32."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        if use_kernels(weight):
            from dovetail.nn.kernels import short_conv as kernels

            with suppress(KernelUnavailable):
                return kernels.short_conv(x, weight, bias, state, tensor, activation)
        wide_bias = None if bias is None else bias.float()
        return _plain(x, weight.float(), wide_bias, state, tensor, activation)

    return with_drafts(state, compute, x)


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: StateLayer,
    tensor: int,
    activation: ConvActivation | None,
) -> torch.Tensor:
    batch = state.batch
    past = weight.shape[1] - 1
    if batch.ahead is not None:
        return _of_lines(x, weight, bias, state, tensor, activation)
    if batch.decodes:
        places = batch.places[: len(x)]
        seen = torch.cat(
            [
                live_states(state, tensor, places, batch.kv_lens[: len(x)] <= 1),
                x[:, :, None].float(),
            ],
            dim=2,
        )
        state.write(tensor, places, seen[:, :, 1:])
        y = (seen * weight).sum(-1)
        return _activated(y, bias, activation).to(x.dtype)
    rows = batch.num_rows
    places = batch.places[: batch.num_rows]
    # [rows, past, channels]
    before = live_states(state, tensor, places, fresh(batch)).transpose(1, 2)
    starts = batch.query_starts[: rows + 1].long()
    lengths = starts.diff()
    row_of = torch.repeat_interleave(
        torch.arange(rows, device=x.device), lengths, output_size=batch.num_tokens
    )
    steps = torch.arange(past, device=x.device)
    # of each row's part of `seen`: its past inputs, then its tokens
    firsts = starts[:-1] + past * torch.arange(rows, device=x.device)
    seen = x.new_empty((batch.num_tokens + past * rows, x.shape[1]), dtype=torch.float32)
    seen[(firsts[:, None] + steps).flatten()] = before.flatten(0, 1)
    seen_at = torch.arange(batch.num_tokens, device=x.device) + past * (row_of + 1)
    seen[seen_at] = x[: batch.num_tokens].float()
    y = sum(
        (seen[seen_at - past + i] * weight[:, i] for i in range(past + 1)),
        start=torch.zeros((), device=x.device),
    )
    out = x.new_zeros(x.shape)
    out[: batch.num_tokens] = _activated(y, bias, activation).to(x.dtype)
    if batch.checkpoint_at is not None and batch.checkpoint_places is not None:
        kept = batch.checkpoint_at[:rows].nonzero()[:, 0]
        at = firsts[kept] + batch.checkpoint_at[kept]
        state.write(
            tensor, batch.checkpoint_places[kept], seen[at[:, None] + steps].transpose(1, 2)
        )
    state.write(tensor, places, seen[(firsts + lengths)[:, None] + steps].transpose(1, 2))
    return out


def _activated(
    y: torch.Tensor, bias: torch.Tensor | None, activation: ConvActivation | None
) -> torch.Tensor:
    biased = y if bias is None else y + bias
    return biased if activation is None else F.silu(biased)


def _of_lines(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: StateLayer,
    tensor: int,
    activation: ConvActivation | None,
) -> torch.Tensor:
    """The convolution of single tokens that may be drafts, whose inputs it notes."""
    batch = state.batch
    out = torch.empty_like(x)
    held = torch.empty(0)
    noted = state.changes[tensor]
    assert isinstance(noted, torch.Tensor)
    for ahead, tokens, row in lines_in_turn(batch, len(x)):
        if not ahead:
            held = live_states(state, tensor, batch.places[tokens], batch.kv_lens[tokens] <= 1)
        seen = torch.cat([held[row], x[tokens, :, None].float()], dim=2)
        held[row] = seen[:, :, 1:]
        if not ahead:
            state.write(tensor, batch.places[tokens], held)
        else:
            noted[tokens] = x[tokens].to(noted.dtype)
        y = (seen * weight).sum(-1)
        out[tokens] = _activated(y, bias, activation).to(x.dtype)
    return out


class ShortConv(nn.Module):
    """Weight and bias of a short convolution, with the activation that follows it. The channels of
    a checkpoint's tensor are sections (shard id -> size on this rank), each split evenly over the
    ranks."""

    def __init__(
        self,
        sections: Mapping[str, int],
        kernel: int,
        context: BuildContext,
        *,
        bias: bool,
        activation: ConvActivation | None = "silu",
    ) -> None:
        super().__init__()
        self.activation: ConvActivation | None = activation
        ranks = context.parallel.size
        rank = context.parallel.rank
        channels = sum(sections.values())
        weights = dict[str | None, Part]()
        biases = dict[str | None, Part]()
        at = 0
        for name, size in sections.items():
            where = (0, at * ranks + rank * size, size, at)
            weights[name] = Part((channels * ranks, 1, kernel), *where)
            biases[name] = Part((channels * ranks,), *where)
            at += size
        self.weight = Weight((channels, 1, kernel), weights, context)
        self.bias = Weight((channels,), biases, context) if bias else None

    def forward(self, x: torch.Tensor, state: StateLayer, tensor: int) -> torch.Tensor:
        """Return `short_conv` of x [tokens, channels]."""
        weight = self.weight[:, 0]
        return short_conv(x, weight, self.bias, state, tensor, activation=self.activation)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for a checkpoint's `{prefix}weight` and `{prefix}bias`."""
        for name in self.weight.parts:
            yield WeightRule(f"{prefix}weight", self.weight, name)
            if self.bias is not None:
                yield WeightRule(f"{prefix}bias", self.bias, name)
