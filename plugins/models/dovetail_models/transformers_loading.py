"""Checkpoints of models that run through transformers: its own loader, the names that it changes
while it loads, and the tensors that Dovetail's formats read instead of it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dovetail.api.media_types import OTHER_PARTS
from dovetail.api.model import WeightRule
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.stored import StoredWeight
from dovetail.nn.skeletons import ONE_AT_A_TIME
from dovetail.nn.weights import (
    TEXT_PARTS,
    for_each_tensor,
    some_of,
    tensor_names,
    tensors_named,
    text_name,
)
from dovetail_models.transformers_attention import NAME, one_line
from dovetail_models.transformers_older import attend_by

log = logging.getLogger("dovetail")

# their frequencies depend on the longest sequence of a batch
SWITCHING_ROPES = (
    "dynamic",
    "longrope",
)
_LEFT_OUT = re.compile(
    rf"{OTHER_PARTS.pattern}|(model\.)?(mtp|mtp_layers|score)\."
)  # of other parts
_OF_EXPERT = re.compile(r"(.*)\.(\d+)\.(gate|up|down)_proj\.weight")
_PUBLISHED_EXPERT = re.compile(r"(.*)\.(\d+)\.(\w+)\.weight")


class Rules:
    """A subset of a model's rules, for `load_weights`."""

    def __init__(self, rules: Sequence[WeightRule]) -> None:
        self._rules = rules

    def weights(self) -> Sequence[WeightRule]:
        return self._rules


class Elsewhere(NamedTuple):
    """Names of the parameters that Dovetail loads instead of transformers, and of their tensors in
    the checkpoint."""

    parameters: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()


def is_stored(rule: WeightRule) -> bool:
    """Return True if the checkpoint doesn't store this weight as a plain tensor."""
    return isinstance(rule.parameter, StoredWeight) and any(
        True for _ in rule.parameter.tensors(rule.shard_id)
    )


def tensors_of(rules: Sequence[WeightRule]) -> frozenset[str]:
    """Return the names of a checkpoint's tensors that rules read."""
    return frozenset(rule.source for rule in for_each_tensor(rules))


def refuse_others_stored(directory: Path, stored: Sequence[WeightRule]) -> None:
    """Raise `UnsupportedError` if the checkpoint stores weights of other layers in the formats of
    `stored`."""
    words = {
        word
        for rule in stored
        if is_stored(rule)
        for word, _ in rule.parameter.tensors(rule.shard_id)
    }
    ours = {rule.source.rpartition(".")[0] for rule in stored}
    modules = []
    for name in sorted(tensor_names(directory)):
        module, _, word = text_name(name).rpartition(".")
        is_quantized = word in words - {"weight", "bias"} and not OTHER_PARTS.match(name)
        if is_quantized and module not in ours:
            modules.append(module)
    if modules:
        raise UnsupportedError(
            f"{directory}: {some_of(dict.fromkeys(modules))} are quantized, and through "
            "transformers only layers that Dovetail replaces can be; use a checkpoint in 16 bits"
        )


# Names


def published_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of a model's weights -> those in checkpoints, where they differ: transformers
    renames modules, and stacks experts. Stacked experts are named as if they were modules:
    "experts.3.gate_proj.weight", and so on; these are listed even if they are published so."""
    conversions = [
        one
        for one in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(one, PrefixChange)
    ]
    names: dict[str, str] = {}
    if not conversions:
        return names
    model = copy.copy(model)
    vars(model)["_weight_conversions"] = conversions  # which `revert_weight_conversion` reads
    for name, parameter in model.named_parameters():
        published = list(revert_weight_conversion(model, {name: parameter}))
        if parameter.ndim == 3:
            names |= _experts_of(name, published)
        elif len(published) == 1 and published[0] != name:
            names[name] = published[0]
    return names


def _experts_of(name: str, published: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the entries of `published_names` for a stacked parameter. There are none if it is
    published stacked, or merged in another way than gate before up."""
    module, _, last = name.rpartition(".")
    found = [_PUBLISHED_EXPERT.fullmatch(one) for one in published]
    layers = list(dict.fromkeys(one[3] for one in found if one is not None))
    words = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(last, ())
    if None in found or len(layers) != len(words):
        return
    for one in found:
        if one is not None:
            word = words[layers.index(one[3])]
            yield f"{module}.{one[2]}.{word}_proj.weight", one[0]


