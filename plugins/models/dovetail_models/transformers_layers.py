"""Replaces modules of a transformers model by Dovetail's layers: linear layers, RMS norms, gated
feed-forwards, experts, attention, pre-norm blocks.

`KINDS` names the classes whose code computes what a layer of ours does; tests compare each with its
layer. Other classes stay as they are. When a checkpoint is loaded, `transformers_check` compares
the model with and without the layers, whatever a version of transformers has made of these classes.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.api.model import BuildContext, WeightRule
from dovetail.nn.activation import ACTIVATIONS, Activation, ClampedSwiGLU
from dovetail.nn.attention import Attention
from dovetail.nn.build import of_runtime
from dovetail.nn.feed_forward import GatedFeedForward
from dovetail.nn.format import DENSE
from dovetail.nn.linear import ReplicatedLinear, linear
from dovetail.nn.moe import Experts, Stacked
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parameter import weight_rules
from dovetail.nn.residual import Residual
from dovetail.nn.rotary import Rotation
from dovetail_models.transformers_attention import AttentionCall, specs_of
from dovetail_models.transformers_check import PlainAttention, PlainBatch

# Families of transformers, by the kind of layer that their classes are.
_NORMS = """
    AXK1 Apertus Arcee AriaText Beam BitNet Cwm DeepseekV2 DeepseekV3 Ernie4_5 Ernie4_5_Moe
    Exaone4 ExaoneMoe FlexOlmo Flint Gemma3n Gemma4 Gemma4Unified Glm Glm4 Glm4Moe Glm4MoeLite
    Granite GraniteMoe GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 Helium HunYuanDenseV1
    HunYuanMoEV1 HyperCLOVAX Kolibri1 Laguna Llama Llama4Text Mellum MiMoV2Flash MiniCPM3
    MiniMaxM2 Ministral Ministral3 Mistral Mixtral Moshi Olmo2 Olmo3 Olmoe Phi3 Phi4Multimodal
    Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 SolarOpen Youtu
"""
_FEED_FORWARDS = """
    AXK1 Afmoe AriaSharedExperts Beam Cohere Cohere2 Cwm DeepseekV2 DeepseekV3 Ernie4_5
    Ernie4_5_Moe Exaone4 ExaoneMoe Flint Gemma Gemma2 Gemma3 Gemma3nText Gemma4Text
    Gemma4UnifiedText Glm4Moe Glm4MoeLite Granite GraniteSWA HYV3 Helium HunYuanDenseV1
    HunYuanMoEV1 HyperCLOVAX Kolibri1 Laguna Llama Llama4Text MiMoV2Flash MiniCPM3 Ministral
    Ministral3 Mistral Olmo Olmo2 Olmo3 Qwen2 Qwen2Moe Qwen3 SeedOss SmolLM3 SolarOpen StableLm
    VaultGemma Youtu
"""
_ATTENTION = """
    Apertus Arcee AriaText Cwm Exaone4 ExaoneMoe Gemma Gemma2 Granite GraniteMoe GraniteMoeShared
    HYV3 HyperCLOVAX Jais2 Kolibri1 Llama Mellum Ministral Ministral3 Mistral Mixtral Olmo Phimoe
    Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 SolarOpen Starcoder2 VaultGemma
"""
_EXPERTS = """
    AXK1 Afmoe Aria BailingHybrid Cohere2Moe DeepseekV2 DeepseekV3 Dots1 Ernie4_5_Moe ExaoneMoe
    FlexOlmo Flint Glm4Moe Glm4MoeLite GptOss GraniteMoe GraniteMoeSWA GraniteMoeShared HYV3
    HunYuanMoEV1 Jamba KimiLinear Kolibri1 Laguna Mellum MiMoV2Flash MiniMax MiniMaxM2 Mixtral
    Olmoe Phimoe Qwen2Moe Qwen3Moe SolarOpen Zaya
"""
_BLOCKS = """
    Cwm ExaoneMoe Granite HYV3 Llama Ministral Ministral3 Mistral Qwen2 Qwen3 SeedOss SmolLM3
