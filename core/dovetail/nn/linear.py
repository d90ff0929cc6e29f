"""Linear layers split over the ranks of a group (possibly a single one). Weights are [out, in], as
in checkpoints.

Column-parallel layers give each rank a share of the outputs; a row-parallel layer takes such shares
as its input and sums over the ranks. A column-parallel layer followed by a row-parallel one needs a
single all-reduce (Megatron-LM, arXiv:1909.08053).

A layer knows the operations that surround it in a decoder, so that a kernel can fuse them: the norm
of its input, the gate of its outputs, the residual stream that it adds to. Its `WeightFormat`
(`dovetail.nn.format`) defines how the weight is stored and which kernels multiply it. In a step
with LoRA adapters (`dovetail.nn.adapters`) nothing is fused: norm, product, what adapters add,
gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.model import BuildContext, ParallelGroup
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, act_mul, silu_mul
from dovetail.nn.adapters import LayerAdapters
from dovetail.nn.build import of_runtime
from dovetail.nn.format import DENSE, WeightFormat
from dovetail.nn.layer import Layer
from dovetail.nn.norm import Norm
from dovetail.nn.parameter import Part, Weight, kv_share, share, whole
from dovetail.nn.residual import Residual, normed_input


def linear(
    x: torch.Tensor | Residual,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [tokens, in], or a residual stream, by plain weights, normed first if `norm` is
    given -> [tokens, out]. `gated`: silu of the first half of the outputs, times the second half.
    `into` [tokens, out]: memory for the result."""
    return DENSE.columns(weight, x, bias, norm, gated=gated, into=into)


class LinearLayer(Layer):
    """Layer with a weight [outputs, inputs] in some format. If the runtime says `weights_later`,
    the weight is on the meta device until `take_format` allocates it."""

    weight: Any  # returned by the format's `allocate`
    format: WeightFormat = DENSE
    sensitive = False  # stays plain where a plain checkpoint is quantized while loading
    adapters: LayerAdapters | None = None  # None: the layer has no bank

    @property
    def adapted(self) -> LayerAdapters | None:
        """Its adapters, if the running step has any."""
        return self.adapters if self.adapters is not None and self.adapters.active else None

    def take_format(self, form: WeightFormat, device: torch.device) -> None:
        """Allocate the weight on `device` in format `form`. Raises `UnsupportedError` if it can't
        store a size."""
        self.format, self.weight = form, form.allocate(self.weight, device)

    def placed_weights(self) -> list[Any]:
        """Return the weights that take a format: its own."""
        return [self.weight]


@dataclass(frozen=True, slots=True)
class Columns:
    """One of several merged layers: this rank has outputs [start, start + size) of
    `out_features`."""

    out_features: int
    start: int
    size: int


class MergedColumnParallelLinear(LinearLayer):
    """Several linear layers with the same input, merged: their outputs are concatenated in the
    order of `parts` (shard id -> columns).

    x [tokens, in] or a residual stream, normed first if `norm` is given -> [tokens, sum of this
    rank's sizes].
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str | None, Columns],
        context: BuildContext,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        weights: dict[str | None, Part] = {}
        biases: dict[str | None, Part] = {}
        at = 0
        for shard_id, part in parts.items():
            weights[shard_id] = Part((part.out_features, in_features), 0, part.start, part.size, at)
            biases[shard_id] = Part((part.out_features,), 0, part.start, part.size, at)
            at += part.size
        later = of_runtime(context).weights_later
        self.weight = Weight((at, in_features), weights, context, later=later)
        self.bias = Weight((at,), biases, context) if bias else None

    def forward(self, x: torch.Tensor | Residual, norm: Norm | None = None) -> torch.Tensor:
        if (adapted := self.adapted) is not None:
            return self._unfused(adapted, x, norm)
        return self.format.columns(self.weight, x, self.bias, norm)

    def _unfused(
        self, adapted: LayerAdapters, x: torch.Tensor | Residual, norm: Norm | None
    ) -> torch.Tensor:
        """Return the outputs with what adapters add."""
        x = normed_input(x, norm)
        return adapted.added_to(self.format.columns(self.weight, x, self.bias), x)


def interleaved(
    pieces: Mapping[str, int], groups: int, group: ParallelGroup, what: str
) -> dict[str | None, Columns]:
    """Return the parts of a layer whose outputs in the checkpoint are `groups` equal groups, each
    of `pieces` (name -> size) in order, and here first all groups' first pieces, then all second
    ones, …: of q and a gate for each head, "q0", "q1", …, "gate0", …. Ranks split the groups.
    Raises `UnsupportedError` that names `what` if they can't."""
    own = share(groups, group, what)
    size = sum(pieces.values())
    starts = range(group.rank * own * size, (group.rank + 1) * own * size, size)
    parts = dict[str | None, Columns]()
    at = 0
    for name, piece in pieces.items():
        parts |= {
            f"{name}{index}": Columns(groups * size, start + at, piece)
            for index, start in enumerate(starts)
        }
        at += piece
    return parts


