"""Reads the config of a model's directory: Hugging Face's `config.json`, how its weights are
stored, and its length.

Code in a checkpoint is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.api.json_files import read_json_object
from dovetail.api.start_phases import phase
from dovetail.base.config_sizes import check_sizes
from dovetail.base.kept_configs import OTHER_FILES, kept_config
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.model_aliases import CLASSES, as_known

log = logging.getLogger("dovetail")


class _SameAsText(NamedTuple):
    """A model equivalent to a text model but for positions on three axes, and fields that the
    former's code fixes."""

    model_type: str
    sections: tuple[int, int, int]  # `mrope_section` unless the config has it
    fixed: Mapping[str, Any] = {}
    interleaved: bool = False  # `mrope_interleaved`, whatever the config says

    def rope_keys(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of `rope_parameters` with other defaults than the text model's. `rope`:
        those of the checkpoint."""
        return {
            "mrope_section": rope.get("mrope_section", list(self.sections)),
            "mrope_interleaved": self.interleaved,
            "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        }


_SAME_AS_TEXT = {
    "glm4v_text": _SameAsText("glm4", (8, 12, 12)),
    "glm4v_moe_text": _SameAsText("glm4_moe", (8, 12, 12)),
    "glm_ocr_text": _SameAsText("glm4", (8, 12, 12), {"attention_bias": False}),
    "qwen2_5_vl_text": _SameAsText("qwen2", (16, 24, 24)),
    "qwen2_vl_text": _SameAsText("qwen2", (16, 24, 24)),
    "qwen3_vl_moe_text": _SameAsText(
        "qwen3_moe", (24, 20, 20), {"norm_topk_prob": True}, interleaved=True
    ),
    "qwen3_vl_text": _SameAsText("qwen3", (24, 20, 20), interleaved=True),
}


# types with names of their own for tensors of their text model
_NAMED_OTHERWISE = ("cosmos3_omni",)


_NOT_OF_SHAPE = ("model_type", "architectures", "transformers_version", "router_aux_loss_coef")


_POSITIONS_AFTER_PADDING = ("mpnet", "roberta", "xlm-roberta")  # model types


_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")  # the first that there is


_WITHOUT_POSITIONS = 1 << 17  # the length of a model whose config names none


_INSTEAD_OF_A_CONFIG = {  # files that indicate other layouts than transformers'
    "params.json": "this checkpoint has Mistral's own layout; use the one in transformers' layout, "
    "with config.json",
    "adapter_config.json": "this is an adapter (LoRA), not a model; serve its base model with "
    "enable_lora=True, and name the adapter in lora_request",
}


_MODELOPT = "hf_quant_config.json"  # ModelOpt's own place for what config.json may say, too


def text_of(config: Any, model_dir: str | Path) -> Any:
    """Return the config of the text model if the checkpoint also has a vision model. Raises
    `UnsupportedError` if it can't be served by itself."""
    text = config.get_text_config(decoder=True)
    if text is config or getattr(config, "is_encoder_decoder", False):
        return config
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if head := next(
        (name for name in config.architectures or () if str(name).endswith("Classification")), None
    ):
        raise UnsupportedError(
            f"{model_dir}: {head} isn't served: a classifier beside a vision model"
        )
    if code := _own_code(config):
        raise UnsupportedError(
            f"{model_dir}: auto_map: {code} is the checkpoint's own code, which is never run"
        )
    if config.model_type in _NAMED_OTHERWISE:
        raise UnsupportedError(
            f"{model_dir}: the text of {config.model_type} isn't served: its tensors have other "
            f"names than those of {text.model_type}"
        )
    if same := _SAME_AS_TEXT.get(text.model_type):
        fields = {key: value for key, value in text.to_dict().items() if key not in _NOT_OF_SHAPE}
        fields.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
        rope = fields["rope_parameters"]
        fields["rope_parameters"] = {
            key: value for key, value in rope.items() if not key.startswith("mrope_")
        }
        text = CONFIG_MAPPING[same.model_type](**{**fields, **same.fixed})
        text.rope_parameters |= same.rope_keys(rope)  # afterwards: transformers would warn of these
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if name is None:
        raise UnsupportedError(
            f"{model_dir}: the text of {config.model_type} isn't served: transformers has no "
            f"causal "
            f"language model for its text model, {text.model_type}, by itself"
        )
    text.architectures = [name]
    # applies to the shared head
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    log.info("%s: the language model of %s is served as %s", model_dir, config.model_type, name)
    return text


def _own_code(config: Any) -> str | None:
    """Return the architecture that code in the checkpoint defines, if transformers has no class of
    this name."""
    import transformers

    auto_map = getattr(config, "auto_map", None)
    values = auto_map.values() if isinstance(auto_map, Mapping) else ()
    own = {str(value).rpartition(".")[2] for value in values}
    names = [str(name) for name in config.architectures or ()]
    known = {*dir(transformers)} if own.intersection(names) else set()
    return next((name for name in names if name in own and name not in known), None)


def stored_as(model_dir: str | Path) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a directory's config; None if its weights are plain.
    Raises `ModelLoadError` if it is malformed."""
    path = Path(model_dir) / "config.json"
    stored = _stored_as(path, read_json_object(path))
    other = Path(model_dir) / _MODELOPT
    return _of_modelopt(other) if stored is None and other.is_file() else stored


def _of_modelopt(path: Path) -> Mapping[str, Any]:
    """Return what `hf_quant_config.json` says as a `quantization_config`."""
    inner = read_json_object(path).get("quantization")
    if not isinstance(inner, Mapping):
        raise ModelLoadError(f"{path}: quantization: expected keys and values, got {shown(inner)}")
    return {"quant_method": "modelopt", **inner}


def _stored_as(path: Path, raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stored = raw.get("quantization_config")
    if stored is not None and not isinstance(stored, Mapping):
        raise ModelLoadError(
            f"{path}: quantization_config: expected keys and values, got {shown(stored)}"
        )
    return stored


def read_config(model_dir: str | Path) -> Any:
    """`config.json` as a transformers config. Raises `ModelLoadError` naming the file when it is
    missing or wrong."""
    path = Path(model_dir) / "config.json"
    raw = _checked(path)
    with phase("imports"):
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers import __version__ as version

    if (config := _alias(path, raw)) is not None:
        return config
    if raw["model_type"] not in CONFIG_MAPPING.keys():  # noqa: SIM118 also of what can't be hashed
        own_code = (
            "; the code that the checkpoint brings for it (auto_map) is never run"
            if raw.get("auto_map")
            else ""
        )
        raise ModelLoadError(
            f"{path}: transformers {version} knows no model_type "
            f"{shown(raw['model_type'])}{own_code}"
        )
    try:
        config = AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises any exception
        raise ModelLoadError(f"{path}: {first_lines(error)}") from error
    _name_class(config)
    return config


def _alias(path: Path, raw: Mapping[str, Any]) -> Any:
    """Return the config of a type that transformers knows, for one that is the same; None for
    others. Raises `ModelLoadError` or `UnsupportedError`."""
    from transformers import CONFIG_MAPPING

    fields = as_known(raw, lambda kind: vars(CONFIG_MAPPING[kind]()), str(path))
    if fields is None:
        return None
    check_sizes(path, fields)
    try:
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception as error:  # transformers raises any exception
        raise ModelLoadError(f"{path}: {first_lines(error)}") from error
    log.info("%s: %s is served as %s", path.parent, raw["model_type"], config.model_type)
    return config


def _name_class(config: Any) -> None:
    """Name the class of transformers where a checkpoint has another name for it."""
    names = config.architectures
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        config.architectures = [CLASSES.get((config.model_type, name), name) for name in names]


class PlainConfig:
    """Attributes of a transformers config, without its methods. Subclasses are made for a config,
    and called without arguments return the defaults of its class, as transformers' do."""

    _defaults: Mapping[str, Any] = {}

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields or deepcopy(dict(self._defaults)))

    def get_text_config(self, decoder: bool = False) -> PlainConfig:
        """Return the config, which is that of a text model."""
        return self


