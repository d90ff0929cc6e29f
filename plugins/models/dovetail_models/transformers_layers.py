"""Replaces modules of a transformers model by Dovetail's layers: linear layers, RMS norms, gated feed-forwards, attention, pre-norm blocks.

`find_layers` proposes replacements from a traced forward pass, never from class names, and keeps one only if it computes the same numbers as the
original module: in float32, with random weights, on inputs of several magnitudes and positions up to the maximum. Unverified modules stay as they
are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.api.model import BuildContext, ParallelGroup, WeightRule
from dovetail.errors import UnsupportedError
from dovetail.nn.activation import ACTIVATIONS, Activation, ClampedSwiGLU
from dovetail.nn.format import DENSE
from dovetail.nn.layer import Layer
from dovetail.nn.linear import (
    Columns,
    GateUpParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    linear,
)
from dovetail.nn.moe import Experts, Stacked
from dovetail.nn.norm import QKNorm, RMSNorm
from dovetail.nn.parallel import SINGLE
from dovetail.nn.parameter import kv_share, share
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail_models.transformers_attention import LAYER, AttentionCall, specs_of
from dovetail_models.transformers_check import PlainAttention, PlainBatch

EXACT = 2e-5  # maximum difference of a replacement, relative to the root mean square: allows another order of sums, but no other activation
ABOUT = 1e-2  # likewise for large inputs, which make the softmax of attention sharp
MAGNITUDES = (0.01, 1.0, 30.0)  # of inputs: small ones reveal an epsilon, large ones a clamp

Shard = tuple[Layer, str | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """A call of a module in a traced forward pass."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    operations: tuple[
        Any, ...
    ]  # of torch, with shapes and scalars: modules of one class with equal operations compute the same

    @property
    def input(self) -> Any:
        """The first argument: the hidden states, in all modules considered here."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all.append((str(func), _described(args), _described(kwargs)))
        return func(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    """Return a hashable key, equal for values that differ only in the content of tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _described(one)) for key, one in value.items())
    return tuple(map(_described, value)) if isinstance(value, tuple | list) else repr(value)


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, list[Seen]]]:
    """Context that records the calls of all modules of `model`, by name."""
    seen: dict[str, list[Seen]] = {}
    operations, begun = _Operations(), list[int]()

    def begin(*_: Any) -> None:
        begun.append(len(operations.all))

    def end(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen.setdefault(name, []).append(
                Seen(args, kwargs, output, tuple(operations.all[begun.pop() :]))
            )

        return note

    hooks = [module.register_forward_pre_hook(begin) for module in model.modules()]
    hooks += [
        module.register_forward_hook(end(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        with operations:
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


class RotaryTable:
    """Rotary embedding of a kind of layer, in the form that kernels read."""

    def __init__(self, table: torch.Tensor) -> None:
        """`table` [max_len, head_size] float32: cos of each pair, then sin of each pair."""
        self.table = table
        self.rotation: Any = None  # `Rotation` of the current step

    def begin(self, positions: torch.Tensor) -> None:
        """Start a step: positions [tokens] int64."""
        self.rotation = Rotation(self.table, positions)


class OwnLayer(nn.Module):
    """Replaces a module of transformers. `sources`: names of that module's submodules -> the layer, and its part, that gets their parameters; the
    name "" is the module itself."""

    sources: dict[str, Shard]

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for the parameters of the module `prefix`."""
        for name, (layer, shard_id) in self.sources.items():
            for kind, parameter in layer.named_parameters():
                yield WeightRule(".".join(filter(None, (prefix, name, kind))), parameter, shard_id)


class OwnLinear(OwnLayer):
    """x [..., in] -> [..., out]. Not split over ranks."""

    def __init__(self, inputs: int, outputs: int, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.layer = MergedColumnParallelLinear(
            inputs, {None: Columns(outputs, 0, outputs)}, context, bias=bias
        )
        self.sources = {"": (self.layer, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    @property
    def weight(self) -> Any:
        """Weight, for code of transformers that reads it."""
        if self.layer.format != DENSE:
            raise AttributeError("these weights aren't plain")
        return self.layer.weight

    @property
    def bias(self) -> Any:
        return self.layer.bias


class OwnNorm(OwnLayer):
    """RMS norm: x [..., size] -> the same shape."""

    def __init__(self, size: int, eps: float, context: BuildContext) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, context)
        self.sources = {"": (self.norm, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of transformers: its name in its module, and its shape."""

    name: str
    inputs: int
    outputs: int
    bias: bool


class OwnFeedForward(OwnLayer):
    """down(activation(gate(x)) * up(x)) of x [1, tokens, hidden]."""

    def __init__(
        self,
        gate: Projection,
        up: Projection,
        down: Projection,
        activation: str,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self.gate_up = GateUpParallelLinear(
            gate.inputs, gate.outputs, context, bias=gate.bias, activation=activation
        )
        self.down = RowParallelLinear(down.inputs, down.outputs, context, bias=down.bias)
        self.sources = {
            gate.name: (self.gate_up, "gate"),
            up.name: (self.gate_up, "up"),
            down.name: (self.down, None),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x.flatten(0, -2))).view(x.shape)

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        self.down.add_to(residual, self.gate_up(residual, norm))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Experts of transformers whose weights are stacked."""

    hidden: int
    inner: int
    count: int
    per_token: int
    bias: bool
    stacked: Stacked


class OwnExperts(OwnLayer):
    """Experts: hidden_states [tokens, hidden], ids [tokens, k] and weights [tokens, k] -> [tokens, hidden]."""

    def __init__(self, shape: ExpertsShape, activation: Activation, context: BuildContext) -> None:
        super().__init__()
        settings = (activation, shape.bias, shape.stacked)
        self.experts = Experts(
            shape.hidden, shape.inner, shape.count, context, *settings, per_token=shape.per_token
        )

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        yield from self.experts.weights(f"{prefix}." if prefix else "")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x = hidden_states.contiguous()
        residual = Residual(torch.zeros_like(x))
        self.experts.add_to(
            residual,
            x,
            top_k_index.to(torch.int32).contiguous(),
            top_k_weights.float().contiguous(),
        )
        return residual.summed()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """An attention module of transformers: q, k and v of one input, perhaps a norm of the heads of q and k, rotary positions, and a projection."""

    spec: LayerSpec  # of the whole model
    q: Projection
    k: Projection
    v: Projection
    output: Projection
    norms: tuple[str, ...]  # names of q's and k's; empty: there are none
    eps: float


class OwnAttention(OwnLayer):
    """Attention of hidden_states [1, tokens, hidden] -> (the same shape, None), as transformers' modules return it. Its `AttentionLayer` is bound
    later, like those of transformers' modules."""

    def __init__(self, shape: AttentionShape, rotary: RotaryTable, context: BuildContext) -> None:
        super().__init__()
        spec = shape.spec
        self.qkv = QKVParallelLinear(
            shape.q.inputs, spec.heads, spec.kv_heads, spec.head_size, context, bias=shape.q.bias
        )
        self.output = RowParallelLinear(
            shape.output.inputs, shape.output.outputs, context, bias=shape.output.bias
        )
        self.head_size, self._rotary = spec.head_size, rotary
        self.sources = {
            shape.q.name: (self.qkv, "q"),
            shape.k.name: (self.qkv, "k"),
            shape.v.name: (self.qkv, "v"),
            shape.output.name: (self.output, None),
        }
        self.qk_norm: QKNorm | None = None
        if shape.norms:
            own = spec_of_rank(spec, context.parallel)
            self.qk_norm = QKNorm(own.heads, own.kv_heads, spec.head_size, shape.eps, context)
            self.sources |= {
                shape.norms[0]: (self.qk_norm, "q"),
                shape.norms[1]: (self.qk_norm, "k"),
            }

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return self.output(self._attended(hidden_states[0], None))[None], None

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        self.output.add_to(residual, self._attended(residual, norm))

    def _attended(self, x: torch.Tensor | Residual, norm: RMSNorm | None) -> torch.Tensor:
        layer: AttentionLayer = getattr(self, LAYER)
        qkv = self.qkv(x, norm).view(
            len(x), -1, self.head_size
        )  # [tokens, heads + 2 * kv_heads, head_size]
        return layer.attend(
            rope_and_store_kv(qkv, self.qk_norm, self._rotary.rotation, layer)
        ).flatten(1)


class OwnBlock(OwnLayer):
    """A pre-norm block: x + attention(norm(x)), and then the same with the feed-forward. hidden_states [1, tokens, hidden] -> the same shape."""

    def __init__(self, parts: Mapping[str, OwnLayer], *, in_place: bool) -> None:
        """`parts`: norm, attention, second norm and feed-forward, by the names that they keep. `in_place`: add to the input itself."""
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._names, self._in_place = tuple(parts), in_place
        self.sources = {
            ".".join(filter(None, (name, inner))): shard
            for name, part in parts.items()
            for inner, shard in part.sources.items()
        }

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        norm, attention, second_norm, feed_forward = (getattr(self, name) for name in self._names)
        residual = Residual(hidden_states[0] if self._in_place else hidden_states[0].clone())
        attention.add_to(residual, norm.norm)
        feed_forward.add_to(residual, second_norm.norm)
        return residual.summed()[None]


class OwnHead(nn.Module):
    """Linear layer with the parameters of transformers' own, which may be tied to another layer's."""

    def __init__(self, theirs: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = theirs.weight, theirs.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], -1)


def spec_of_rank(spec: LayerSpec, group: ParallelGroup) -> LayerSpec:
    """Return the share of a layer of the whole model that a rank computes. Raises `UnsupportedError` if its heads can't be split."""
    if group.size == 1:
        return spec
    return replace(
        spec,
        heads=share(spec.heads, group, "num_attention_heads"),
        kv_heads=kv_share(spec.kv_heads, group)[1],
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A module of the model, by its name, that can be replaced by what `make` returns, an instance of `kind`."""

    name: str
    kind: type[OwnLayer]
    make: Callable[[BuildContext], OwnLayer]


@dataclass(frozen=True, slots=True)
class Layers:
    """Replacements found for a base model, and the rotary embeddings that they read."""

    found: tuple[Found, ...] = ()
    rotaries: tuple[RotaryTable, ...] = ()


def find_layers(
    base: nn.Module,
    calls: Sequence[AttentionCall],
    seen: Mapping[str, list[Seen]],
    max_len: int,
    device: torch.device,
    keep: Callable[[str], bool],
) -> Layers:
    """Return the replacements for modules of `base`, which is on the meta device, and whose forward pass `seen` holds. They are tried on `device`,
    with positions below `max_len`. `keep`: names of modules that must stay as they are."""
    finder = _Finder(base, calls, seen, max_len, device, keep)
    with torch.no_grad():
        finder.find()
    return Layers(tuple(finder.found.values()), tuple(finder.rotaries))


def reasons_against_split(
    base: nn.Module, calls: Sequence[AttentionCall], layers: Layers, plan: Mapping[str, str] | None
) -> list[str]:
    """Return why a base model can't be split over ranks. `plan`: how transformers would split it, by patterns of names. Only replaced attention and
    feed-forwards are split here: whatever else is to be split is named, the first of each pattern."""
    if not plan:
        return ["its config has no base_model_tp_plan"]
    split = {
        found.name
        for found in layers.found
        if found.kind in (OwnAttention, OwnExperts, OwnFeedForward, OwnBlock)
    }

    def is_split(name: str) -> bool:
        words = name.split(".")
        return any(".".join(words[:count]) in split for count in range(1, len(words) + 1))

    whole = [
        f"{call.module} isn't attention of ours" for call in calls if not is_split(call.module)
    ][:1]
    names = [
        name for name, _ in (*base.named_modules(), *base.named_parameters()) if not is_split(name)
    ]
    for pattern, way in plan.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        named = (
            None if way.startswith("replicated") else next(filter(wanted.fullmatch, names), None)
        )
        if named is not None and not any(call.module in named for call in calls if whole):
            whole.append(f"its plan splits {named} ({way}), which isn't a layer of ours")
    return whole


class _Unproven(Exception):
    """A module's arguments can't be synthesized."""


class _Finder:
    def __init__(
        self,
        base: nn.Module,
        calls: Sequence[AttentionCall],
        seen: Mapping[str, list[Seen]],
        max_len: int,
        device: torch.device,
        keep: Callable[[str], bool],
    ) -> None:
        self._seen, self._max_len, self._device, self._keep = seen, max_len, device, keep
        self._modules = dict(base.named_modules())
        self._specs = {call.module: spec for call, spec in zip(calls, specs_of(calls), strict=True)}
        self._position_ids = seen[""][0].kwargs["position_ids"]
        self._positions = (
            _spread(max_len).repeat(len(MAGNITUDES)).to(device)
        )  # for rows of several magnitudes
        self._rotaries: dict[
            int, tuple[torch.Tensor, RotaryTable | None]
        ] = {}  # by the id of a traced cos or sin: its numbers; the table of both
        self._random: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._tried: dict[Any, bool] = {}
        self._context = BuildContext(
            SINGLE, torch.float32, device, lambda spec: PlainAttention(spec, PlainBatch())
        )
        self.found: dict[str, Found] = {}

    @property
    def rotaries(self) -> list[RotaryTable]:
        tables = {id(table): table for _, table in self._rotaries.values() if table is not None}
        return list(tables.values())

    def find(self) -> None:
        """Fill `found`: large modules after their parts, which they then replace."""
        for kind in (
            self._attention,
            self._feed_forward,
            self._experts,
            self._norm,
            self._linear,
            self._block,
        ):
            for name, module in self._modules.items():
                if (
                    not name
                    or self._is_replaced(name)
                    or self._keep(name)
                    or len(self._seen.get(name, ())) == 0
                ):
                    continue
                with suppress(_Unproven):
                    for candidate in kind(name, module):
                        self.found = {
                            old: one
                            for old, one in self.found.items()
                            if not old.startswith(f"{name}.")
                        }
                        self.found[name] = candidate
                        break

    def _is_replaced(self, name: str) -> bool:
        """Return True for a found module, or one within it."""
        words = name.split(".")
        return any(".".join(words[:count]) in self.found for count in range(1, len(words) + 1))

    def _call(self, name: str) -> Seen | None:
        """Return the call of a module that is called once, with one tensor of hidden states."""
        calls = self._seen.get(name, [])
        return calls[0] if len(calls) == 1 and isinstance(calls[0].input, torch.Tensor) else None

    def _norm(self, name: str, module: nn.Module) -> Iterator[Found]:
        eps = self._eps(name, module)
        if eps is not None:
            yield Found(name, OwnNorm, partial(OwnNorm, len(module.get_parameter("weight")), eps))

    def _eps(self, name: str, module: nn.Module) -> float | None:
        """Return the epsilon of a module verified as an RMS norm, otherwise None."""
        calls = self._seen.get(name, ())
        if (
            not _has_only(module, {"weight"})
            or module.get_parameter("weight").ndim != 1
            or any(len(call.args) != 1 or call.kwargs for call in calls)
        ):
            return None
        size = len(module.get_parameter("weight"))
        candidates = sorted(
            {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1}
        )
        return next(
            (
                eps
                for eps in candidates
                if self._is_same(name, module, partial(OwnNorm, size, eps), size, eps)
            ),
            None,
        )

    def _linear(self, name: str, module: nn.Module) -> Iterator[Found]:
        if type(module) is nn.Linear:
            inputs, outputs, bias = module.in_features, module.out_features, module.bias is not None
            yield Found(
                name, OwnLinear, lambda context: OwnLinear(inputs, outputs, context, bias=bias)
            )

    def _projections(
        self, name: str, module: nn.Module
    ) -> tuple[list[Projection], list[Projection]] | None:
        """Return the linear layers among the children of a module: those of its own input, and the others. None if one isn't called once."""
        call = self._call(name)
        mine: tuple[list[Projection], list[Projection]] = [], []
        for child, layer in module.named_children():
            if type(layer) is not nn.Linear:
                continue
            inner = self._call(f"{name}.{child}")
            if inner is None or call is None or self._keep(f"{name}.{child}"):
                return None
            mine[inner.input is not call.input].append(
                Projection(child, layer.in_features, layer.out_features, layer.bias is not None)
            )
        return mine

    def _feed_forward(self, name: str, module: nn.Module) -> Iterator[Found]:
        projections = self._projections(name, module)
        if projections is None or [len(some) for some in projections] != [2, 1]:
            return
        (first, second), (down,) = projections
        names = {
            f"{one.name}.{kind}"
            for one in (first, second, down)
            for kind in ("weight", "bias")
            if kind == "weight" or one.bias
        }
        alike = (first.inputs, first.outputs, first.bias) == (
            second.inputs,
            second.outputs,
            second.bias,
        ) and down.inputs == first.outputs
        if not alike or not _has_only(module, names):
            return
        for gate, up in ((first, second), (second, first)):
            for activation in ACTIVATIONS:
                make = partial(OwnFeedForward, gate, up, down, activation)
                if self._is_same(name, module, make, first.inputs, gate.name, activation):
                    yield Found(name, OwnFeedForward, make)

    def _experts(self, name: str, module: nn.Module) -> Iterator[Found]:
        call, weights = self._call(name), dict(module.named_parameters())
        given = () if call is None or call.kwargs else call.args[1:]
        bias = "gate_up_proj_bias" in weights
        names = {
            f"{one}_proj{kind}"
            for one in ("gate_up", "down")
            for kind in (("", "_bias") if bias else ("",))
        }
        if (
            [one.ndim for one in given if isinstance(one, torch.Tensor)] != [2, 2]
            or len(given) != 2
            or not _has_only(module, names)
        ):
            return
        (ids, shares), down = given, weights["down_proj"]
        if (
            down.ndim != 3
            or ids.is_floating_point()
            or not shares.is_floating_point()
            or getattr(module, "num_experts", None) != len(down)
        ):
            return
        stacked = Stacked(
            not getattr(module, "is_concatenated", True),
            bool(getattr(module, "is_transposed", False)),
        )
        inner, hidden = down.shape[1:] if stacked.transposed else (down.shape[2], down.shape[1])
        shape = ExpertsShape(hidden, inner, len(down), ids.shape[1], bias, stacked)
        alpha, limit = vars(module).get("alpha"), vars(module).get("limit")
        clamped = (
            [ClampedSwiGLU(alpha, limit)]
            if isinstance(alpha, float) and isinstance(limit, float)
            else []
        )
        settings = sorted(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        )
        key = repr((type(module), settings, shape, getattr(module, "act_fn", None)))
        candidates: list[Activation] = [*ACTIVATIONS, *clamped]
        for activation in candidates:
            if (key, activation) not in self._tried:
                self._tried[key, activation] = self._are_same_experts(module, shape, activation)
            if self._tried[key, activation]:
                yield Found(name, OwnExperts, partial(OwnExperts, shape, activation))

    def _are_same_experts(
        self, module: nn.Module, shape: ExpertsShape, activation: Activation
    ) -> bool:
        """Return True if our experts compute what a few of a module's do: all would need as much memory as the model."""
        few = replace(shape, count=min(shape.count, max(4, shape.per_token)))
        config = getattr(module, "config", None)
        small: Any = copy.deepcopy(module, {id(config): config})
        small.num_experts = few.count
        for name, parameter in list(small.named_parameters()):
            setattr(small, name, nn.Parameter(parameter[: few.count], requires_grad=False))
        tokens = len(self._positions) // len(MAGNITUDES)
        hidden = torch.cat(
            [
                self._numbers("hidden", (tokens, shape.hidden)) * magnitude
                for magnitude in MAGNITUDES
            ]
        )
        ids = self._numbers("ids", (len(hidden), few.count)).argsort(dim=1)[:, : shape.per_token]
        shares = self._numbers("shares", tuple(ids.shape)).abs()
        try:
            theirs, own = self._filled(small), OwnExperts(few, activation, self._context)
            for rule in own.rules(""):
                rule.parameter.load(theirs.get_parameter(rule.source).data, rule.shard_id)
            return _agree(theirs(hidden, ids, shares), own(hidden, ids, shares))
        except (
            _Unproven,
            UnsupportedError,
            AttributeError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ):
            return False

    def _attention(self, name: str, module: nn.Module) -> Iterator[Found]:
        call, spec, projections = (
            self._call(name),
            self._specs.get(name),
            self._projections(name, module),
        )
        if (
            call is None
            or spec is None
            or projections is None
            or [len(some) for some in projections] != [3, 1]
        ):
            return
        (q, k, v), (output,) = projections
        outputs = (
            spec.heads * spec.head_size,
            spec.kv_heads * spec.head_size,
            spec.kv_heads * spec.head_size,
        )
        if (
            (q.outputs, k.outputs, v.outputs) != outputs
            or output.inputs != outputs[0]
            or len({one.bias for one in (q, k, v)}) > 1
        ):
            return
        norms = {
            child: one
            for child, one in module.named_children()
            if type(one) is not nn.Linear and any(True for _ in one.parameters())
        }
        eps = {self._eps(f"{name}.{child}", one) for child, one in norms.items()} or {0.0}
        names = {
            f"{one.name}.{kind}"
            for one in (q, k, v, output)
            for kind in ("weight", "bias")
            if kind == "weight" or one.bias
        }
        if (
            len(norms) not in (0, 2)
            or len(eps) > 1
            or not _has_only(module, names | {f"{norm}.weight" for norm in norms})
        ):
            return
        (own_eps,), sizes = eps, {len(norm.get_parameter("weight")) for norm in norms.values()}
        if own_eps is None or sizes - {spec.head_size}:
            return
        embeddings = call.kwargs.get("position_embeddings")
        rotary = (
            self._rotary(embeddings[0])[1]
            if isinstance(embeddings, tuple) and len(embeddings) == 2
            else None
        )
        if rotary is None or rotary.table.shape[1] != spec.head_size:
            return
        shape = AttentionShape(spec, q, k, v, output, tuple(norms), own_eps)
        make = partial(OwnAttention, shape, rotary)
        if self._is_same(name, module, make, q.inputs, id(rotary), own_eps):
            yield Found(name, OwnAttention, make)

    def _block(self, name: str, module: nn.Module) -> Iterator[Found]:
        call = self._call(name)
        parts = {
            child: self.found.get(f"{name}.{child}")
            for child, one in module.named_children()
            if any(True for _ in one.parameters())
        }
        by_kind = {
            kind: [child for child, one in parts.items() if one is not None and one.kind is kind]
            for kind in (OwnNorm, OwnAttention, OwnFeedForward)
        }
        if call is None or len(parts) != 4 or [len(some) for some in by_kind.values()] != [2, 1, 1]:
            return
        (attention,), (feed_forward,) = by_kind[OwnAttention], by_kind[OwnFeedForward]
        norms = {
            id(self._seen[f"{name}.{child}"][0].output): child for child in by_kind[OwnNorm]
        }  # by output
        order = [
            norms.get(id(self._seen[f"{name}.{child}"][0].input))
            for child in (attention, feed_forward)
        ]
        if None in order or order[0] == order[1] or not isinstance(call.output, torch.Tensor):
            return
        names = [str(order[0]), attention, str(order[1]), feed_forward]
        chosen = [(child, parts[child]) for child in names]
        in_place = self._is_of_previous(name, call.input)

        def make(context: BuildContext) -> OwnLayer:
            return OwnBlock(
                {child: one.make(context) for child, one in chosen if one is not None},
                in_place=in_place,
            )

        if self._is_same(name, module, make, call.input.shape[-1], names, in_place):
            yield Found(name, OwnBlock, make)

    def _is_of_previous(self, name: str, hidden: torch.Tensor) -> bool:
        """Return True if `hidden` is another block's output, and only used by `name` and modules within it."""
        from_block = any(
            one.kind is OwnBlock and self._seen[one.name][0].output is hidden
            for one in self.found.values()
        )
        readers = [
            other
            for other, calls in self._seen.items()
            for call in calls
            if any(one is hidden for one in (*call.args, *call.kwargs.values()))
        ]
        return from_block and all(
            other == name or other.startswith(f"{name}.") for other in readers
        )

    def _rotary(self, traced: Any) -> tuple[torch.Tensor, RotaryTable | None]:
        """Return the numbers of `traced`, the cos or sin that a rotary embedding returned, at the positions of the proof, and that embedding's table:
        None if the halves of a head don't turn together. Raises `_Unproven`."""
        if id(traced) in self._rotaries:
            return self._rotaries[id(traced)]
        for name, calls in self._seen.items():
            for call in calls:
                output = call.output
                if (
                    isinstance(output, tuple)
                    and len(output) == 2
                    and any(one is traced for one in output)
                ):
                    numbers, table = self._make_rotary(self._modules[name], call)
                    self._rotaries |= {
                        id(one): (number, table)
                        for one, number in zip(output, numbers, strict=True)
                    }
                    return self._rotaries[id(traced)]
        raise _Unproven

    def _make_rotary(
        self, module: nn.Module, call: Seen
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], RotaryTable | None]:
        """Return cos and sin at the positions of the proof, and the table."""

        def at(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            def real(value: Any) -> Any:
                return (
                    positions[None]
                    if value is self._position_ids
                    else torch.zeros(1, 1, 1)
                    if isinstance(value, torch.Tensor)
                    else value
                )

            cos, sin = rotary(
                *map(real, call.args), **{key: real(value) for key, value in call.kwargs.items()}
            )
            return cos, sin

        if not any(value is self._position_ids for value in (*call.args, *call.kwargs.values())):
            raise _Unproven
        try:
            rotary = type(module)(config=module.config)
            rotary.rope_type = module.rope_type  # see `transformers._ready`
            cos, sin = (one[0] for one in at(torch.arange(self._max_len)))
            few = at(self._positions.cpu())
        except Exception as error:  # another constructor or signature
            raise _Unproven from error
        half = cos.shape[-1] // 2
        whole = cos.ndim == 2 and all(
            torch.equal(one[:, :half], one[:, half:]) for one in (cos, sin)
        )
        table = (
            RotaryTable(torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float().to(self._device))
            if whole
            else None
        )
        return (few[0].to(self._device), few[1].to(self._device)), table

    def _is_same(
        self,
        name: str,
        module: nn.Module,
        make: Callable[[BuildContext], OwnLayer],
        size: int,
        *of: Any,
    ) -> bool:
        """Return True if what `make` returns computes what `module` does, for hidden states of `size`. `of`: what distinguishes `make` from others
        that are tried on modules like this one."""
        inner = [
            (key[len(name) :], replace(spec, index=0))
            for key, spec in self._specs.items()
            if key == name or key.startswith(f"{name}.")
        ]
        parameters = [(key, tuple(one.shape)) for key, one in module.named_parameters()]
        key = repr((type(module), parameters, inner, of)), self._seen[name][0].operations
        if key not in self._tried:
            self._tried[key] = self._computes_same(name, module, make, size)
        return self._tried[key]

    def _computes_same(
        self, name: str, module: nn.Module, make: Callable[[BuildContext], OwnLayer], size: int
    ) -> bool:
        try:
            theirs, own = self._filled(module), make(self._context)
            for rule in own.rules(""):
                rule.parameter.load(theirs.get_parameter(rule.source).data, rule.shard_id)
            tokens = len(self._positions) // len(MAGNITUDES)
            hidden = torch.cat(
                [
                    self._numbers("hidden", (1, tokens, size)) * magnitude
                    for magnitude in MAGNITUDES
                ],
                dim=1,
            )
            return _agree(*(self._run(name, one, hidden.clone()) for one in (theirs, own)))
        except (_Unproven, UnsupportedError):
            return False

    def _run(self, name: str, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that `module` computes from `hidden` when called like the module `name`."""
        batch = PlainBatch()
        batch.rows = [
            (row, len(self._positions) // len(MAGNITUDES)) for row in range(len(MAGNITUDES))
        ]
        for inner, spec in self._specs.items():
            if inner == name or inner.startswith(f"{name}."):
                setattr(
                    module.get_submodule(inner[len(name) + 1 :]), LAYER, PlainAttention(spec, batch)
                )
        for rotary in self.rotaries:
            rotary.begin(self._positions)
        call = self._seen[name][0]

        def real(value: Any) -> Any:
            if value is call.input:
                return hidden
            if value is self._position_ids:
                return self._positions[None]
            if isinstance(value, torch.Tensor):
                return self._rotary(value)[0]
            if isinstance(value, tuple | list):
                return type(value)(map(real, value))
            if value is None or isinstance(value, bool | int | float | str):
                return value
            raise _Unproven

        out = module(
            *map(real, call.args), **{key: real(value) for key, value in call.kwargs.items()}
        )
        states: torch.Tensor = out[0] if isinstance(out, tuple) else out
        if isinstance(out, tuple) != isinstance(call.output, tuple) or (
            isinstance(out, tuple) and (len(out) != 2 or out[1] is not None)
        ):
            raise _Unproven
        return states

    def _filled(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module that has no buffers, in float32, with random parameters."""
        if any(True for _ in module.buffers()):
            raise _Unproven
        config = getattr(module, "config", None)
        made = copy.deepcopy(module, {id(config): config}).to_empty(device=self._device).float()
        for name, parameter in made.named_parameters():
            numbers = self._numbers(name, tuple(parameter.shape))
            parameter.copy_(
                numbers * (3 / numbers.shape[1]) ** 0.5 if numbers.ndim > 1 else 1 + numbers / 2
            )
        return made

    def _numbers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return random numbers between -1 and 1, different by name, but the same for identical modules."""
        if (name, shape) not in self._random:
            generator = torch.Generator(self._device).manual_seed(len(self._random))
            self._random[name, shape] = (
                torch.rand(shape, generator=generator, device=self._device) * 2 - 1
            )
        return self._random[name, shape]


def _agree(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    """Return True if outputs for inputs of all magnitudes agree."""
    wanted, got = (one.reshape(len(MAGNITUDES), -1) for one in (wanted, got))
    off = (wanted - got).abs().amax(1) / wanted.square().mean(1).sqrt()  # of each magnitude
    return all(
        one <= (EXACT if magnitude <= 1 else ABOUT)
        for one, magnitude in zip(off.tolist(), MAGNITUDES, strict=True)
    )


def _has_only(module: nn.Module, names: set[str]) -> bool:
    """Return True if the parameters of a module have these names, and it has no buffers."""
    return {name for name, _ in module.named_parameters()} == names and not any(
        True for _ in module.buffers()
    )


def _spread(max_len: int) -> torch.Tensor:
    """Return some two dozen positions below `max_len`: the first ones, powers of two and their neighbours, the last."""
    positions = {
        0,
        1,
        2,
        3,
        max_len - 1,
        *(2**power + by for power in range(2, max_len.bit_length()) for by in (-1, 0)),
    }
    return torch.tensor(sorted(one for one in positions if 0 <= one < max_len))
