"""How each type of transformers is served when its checkpoint is named to `LLM` as it is published:
`docs/model-types.md` is generated from this.

python -m tests.models.model_types                 # tries all types and writes the page: some ten minutes
python -m tests.models.model_types mixtral gpt2    # tries some, prints what came of them, and writes their rows
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto as known

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError
from dovetail_executors.runtime.architecture import find_architecture
from tests.models import vllm_architectures
from tests.models.alias_configs import ALIASES
from tests.models.oracle import MODELS
from tests.models.tiny_configs import PLACEHOLDER, random_model, tiny, tiny_whole

PAGE = Path(__file__).parents[2] / "docs" / "model-types.md"
MOST_PARAMETERS = 30_000_000
TOKENS = 8
# the third is 8 windows long
PROMPTS = (
    [5, 6, 7],
    list(range(3, 43)),
    [*range(3, 91), *range(40)],
    [9],
)
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 160,
    "executor": {"name": "local", "num_pages": 1200},
}
# by type: names of classes in published checkpoints that transformers spells otherwise
PUBLISHED = {
    "bailing_hybrid": "BailingMoeV2_5ForCausalLM",
    "exaone_moe": "ExaoneMoEForCausalLM",
    "mpt": "MPTForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "shieldgemma2": "ShieldGemma2ForImageClassification",
}
# by type: what transformers writes into names of text tensors by mistake, and what published
# checkpoints have
MISNAMED = {
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
    "qianfan_ocr": ("language_model.model.encoder.layers.", "language_model.model.layers."),
}
UNSCALED = ("aya_vision", "cohere2_vision")

OF_VLLM = "## Architectures of vLLM"

EXACT = "exact"
NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Family:
    """A table of transformers: its classes by type, how a small model is created, what it computes,
    and what is served of its checkpoint."""

    classes: Mapping[str, str]
    auto: Any
    config: Callable[[str], Any]
    expected: Callable[[Any], torch.Tensor]
    served: Callable[[Path], torch.Tensor]


@torch.no_grad()
def greedy_tokens(model: Any) -> torch.Tensor:
    """Return greedy tokens and their log-probabilities [prompts, tokens, 2]."""
    return torch.tensor([greedy(model, prompt) for prompt in PROMPTS], dtype=torch.float64)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[tuple[int, float]]:
    ids, found = list(prompt), list[tuple[int, float]]()
    for _ in range(TOKENS):
        logprobs = (
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        )
        token = int(logprobs[:PLACEHOLDER].argmax())
        ids.append(token)
        found.append((token, float(logprobs[token])))
    return found


def served_tokens(directory: Path) -> torch.Tensor:
    """Return the same, computed in steps of 16 tokens."""
    with LLM(str(directory), **SETTINGS, max_num_batched_tokens=16) as llm:
        params = SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            allowed_token_ids=list(range(PLACEHOLDER)),
        )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
    samples = [output.outputs[0] for output in outputs]
    found = [
        [
            (token, by_id[token].logprob)
            for token, by_id in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for one in samples
    ]
    return torch.tensor(found, dtype=torch.float64)


@torch.no_grad()
def mean_states(model: Any) -> torch.Tensor:
    states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return torch.stack([torch.nn.functional.normalize(one.mean(0), dim=-1) for one in states])


def served_embeddings(directory: Path) -> torch.Tensor:
    with LLM(str(directory), **SETTINGS) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


VISION = Family(
    known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    AutoModelForImageTextToText,
    tiny_whole,
    greedy_tokens,
    served_tokens,
)
ENCODERS = Family(
    {
        name: known.MODEL_MAPPING_NAMES[name]
        for name in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if name in known.MODEL_MAPPING_NAMES
    },
    AutoModel,
    tiny,
    mean_states,
    served_embeddings,
)
CAUSAL = Family(
    known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForCausalLM,
    tiny,
    greedy_tokens,
    served_tokens,
)
FAMILIES = {
    "Causal language models": CAUSAL,
    "Vision-language models": VISION,
    "Encoders": ENCODERS,
}


def family_of(model_type: str) -> Family:
    """Return the family whose class a checkpoint of this type is published as: causal models of a
    type of encoders seldom are."""
    return next(family for family in (VISION, ENCODERS, CAUSAL) if model_type in family.classes)


def published_as(model_type: str) -> str:
    """Return the architecture that a published checkpoint of this type names. Some types are served
    by another type's class in transformers; their checkpoints bring a class of their own."""
    if model_type in PUBLISHED:
        return PUBLISHED[model_type]
    name: str = family_of(model_type).classes[model_type]
    whose, config = (
        getattr(transformers, name).config_class,
        transformers.CONFIG_MAPPING[model_type],
    )
    stem, of_class = (one.__name__.removesuffix("Config") for one in (config, whose))
    is_own = (
        whose is config or not name.startswith(of_class) or config.model_type == whose.model_type
    )
    return name if is_own else stem + name.removeprefix(of_class)


