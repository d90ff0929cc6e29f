"""Mixtures of experts: many feed-forwards; a router chooses a few of them for each token.

    logits = router(x)                                    # [tokens, experts] float32
    ids, weights = choose(logits, k, normalize=True)      # [tokens, k]
    experts.add_to(residual, x, ids, weights)

`SparseFeedForward` is these as a part of a block. How logits are used is up to the model; `choose`
is what most models do. Each rank has a share of the inner size of every expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from dovetail.api.model import BuildContext, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, RELU2, Activation, activate
from dovetail.nn.build import of_runtime
from dovetail.nn.format import DENSE, WeightFormat
from dovetail.nn.format.base import ExpertLayers
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.layer import Layer
from dovetail.nn.linear import RowParallelLinear
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part, Weight, share, weight_rules, whole
from dovetail.nn.residual import Residual

ALIGNED = 8  # outputs: other numbers are slow to multiply


class Router(Layer):
    """x [tokens, hidden] -> logits [tokens, experts] float32, the same on every rank. Its weight is
    never quantized. `shared`: the last logit is one more, of an expert that all tokens go through;
    its weight [1, hidden] has the shard id "shared"."""

    def __init__(
        self,
        hidden: int,
        count: int,
        context: BuildContext,
        *,
        bias: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__()
        parts: dict[str | None, Part] = {None: Part((count, hidden), 0, 0, count)}
        self.has_shared = shared
        if shared:
            parts["shared"] = Part((1, hidden), 0, 0, 1, at=count)
        self.outputs = count + shared
        self.weight = Weight(
            (-(-self.outputs // ALIGNED) * ALIGNED if shared else count, hidden), parts, context
        )
        self.bias = whole((count,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if use_kernels(x, self.weight):
            from dovetail.nn.kernels import routing

            with suppress(KernelUnavailable):
                return routing.logits(x, self.weight, self.bias)[:, : self.outputs]
        return F.linear(
            x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )[:, : self.outputs]

    def choose(
        self, x: torch.Tensor, k: int, *, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids [tokens, k] int32 and weights [tokens, k] float32 of the experts of x
        [tokens, hidden], one more of each if there is a shared one: see `choose`."""
        return choose(self(x), k, normalize=normalize, shared=self.has_shared)


