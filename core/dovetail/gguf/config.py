"""`model_config`: the `config.json` of a model, made of a GGUF file's metadata.

The keys are those that llama.cpp's converter writes; one that isn't known is refused, since it may
change the numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.gguf.header import MAX_KEYS, Header

_LAYER = re.compile(r"[0-9]{1,6}")  # Python doesn't convert thousands of digits
ROPE_FACTORS = "rope_freqs.weight"  # tensor with a divisor for each frequency, of Llama 3.1 and on
KEYS = FileKeys(
    "GGUF",
    {
        "block_count": Used("num_hidden_layers"),
        "context_length": Used("max_position_embeddings"),
        "embedding_length": Used("hidden_size"),
        "feed_forward_length": Used("intermediate_size"),
        "vocab_size": Used("vocab_size; the number of tokens if it is missing"),
        "attention.head_count": Used("num_attention_heads"),
        "attention.head_count_kv": Used("num_key_value_heads"),
        "attention.key_length": Used("head_dim"),
        "attention.value_length": Used("must be the same as `attention.key_length`"),
        "attention.layer_norm_rms_epsilon": Used("rms_norm_eps"),
        "attention.sliding_window": Used("sliding_window, of Gemma; refused of others"),
        "attention.sliding_window_pattern": Used("layer_types, of Gemma"),
        "attn_logit_softcapping": Used("the same, of Gemma 2"),
        "final_logit_softcapping": Used("the same, of Gemma 2"),
        "rope.dimension_count": Used("must be the head's size, where `rope.freq_base` is used"),
        "rope.freq_base": Used("rope_theta"),
        "rope.freq_base_swa": Used("rope_local_base_freq, of Gemma 3"),
        "rope.scaling.type": Used("linear, yarn, or none; linear if only a factor is there"),
        "rope.scaling.factor": Used("the factor of rope_scaling"),
        "rope.scaling.original_context_length": Used("the same, of YaRN"),
        "rope.scaling.finetuned": NoEffect("how the model was trained"),
        "rope.scaling.attn_factor": Refused("another scale of attention", (1.0,)),
        "rope.scaling.yarn_*": Refused("other ramps of YaRN"),
        "expert_count": Refused("a mixture of experts in GGUF", (0,)),
        "expert_used_count": Refused("a mixture of experts in GGUF", (0,)),
        "attention.causal": Refused("an encoder in GGUF", (True,)),
        "pooling_type": NoEffect("`pooling` in the config says how a generator embeds"),
        "attention.layer_norm_epsilon": NoEffect("of another kind of norm"),
        "tensor_data_layout": NoEffect("it names the order of rows of Q and K, which is known"),
    },
)
_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_LOCAL_BASE = "rope.freq_base_swa"
_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_LLAMA3 = {  # what Llama 3.1 and its successors share
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of GGUF files that is served.

    `names`: the names of a layer's tensors -> those of the checkpoint. `turned`: rows of Q and K
    are stored in pairs (x, y) of the rotation. `one_more`: norms' weights are stored plus 1.
    `fields`: of `config.json`, by the values that all families share.
    """

    architecture: str  # transformers' class
    model_type: str
    names: Mapping[str, str]
    fields: Callable[[_Values, dict[str, Any]], dict[str, Any]]
    turned: bool = False
    one_more: bool = False
    own_keys: frozenset[str] = frozenset()