class ReplicatedLinear(MergedColumnParallelLinear):
    """x [tokens, in] -> [tokens, out], all of them on every rank."""

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__(
            in_features, {None: Columns(out_features, 0, out_features)}, context, bias=bias
        )


class ColumnParallelLinear(MergedColumnParallelLinear):
    """x [tokens, in] -> this rank's share of the outputs [tokens, out / size]."""

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext, *, bias: bool
    ) -> None:
        size = share(out_features, context.parallel, "out_features")
        super().__init__(
            in_features,
            {None: Columns(out_features, context.parallel.rank * size, size)},
            context,
            bias=bias,
        )


class QKVParallelLinear(MergedColumnParallelLinear):
    """x [tokens, hidden] -> [tokens, (heads + 2 * kv_heads) * head_size] for this rank's heads: q,
    then k, then v, then the gates if it is `gated`.

    Arguments are those of the whole model. With more ranks than K and V heads, several ranks hold
    the same head. Shard ids: "q", "k", "v"; without K and V heads only "q". `gated`: each head of q
    in the checkpoint is followed by its gate, of the same size; shard ids "q0", "gate0", …
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        context: BuildContext,
        *,
        bias: bool,
        gated: bool = False,
    ) -> None:
        own = share(heads, context.parallel, "num_attention_heads")
        q: dict[str | None, Columns] = {
            "q": Columns(
                heads * head_size, context.parallel.rank * own * head_size, own * head_size
            )
        }
        if gated:
            q = interleaved(
                {"q": head_size, "gate": head_size}, heads, context.parallel, "num_attention_heads"
            )
        kv: dict[str | None, Columns] = {}
        if kv_heads:
            first_kv, own_kv = kv_share(kv_heads, context.parallel)
            kv["k"] = kv["v"] = Columns(
                kv_heads * head_size, first_kv * head_size, own_kv * head_size
            )
        gates = dict(list(q.items())[own:])
        super().__init__(
            hidden_size, {**dict(list(q.items())[:own]), **kv, **gates}, context, bias=bias
        )


class GateUpParallelLinear(MergedColumnParallelLinear):
    """x [tokens, hidden], normed first if `norm` is given -> activation(gate(x)) * up(x) [tokens,
    intermediate / size]. Shard ids: "gate", "up"."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        context: BuildContext,
        *,
        bias: bool,
        activation: str = "silu",
        stacked: bool = False,
    ) -> None:
        """`activation`: a key of `dovetail.nn.activation.ACTIVATIONS`, named like `hidden_act` in a
        Hugging Face config; only silu is fused into the product's kernels. `stacked`: the
        checkpoint has both in one tensor, gates first. Raises `UnsupportedError` for any other
        activation."""
        if activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"hidden_act = {activation!r} is not implemented (implemented: "
                f"{', '.join(ACTIVATIONS)})"
            )
        size = share(intermediate_size, context.parallel, "intermediate_size")
        outputs = intermediate_size * (2 if stacked else 1)
        first = context.parallel.rank * size
        up = first + outputs - intermediate_size
        super().__init__(
            hidden_size,
            {"gate": Columns(outputs, first, size), "up": Columns(outputs, up, size)},
            context,
            bias=bias,
        )
        self.activation = activation

    def forward(self, x: torch.Tensor | Residual, norm: Norm | None = None) -> torch.Tensor:
        if (adapted := self.adapted) is not None:
            y = self._unfused(adapted, x, norm)
            return silu_mul(y) if self.activation == "silu" else act_mul(y, self.activation)
        if self.activation == "silu":
            return self.format.columns(self.weight, x, self.bias, norm, gated=True)
        return act_mul(self.format.columns(self.weight, x, self.bias, norm), self.activation)