def choose(
    logits: torch.Tensor, k: int, *, normalize: bool, shared: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [tokens, k] int32 of each token's largest logits [tokens, experts],
    descending, ties by lowest id; and their softmax [tokens, k] float32 over all experts, or, if
    `normalize`, over the chosen ones. `shared`: the last logit isn't among these; its expert is
    added to the ids of every token, weighted by the logit's sigmoid. Raises `UnsupportedError` if
    there are fewer than k experts."""
    if k > logits.shape[1] - shared:
        raise UnsupportedError(
            f"{k} experts per token are more than all {logits.shape[1] - shared}"
        )
    if use_kernels(logits[:1]) and logits.stride(1) == 1:
        from dovetail.nn.kernels import routing

        with suppress(KernelUnavailable):
            return routing.choose(logits, k, normalize, shared)
    if shared:
        ids, weights = choose(logits[:, :-1], k, normalize=normalize)
        return F.pad(ids, (0, 1), value=logits.shape[1] - 1), torch.cat(
            (weights, logits[:, -1:].float().sigmoid()), dim=1
        )
    values, ids = (x[:, :k] for x in logits.float().sort(dim=-1, descending=True, stable=True))
    shares = (
        values.softmax(-1)
        if normalize
        else (values - logits.float().logsumexp(-1, keepdim=True)).exp()
    )
    return ids.to(torch.int32).contiguous(), shares.contiguous()


@dataclass(frozen=True, slots=True)
class Stacked:
    """Layout of a checkpoint with all experts in one tensor. `interleaved`: gates and ups
    alternate. `transposed`: plain weights are [experts, inputs, outputs]. `optional`: the
    checkpoint may have a tensor for each expert instead."""

    interleaved: bool = False
    transposed: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class _Layout:
    """Maps the experts' weights of one rank to parts of a checkpoint's tensors."""

    hidden: int
    inner: int  # of an expert
    count: int  # experts
    layers: tuple[str, ...]  # whose outputs are merged: gate and up, or up alone
    share: tuple[int, int]  # the rank's indices of the inner size: (first, number of them)
    stacked: Stacked | None  # None: each expert has tensors of its own
    suffix: str = ""  # of shard ids: where a checkpoint may have either layout, they differ

    def first(self, expert: int) -> dict[str | None, Part]:
        """Return the parts of an expert's first layer [merged outputs, hidden], by shard ids."""
        if self.stacked is None:
            return self._merged((self.inner, self.hidden), 0)
        shape = len(self.layers) * self.inner, self.hidden
        return self._merged(shape, 0, (expert, self.count), transposed=self.stacked.transposed)

    def first_biases(self) -> dict[str | None, Part]:
        """Return the parts of the biases [experts, merged outputs] of all experts' first layers."""
        return self._merged((self.count, len(self.layers) * self.inner), 1)

    def _merged(
        self,
        shape: tuple[int, ...],
        dim: int,
        expert: tuple[int, int] | None = None,
        *,
        transposed: bool = False,
    ) -> dict[str | None, Part]:
        """Return parts of a tensor of `shape`, whose outputs are along `dim`."""
        first, size = self.share
        stride = 1
        next_layer = 0
        if self.stacked is not None:
            stride, next_layer = (2, 1) if self.stacked.interleaved else (1, self.inner)
        return {
            f"{name}{self.suffix}": Part(
                shape,
                dim,
                stride * first + index * next_layer,
                size,
                index * size,
                stride=stride,
                expert=expert,
                transposed=transposed,
            )
            for index, name in enumerate(self.layers)
        }

    def down(self, expert: int) -> dict[str | None, Part]:
        """Return the part of an expert's last layer [hidden, inner], by its shard id."""
        stacked = self.stacked
        part = Part(
            (self.hidden, self.inner),
            1,
            *self.share,
            expert=None if stacked is None else (expert, self.count),
            transposed=stacked is not None and stacked.transposed,
        )
        return {self.down_id: part}

    @property
    def down_id(self) -> str | None:
        return f"down{self.suffix}" if self.suffix else None


class Experts(nn.Module):
    """`count` feed-forwards: down(activation(gate(x)) * up(x)), another function of gate and up,
    or, without gates, down(relu(up(x))²). Weights are in a format of `dovetail.nn.format`."""

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
        shared: bool = False,
    ) -> None:
        """`stacked`: the checkpoint has one tensor for all experts; `bias` requires it.
        `per_token`: experts of a token; None: all. `shared`: there is one more expert, which the
        checkpoint has by itself; not with `bias`. Raises `UnsupportedError` for an unknown
        activation, for `bias` without `stacked`, and if `inner` can't be split over the ranks."""
        super().__init__()
        if isinstance(activation, str) and activation not in (*ACTIVATIONS, RELU2):
            raise UnsupportedError(
                f"activation {activation!r} of experts is not implemented (implemented: "
                f"{', '.join((*ACTIVATIONS, RELU2))})"
            )
        if bias and stacked is None:
            raise UnsupportedError(
                "biases of experts are implemented only for checkpoints with all experts in one "
                "tensor (stacked)"
            )
        self.group = context.parallel
        self.activation = activation
        self.per_token = per_token or count
        self.share_per_token = self.per_token / count
        self.shared = count if shared else None  # its id
        size = share(inner, self.group, "the inner size of experts")
        layers = ("up",) if activation == RELU2 else ("gate", "up")
        own = (self.group.rank * size, size)
        alone = _Layout(hidden, inner, count, layers, own, None)
        self._alone = (alone,)
        self._layouts: tuple[_Layout, ...] = self._alone
        if stacked is not None:
            suffix = " of all" if stacked.optional else ""
            of_all = replace(alone, stacked=stacked, suffix=suffix)
            self._layouts = (of_all, alone) if stacked.optional else (of_all,)

        experts = range(count + shared)
        held = len(layers) * size  # outputs of the first layer
        self.gate_up = nn.ParameterList(
            Weight(
                (held, hidden),
                _joined(layout.first(index) for layout in self._layouts_of(index)),
                context,
                later=True,
            )
            for index in experts
        )
        self.down = nn.ParameterList(
            Weight(
                (hidden, size),
                _joined(layout.down(index) for layout in self._layouts_of(index)),
                context,
                later=True,
            )
            for index in experts
        )
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = Weight((count, held), self._layouts[0].first_biases(), context)
            self.down_bias = whole((count, hidden), context)
        if not of_runtime(context).weights_later:
            self.take_format(DENSE, context.device)

    def _layouts_of(self, expert: int) -> tuple[_Layout, ...]:
        return self._alone if expert == self.shared else self._layouts

    def take_format(
        self, form: WeightFormat, device: torch.device, of_shared: WeightFormat | None = None
    ) -> None:
        """Allocate the weights on `device` in format `form`, those of the shared expert in
        `of_shared` if given. A shared expert in the format of the others is computed with them.
        Raises `UnsupportedError` if a format can't store a size."""
        self.format = form
        apart = of_shared is not None and of_shared != form
        self._shared_format = of_shared if apart else None
        for name in ("gate_up", "down"):
            weights = list(getattr(self, name))
            last = (
                [of_shared.allocate(weights.pop(), device)]
                if of_shared is not None and apart
                else []
            )
            setattr(self, name, nn.ParameterList([*form.allocate_experts(weights, device), *last]))
        own_bias = self.down_bias if self.group.rank == 0 else None
        routed = len(self.gate_up) - apart
        self._layers = ExpertLayers(
            list(self.gate_up)[:routed],
            list(self.down)[:routed],
            self.gate_up_bias,
            own_bias,
            self.activation,
        )

    def placed_weights(self) -> list[Any]:
        """Return the weights that have a format, but for those of the shared expert."""
        return [*list(self.gate_up)[: self.shared], *list(self.down)[: self.shared]]

    def shared_weights(self) -> list[Any]:
        """Return the weights of the shared expert, if there is one."""
        return [] if self.shared is None else [self.gate_up[self.shared], self.down[self.shared]]

    def add_to(
        self, residual: Residual, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Add to the stream, for each token, the weighted sum of its experts' outputs for x
        [tokens, hidden], the normed stream. `ids` [tokens, k] int32: distinct, from 0 to count - 1.
        `weights` [tokens, k] float32."""
        form = self._shared_format
        inner = None
        if form is not None:
            inner = self._inner_of_shared(form, x).mul_(weights[:, -1:])
            ids = ids[:, :-1].contiguous()
            weights = weights[:, :-1].contiguous()
        if self.group.size == 1:
            if form is not None and inner is not None:
                form.add_to(self.down[-1], residual, inner)
            self.format.add_experts_to(self._layers, residual, x, ids, weights)
            return
        total = self.format.experts(self._layers, x, ids, weights).sum(0)
        if form is not None and inner is not None:
            total += form.columns(self.down[-1], inner)
        place = residual.place_of_share(self.group)
        if place is None:
            residual.summed().add_(self.group.all_reduce(total.to(x.dtype)))
        else:
            place.copy_(total)

    def _inner_of_shared(self, form: WeightFormat, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the last layer of a shared expert that is computed by itself."""
        if self.activation == "silu":
            return form.columns(self.gate_up[-1], x, gated=True)
        return activate(form.columns(self.gate_up[-1], x), self.activation)

    def weights(
        self,
        prefix: str,
        gate: str = "gate_proj",
        up: str = "up_proj",
        down: str = "down_proj",
        both: str = "gate_up_proj",
        shared: str = "",
    ) -> Iterator[WeightRule]:
        """Yield the rules for a checkpoint's tensors: `{prefix}3.{gate}.weight` for expert 3 and so
        on; or, if one tensor has all experts, `{prefix}{both}` and `{prefix}{down}`, with the
        suffix `_bias` for biases. `shared`: the prefix of the shared expert's."""
        for index, (first, back) in enumerate(zip(self.gate_up, self.down, strict=True)):
            for layout in self._layouts_of(index):
                one = shared if index == self.shared else f"{prefix}{index}."
                is_alone = layout.stacked is None
                for name, own in zip(("gate", "up"), (gate, up), strict=True):
                    if name in layout.layers:
                        source = f"{one}{own}.weight" if is_alone else f"{prefix}{both}"
                        yield WeightRule(source, first, f"{name}{layout.suffix}")
                source = f"{one}{down}.weight" if is_alone else f"{prefix}{down}"
                yield WeightRule(source, back, layout.down_id)
        if self.gate_up_bias is not None:
            yield from (
                WeightRule(f"{prefix}{both}_bias", self.gate_up_bias, part)
                for part in self.gate_up_bias.parts
            )
            yield WeightRule(f"{prefix}{down}_bias", self.down_bias)


def _joined(parts: Iterable[Mapping[str | None, Part]]) -> dict[str | None, Part]:
    return {shard_id: part for some in parts for shard_id, part in some.items()}


class SharedFeedForward(Protocol):
    """Feed-forward that all tokens go through, beside their experts: a `torch.nn.Module`, such as
    `GatedFeedForward`."""

    down_proj: RowParallelLinear

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of `down_proj`, for x [tokens, hidden]."""

    def weights(self, prefix: str) -> Iterable[WeightRule]:
        """Return the rules for tensors whose names begin with `prefix`."""


class SparseFeedForward(nn.Module):
    """Weighted sum of a few experts, which a router chooses for each token, plus perhaps a
    feed-forward that all tokens go through."""

    router_name = "gate"  # names in a checkpoint
    shared_name = "shared_experts"

    def __init__(
        self,
        router: Router,
        experts: Experts,
        *,
        normalize: bool,
        shared: SharedFeedForward | None = None,
    ) -> None:
        """`normalize`: see `choose`."""
        super().__init__()
        self.router = router
        self.experts = experts
        self.normalize = normalize
        self.shared = shared

    def add_to(self, residual: Residual, norm: Norm) -> None:
        """See `GatedFeedForward.add_to`."""
        x = residual.normed(norm)
        ids, weights = self.router.choose(x, self.experts.per_token, normalize=self.normalize)
        if self.shared is not None:
            self.shared.down_proj.add_to(residual, self.inner_of_shared(self.shared, x))
        self.experts.add_to(residual, x, ids, weights)

    def inner_of_shared(self, shared: SharedFeedForward, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer of the shared feed-forward multiplies, for x [tokens,
        hidden]."""
        return shared.inner(x)

    def weights(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for tensors whose names begin with `prefix`."""
        yield from weight_rules(prefix, {self.router_name: self.router})
        if self.shared is not None:
            yield from self.shared.weights(f"{prefix}{self.shared_name}.")
        yield from self.experts.weights(f"{prefix}experts.", shared=f"{prefix}{self.shared_name}.")
