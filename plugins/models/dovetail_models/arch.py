"""Bases of architectures: `ConfigArch` validates a Hugging Face config, `DecoderArch` also builds
a decoder of a family's blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dovetail.api.attention import LayerSpec
from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.api.model import BuildContext, ModelArch, ModelCapabilities, ParallelGroup
from dovetail.errors import UnsupportedError
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.decoder import AnyBlock, Decoder
from dovetail.nn.embedding import LMHead, VocabParallelEmbedding
from dovetail.nn.model_files import model_length
from dovetail.nn.norm import RMSNorm
from dovetail.nn.rotary import Rope, rope_from_config, rope_reasons_against

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

_HANDLED = {
    *_SIZES,
    "architectures",
    "head_dim",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
}

_DEFAULTS = NoEffect("a default of requests: see generation_config.json")
_NAMES = NoEffect("what was loaded, and how transformers computes it")
_TRAINING = NoEffect("of training")
_VERSIONS = NoEffect("the versions and tools that wrote the file")
_POOLING = Used("of classifiers and embeddings")
_OUTPUTS = NoEffect("what transformers' model returns")
KEYS = FileKeys(
    "config.json",
    {
        **dict.fromkeys(("architectures", "model_type"), Used("the class of the model")),
        **dict.fromkeys(("eos_token_id", "pad_token_id"), Used("ids of tokens")),
        **dict.fromkeys(("id2label", "num_labels", "problem_type", "sbert_ce_*"), _POOLING),
        **dict.fromkeys(("matryoshka_dimensions", "sentence_transformers"), _POOLING),
        **dict.fromkeys(("dtype", "torch_dtype"), Used("the dtype, if `dtype` is auto")),
        "auto_map": Used("code of the checkpoint is never run: a class of its own is refused"),
        "is_causal": Used("false is refused"),
        "pretraining_tp": Used("other values than 1 are refused"),
        "quantization_config": Used("how weights are stored, below"),
        **dict.fromkeys(
            ("*_token_id", "*_token_ids", "max_length", "task_specific_params"), _DEFAULTS
        ),
        **dict.fromkeys(("_name_or_path", "name_or_path", "model_name"), _NAMES),
        **dict.fromkeys(
            ("_attn_implementation*", "_experts_implementation*", "_post_init_done"), _NAMES
        ),
        **dict.fromkeys(("_output_attentions", "_commit_hash", "_pre_quantization_dtype"), _NAMES),
        **dict.fromkeys(("*_plan", "chunk_size_feed_forward", "use_cache"), _NAMES),
        **dict.fromkeys(
            ("*dropout*", "*pdrop", "initializer_range", "gradient_checkpointing"), _TRAINING
        ),
        **dict.fromkeys(("*_version", "transformers*", "unsloth_*", "is_llama_config"), _VERSIONS),
        **dict.fromkeys(("keys_to_ignore_at_inference", "return_dict"), _OUTPUTS),
        **dict.fromkeys(("output_attentions", "output_hidden_states"), _OUTPUTS),
        **dict.fromkeys(
            ("classifier_from_token", "is_original_qwen3_reranker"),
            NoEffect("how a classifier was made"),
        ),
        **dict.fromkeys(("is_matryoshka", "label2id"), NoEffect("other keys say it")),
        "ignore_keys_at_rope_validation": NoEffect("of transformers' own checks"),
        **dict.fromkeys(
            ("max_sequence_length", "model_max_length"), NoEffect("max_position_embeddings says it")
        ),
        "_sliding_window_pattern": NoEffect("layer_types says it"),
        "tokenizer_*": NoEffect("the tokenizer's own files say it"),
        "is_encoder_decoder": Refused("encoder-decoder models", (False,)),
        "per_layer_config": Refused("fields of single layers"),
        "_heterogeneity_spec": Refused("fields of single layers, `per_layer_config`"),
    },
)
_HARMLESS_VALUES = {
    "activation": ("swiglu",)
}  # Falcon3's name for a gated feed-forward with hidden_act = silu


class ConfigArch(ModelArch):
    """Architecture that knows every field of its config.

    A config is served only if every field in it is handled by the architecture (`handled`, besides
    the common ones), in the table `KEYS`, equal to transformers' default, or unknown to
    transformers and off (None, False, 0 or empty). Any other field may change the numbers, even one
    that transformers itself ignores, and is rejected by name; users who know that it has no effect
    can remove it from config.json.
    """

    capabilities = ModelCapabilities(tensor_parallel=True, taps=True, plain_config=True)
    model_type: str  # of transformers' config
    handled: frozenset[str] = frozenset()
    activation_field = "hidden_act"
    activations: tuple[str, ...] = ("silu",)  # implemented
    # keys of `auto_map` that would replace this model by code in the checkpoint
    auto_classes: tuple[str, ...] = ("AutoModelForCausalLM",)

    def reasons_against(self, config: Any) -> list[str]:
        if config.model_type != self.model_type:
            return [f"model_type = {config.model_type!r}, expected {self.model_type!r}"]
        return self.reasons_against_fields(config)

    def reasons_against_fields(self, config: Any) -> list[str]:
        """Return the reasons for a config with the right `model_type`; architectures add their
        own."""
        return [
            *self.size_reasons(config),
            *self._wrong_activation(config),
            *_wrong_values(config, self.auto_classes),
            *self.rope_reasons(config),
            *self._unknown(config),
        ]

    @abstractmethod
    def size_reasons(self, config: Any) -> list[str]:
        """Return the reasons why sizes in the config can't be right."""

    def rope_reasons(self, config: Any) -> list[str]:
        return []

    def _wrong_activation(self, config: Any) -> list[str]:
        # transformers' code for a config without the field has no other
        activation = getattr(config, self.activation_field, self.activations[0])
        implemented = ", ".join(map(repr, self.activations))
        return (
            []
            if activation in self.activations
            else [
                f"{self.activation_field} = {activation!r} is not implemented (only {implemented})"
            ]
        )

    def _unknown(self, config: Any) -> list[str]:
        known = _HANDLED | self.handled | {self.activation_field}
        defaults = vars(type(config)())  # what transformers puts into every such config
        reasons = []
        for name, value in vars(config).items():
            is_off = not value and not defaults.get(name)
            is_default = value == defaults.get(name)
            if not (is_off or is_default or name in known or _is_harmless(name, value)):
                reasons.append(f"{name} = {_short(value)} {_unknown_because(name, defaults)}")
        return reasons