def save_as_published(reference: Any, model_type: str, directory: Path) -> None:
    """Save a checkpoint with the architecture of published ones; with the name of its own code if
    it has some."""
    reference.save_pretrained(directory)
    name, file = published_as(model_type), directory / "config.json"
    if model_type in MISNAMED:
        tensors = load_file(directory / "model.safetensors")
        save_file(
            {key.replace(*MISNAMED[model_type]): one for key, one in tensors.items()},
            directory / "model.safetensors",
            {"format": "pt"},
        )
    fields = json.loads(file.read_text(encoding="utf-8"))
    if fields["architectures"] != [name]:
        fields["architectures"] = [name]
        fields["auto_map"] = {"AutoModelForCausalLM": f"modeling_{model_type}.{name}"}
    # which a decoder by itself leaves out
    fields["is_encoder_decoder"] = transformers.CONFIG_MAPPING[model_type]().is_encoder_decoder
    file.write_text(json.dumps(fields), encoding="utf-8")


def verdict(model_type: str) -> str:
    """Return `EXACT` or "native: …" if a small checkpoint of this type, as it is published, gives
    what transformers computes; "refused: …" with the reason, or "not tried: …"."""
    family = family_of(model_type)
    try:
        config = family.config(model_type)
        with torch.device("meta"):
            size = sum(
                parameter.numel() for parameter in family.auto.from_config(config).parameters()
            )
        if size > MOST_PARAMETERS:
            return NOT_TRIED
        reference = with_scaled_logits(random_model(config, auto=family.auto))
    except Exception:
        return NOT_TRIED
    try:
        expected = family.expected(reference)
    except Exception:
        expected = None  # it may be refused for a reason nevertheless
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, XDG_CACHE_HOME=f"{folder}/cache"),
    ):
        directory = Path(folder) / "model"
        save_as_published(reference, model_type, directory)
        try:
            found = family.served(directory)
        except DovetailError as error:
            return f"refused: {reason_of(str(error), str(directory))}"
        native = native_name(directory)
    if expected is None:
        return NOT_TRIED
    if not torch.allclose(found.double(), expected.double(), atol=1e-3):
        return "WRONG"
    return EXACT if native is None else f"native: `{native}`"


def with_scaled_logits(model: Any) -> Any:
    """Return the model with the `logit_scale` of its text model, which transformers leaves out of
    Cohere's vision-language models: a text model that was trained with it has other probabilities
    without."""
    scale = getattr(model.config.get_text_config(decoder=True), "logit_scale", None)
    if model.config.model_type in UNSCALED:
        model.lm_head.register_forward_hook(lambda _, __, logits: logits * scale)
    return model


def native_name(directory: Path) -> str | None:
    """Return the name of the native component that serves a checkpoint; None if transformers' code
    does."""
    serving = type(find_architecture(directory, MODELS).arch)
    path = f"{serving.__module__}:{serving.__qualname__}"
    return next(
        (
            target.name.partition(":")[2]
            for target in MODELS
            if target.path == path and target.architectures != ("*",)
        ),
        None,
    )