def place_in(parameters: Mapping[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """Return the part of transformers' parameters for a weight, by its name as of
    `published_names`; None if they have none."""
    found = _OF_EXPERT.fullmatch(name)
    if name in parameters or found is None:
        return parameters.get(name)
    stacked = parameters.get(parameter_of(name))
    if stacked is None:
        return None
    weight = stacked[int(found[2])]
    if found[3] == "down":
        return weight
    return weight.chunk(2)[("gate", "up").index(found[3])]


def parameter_of(name: str) -> str:
    """Return the name of transformers' parameter that holds a weight, if an expert's is stacked."""
    found = _OF_EXPERT.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"


# Loading


def loaded(
    config: Any,
    directory: Path,
    dtype: torch.dtype,
    elsewhere: Elsewhere,
    *,
    whole: bool = True,
) -> PreTrainedModel:
    """Return the model with the weights from `directory`, on the CPU. Parameters that are loaded
    `elsewhere` are None; undefined, if not `whole`.

    `whole`: reject tensors that the model doesn't know, except parts that a text model omits.
    Raises `ModelLoadError`."""
    model, info = _load(config, directory, dtype, elsewhere, whole=whole)
    missing = set(info["missing_keys"]) - elsewhere.parameters
    misshapen = {key for key, *_ in info["mismatched_keys"]} - elsewhere.parameters
    problems = [f"lacks {some_of(missing)}"] if missing else []
    if misshapen:
        problems.append(f"holds tensors of other shapes than the config says: {some_of(misshapen)}")
    unexpected = sorted(info["unexpected_keys"]) if whole else []
    unknown = [name for name in unexpected if not _LEFT_OUT.match(name)]
    if unknown:
        problems.append(f"holds {some_of(unknown)}, which the model doesn't know")
    if problems:
        raise ModelLoadError(f"{directory}: the checkpoint {' and '.join(problems)}")
    left_out = [found[0] for found in map(_LEFT_OUT.match, unexpected) if found]
    if left_out:
        log.info(
            "%d tensors of other parts than the text model are skipped: %s*",
            len(left_out),
            "*, ".join(dict.fromkeys(left_out)),
        )
    return ready(model)


def _load(
    config: Any, directory: Path, dtype: torch.dtype, elsewhere: Elsewhere, *, whole: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return what transformers' loader returns. Raises `ModelLoadError` where it fails."""
    settings: dict[str, Any] = {
        "config": copy.deepcopy(config),
        "dtype": dtype,
        "attn_implementation": "eager",
        "experts_implementation": NAME,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are read below
        "key_mapping": {f"^{re.escape(old)}": new for old, new in TEXT_PARTS.items()},
    }
    try:
        with ONE_AT_A_TIME, _quiet():
            if not elsewhere.parameters:
                found: Any = AutoModelForCausalLM.from_pretrained(
                    str(directory),
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    **settings,
                )
                return found[0], found[1]
            kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
            kind = _without(kind, elsewhere.parameters) if whole else kind
            others = tensors_named(directory, lambda name: text_name(name) not in elsewhere.tensors)
            found = kind.from_pretrained(None, state_dict=dict(others), **settings)
            return found[0], found[1]
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{directory}: transformers can't load it: {one_line(error)}"
        ) from error


def _without(kind: type[PreTrainedModel], parameters: frozenset[str]) -> type[PreTrainedModel]:
    """Return a class of models like `kind` in which some parameters are None, so that they take no
    memory."""

    def create(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for name in parameters:
            module, _, last = name.rpartition(".")
            owner: Any = self.get_submodule(module)
            owner.register_parameter(last, None)
            vars(owner)["_is_hf_initialized"] = True  # transformers draws no numbers for it

    return type(kind.__name__, (kind,), {"__init__": create, "__module__": kind.__module__})


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model attend by `attention`, and keep its rotary embeddings from changing their
    frequencies: sequences of such a length are excluded when the model is built."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if one in SWITCHING_ROPES else one for layer, one in kind.items()
            }
        elif kind in SWITCHING_ROPES:
            module.rope_type = "default"
    attend_by(model, NAME)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' report of missing or unknown tensors, which Dovetail reports,
    and without its progress bar."""
    level = transformers.logging.get_verbosity()
    had_bar = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if had_bar:
            transformers.logging.enable_progress_bar()