def _unknown_because(name: str, defaults: Mapping[str, Any]) -> str:
    """Return why a field is rejected. Removing one that transformers' class has would make
    another model."""
    if name in defaults:
        return f"is not implemented (only {_short(defaults[name])})"
    return (
        "is no field of this model in transformers and may change the numbers; if it doesn't, "
        "remove it from config.json"
    )


class DecoderArch(ConfigArch):
    """Architecture of a decoder. Its methods but `reasons_against_fields`, `size_reasons` and
    `rope_reasons` are called only for configs without reasons against them."""

    capabilities = ModelCapabilities(
        tensor_parallel=True, taps=True, media=True, levels=True, axes=True, plain_config=True
    )
    decoder = Decoder

    @abstractmethod
    def block(self, config: Any, spec: LayerSpec, context: BuildContext) -> AnyBlock:
        """Return layer `spec.index`. `spec`: its attention, of the whole model."""

    def norm(self, config: Any, context: BuildContext) -> RMSNorm:
        """Return a norm of the residual stream."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def window(self, config: Any, index: int) -> int | None:
        """Return `LayerSpec.window` of a layer."""
        return None

    def rope(self, config: Any, index: int) -> Rope:
        """Return the rotary embedding of a layer."""
        return rope_from_config(config.rope_parameters, head_size(config))

    def spec(self, config: Any, index: int) -> LayerSpec:
        """Return the attention of a layer, of the whole model."""
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads
        size = head_size(config)
        return LayerSpec(index, heads, kv_heads, size, size**-0.5, self.window(config, index))

    def embedding(self, config: Any, context: BuildContext) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(config.vocab_size, config.hidden_size, context)

    def head(
        self, config: Any, context: BuildContext, tied: VocabParallelEmbedding | None
    ) -> LMHead:
        """Return the output layer. `tied`: the embedding whose weight it shares."""
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied)

    def skipped(self, config: Any) -> list[str]:
        """Return the tensors of checkpoints that aren't loaded: see `Decoder`."""
        return []

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        layers = range(config.num_hidden_layers)
        return [spec_of_rank(self.spec(config, index), parallel) for index in layers]

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        embedding = self.embedding(config, context)
        layers = range(config.num_hidden_layers)
        return self.decoder(
            embedding,
            [self.block(config, self.spec(config, index), context) for index in layers],
            self.norm(config, context),
            self.head(config, context, embedding if config.tie_word_embeddings else None),
            [self.rope(config, index) for index in layers],
            context.max_len or model_length(config),
            self.skipped(config),
        )

    def reasons_against_fields(self, config: Any) -> list[str]:
        reasons = super().reasons_against_fields(config)
        if not getattr(config, "is_causal", True):
            reasons.append(
                "is_causal = False is not implemented: tokens attend to those before them only"
            )
        return reasons

    def size_reasons(self, config: Any) -> list[str]:
        return list(
            dict.fromkeys(
                reason for layer in self.layer_configs(config) for reason in _wrong_sizes(layer)
            )
        )

    def layer_configs(self, config: Any) -> list[Any]:
        """Return the configs in which sizes are read."""
        return [config]

    def rope_reasons(self, config: Any) -> list[str]:
        return rope_reasons_against(config.rope_parameters or {})