"""
EPS = ("variance_epsilon", "eps")  # attributes of norms
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
BLOCK = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


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
    """Replaces a module of transformers."""

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        """Yield the rules for the parameters of the module `prefix`."""
        raise NotImplementedError


class OwnLinear(OwnLayer):
    """x [..., in] -> [..., out]. Not split over ranks."""

    def __init__(self, inputs: int, outputs: int, context: BuildContext, *, bias: bool) -> None:
        super().__init__()
        self.layer = ReplicatedLinear(inputs, outputs, context, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        return weight_rules("", {prefix: self.layer})

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        return weight_rules("", {prefix: self.norm})


class OwnFeedForward(OwnLayer):
    """Gated feed-forward of x [1, tokens, hidden]."""

    def __init__(
        self, sizes: tuple[int, int], activation: str, context: BuildContext, *, bias: bool
    ) -> None:
        super().__init__()
        self.mlp = GatedFeedForward(*sizes, context, bias=bias, activation=activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp.down_proj(self.mlp.inner(x.flatten(0, -2))).view(x.shape)

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        return self.mlp.weights(f"{prefix}.")


class OwnExperts(OwnLayer):
    """Experts: hidden_states [tokens, hidden], ids and weights [tokens, k] -> [tokens, hidden]."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        return self.experts.weights(f"{prefix}.")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x = hidden_states.contiguous()
        ids = top_k_index.to(torch.int32).contiguous()
        residual = Residual(torch.zeros_like(x))
        self.experts.add_to(residual, x, ids, top_k_weights.float().contiguous())
        return residual.summed()


class OwnAttention(OwnLayer):
    """Attention of hidden_states [1, tokens, hidden] -> (the same shape, None), as transformers'
    modules return it. Its `AttentionLayer` is bound later, like those of transformers' modules."""

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        rotary: RotaryTable,
        context: BuildContext,
        **settings: Any,
    ) -> None:
        """`spec`: of the whole model. `settings`: as of `Attention`."""
        super().__init__()
        unbound = replace(context, make_attention=lambda own: PlainAttention(own, PlainBatch()))
        self.attention = Attention(hidden, spec, unbound, **settings)
        self.rotary = rotary

    @property
    def dovetail_layer(self) -> AttentionLayer:
        """The attribute that `transformers_attention.LAYER` names."""
        return self.attention.attn

    @dovetail_layer.setter
    def dovetail_layer(self, layer: AttentionLayer) -> None:
        self.attention.attn = layer

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q = self.attention.store(hidden_states[0], None, self.rotary.rotation)
        out = self.attention.attn.attend(q).flatten(1)
        return self.attention.o_proj(out)[None], None

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        return self.attention.weights(f"{prefix}.")


class OwnBlock(OwnLayer):
    """A pre-norm block: hidden_states [1, tokens, hidden] -> the same shape. `in_place`: it adds to
    the input itself."""

    def __init__(self, parts: Mapping[str, Any], *, in_place: bool) -> None:
        """`parts`: layers by the names in `BLOCK`."""
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._in_place = in_place

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        norm, attention, second_norm, feed_forward = (getattr(self, name) for name in BLOCK)
        residual = Residual(hidden_states[0] if self._in_place else hidden_states[0].clone())
        attention.attention.add_to(residual, norm.norm, attention.rotary.rotation)
        feed_forward.mlp.add_to(residual, second_norm.norm)
        return residual.summed()[None]

    def rules(self, prefix: str) -> Iterator[WeightRule]:
        for name in BLOCK:
            yield from getattr(self, name).rules(f"{prefix}.{name}")


class OwnHead(nn.Module):
    """Linear layer with the parameters of transformers' own, which may be tied to another
    layer's."""

    def __init__(self, theirs: nn.Linear) -> None:
        super().__init__()
        self.weight = theirs.weight
        self.bias = theirs.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.flatten(0, -2), self.weight, self.bias).view(*x.shape[:-1], -1)


Make = Callable[[BuildContext], OwnLayer]


@dataclass(frozen=True, slots=True)
class Found:
    """A module of the model, by its name, that can be replaced by what `make` returns, an instance
    of `kind`."""

    name: str
    kind: type[OwnLayer]
    make: Make


@dataclass(frozen=True, slots=True)
class Layers:
    """Replacements found for a base model, and the rotary embeddings that they read."""

    found: tuple[Found, ...] = ()
    rotaries: tuple[RotaryTable, ...] = ()


def find_layers(
    base: nn.Module,
    calls: Sequence[AttentionCall],
    max_len: int,
    device: torch.device,
    keep: Callable[[str], bool],
    apart: Callable[[str], bool] = lambda _: False,
) -> Layers:
    """Return the replacements for modules of `base`, which may be on the meta device. Rotary
    embeddings are computed for positions below `max_len`, and put on `device`. `keep`: names of
    modules that must stay as they are. `apart`: names of experts of which a checkpoint that is
    quantized has tensors for each."""
    finder = _Finder(base, calls, max_len, device, apart)
    for kind in (OwnAttention, OwnFeedForward, OwnExperts, OwnNorm, OwnLinear, OwnBlock):
        for name, module in base.named_modules():
            if KINDS.get(_class_of(module)) is kind and name and not keep(name):
                finder.replace(name, module, kind)
    return Layers(tuple(finder.found.values()), tuple(finder.rotaries.values()))