class RowParallelLinear(LinearLayer):
    """This rank's share of the inputs [tokens, in / size] -> [tokens, out], summed over the ranks.
    The first rank adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext, *, bias: bool
    ) -> None:
        super().__init__()
        self.group = context.parallel
        size = share(in_features, self.group, "in_features")
        part = Part((out_features, in_features), 1, self.group.rank * size, size)
        later = of_runtime(context).weights_later
        self.weight = Weight((out_features, size), {None: part}, context, later=later)
        self.bias = whole((out_features,), context) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self._share(x))

    def add_to(
        self,
        residual: Residual,
        x: torch.Tensor,
        *,
        wanted: torch.Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Add self(x) [tokens, out] to the stream, normed before if `norm` is given. `wanted` [n]
        int64: first reduce the stream and x to these tokens."""
        if wanted is not None:
            residual.keep(wanted)
            x = x.index_select(0, wanted)
        if norm is not None:
            residual.add_parts(norm(self(x))[None])
            return
        x = x.contiguous()
        if self.group.size > 1:
            self._add_sum_to(residual, x)
        elif self.bias is not None or self.adapted is not None:  # the next norm adds it
            residual.add_parts(self._share(x)[None])
        else:
            self.format.add_to(self.weight, residual, x)

    def _add_sum_to(self, residual: Residual, x: torch.Tensor) -> None:
        place = residual.place_of_share(self.group)
        if place is None:
            residual.summed().add_(self(x))
        else:
            self._share(x, place)

    def _share(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's share of the sum [tokens, out], in the memory `into` if given."""
        y = self.format.columns(
            self.weight, x, self.bias if self.group.rank == 0 else None, into=into
        )
        return y if (adapted := self.adapted) is None else adapted.added_to(y, x)


class LatentUpLinear(LinearLayer):
    """K and V of all heads from one latent, multiplied from both sides, so that neither is computed
    (see latent attention, arXiv:2405.04434).

    Its weight [heads * (key + value), latent] is that of a linear layer, this rank's heads of it,
    and stays plain, also where the checkpoint stores it in a format.
    """

    def __init__(
        self, latent: int, heads: int, key: int, value: int, context: BuildContext
    ) -> None:
        """`heads`: of the whole model. Raises `UnsupportedError` if they can't be split over the
        ranks."""
        super().__init__()
        own = share(heads, context.parallel, "num_attention_heads")
        self.heads = own
        self.sizes = [key, value]
        wide = key + value
        part = Part((heads * wide, latent), 0, context.parallel.rank * own * wide, own * wide)
        self.weight = Weight((own * wide, latent), {None: part}, context, plain=True)

    def take_format(self, form: WeightFormat, device: torch.device) -> None:
        """Do nothing: the weight is plain, and allocated."""

    def placed_weights(self) -> list[Any]:
        return []

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """Return what queries [tokens, heads, key] multiply latents by, [tokens, heads, latent]."""
        y = torch.bmm(q.transpose(0, 1), self._sides()[0]).transpose(0, 1)
        adapted = self.adapted
        return (
            y
            if adapted is None
            else adapted.added_by_heads(y, q, slice(0, self.sizes[0]), from_left=True)
        )

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the values [tokens, heads, value] of weighted sums of latents [tokens, heads,
        latent]."""
        y = torch.bmm(latents.transpose(0, 1), self._sides()[1].transpose(1, 2)).transpose(0, 1)
        adapted = self.adapted
        return (
            y
            if adapted is None
            else adapted.added_by_heads(
                y, latents, slice(self.sizes[0], sum(self.sizes)), from_left=False
            )
        )

    def _sides(self) -> Sequence[torch.Tensor]:
        """Return the matrices of K and V: [heads, key, latent] and [heads, value, latent]."""
        return torch.split(self.weight.view(self.heads, sum(self.sizes), -1), self.sizes, dim=1)
