"""Mixtures of experts: many feed-forwards; a router chooses a few of them for each token.

    logits = router(x)                                    # [tokens, experts] float32
    ids, weights = choose(logits, k, normalize=True)      # [tokens, k]
    experts.add_to(residual, x, ids, weights)

How logits are used is up to the model; `choose` is what most models do. Each rank has a share of the inner size of every expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.model import BuildContext, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, Activation
from dovetail.nn.format import DENSE, WeightFormat
from dovetail.nn.format.base import ExpertLayers
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.parameter import Part, Weight, share, whole
from dovetail.nn.residual import Residual


class Router(Layer):
    """x [tokens, hidden] -> logits [tokens, experts] float32, the same on every rank. Its weight is never quantized."""

    def __init__(self, hidden: int, count: int, context: BuildContext, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = whole((count, hidden), context)
        self.bias = whole((count,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if use_kernels(x, self.weight):
            from dovetail.nn.kernels import routing

            with suppress(KernelUnavailable):
                return routing.logits(x, self.weight, self.bias)
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def choose(logits: torch.Tensor, k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [tokens, k] int32 of each token's largest logits [tokens, experts], descending, ties by lowest id; and their softmax [tokens,
    k] float32 over all experts, or, if `normalize`, over the chosen ones. Raises `UnsupportedError` if there are fewer than k experts."""
    if k > logits.shape[1]:
        raise UnsupportedError(f"{k} experts per token are more than all {logits.shape[1]}")
    if use_kernels(logits):
        from dovetail.nn.kernels import routing

        with suppress(KernelUnavailable):
            return routing.choose(logits, k, normalize)
    values, ids = (x[:, :k] for x in logits.float().sort(dim=-1, descending=True, stable=True))
    shares = values.softmax(-1) if normalize else (values - logits.float().logsumexp(-1, keepdim=True)).exp()
    return ids.to(torch.int32).contiguous(), shares.contiguous()


@dataclass(frozen=True, slots=True)
class Stacked:
    """Layout of a checkpoint with all experts in one tensor. `interleaved`: gates and ups alternate. `transposed`: plain weights are
    [experts, inputs, outputs]."""

    interleaved: bool = False
    transposed: bool = False


class Experts(nn.Module):
    """`count` gated feed-forwards: down(activation(gate(x)) * up(x)), or another function of gate and up, with weights in a format of
    `dovetail.nn.format`."""

    format: WeightFormat = DENSE

    def __init__(
        self,
        hidden: int,
        inner: int,
        count: int,
        context: BuildContext,
        activation: Activation = "silu",
        bias: bool = False,
        stacked: Stacked | None = None,
        *,
        per_token: int | None = None,
    ) -> None:
        """`stacked`: the checkpoint has one tensor for all experts; `bias` requires it. `per_token`: experts of a token, to estimate the work of a
        step. Raises `UnsupportedError` for an unknown activation, for `bias` without `stacked`, and if `inner` can't be split over the ranks."""
        super().__init__()
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise UnsupportedError(f"activation {activation!r} of experts is not implemented (implemented: {', '.join(ACTIVATIONS)})")
        if bias and stacked is None:
            raise UnsupportedError("biases of experts are implemented only for checkpoints with all experts in one tensor (stacked)")
        self.group, self.activation, self.stacked = context.parallel, activation, stacked
        self.share_per_token = (per_token or count) / count
        size = share(inner, self.group, "the inner size of experts")
        first = self.group.rank * size
        stride = 2 if stacked is not None and stacked.interleaved else 1
        starts = {"gate": stride * first, "up": stride * first + (0 if stacked is None else 1 if stride == 2 else inner)}
        rows = inner if stacked is None else 2 * inner

        def gate_up_of(expert: int) -> dict[str | None, Part]:
            whose = None if stacked is None else (expert, count)
            turned = stacked is not None and stacked.transposed
            both = zip(starts.items(), (0, size), strict=True)
            return {name: Part((rows, hidden), 0, start, size, at, stride=stride, expert=whose, transposed=turned) for (name, start), at in both}

        def down_of(expert: int) -> dict[str | None, Part]:
            whose = None if stacked is None else (expert, count)
            return {None: Part((hidden, inner), 1, first, size, expert=whose, transposed=stacked is not None and stacked.transposed)}

        self.gate_up = nn.ParameterList(Weight((2 * size, hidden), gate_up_of(index), context, later=True) for index in range(count))
        self.down = nn.ParameterList(Weight((hidden, size), down_of(index), context, later=True) for index in range(count))
        self.gate_up_bias = self.down_bias = None
        if bias:
            both = zip(starts.items(), (0, size), strict=True)
            parts: dict[str | None, Part] = {name: Part((count, rows), 1, start, size, at, stride=stride) for (name, start), at in both}
            self.gate_up_bias = Weight((count, 2 * size), parts, context)
            self.down_bias = whole((count, hidden), context)
        if not context.weights_later:
            self.take_format(DENSE, context.device)

    def take_format(self, form: WeightFormat, device: torch.device) -> None:
        """Allocate the weights on `device` in format `form`. Raises `UnsupportedError` if it can't store a size."""
        self.format = form
        for name in ("gate_up", "down"):
            setattr(self, name, nn.ParameterList(form.allocate_experts(list(getattr(self, name)), device)))
        own_bias = self.down_bias if self.group.rank == 0 else None
        self._layers = ExpertLayers(list(self.gate_up), list(self.down), self.gate_up_bias, own_bias, self.activation)

    def placed_weights(self) -> list[Any]:
        """Return the weights that have a format."""
        return [*self.gate_up, *self.down]

    def add_to(self, residual: Residual, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Add to the stream, for each token, the weighted sum of its experts' outputs for x [tokens, hidden], the normed stream. `ids` [tokens, k]
        int32: distinct, from 0 to count - 1. `weights` [tokens, k] float32."""
        parts = self.format.experts(self._layers, x, ids, weights)
        if self.group.size == 1:
            residual.add_parts(parts)
            return
        place = residual.place_of_share(self.group)
        if place is None:
            residual.summed().add_(self.group.all_reduce(parts.sum(0).to(x.dtype)))
        else:
            place.copy_(parts.sum(0))

    def weights(self, prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Iterator[WeightRule]:
        """Yield the rules for a checkpoint's tensors: `{prefix}3.{gate}.weight` for expert 3 and so on; or, if one tensor has all experts,
        `{prefix}gate_up_proj` and `{prefix}{down}`, with the suffix `_bias` for biases."""
        for index, (both, back) in enumerate(zip(self.gate_up, self.down, strict=True)):
            one = f"{prefix}{index}."
            names = (f"{one}{gate}.weight", f"{one}{up}.weight", f"{one}{down}.weight")
            if self.stacked is not None:
                names = (f"{prefix}gate_up_proj", f"{prefix}gate_up_proj", f"{prefix}{down}")
            yield WeightRule(names[0], both, "gate")
            yield WeightRule(names[1], both, "up")
            yield WeightRule(names[2], back)
        if self.gate_up_bias is not None:
            yield WeightRule(f"{prefix}gate_up_proj_bias", self.gate_up_bias, "gate")
            yield WeightRule(f"{prefix}gate_up_proj_bias", self.gate_up_bias, "up")
            yield WeightRule(f"{prefix}{down}_bias", self.down_bias)