def reason_of(message: str, directory: str) -> str:
    message = " ".join(message.replace(directory, "").split())
    message = re.sub(r"^dovetail:\w+ can't serve : - |^(/config.json)?: ", "", message)
    return message.replace("`", "").replace("|", "/").strip()


def page(verdicts: Mapping[str, str]) -> str:
    native, exact = (
        sum(one.startswith(kind) for one in verdicts.values()) for kind in ("native", EXACT)
    )
    served, causal = causal_served(verdicts)
    return f"""# Model types

Generated by `python -m tests.models.model_types` with transformers {transformers.__version__}: {len(verdicts)} types,
{native} native and {exact} exact through transformers. [Models](models.md) describes both.
Of the {causal} types that have a causal language model in transformers, {served} are served.

A tiny random checkpoint of each type is named to `LLM`, with the `architectures` that published ones have.

- *native*, *exact*: it gives transformers' greedy tokens and log-probabilities in float32; encoders give the mean of its states.
- *refused*: loading fails with the reason given.
- *{NOT_TRIED}*: no small config was found. The checks at load decide.

Of vision-language models the text is served, see [Models](models.md#text-of-vision-language-models). Encoders make
[embeddings](pooling.md#models). {" and ".join(f"`{name}`" for name in UNSCALED)} are compared with logits times the
`logit_scale` of their text model, which transformers leaves out.
{"".join(section(title, family, verdicts) for title, family in FAMILIES.items())}{architectures(verdicts)}"""


def architectures(verdicts: Mapping[str, str]) -> str:
    """Return the section about the text architectures in vLLM's list."""
    found = by_architecture(verdicts)
    served = sum(not one.startswith("refused") for one in found.values())
    rows = "\n".join(f"| `{name}` | {one} |" for name, one in found.items())
    return f"""
{OF_VLLM}

Of the {len(found)} text architectures in vLLM's registry (mid-2026), {served} are served. Some checkpoints bring code of their own
that computes what a type above does; they are read as it (`dovetail.nn.model_aliases`), and rejected if a field says otherwise.

| architecture | |
|---|---|
{rows}
"""


def by_architecture(verdicts: Mapping[str, str]) -> dict[str, str]:
    """Return how each architecture in vLLM's list is served: "as `type`", or "refused: …"."""
    types: dict[str, list[str]] = {}
    for kind, name in CAUSAL.classes.items():
        for one in dict.fromkeys((published_as(kind), name)):
            types.setdefault(one, []).append(kind)
    found = {}
    for name in vllm_architectures.NAMES:
        kinds = types.get(name, [])
        if name in ALIASES:
            kinds = [ALIASES[name].same]
        served = [one for one in kinds if verdicts[one].startswith(("native", EXACT))]
        why = [verdicts[one] for one in kinds if verdicts[one].startswith("refused")]
        if served:
            found[name] = f"as `{served[0]}`"
        elif why:
            found[name] = why[0]
        else:
            found[name] = f"refused: {vllm_architectures.WHY_NOT[name]}"
    return found


def causal_served(verdicts: Mapping[str, str]) -> tuple[int, int]:
    """Return how many types with a causal language model are served, and how many there are."""
    found = [verdicts[name] for name in CAUSAL.classes]
    return sum(one.startswith(("native", EXACT)) for one in found), len(found)


def section(title: str, family: Family, verdicts: Mapping[str, str]) -> str:
    rows = "\n".join(
        f"| `{name}` | {one} |"
        for name, one in sorted(verdicts.items())
        if family_of(name) is family
    )
    return f"""
## {title}

| type | |
|---|---|
{rows}
"""


def rows_of(text: str) -> dict[str, str]:
    """Return the rows of the page: what it says of each type."""
    types = text.partition(OF_VLLM)[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", types, re.M))


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = sys.argv[1:] or sorted(
        {name for family in FAMILIES.values() for name in family.classes}
    )
    verdicts = rows_of(PAGE.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    for name in names:
        verdicts[name] = verdict(name)
        print(f"{name:28} {verdicts[name]}", flush=True)
    PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main()
