"""Transformers' attention modules on Dovetail's attention backends, through transformers'
`AttentionInterface`.

`trace` runs a model on the meta device and records the call of each attention module. `bind` gives
each module its layer, which writes K and V to the paged cache and attends over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.errors import UnsupportedError
from dovetail.nn.fixed_shapes import shapes_are_fixed

# name of our functions in transformers' registries of attention and experts implementations
NAME = "dovetail"
NOT_THROUGH = "{}: its attention doesn't go through transformers' AttentionInterface"
LAYER = "dovetail_layer"  # attribute of an attention module: its `AttentionLayer`, or `_InTurn`

# arguments of attention calls that layers have, or that don't change the numbers here: positions
# and masks are the backend's
_HANDLED = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "position_embeddings",
        "layer_idx",
        "logits_to_keep",
        "output_router_logits",
        "is_causal",
        "sliding_window",
        "layer_type",
        "max_length_q",
        "max_length_k",
        "s_aux",  # sinks, and the cap of scores: layers have them
        "softcap",
        "has_positions",  # see `AttentionCall`
    ]
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A module's call of the attention function, recorded by `trace`."""

    module: str  # its name in the model
    heads: int
    kv_heads: int
    head_size: int  # of q and k; V's may be smaller, and is padded
    scale: float
    window: int | None
    problems: tuple[str, ...]  # unsupported features
    sinks: str | None = None  # name of the module's parameter
    softcap: float | None = None
    has_positions: bool = False  # K has numbers that a smaller dtype of the cache would falsify


class _InTurn:
    """Layers of a module that attends several times in a step, each time over its own K and V."""

    def __init__(self, layers: Sequence[AttentionLayer]) -> None:
        self._layers = layers
        self._next = 0

    def begin(self) -> None:
        """Begin a step: the first layer is next."""
        self._next = 0

    def take(self) -> AttentionLayer | None:
        """Return the layer of this call; None after the last."""
        self._next += 1
        return self._layers[self._next - 1] if self._next <= len(self._layers) else None


class _Recorder:
    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.names, self.calls = names, list[AttentionCall]()