class _Values:
    """Metadata of the architecture, with their types checked."""

    def __init__(self, header: Header, name: str) -> None:
        self.path = header.path
        self._name = name
        self._values = {
            key.removeprefix(f"{name}."): value
            for key, value in header.metadata.items()
            if key.startswith(f"{name}.")
        }

    @property
    def content(self) -> Mapping[str, Any]:
        return self._values

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self._values.get(key, default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]  # one for each layer
        if type(value) is not int or value < 1:
            raise ModelLoadError(
                f"{self.path}: {self._name}.{key} must be a number of 1 or more, got {shown(value)}"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value: Any = self._values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelLoadError(
                f"{self.path}: {self._name}.{key} must be a number above 0, got {shown(value)}"
            )
        return _shortest(value)


def family_of(header: Header) -> Family:
    """Return the family of a file. Raises `UnsupportedError` if it isn't served."""
    name = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise UnsupportedError(
            f"{header.path}: general.type is {shown(header.metadata['general.type'])}, not a model"
        )
    if header.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError(
            f"{header.path}: a part of a model in several GGUF files; merge them with "
            f"`llama-gguf-split --merge`"
        )
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedError(
            f"{header.path}: general.architecture is {shown(name)}; of GGUF files only "
            f"{', '.join(FAMILIES)} are served. Take the safetensors files that it was made from"
        )
    return FAMILIES[name]


def model_config(header: Header, factors: Sequence[float] | None) -> dict[str, Any]:
    """Return the content of `config.json`. `factors`: the values of `ROPE_FACTORS`, if the file has
    it. Raises `ModelLoadError` for invalid values, `UnsupportedError` for what isn't
    implemented."""
    family = family_of(header)
    values = _Values(header, header.metadata["general.architecture"])
    KEYS.check(values.content, header.path)
    for key in (*_WINDOW, *_CAPS, _LOCAL_BASE):
        if key in values.content and key not in family.own_keys:
            raise UnsupportedError(
                f"{header.path}: {key} isn't implemented for {family.model_type}"
            )
    heads = values.number("attention.head_count")
    hidden = values.number("embedding_length")
    head = values.number("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := values.number(key, head)) != head:
            raise UnsupportedError(
                f"{header.path}: {key} is {other}, and a head has {head} numbers"
            )
    vocabulary = header.metadata.get("tokenizer.ggml.tokens")
    known = len(vocabulary) if isinstance(vocabulary, list) else None
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": values.number("block_count"),
        "intermediate_size": values.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.number("attention.head_count_kv", heads),
        "head_dim": head,
        "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.number("context_length"),
        "vocab_size": values.number("vocab_size", known),
        "rope_theta": values.real("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    fields |= _scaling(values, fields, factors)
    return fields | family.fields(values, fields)


def _scaling(
    values: _Values, fields: Mapping[str, Any], factors: Sequence[float] | None
) -> dict[str, Any]:
    """Return `rope_scaling`, if there is any."""
    unnamed = "linear" if values.content.get("rope.scaling.factor") else "none"  # as llama.cpp does
    kind = values.content.get("rope.scaling.type", unnamed)
    if factors is not None:
        if kind != "none":
            raise UnsupportedError(f"{values.path}: {ROPE_FACTORS} beside rope.scaling.type")
        return {"rope_scaling": _llama3(values, fields, factors)}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{values.path}: rope.scaling.type = {shown(kind)} isn't implemented (only linear, yarn)"
        )
    factor = values.real("rope.scaling.factor")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    original = values.number("rope.scaling.original_context_length")
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": original}
    return {"rope_scaling": {**scaling, "factor": factor}}


def _llama3(values: _Values, fields: Mapping[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling, of which a file has only the divisors that
    follow. Raises `UnsupportedError` if they follow from others."""
    wrong = UnsupportedError(
        f"{values.path}: {ROPE_FACTORS}: only the factors of Llama 3.1 and its successors are "
        f"implemented"
    )
    half = len(factors)
    if fields["head_dim"] != 2 * half or not all(1 <= one < math.inf for one in factors):
        raise wrong
    factor = _shortest(max(factors))
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    original = _LLAMA3["original_max_position_embeddings"]
    for index, found in enumerate(factors):
        turns = original / (2 * math.pi * fields["rope_theta"] ** (index / half))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(found - expected) > 1e-3 * expected:
            raise wrong
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _shortest(value: float) -> float:
    """Return the shortest decimal number that is the same in float32, as the original config has
    it."""
    return next(
        short
        for digits in range(1, 18)
        if abs((short := float(f"{value:.{digits}g}")) - value) <= 2**-25 * abs(value)
    )


def _plain(values: _Values, fields: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _llama(values: _Values, fields: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def _gemma(values: _Values, fields: dict[str, Any], largest: int) -> dict[str, Any]:
    """`largest`: layers of the one size whose scale of attention is hidden_size / heads, which
    files don't say; it is that of a head's size in all others."""
    is_largest = fields["num_hidden_layers"] == largest
    scale = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.number("attention.sliding_window"),
        "query_pre_attn_scalar": scale if is_largest else fields["head_dim"],
        **_layer_types(values, fields["num_hidden_layers"]),
    }


def _layer_types(values: _Values, layers: int) -> dict[str, Any]:
    """Return `layer_types` if the file says which layers have a window: by a flag for each, or by
    n, of which the n-th has none. transformers' own otherwise, which are those of the models."""
    pattern = values.content.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    if type(pattern) is int and pattern > 0:
        pattern = [(index + 1) % pattern != 0 for index in range(min(layers, MAX_KEYS))]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ModelLoadError(
            f"{values.path}: attention.sliding_window_pattern must be a flag for each of "
            f"{layers} layers, got {shown(pattern)}"
        )
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern]}


def _gemma2(values: _Values, fields: dict[str, Any]) -> dict[str, Any]:
    return _gemma(values, fields, 46) | {
        name: values.real(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")
    }


def _gemma3(values: _Values, fields: dict[str, Any]) -> dict[str, Any]:
    return _gemma(values, fields, 62) | {
        "rope_local_base_freq": values.real(_LOCAL_BASE, 10_000.0),
        # older files don't say it
        "rope_theta": values.real("rope.freq_base", 1_000_000.0),
    }


_NORMS_BEFORE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NORMS_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", _NORMS_BEFORE | _LINEAR, _llama, turned=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _NORMS_BEFORE | _LINEAR, _plain),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _NORMS_BEFORE | _LINEAR | _HEAD_NORMS, _plain),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _NORMS_AROUND | _LINEAR,
        _gemma2,
        one_more=True,
        own_keys=_WINDOW | _CAPS,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _NORMS_AROUND | _LINEAR | _HEAD_NORMS,
        _gemma3,
        one_more=True,
        own_keys=_WINDOW | {_LOCAL_BASE},
    ),
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def checkpoint_name(name: str, family: Family) -> str | None:
    """Return the name in an ordinary checkpoint of the tensor `name`; None for one that isn't
    known."""
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    parts = module.split(".")
    if len(parts) != 3 or parts[0] != "blk" or not _LAYER.fullmatch(parts[1]):
        return None
    inner = family.names.get(parts[2])
    return None if inner is None else f"model.layers.{int(parts[1])}.{inner}.{kind}"