def reasons_against_split(
    base: nn.Module, calls: Sequence[AttentionCall], layers: Layers, plan: Mapping[str, str] | None
) -> list[str]:
    """Return why a base model can't be split over ranks. `plan`: how transformers would split it,
    by patterns of names. Only replaced attention and feed-forwards are split here: whatever else is
    to be split is named, the first of each pattern."""
    if not plan:
        return ["its config has no base_model_tp_plan"]
    kinds = (OwnAttention, OwnExperts, OwnFeedForward, OwnBlock)
    split = {found.name for found in layers.found if found.kind in kinds}
    others = [call.module for call in calls if not _is_within(call.module, split)]
    whole = [f"{name} isn't attention of ours" for name in others[:1]]
    names = [
        name
        for name, _ in (*base.named_modules(), *base.named_parameters())
        if not _is_within(name, split)
    ]
    for pattern, way in plan.items():
        if way.startswith("replicated"):
            continue
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        named = next(filter(wanted.fullmatch, names), None)
        is_told = bool(others) and any(call.module in (named or "") for call in calls)
        if named is not None and not is_told:
            whole.append(f"its plan splits {named} ({way}), which isn't a layer of ours")
    return whole


def _is_within(name: str, modules: set[str] | Mapping[str, Any]) -> bool:
    """Return True for one of `modules`, or one within it."""
    words = name.split(".")
    return any(".".join(words[:count]) in modules for count in range(1, len(words) + 1))


