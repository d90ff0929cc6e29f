"""Checkpoints of `tests.media.checkpoints` without weights, as the front end reads them. And
transformers' whole processor of each, as the oracle.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from dovetail.config.limits import Limits
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.processes import ImageProcesses
from dovetail.front.media.prompts import ImagePrompts
from dovetail.front.media.worker import answer_of
from dovetail.front.tokenizer import TransformersTokenizer
from tests.media import checkpoints
from tests.media.checkpoints import KINDS, save_files

_CHAT = """{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}%IMAGE%{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
_PROCESSING = {  # classes of processors -> their modules
    "AyaVisionProcessor": "aya_vision",
    "Exaone4_5_Processor": "exaone4_5",
    "Gemma3Processor": "gemma3",
    "Gemma4Processor": "gemma4",
    "Glm46VProcessor": "glm46v",
    "Glm4vProcessor": "glm4v",
    "Idefics3Processor": "idefics3",
    "InternVLProcessor": "internvl",
    "LightOnOcrProcessor": "lighton_ocr",
    "LlavaNextProcessor": "llava_next",
    "LlavaOnevisionProcessor": "llava_onevision",
    "LlavaProcessor": "llava",
    "PixtralProcessor": "pixtral",
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen2_5_VLProcessor": "qwen2_5_vl",
    "Qwen3VLProcessor": "qwen3_vl",
    "SmolVLMProcessor": "smolvlm",
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a type, with a short chat template."""
    kind = KINDS[name]
    tokenizer = checkpoints.tokenizer_of(kind)
    tokenizer.chat_template = _CHAT.replace("%IMAGE%", kind.in_template or kind.prompt_token)
    return tokenizer


def write(directory: Path, name: str) -> dict[str, Any]:
    """Write a checkpoint of a type to a directory; return its config."""
    save_files(directory, name)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def own_tokenizer(name: str) -> TransformersTokenizer:
    """The tokenizer of a type, as the front end has it."""
    return TransformersTokenizer(tokenizer_of(name))


def whole_processor(name: str) -> Any:
    """transformers' whole processor of a type, without the parts for audio and video, some of which
    need packages that nothing else does."""
    kind = KINDS[name]
    module = _PROCESSING[kind.processor_class]
    if module == "pixtral":  # its processor reads a function of a module that needs torchvision
        folder = "transformers.models.pixtral.image_processing"
        sys.modules[f"{folder}_pixtral"] = importlib.import_module(f"{folder}_pil_pixtral")
    own = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    if hasattr(own, "num2words"):
        own.num2words = str  # only videos use it
    settings = dict(kind.preprocessor)
    pil = f"{settings.pop('image_processor_type')}Pil"
    image_processor = getattr(importlib.import_module("transformers"), pil)(**settings)
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    made = type("Whole", (getattr(own, kind.processor_class),), unchecked)
    parts = dict.fromkeys(("video_processor", "feature_extractor"))
    wanted = {name: None for name in parts if name in made.get_attributes()}
    return made(
        image_processor=image_processor, tokenizer=tokenizer_of(name), **wanted, **kind.processor
    )


class InThisProcess(ImageProcesses):
    """Does what the processes do, in this one, which takes no time to start."""

    asked = 0  # so often

    def ask(self, request: Mapping[str, Any], place: str) -> dict[str, Any]:
        self.asked += 1
        answer: dict[str, Any] = json.loads(json.dumps(answer_of(json.loads(json.dumps(request)))))
        return answer


def image_prompts(
    name: str,
    directory: Path,
    limits: Limits | None = None,
    max_model_len: int | None = None,
    **facts: Any,
) -> ImagePrompts:
    """Write a checkpoint of a type to `directory`, and return the object that prepares its images."""
    directory.mkdir(exist_ok=True)
    config = write(directory, name)
    tokenizer = own_tokenizer(name)
    given = {"cache_rows": 10_000, "step_tokens": 10_000} | facts
    limits = limits or Limits()
    return ImagePrompts(
        MediaFacts(model_dir=str(directory), config=config, **given),
        limits,
        lambda: tokenizer,
        max_model_len,
        processes=InThisProcess(str(directory), limits, 2**20),
    )
