"""Checkpoints without weights: a tokenizer, a config and the settings of an image processor, for
each type of model that reads images. And transformers' whole processor of each, as the oracle.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dovetail.config.limits import Limits
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.processes import ImageProcesses
from dovetail.front.media.prompts import ImagePrompts
from dovetail.front.media.worker import answer_of
from dovetail.front.tokenizer import TransformersTokenizer

VISION = {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 16}
_CHAT = """{%- for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}%IMAGE%{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass(frozen=True)
class Kind:
    """A type of model, small."""

    model_type: str
    image_token: str
    image_processor: str  # transformers' class, without "Pil"
    settings: Mapping[str, Any]  # of the image processor
    processor: str  # the module and class of transformers' whole processor
    options: Mapping[str, Any] = field(default_factory=dict)  # of the processor
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=lambda: VISION)
    tokens: Mapping[str, str] = field(default_factory=dict)  # names -> further special tokens
    extra: tuple[str, ...] = ()  # special tokens without a name
    in_prompt: str = ""  # the token of an image in a prompt, if that isn't `image_token`
    # an image as the chat template writes it and the whole processor reads it; empty: `prompt_token`
    written: str = ""

    @property
    def prompt_token(self) -> str:
        return self.in_prompt or self.image_token


_QWEN: dict[str, Any] = {
    "image_token": "<|image_pad|>",
    "image_processor": "Qwen2VLImageProcessor",
    "settings": {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 40},
    "vision": {"patch_size": 4, "spatial_merge_size": 2, "deepstack_visual_indexes": [0]},
    "tokens": {"video_token": "<|video_pad|>"},
}
_SPLIT: dict[str, Any] = {
    "image_token": "<image>",
    "settings": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}},
    "options": {"image_seq_len": 4},
    "extra": ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"),
}
_PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
KINDS = {
    kind.model_type: kind
    for kind in (
        Kind(
            "llava",
            "<image>",
            "CLIPImageProcessor",
            {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
            "llava.LlavaProcessor",
            {
                "patch_size": 4,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        Kind(
            "llava_next",
            "<image>",
            "LlavaNextImageProcessor",
            {
                "size": {"shortest_edge": 16},
                "crop_size": {"height": 16, "width": 16},
                "image_grid_pinpoints": _PINPOINTS,
            },
            "llava_next.LlavaNextProcessor",
            {
                "patch_size": 4,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        ),
        Kind(
            "llava_onevision",
            "<image>",
            "LlavaOnevisionImageProcessor",
            {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": _PINPOINTS},
            "llava_onevision.LlavaOnevisionProcessor",
            {
                "num_image_tokens": 16,
                "vision_feature_select_strategy": "full",
                "vision_aspect_ratio": "anyres_max_2",
            },
            tokens={"video_token": "<video>"},
        ),
        Kind(
            "mistral3",
            "[IMG]",
            "PixtralImageProcessor",
            {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}},
            "pixtral.PixtralProcessor",
            {"patch_size": 4, "spatial_merge_size": 2},
            vision={"model_type": "pixtral", "patch_size": 4, "image_size": 64},
            extra=("[IMG_BREAK]", "[IMG_END]"),
        ),
        Kind(
            "internvl",
            "<IMG_CONTEXT>",
            "GotOcr2ImageProcessor",
            {"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 6},
            "internvl.InternVLProcessor",
            {"image_seq_length": 4},
            tokens={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        ),
        Kind(
            "aya_vision",
            "<|IMG_PATCH|>",
            "GotOcr2ImageProcessor",
            {"size": {"height": 16, "width": 16}, "min_patches": 1, "max_patches": 6},
            "aya_vision.AyaVisionProcessor",
            {"img_size": 16, "patch_size": 4, "downsample_factor": 2},
            extra=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", "TILE_1", "TILE_12"),
            written="<image>",
        ),
        Kind(
            "smolvlm",
            image_processor="SmolVLMImageProcessor",
            processor="smolvlm.SmolVLMProcessor",
            **_SPLIT,
        ),
        Kind(
            "idefics3",
            image_processor="Idefics3ImageProcessor",
            processor="idefics3.Idefics3Processor",
            **_SPLIT,
        ),
        Kind("qwen2_vl", processor="qwen2_vl.Qwen2VLProcessor", **_QWEN),
        Kind("qwen2_5_vl", processor="qwen2_5_vl.Qwen2_5_VLProcessor", **_QWEN),
        Kind("qwen3_vl", processor="qwen3_vl.Qwen3VLProcessor", **_QWEN),
        Kind("qwen3_5", processor="qwen3_vl.Qwen3VLProcessor", **_QWEN),
        Kind("exaone4_5", processor="exaone4_5.Exaone4_5_Processor", **_QWEN),
        Kind(
            "lighton_ocr",
            "<|image_pad|>",
            "PixtralImageProcessor",
            {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
            "lighton_ocr.LightOnOcrProcessor",
            {"patch_size": 4, "spatial_merge_size": 2},
            vision={"model_type": "pixtral", "patch_size": 4, "image_size": 64},
            tokens={"image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
        ),
        Kind(
            "gemma3",
            "<image_soft_token>",
            "Gemma3ImageProcessor",
            {"size": {"height": 16, "width": 16}},
            "gemma3.Gemma3Processor",
            {"image_seq_length": 4},
            tokens={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
            config={"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
            in_prompt="<start_of_image>",
        ),
        Kind(
            "gemma4",
            "<|image|>",
            "Gemma4ImageProcessor",
            {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
            "gemma4.Gemma4Processor",
            tokens={
                "boi_token": "<|image>",
                "eoi_token": "<image|>",
                "audio_token": "<|audio|>",
                "boa_token": "<|audio>",
                "eoa_token": "<audio|>",
            },
            config={"boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
        ),
    )
}


def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, two to four newlines, and special tokens."""
    newline = "\u010a"  # as byte-level tokenizers spell it
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(newline * n for n in (2, 3, 4))]
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [(newline, newline), (newline * 2, newline * 2), (newline * 2, newline)]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = {"image_token": kind.image_token, **kind.tokens}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", extra_special_tokens=names
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.extra]})
    tokenizer.chat_template = _CHAT.replace("%IMAGE%", kind.written or kind.prompt_token)
    return tokenizer


def write(directory: Path, name: str) -> dict[str, Any]:
    """Write a checkpoint of a type to a directory; return its config."""
    kind = KINDS[name]
    tokenizer = tokenizer_of(kind)
    tokenizer.save_pretrained(directory)
    ids = {
        key: tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) else value
        for key, value in kind.config.items()
    }
    config = {
        "model_type": name,
        "image_token_id": tokenizer.convert_tokens_to_ids(kind.image_token),
        "vision_config": dict(kind.vision),
        **ids,
    }
    files = {
        "config.json": config,
        "preprocessor_config.json": {
            "image_processor_type": kind.image_processor,
            **kind.settings,
        },
        "processor_config.json": dict(kind.options),
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    return config


def own_tokenizer(name: str) -> TransformersTokenizer:
    """The tokenizer of a type, as the front end has it."""
    return TransformersTokenizer(tokenizer_of(KINDS[name]))


def whole_processor(name: str) -> Any:
    """transformers' whole processor of a type, without the parts for audio and video, some of which
    need packages that nothing else does."""
    kind = KINDS[name]
    module, _, processor = kind.processor.partition(".")
    if module == "pixtral":  # its processor reads a function of a module that needs torchvision
        folder = "transformers.models.pixtral.image_processing"
        sys.modules[f"{folder}_pixtral"] = importlib.import_module(f"{folder}_pil_pixtral")
    own = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    if hasattr(own, "num2words"):
        own.num2words = str  # only videos use it
    pil = f"{kind.image_processor}Pil"
    image_processor = getattr(importlib.import_module("transformers"), pil)(**kind.settings)
    unchecked = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    made = type("Whole", (getattr(own, processor),), unchecked)
    parts = dict.fromkeys(("video_processor", "feature_extractor"))
    wanted = {name: None for name in parts if name in made.get_attributes()}
    return made(
        image_processor=image_processor, tokenizer=tokenizer_of(kind), **wanted, **kind.options
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