class _Finder:
    """Finds replacements: large modules after their parts, which they then replace."""

    def __init__(
        self,
        base: nn.Module,
        calls: Sequence[AttentionCall],
        max_len: int,
        device: torch.device,
        apart: Callable[[str], bool],
    ) -> None:
        self._base = base
        self._apart = apart
        self._max_len = max_len
        self._device = device
        times = Counter(call.module for call in calls)
        self._specs = {
            call.module: spec
            for call, spec in zip(calls, specs_of(calls), strict=True)
            if times[call.module] == 1
        }
        self.found: dict[str, Found] = {}
        self.rotaries: dict[str | None, RotaryTable] = {}  # by kind of layer, if they differ
        self._makers: Mapping[type[OwnLayer], Callable[[str, Any], Make | None]] = {
            OwnNorm: self._norm,
            OwnLinear: self._linear,
            OwnFeedForward: self._feed_forward,
            OwnExperts: self._experts,
            OwnAttention: self._attention,
            OwnBlock: self._block,
        }

    def replace(self, name: str, module: Any, kind: type[OwnLayer]) -> None:
        """Note the replacement of a module, unless its attributes make its class compute something
        else."""
        if _is_within(name, self.found):
            return
        make = self._makers[kind](name, module)
        if make is not None:
            inner = [other for other in self.found if other.startswith(f"{name}.")]
            for other in inner:
                del self.found[other]
            self.found[name] = Found(name, kind, make)

    def _norm(self, name: str, module: Any) -> Make | None:
        eps = _eps(module)
        parameters = [one for one, _ in module.named_parameters()]
        if eps is None or parameters != ["weight"]:
            return None
        return partial(OwnNorm, len(module.weight), eps)

    def _linear(self, name: str, module: Any) -> Make:
        sizes = (module.in_features, module.out_features)
        bias = module.bias is not None
        return partial(OwnLinear, *sizes, bias=bias)

    def _feed_forward(self, name: str, module: Any) -> Make | None:
        activation = _activation(module)
        parts = (module.gate_proj, module.up_proj, module.down_proj)
        biases = {part.bias is not None for part in parts}
        is_sparse = getattr(module, "activation_sparsity", 0) > 0
        if activation is None or is_sparse or len(biases) > 1:
            return None
        sizes = (module.gate_proj.in_features, module.gate_proj.out_features)
        return partial(OwnFeedForward, sizes, activation, bias=biases.pop())

    def _experts(self, name: str, module: Any) -> Make | None:
        activation: Activation | None = _activation(module)
        if _class_of(module) == "GptOssExperts":
            activation = ClampedSwiGLU(module.alpha, module.limit)
        if activation is None:
            return None
        stacked = Stacked(not module.is_concatenated, module.is_transposed)
        count, *sizes = module.down_proj.shape
        inner, hidden = sizes if stacked.transposed else sizes[::-1]
        per_token = getattr(self._base.config, "num_experts_per_tok", None)
        per_token = per_token if isinstance(per_token, int) else None
        apart = self._apart(name) and not module.has_bias and stacked == Stacked()

        def make(context: BuildContext) -> OwnLayer:
            layout = None if apart and of_runtime(context).weights_stored else stacked
            settings = (activation, module.has_bias, layout)
            return OwnExperts(
                Experts(hidden, inner, count, context, *settings, per_token=per_token)
            )

        return make

    def _attention(self, name: str, module: Any) -> Make | None:
        spec = self._specs.get(name)
        parts = [getattr(module, one) for one in PROJECTIONS]
        rotary = self._rotary(module)
        biases = {part.bias is not None for part in parts[:3]}
        if spec is None or rotary is None or len(biases) > 1 or not self._rotates_only(module):
            return None
        if rotary.table.shape[1] != spec.head_size:
            return None
        norms = [getattr(module, one, None) for one in ("q_norm", "k_norm")]
        eps = _eps(norms[0])
        if any(norm is not None and _eps(norm) != eps for norm in norms):
            return None
        return partial(
            OwnAttention,
            parts[0].in_features,
            spec,
            rotary,
            bias=biases.pop(),
            output_bias=parts[3].bias is not None,
            qk_norm_eps=eps,
        )

    def _rotates_only(self, module: Any) -> bool:
        """Return True if an attention module rotates q and k, and changes nothing else."""
        rope = module.config.rope_parameters or {}
        scales = rope.get("llama_4_scaling_beta") is not None
        is_scaled = scales and self._max_len > rope["original_max_position_embeddings"]
        rotates = getattr(module, "use_rope", True)
        if not getattr(module, "is_sliding", True):
            rotates = module.sliding_window is None
        clips = getattr(module.config, "clip_qkv", None) is not None
        return bool(rotates) and not is_scaled and not clips

    def _rotary(self, module: Any) -> RotaryTable | None:
        """Return the table of the base's rotary embedding that turns an attention module's q and k;
        None if it has several, or the halves of a head don't turn together."""
        all_of_them: list[Any] = [
            one for one in self._base.modules() if _class_of(one).endswith("RotaryEmbedding")
        ]
        if len(all_of_them) != 1:
            return None
        given = all_of_them[0]
        kind = None
        arguments = list[Any]()
        if "layer_type" in inspect.signature(given.forward).parameters:
            kind = module.config.layer_types[module.layer_idx]
            arguments = [kind]
        if kind not in self.rotaries:
            rotary = type(given)(config=given.config)
            rotary.rope_type = given.rope_type  # see `transformers_loading.ready`
            positions = torch.arange(self._max_len)[None]
            cos, sin = (one[0] for one in rotary(torch.zeros(1, 1, 1), positions, *arguments))
            half = cos.shape[-1] // 2
            if not all(torch.equal(one[:, :half], one[:, half:]) for one in (cos, sin)):
                return None
            table = torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float()
            self.rotaries[kind] = RotaryTable(table.to(self._device))
        return self.rotaries[kind]

    def _block(self, name: str, module: Any) -> Make | None:
        parts = {child: self.found.get(f"{name}.{child}") for child in BLOCK}
        kinds = [None if part is None else part.kind for part in parts.values()]
        multiplier = getattr(module, "residual_multiplier", 1)
        if kinds != [OwnNorm, OwnAttention, OwnNorm, OwnFeedForward] or multiplier != 1:
            return None
        layers, _, index = name.rpartition(".")
        previous = self.found.get(f"{layers}.{int(index) - 1}")
        in_place = previous is not None and previous.kind is OwnBlock

        def make(context: BuildContext) -> OwnLayer:
            made = {child: one.make(context) for child, one in parts.items() if one is not None}
            return OwnBlock(made, in_place=in_place)

        return make


def _class_of(module: nn.Module) -> str:
    """Return the name of a class of transformers, or of torch's linear layer."""
    kind = type(module)
    known = kind is nn.Linear or kind.__module__.startswith("transformers.")
    return kind.__name__ if known else ""


def _eps(module: Any) -> float | None:
    """Return the epsilon of a norm; None if it says none."""
    return next((value for name in EPS if (value := getattr(module, name, None))), None)


def _activation(module: Any) -> str | None:
    """Return the key in `ACTIVATIONS` of a module's activation."""
    own = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return next((name for name in ACTIVATIONS if type(ACT2FN[name]) is type(own)), None)


def _classes(families: str, suffix: str) -> list[str]:
    return [f"{family}{suffix}" for family in families.split()]


KINDS: Mapping[str, type[OwnLayer]] = {  # by the names of classes
    "Linear": OwnLinear,
    **dict.fromkeys(_classes(_NORMS, "RMSNorm"), OwnNorm),
    **dict.fromkeys(_classes(_FEED_FORWARDS, "MLP"), OwnFeedForward),
    **dict.fromkeys(_classes(_ATTENTION, "Attention"), OwnAttention),
    **dict.fromkeys(_classes(_EXPERTS, "Experts"), OwnExperts),
    **dict.fromkeys(_classes(_BLOCKS, "DecoderLayer"), OwnBlock),
}