# positions [tokens] int64 of the tokens that a model computes
positions_of_step: ContextVar[torch.Tensor] = ContextVar("positions")
_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: query [1, heads, tokens, head_size], key and value [1,
    kv_heads, tokens, head_size] -> [1, tokens, heads, V's head_size]."""
    if (recorder := _recorder.get()) is not None:
        given = {**kwargs, "dropout": dropout or None}
        recorder.calls.append(
            _call(recorder.names[module], module, query, key, value, attention_mask, scaling, given)
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    if unhandled := _unhandled(kwargs):  # arguments may depend on the length
        raise UnsupportedError(
            f"its attention has {', '.join(unhandled)}, which attention backends don't compute"
        )
    bound = getattr(module, LAYER, None)
    layer: AttentionLayer | None = bound.take() if isinstance(bound, _InTurn) else bound
    if layer is None:
        raise UnsupportedError(
            f"{type(module).__name__} is called, and wasn't when the model was traced"
        )
    if changed := _changed(
        layer.spec, module, key, attention_mask, scaling, kwargs
    ):  # and so may their values
        raise UnsupportedError(
            f"{type(module).__name__}: {changed} of its attention isn't what it was when the model "
            f"was traced"
        )
    # [tokens, heads, head_size], views
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (missing := k.shape[2] - v.shape[2]) > 0:
        v = nn.functional.pad(v, (0, missing))
    layer.write(k, v)
    out = layer.attend(q)
    return out[None, ..., : value.shape[3]], None


def _unhandled(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the arguments that change the numbers, and that nobody here reads."""
    return [
        key
        for key, given in kwargs.items()
        if key not in _HANDLED and given is not None and given is not False
    ]


def _changed(
    spec: LayerSpec,
    module: nn.Module,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: Any,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Return the name of an argument with another value than `spec`, which the trace made, says;
    None if there is none."""
    same = {
        "attention_mask": mask is None,
        "is_causal": kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False,
        "scaling": (key.shape[3] ** -0.5 if scaling is None else scaling) == spec.scale,
        "sliding_window": kwargs.get("sliding_window") == spec.window,
        "softcap": kwargs.get("softcap") == spec.softcap,
        "s_aux": (kwargs.get("s_aux") is not None) == spec.sinks,
    }
    return next((name for name, holds in same.items() if not holds), None)


def _call(
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: Mapping[str, Any],
) -> AttentionCall:
    problems = [
        f"its attention has {key}, which attention backends don't compute"
        for key in _unhandled(kwargs)
    ]
    if mask is not None:
        problems.append("it creates its own attention mask")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        problems.append("its attention isn't causal")
    if query.shape[2] != key.shape[2]:
        problems.append("it attends over other tokens than those of the step")
    if value.shape[3] > key.shape[3]:
        problems.append(f"V's head size {value.shape[3]} is larger than K's, {key.shape[3]}")
    if value.shape[1] != key.shape[1]:
        problems.append(f"K has {key.shape[1]} heads and V {value.shape[1]}")
    window = kwargs.get("sliding_window")
    softcap = kwargs.get("softcap")
    given = kwargs.get("s_aux")
    if window is not None and int(window) < 1:
        problems.append(f"sliding_window = {window} must be at least 1")
    sinks = next(
        (own for own, parameter in module.named_parameters(recurse=False) if parameter is given),
        None,
    )
    if given is not None and (sinks is None or given.shape != (query.shape[1],)):
        problems.append("its attention has sinks that aren't a parameter with one number per head")
    return AttentionCall(
        name,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_size=key.shape[3],
        scale=key.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=None if window is None else int(window),
        problems=tuple(problems),
        sinks=sinks,
        softcap=None if softcap is None else float(softcap),
        has_positions=bool(kwargs.get("has_positions")),
    )


def experts(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts function for transformers: grouped products without synchronization, and no products
    while a model is traced; with `fixed_shapes` a product for each token and expert."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    forward = batched_mm_experts_forward if shapes_are_fixed() else grouped_mm_experts_forward
    result: torch.Tensor = forward(module, hidden, top_k_index, top_k_weights)
    return result


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[AttentionCall]]:
    recorder = _Recorder({module: name for name, module in model.named_modules()})
    token = _recorder.set(recorder)
    try:
        yield recorder.calls
    finally:
        _recorder.reset(token)


@torch.no_grad()
def trace(base: nn.Module) -> list[AttentionCall]:
    """Return the attention calls of a forward pass of a model on the meta device, in their order.
    Raises `UnsupportedError` if the model can't be traced."""
    ids, positions = (torch.zeros(1, 3, dtype=torch.long, device="meta") for _ in range(2))
    with _recording(base) as calls:
        positions_of_step.set(positions[0])
        try:
            base(input_ids=ids, position_ids=positions, use_cache=False)
        except Exception as error:
            raise UnsupportedError(
                f"{type(base).__name__}: its code can't be traced: {one_line(error)}"
            ) from error
    return calls


def specs_of(calls: Sequence[AttentionCall]) -> list[LayerSpec]:
    return [
        LayerSpec(
            index,
            call.heads,
            call.kv_heads,
            call.head_size,
            call.scale,
            call.window,
            call.sinks is not None,
            call.softcap,
        )
        for index, call in enumerate(calls)
    ]


def bind(base: nn.Module, calls: Sequence[AttentionCall], layers: Sequence[AttentionLayer]) -> None:
    """Make each attention module of `base` use its layer, or its layers in turn. Sinks are read
    from the module's parameter."""
    of_module = dict[str, list[AttentionLayer]]()
    for call, layer in zip(calls, layers, strict=True):
        module = base.get_submodule(call.module)
        of_module.setdefault(call.module, []).append(layer)
        if call.sinks is not None:
            layer.bind_sinks(getattr(module, call.sinks).detach())
    for name, own in of_module.items():
        module = base.get_submodule(name)
        setattr(module, LAYER, own[0])
        if len(own) > 1:
            turn = _InTurn(own)
            setattr(module, LAYER, turn)
            base.register_forward_pre_hook(lambda *_, turn=turn: turn.begin())