def rounded(number: float, context: BuildContext) -> float:
    """Return `number` as the model's dtype holds it: transformers keeps scales of embeddings as
    tensors of that dtype."""
    return float(torch.tensor(number, dtype=context.dtype))


def head_size(config: Any) -> int:
    """Return `head_dim` if the config has it, otherwise an equal share of the hidden size."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def after_the_last(config: Any, *counts: str) -> list[str]:
    """Return the tensors of layers that checkpoints have after the last, to predict further tokens,
    as `Decoder` names skipped ones. `counts`: the fields with their number; the first that is set
    counts."""
    first = config.num_hidden_layers
    count = next((int(value) for name in counts if (value := getattr(config, name, None))), 0)
    return [f"{Decoder.layers_name}.{index}.*" for index in range(first, first + count)]


def partial_rope_reasons(config: Any, parameters: Mapping[str, Any]) -> list[str]:
    """Return the reasons against the `parameters` of a rotary embedding that turns a part of each
    head."""
    if reasons := rope_reasons_against(parameters, partial=True):
        return reasons
    size = head_size(config)
    try:
        rotated = rope_from_config(parameters, size, partial=True).head_size
    except UnsupportedError as error:  # sections that don't fit the head
        return [str(error)]
    if not rotated % 2:
        return []
    return [
        f"partial_rotary_factor rotates {rotated} of {size} numbers of a head, which must be even"
    ]


def window_of_layer_type(config: Any, index: int) -> int | None:
    """Return a layer's window, for configs with `layer_types`."""
    slides = config.layer_types[index] == "sliding_attention"
    return config.sliding_window if slides else None


def layer_type_reasons(config: Any) -> list[str]:
    """Return the reasons why `window_of_layer_type` can't read this config."""
    kinds = config.layer_types or []
    reasons = [
        f"layer_types: {kind!r} is not implemented (implemented: full_attention, sliding_attention)"
        for kind in sorted(set(kinds) - {"full_attention", "sliding_attention"})
    ]
    if len(kinds) != config.num_hidden_layers:
        reasons.append(
            f"layer_types has {len(kinds)} entries, num_hidden_layers is {config.num_hidden_layers}"
        )
    if "sliding_attention" in kinds and config.sliding_window is None:
        reasons.append(
            "layer_types has sliding_attention, but sliding_window is null (or use_sliding_window "
            "is false)"
        )
    return reasons + window_reasons(config)


def window_reasons(config: Any) -> list[str]:
    window = config.sliding_window
    return (
        [f"sliding_window = {window} must be at least 1"]
        if window is not None and window < 1
        else []
    )


def experts_reasons(
    config: Any,
    count_name: str,
    inner_name: str = "moe_intermediate_size",
    per_token_name: str = "num_experts_per_tok",
) -> list[str]:
    """Why the sizes of a mixture of experts can't be right."""
    names = (count_name, per_token_name, inner_name)
    if reasons := [
        f"{name} = {getattr(config, name)} must be at least 1"
        for name in names
        if (getattr(config, name) or 0) < 1
    ]:
        return reasons
    per_token = getattr(config, per_token_name)
    count = getattr(config, count_name)
    if per_token > count:
        return [f"{per_token_name} ({per_token}) is more than {count_name} ({count})"]
    return []


def _wrong_sizes(config: Any) -> list[str]:
    reasons = [
        f"{name} = {getattr(config, name)} must be at least 1"
        for name in _SIZES
        if getattr(config, name, 1) < 1
    ]
    if reasons:
        return reasons
    if config.num_attention_heads % config.num_key_value_heads:
        reasons.append(
            f"num_attention_heads ({config.num_attention_heads}) is no multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    if head_size(config) < 2 or head_size(config) % 2:
        reasons.append(f"head_dim = {head_size(config)} must be even, for rotary positions")
    return reasons


def _wrong_values(config: Any, auto_classes: Sequence[str]) -> list[str]:
    reasons = []
    if getattr(config, "pretraining_tp", None) not in (None, 0, 1):
        reasons.append(f"pretraining_tp = {config.pretraining_tp} is not implemented (only 1)")
    if getattr(config, "quantization_config", None):
        reasons.append(
            f"quantization_config = {_short(config.quantization_config)} is not implemented: only "
            f"plain weights"
        )
    auto_map = getattr(config, "auto_map", None) or {}
    for own in (auto_map.get(name) for name in auto_classes):
        if _is_copy(own, config):
            continue
        reasons.append(
            f"auto_map: the checkpoint has its own code for this model ({_short(own)}), which is "
            f"never run"
        )
    return reasons


def _is_harmless(name: str, value: object) -> bool:
    if isinstance(KEYS.rule(name), Used | NoEffect):
        return True
    return value in _HARMLESS_VALUES.get(name, ())


def _is_copy(code: object, config: Any) -> bool:
    """True if a class in the checkpoint's code has the name of transformers' class for this config;
    transformers also prefers its own then."""
    return code is None or str(code).rpartition(".")[2] in (config.architectures or ())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