class ReadConfig(NamedTuple):
    """The config of a text model, and the name of the causal model that transformers has for its
    `model_type`, None if there is none."""

    config: Any
    causal_model: str | None


def kept_text_config(model_dir: str | Path) -> ReadConfig | None:
    """Return what `text_of(read_config(model_dir), model_dir)` does, as a `PlainConfig`, without
    importing transformers; None if that isn't kept (`dovetail.base.kept_configs`). Raises as
    `read_config` for what it checks itself."""
    _checked(Path(model_dir) / "config.json")
    if (kept := kept_config(Path(model_dir))) is None:
        return None
    import torch

    for fields in (kept.fields, kept.defaults):
        if (name := fields.get("dtype")) is not None:
            dtype = getattr(torch, name, None) if isinstance(name, str) else None
            if not isinstance(dtype, torch.dtype):
                return None
            fields["dtype"] = dtype
    own_class = type(kept.name, (PlainConfig,), {**kept.derived, "_defaults": kept.defaults})
    config = own_class(**kept.fields)
    _name_class(config)
    return ReadConfig(config, kept.causal_model)


def _checked(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a config. Raises `ModelLoadError` or `UnsupportedError`."""
    if not path.is_file():
        _refuse(path.parent, _INSTEAD_OF_A_CONFIG)
        raise ModelLoadError(
            f"{path}: no such file; a model is a directory with config.json and safetensors files"
        )
    raw = read_json_object(path)
    if kind := raw.get("speculators_model_type"):
        raise UnsupportedError(
            f"{path}: this is a draft head ({shown(kind)}), not a model; name it as the model of "
            f"`speculation.drafter`"
        )
    if "model_type" not in raw:
        raise ModelLoadError(f"{path}: no 'model_type', which says how to read the config")
    if OTHER_FILES in raw:
        raise UnsupportedError(
            f"{path}: {OTHER_FILES} isn't implemented: configs in files for single versions of "
            f"transformers"
        )
    check_sizes(path, raw)
    _stored_as(path, raw)  # transformers reads it, too, but wouldn't name the file
    return raw


def _refuse(directory: Path, files: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if the directory has one of `files`, a map from name to
    explanation."""
    for name, what in files.items():
        if (directory / name).is_file():
            raise UnsupportedError(f"{directory / name}: {what}")


def first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def model_length(config: Any) -> int:
    """Return the model's maximum sequence length in tokens. YaRN multiplies the trained length by
    its factor; in RoBERTa's models the first position follows that of padding. A model without
    positions has no maximum of its own."""
    named = (getattr(config, name) for name in _LENGTHS if hasattr(config, name))
    length = int(next(named, _WITHOUT_POSITIONS))
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return length - int(config.pad_token_id) - 1
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        length = max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length
