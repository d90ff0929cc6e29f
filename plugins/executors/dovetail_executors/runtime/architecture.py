"""Finds the architecture that serves a model's directory, and resolves its dtype and length."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from dovetail.api.executor import ComponentRef, QuantizationRef
from dovetail.api.model import ModelArch, ModelContext
from dovetail.api.start_phases import phase
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError, shown
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.model_files import (
    ReadConfig,
    first_lines,
    kept_text_config,
    model_length,
    read_config,
    text_of,
)
from dovetail_executors.runtime.pooling import MadeFor, is_embedding_model

log = logging.getLogger("dovetail")

Ref = TypeVar("Ref", ComponentRef, QuantizationRef)

ANY = "*"  # in `architectures` of a model that serves all others
BUILT_IN = "dovetail:"  # prefix of the full names of built-ins


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class FoundArchitecture(NamedTuple):
    """The architecture that serves a directory, and the directory's transformers
    `PretrainedConfig`, without `quantization_config`: how weights are stored is no business of the
    architecture's (`stored_as`). Of a checkpoint without a generator's head, the config is that of
    one which is tied."""

    arch: ModelArch
    config: Any
    made_for: MadeFor


def find_architecture(model_dir: str | Path, models: Sequence[ComponentRef]) -> FoundArchitecture:
    """Return the one of `models` whose `architectures` include the config's, otherwise one that
    serves any; of several, the built-in.

    An architecture with the capability `plain_config` gets a `PlainConfig` if one is kept.

    Raises `ModelLoadError` if the config can't be read, `UnsupportedError` if none serves it, if
    several do and none is built in, or if the one that does has reasons against it."""
    if (kept := kept_text_config(model_dir)) is not None:
        with suppress(DovetailError):  # those of transformers' config are raised below
            found = _find(kept, model_dir, models)
            if found.arch.capabilities.plain_config:
                return found
    config = text_of(read_config(model_dir), model_dir)
    with phase("imports"):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return _find(ReadConfig(config, causal_model), model_dir, models)


def _find(
    read: ReadConfig, model_dir: str | Path, models: Sequence[ComponentRef]
) -> FoundArchitecture:
    """Return the architecture for a config, as `find_architecture` does."""
    config = read.config
    vars(config).pop("quantization_config", None)
    names = config.architectures
    if not names:
        raise ModelLoadError(
            f"{Path(model_dir) / 'config.json'}: no 'architectures', which say what model to build"
        )
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(
            f"{Path(model_dir) / 'config.json'}: 'architectures' must be a list of names, got "
            f"{shown(names)}"
        )
    serving = _serving(models, names, read)
    made_for: MadeFor = "embed" if is_embedding_model(model_dir) else "generate"
    if any(name.endswith("ForSequenceClassification") for name in names):
        made_for = "classify"
    elif serving and any(name.endswith("ForTokenClassification") for name in names):
        made_for = "tag"
    if not serving and (generator := _generator_of(names, config.model_type)):
        made_for = "embed" if made_for == "generate" else made_for
        names = config.architectures = [generator]
        serving = _serving(models, names, read)
    if made_for != "generate":
        # a head that is never used costs nothing then, and its tensor may be missing
        config.tie_word_embeddings = True
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
        remedy = (
            f"name the one you mean: `model: {{path: {shown(str(model_dir))}, component: "
            f"{serving[0].name}}}`"
        )
        raise UnsupportedError(f"{model_dir}: {', '.join(names)} is served by {offers}; {remedy}")
    arch: ModelArch = serving[0].make(ModelContext())
    if reasons := _reasons_against(arch, config, Path(model_dir) / "config.json"):
        raise UnsupportedError(
            f"{serving[0].name} can't serve {model_dir}:\n"
            + "\n".join(f"  - {reason}" for reason in reasons)
        )
    return FoundArchitecture(arch, config, made_for)


def _serving(
    models: Sequence[ComponentRef], names: Sequence[str], read: ReadConfig
) -> Sequence[ComponentRef]:
    """Return the models that name one of the architectures."""
    if _is_of_another_type(names, read):
        return []
    return built_ins_first([target for target in models if set(names) & set(target.architectures)])


def _is_of_another_type(names: Sequence[str], read: ReadConfig) -> bool:
    """Return True if transformers serves the type with another type's class (InternLM3 with
    Llama's). A native model of that class is made for the other type's config."""
    stem = read.config.model_type.removesuffix("_text").replace("_", "").replace("-", "")
    name = read.causal_model or ""
    return name in names and not name.replace("_", "").lower().startswith(stem)


def _generator_of(names: Sequence[str], model_type: str) -> str | None:
    """Return the generator whose body a checkpoint of these architectures has by itself, or with a
    classifier; None if there is none. Encoders have generators in transformers, too, but attend to
    later tokens."""
    from transformers.models.auto import modeling_auto as known

    bodies = known.MODEL_MAPPING_NAMES, known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES or not any(
        of_type.get(model_type) in names for of_type in bodies
    ):
        return None
    name: str | None = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name


def built_ins_first(refs: Sequence[Ref]) -> Sequence[Ref]:
    """Return the built-ins among equivalent `refs`, or all if there are none: installing a plugin
    never replaces a built-in."""
    return [ref for ref in refs if ref.name.startswith(BUILT_IN)] or refs


def _reasons_against(arch: ModelArch, config: Any, path: Path) -> list[str]:
    """Call the model's checks. Raises `ModelLoadError` if a value has a type that they can't
    handle."""
    try:
        reasons = list(arch.reasons_against(config))
        if not reasons:
            model_length(config)
        return reasons
    except DovetailError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{path}: a value in it can't be used: {first_lines(error)}"
        ) from error


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations. "auto": float32 on a CPU; else the checkpoint's own,
    bfloat16 for a float32 one or one that doesn't say, and float16 instead of it, with a warning,
    on a GPU that has no bfloat16. Raises `ConfigError` for an unknown name, `UnsupportedError` for
    "bfloat16" on such a GPU."""
    if name != "auto" and name not in DTYPES:
        raise ConfigError(f"dtype: unknown name {name!r}, expected auto, {', '.join(DTYPES)}")
    gpu = gpu_of(device)
    lacks_bfloat16 = gpu is not None and not gpu.has_bfloat16
    if name == "bfloat16" and lacks_bfloat16:
        raise UnsupportedError(
            f"dtype: {gpu} has no bfloat16, which came with compute capability 8.0; use auto, "
            f"float16 or float32"
        )
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    own = config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    if own == torch.bfloat16 and lacks_bfloat16:
        _warn_once(
            f"dtype: auto is float16, for {gpu} has no bfloat16; float16 ends at 65,504, and a "
            f"model that goes beyond needs dtype: float32"
        )
        return torch.float16
    return own


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def resolve_max_model_len(asked: int | None, config: Any, usual: int | None = None) -> int:
    """Return `asked`, or the model's own length, or the `usual` one if that is shorter. Raises
    `UnsupportedError` if `asked` is longer."""
    own = model_length(config)
    if asked is None:
        return min(own, usual or own)
    if asked > own:
        raise UnsupportedError(
            f"max_model_len: {asked} tokens is more than this model's own length of {own}"
        )
    return asked
