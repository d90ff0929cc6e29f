"""Reads a model directory: its Hugging Face config, architecture, dtype and length. Code in a checkpoint is never run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from dovetail.api.executor import ComponentRef, QuantizationRef
from dovetail.api.model import ModelArch, ModelContext
from dovetail.checks import shown
from dovetail.config_sizes import check_sizes
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError
from dovetail.json_files import read_json_object
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.runtime.pooling import MadeFor, is_embedding_model

log = logging.getLogger("dovetail")

Ref = TypeVar("Ref", ComponentRef, QuantizationRef)

ANY = "*"  # in `architectures` of a model that serves all others
BUILT_IN = "dovetail:"  # prefix of the full names of built-ins


class _SameAsText(NamedTuple):
    """A model equivalent to a text model, where the three positions of a token are equal, and
    fields that the latter's code fixes."""

    model_type: str
    fixed: Mapping[str, Any] = {}


_SAME_AS_TEXT = {
    "glm4v_text": _SameAsText("glm4"),
    "glm4v_moe_text": _SameAsText("glm4_moe"),
    "glm_ocr_text": _SameAsText("glm4", {"attention_bias": False}),
    "qwen2_5_vl_text": _SameAsText("qwen2"),
    "qwen2_vl_text": _SameAsText("qwen2"),
    "qwen3_vl_moe_text": _SameAsText("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_vl_text": _SameAsText("qwen3"),
}
_NAMED_OTHERWISE = (
    "cosmos3_omni",
)  # types with names of their own for tensors of their text model

_NOT_OF_SHAPE = ("model_type", "architectures", "transformers_version", "router_aux_loss_coef")

_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta")  # model types

_INSTEAD_OF_A_CONFIG = {  # files that indicate other layouts than transformers'
    "params.json": "this checkpoint has Mistral's own layout; use the one in transformers' layout, with config.json",
    "adapter_config.json": "this is an adapter (LoRA), not a model; serve its base model with enable_lora=True, and name the adapter in lora_request",
}
_BESIDE_A_CONFIG = {  # files that indicate unsupported models
    "hf_quant_config.json": "weights quantized by ModelOpt aren't served; see docs/quantization.md",
}

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class FoundArchitecture(NamedTuple):
    """The architecture that serves a directory, and the directory's transformers `PretrainedConfig`, without `quantization_config`: how weights are
    stored is no business of the architecture's (`stored_as`). Of a checkpoint without a generator's head, the config is that of one which is tied."""

    arch: ModelArch
    config: Any
    made_for: MadeFor


def find_architecture(model_dir: str | Path, models: Sequence[ComponentRef]) -> FoundArchitecture:
    """Return the one of `models` whose `architectures` include the config's, otherwise one that serves any; of several, the built-in.

    Raises `ModelLoadError` if the config can't be read, `UnsupportedError` if none serves it, if several do and none is built in, or if the one that
    does has reasons against it."""
    config = _text_of(read_config(model_dir), model_dir)
    vars(config).pop("quantization_config", None)
    names = config.architectures
    if not names:
        raise ModelLoadError(
            f"{Path(model_dir) / 'config.json'}: no 'architectures', which say what model to build"
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(
            f"{Path(model_dir) / 'config.json'}: 'architectures' must be a list of names, got {shown(names)}"
        )
    serving = _serving(models, names, config.model_type)
    made_for: MadeFor = "embed" if is_embedding_model(model_dir) else "generate"
    if any(name.endswith("ForSequenceClassification") for name in names):
        made_for = "classify"
    if not serving and (generator := _generator_of(names, config.model_type)):
        made_for = "embed" if made_for == "generate" else made_for
        names = config.architectures = [generator]
        serving = _serving(models, names, config.model_type)
    if made_for != "generate":
        config.tie_word_embeddings = (
            True  # a head that is never used costs nothing then, and its tensor may be missing
        )
    serving = serving or built_ins_first(
        [target for target in models if ANY in target.architectures]
    )
    if not serving:
        served = sorted({name for target in models for name in target.architectures} - {ANY})
        whose = (
            f"{models[0].name} doesn't serve" if len(models) == 1 else "no installed model serves"
        )
        raise UnsupportedError(
            f"{model_dir}: {whose} {', '.join(names)}; served are {', '.join(served) or 'none'}"
        )
    if len(serving) > 1:
        offers = " and ".join(target.name for target in serving)
        remedy = f"name the one you mean: `model: {{path: {shown(str(model_dir))}, component: {serving[0].name}}}`"
        raise UnsupportedError(f"{model_dir}: {', '.join(names)} is served by {offers}; {remedy}")
    arch: ModelArch = serving[0].make(ModelContext())
    if reasons := _reasons_against(arch, config, Path(model_dir) / "config.json"):
        raise UnsupportedError(
            f"{serving[0].name} can't serve {model_dir}:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
        )
    return FoundArchitecture(arch, config, made_for)


def _serving(
    models: Sequence[ComponentRef],
    names: Sequence[str],
    model_type: str,
) -> Sequence[ComponentRef]:
    """Return the models that name one of the architectures."""
    if _is_of_another_type(names, model_type):
        return []
    return built_ins_first([target for target in models if set(names) & set(target.architectures)])


def _is_of_another_type(names: Sequence[str], model_type: str) -> bool:
    """Return True if transformers serves the type with another type's class (InternLM3 with
    Llama's). A native model of that class is made for the other type's config."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    stem = model_type.removesuffix("_text").replace("_", "").replace("-", "")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    return name in names and not name.replace("_", "").lower().startswith(stem)


def _generator_of(names: Sequence[str], model_type: str) -> str | None:
    """Return the generator whose body a checkpoint of these architectures has by itself, or with a classifier; None if there is none. Encoders have
    generators in transformers, too, but attend to later tokens."""
    from transformers.models.auto import modeling_auto as known

    bodies = known.MODEL_MAPPING_NAMES, known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES or not any(
        of_type.get(model_type) in names for of_type in bodies
    ):
        return None
    name: str | None = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name


def _text_of(config: Any, model_dir: str | Path) -> Any:
    """Return the config of the text model if the checkpoint also has a vision model. Raises `UnsupportedError` if it can't be served by itself."""
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
    if config.model_type in _NAMED_OTHERWISE:
        raise UnsupportedError(
            f"{model_dir}: the text of {config.model_type} isn't served: its tensors have other names than those of {text.model_type}"
        )
    if same := _SAME_AS_TEXT.get(text.model_type):
        fields = {key: value for key, value in text.to_dict().items() if key not in _NOT_OF_SHAPE}
        fields.setdefault("head_dim", text.hidden_size // text.num_attention_heads)
        fields["rope_parameters"] = {
            key: value
            for key, value in fields["rope_parameters"].items()
            if not key.startswith("mrope_")
        }
        text = CONFIG_MAPPING[same.model_type](**{**fields, **same.fixed})
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if name is None:
        raise UnsupportedError(
            f"{model_dir}: the text of {config.model_type} isn't served: transformers has no causal "
            f"language model for its text model, {text.model_type}, by itself"
        )
    text.architectures = [name]
    text.tie_word_embeddings = getattr(
        config, "tie_word_embeddings", text.tie_word_embeddings
    )  # applies to the shared head
    log.info("%s: only the text model of %s is served, as %s", model_dir, config.model_type, name)
    return text


def built_ins_first(refs: Sequence[Ref]) -> Sequence[Ref]:
    """Return the built-ins among equivalent `refs`, or all if there are none: installing a plugin never replaces a built-in."""
    return [ref for ref in refs if ref.name.startswith(BUILT_IN)] or refs


def stored_as(model_dir: str | Path) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a directory's config; None if its weights are plain. Raises `ModelLoadError` if it is malformed."""
    path = Path(model_dir) / "config.json"
    return _stored_as(path, read_json_object(path))


def _stored_as(path: Path, raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    stored = raw.get("quantization_config")
    if stored is not None and not isinstance(stored, Mapping):
        raise ModelLoadError(
            f"{path}: quantization_config: expected keys and values, got {shown(stored)}"
        )
    return stored


def _reasons_against(arch: ModelArch, config: Any, path: Path) -> list[str]:
    """Call the model's checks. Raises `ModelLoadError` if a value has a type that they can't handle."""
    try:
        reasons = list(arch.reasons_against(config))
        if not reasons:
            model_length(config)
        return reasons
    except DovetailError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{path}: a value in it can't be used: {_first_lines(error)}"
        ) from error


def read_config(model_dir: str | Path) -> Any:
    """`config.json` as a transformers config. Raises `ModelLoadError` naming the file when it is missing or wrong."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        _refuse(path.parent, _INSTEAD_OF_A_CONFIG)
        raise ModelLoadError(
            f"{path}: no such file; a model is a directory with config.json and safetensors files"
        )
    _refuse(path.parent, _BESIDE_A_CONFIG)
    raw = read_json_object(path)
    if kind := raw.get("speculators_model_type"):
        raise UnsupportedError(
            f"{path}: this is a draft head ({shown(kind)}), not a model; name it as the model of `speculation.drafter`"
        )
    if "model_type" not in raw:
        raise ModelLoadError(f"{path}: no 'model_type', which says how to read the config")
    check_sizes(path, raw)
    _stored_as(path, raw)  # transformers reads it, too, but wouldn't name the file
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers import __version__ as version

    if raw["model_type"] not in CONFIG_MAPPING.keys():  # noqa: SIM118 also of what can't be hashed
        own_code = (
            "; the code that the checkpoint brings for it (auto_map) is never run"
            if raw.get("auto_map")
            else ""
        )
        raise ModelLoadError(
            f"{path}: transformers {version} knows no model_type {shown(raw['model_type'])}{own_code}"
        )
    try:
        return AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises any exception
        raise ModelLoadError(f"{path}: {_first_lines(error)}") from error


def _refuse(directory: Path, files: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if the directory has one of `files`, a map from name to explanation."""
    for name, what in files.items():
        if (directory / name).is_file():
            raise UnsupportedError(f"{directory / name}: {what}")


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations. "auto": float32 on a CPU; else the checkpoint's own, bfloat16 for a float32 one or one that doesn't
    say, and float16 instead of it, with a warning, on a GPU that has no bfloat16. Raises `ConfigError` for an unknown name, `UnsupportedError` for
    "bfloat16" on such a GPU."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype: unknown name {name!r}, expected auto, {', '.join(DTYPES)}")
    gpu = gpu_of(device)
    lacks_bfloat16 = gpu is not None and not gpu.has_bfloat16
    if name == "bfloat16" and lacks_bfloat16:
        raise UnsupportedError(
            f"dtype: {gpu} has no bfloat16, which came with compute capability 8.0; use auto, float16 or float32"
        )
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    if own == torch.bfloat16 and lacks_bfloat16:
        _warn_once(
            f"dtype: auto is float16, for {gpu} has no bfloat16; float16 ends at 65,504, and a model that goes beyond needs dtype: float32"
        )
        return torch.float16
    return own


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def model_length(config: Any) -> int:
    """Return the model's maximum sequence length in tokens. YaRN multiplies the trained length by its factor; in RoBERTa's models the first
    position follows that of padding."""
    length = int(config.max_position_embeddings)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return length - int(config.pad_token_id) - 1
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        length = max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def resolve_max_model_len(asked: int | None, config: Any, usual: int | None = None) -> int:
    """Return `asked`, or the model's own length, or the `usual` one if that is shorter. Raises `UnsupportedError` if `asked` is longer."""
    own = model_length(config)
    if asked is None:
        return min(own, usual or own)
    if asked > own:
        raise UnsupportedError(
            f"max_model_len: {asked} tokens is more than this model's own length of {own}"
        )
    return asked
