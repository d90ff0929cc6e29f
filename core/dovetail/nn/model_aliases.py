"""Configs of models whose own code computes what a type of transformers does, and which have the same
names of tensors: they are read as that type, and served like it.

The code of such a checkpoint is never run. Each entry says what its fields mean; a field that it
doesn't name, and that isn't one of the type, is refused unless it is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import UnsupportedError, shown

Fields = Mapping[str, Any]


def _nothing(_: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class SameAs:
    """`model_type`, `architecture`: of transformers. `renamed`: fields by other names. `fixed`:
    fields that the code of the model fixes. `derived`: more fields, from the checkpoint's.
    `required`: values without which the code computes something else. `ignored`: fields that
    change nothing."""

    model_type: str
    architecture: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    fixed: Fields = field(default_factory=dict)
    derived: Callable[[Fields], dict[str, Any]] = _nothing
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def _of_minicpm(raw: Fields) -> dict[str, Any]:
    """Scales of MiniCPM (arXiv:2404.06395, table 7) as Granite's multipliers."""
    hidden = float(raw["hidden_size"])
    heads = float(raw["num_attention_heads"])
    depth = float(raw["num_hidden_layers"])
    return {
        "embedding_multiplier": float(raw.get("scale_emb", 1)),
        "residual_multiplier": float(raw.get("scale_depth", 1)) / math.sqrt(depth),
        "logits_scaling": hidden / float(raw.get("dim_model_base", 1)),
        "attention_multiplier": 1 / math.sqrt(hidden / heads),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }


def _of_tele_flm(raw: Fields) -> dict[str, Any]:
    """Scales of Tele-FLM (arXiv:2404.16645, section 3) as Granite's multipliers."""
    head_size = float(raw["hidden_size"]) / float(raw["num_attention_heads"])
    scaled = bool(raw.get("use_mup", False))
    return {
        "embedding_multiplier": float(raw["input_mult"]) if scaled else 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": float(raw["mup_scale_factor"]) / float(raw["output_mult"])
        if scaled
        else 1.0,
        "attention_multiplier": 1 / math.sqrt(head_size),
    }


_FALCON = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}

SAME: Mapping[str, SameAs] = {  # by `model_type`
    "aquila": SameAs("llama", "LlamaForCausalLM"),
    "xverse": SameAs("llama", "LlamaForCausalLM", ignored=("max_tokenizer_truncation",)),
    "internlm": SameAs("llama", "LlamaForCausalLM", {"bias": "attention_bias"}),
    "PanguEmbedded": SameAs("llama", "LlamaForCausalLM", {"bias": "attention_bias"}),
    "mimo": SameAs(
        "qwen2",
        "Qwen2ForCausalLM",
        required={"attention_bias": (True,)},
        ignored=("num_nextn_predict_layers", "head_dim"),
    ),
    "minicpm": SameAs(
        "granite",
        "GraniteForCausalLM",
        derived=_of_minicpm,
        ignored=("scale_emb", "scale_depth", "dim_model_base", "mup_denominator"),
    ),
    "TeleFLM": SameAs(
        "granite",
        "GraniteForCausalLM",
        derived=_of_tele_flm,
        ignored=("use_mup", "mup_scale_factor", "output_mult", "input_mult"),
    ),
    "orion": SameAs(
        "stablelm",
        "StableLmForCausalLM",
        {"rms_norm_eps": "layer_norm_eps"},
        {"partial_rotary_factor": 1.0},
        required={"attention_bias": (False,)},
    ),
    "stablelm_epoch": SameAs(
        "stablelm",
        "StableLmForCausalLM",
        {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"},
        required={"rotary_scaling_factor": (1, 1.0)},
    ),
    "RefinedWebModel": SameAs(
        "falcon",
        "FalconForCausalLM",
        _FALCON,
        {"new_decoder_architecture": False},
        required={"alibi": (False,)},
    ),
    "RefinedWeb": SameAs(
        "falcon",
        "FalconForCausalLM",
        {**_FALCON, "n_head_kv": "num_kv_heads"},
        {"new_decoder_architecture": True},
        required={"alibi": (False,)},
    ),
}
# names of classes in checkpoints whose `model_type` transformers knows -> its own names
CLASSES = {
    ("llama", "LLaMAForCausalLM"): "LlamaForCausalLM",
    ("mistral", "GritLM"): "MistralForCausalLM",
    ("bailing_hybrid", "BailingMoeV2_5ForCausalLM"): "BailingHybridForCausalLM",
}
# of any checkpoint, without a meaning for what is computed
_ANY = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "model_type",
    "name",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "tokenizer_class",
    "torch_dtype",
    "unk_token_id",
)


def as_known(raw: Fields, known: Callable[[str], Fields], where: str) -> dict[str, Any] | None:
    """Return a config as one of a type that transformers knows; None if its type isn't the same as
    one. `known`: the fields of a type's config, with their defaults.

    Raises `UnsupportedError`, which begins with `where`, for a field that would change the
    numbers."""
    kind = raw.get("model_type")
    same = SAME.get(kind) if isinstance(kind, str) else None
    if same is None:
        return None
    for name, values in same.required.items():
        if name in raw and raw[name] not in values:
            raise UnsupportedError(
                f"{where}: {name} = {shown(raw[name])} of {shown(kind)} isn't implemented (only "
                f"{', '.join(map(repr, values))})"
            )
    left_out = (*same.required, *same.ignored, *same.renamed, *_ANY)
    defaults = known(same.model_type)
    unknown = [
        name
        for name, value in raw.items()
        if name not in left_out and name not in defaults and value not in (None, False, 0, "", [])
    ]
    if unknown:
        raise UnsupportedError(
            f"{where}: {', '.join(map(shown, unknown[:5]))}: a {same.model_type}, as which "
            f"{shown(kind)} is served, has no such fields"
        )
    fields = {key: value for key, value in raw.items() if key not in same.renamed}
    for name in (*same.required, *same.ignored):
        if name not in defaults:
            fields.pop(name, None)
    fields |= {new: raw[old] for old, new in same.renamed.items() if old in raw}
    fields |= same.fixed
    try:
        fields |= same.derived(raw)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UnsupportedError(
            f"{where}: a field of {shown(kind)} is missing or no number: {error!r}"
        ) from None
    return fields | {"model_type": same.model_type, "architectures": [same.architecture]}
