"""Tiny checkpoints of each type of `MEDIA_TYPES` that is served, and of LLaVA's with Pixtral's
vision model: random weights, a tokenizer, a chat template and the files of a processor; and what
transformers makes of them."""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from dovetail.api.media_types import MEDIA_TYPES, MediaType

VOCAB_SIZE = 320
PAD, BOS, EOS = 259, 260, 261  # after the bytes, and two to four newlines
HIDDEN = 64  # of the language model
PATCH = 4  # pixels along a side of a patch of a tower that takes any size
TILE = 28  # pixels along a side of a picture, or of a tile, of other towers
TILE_PATCH = 7
_SPECIAL = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}

TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
TILES: dict[str, Any] = {**VISION, "image_size": TILE, "patch_size": TILE_PATCH}
SIGLIP: dict[str, Any] = {**TILES, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL: dict[str, Any] = {
    **VISION,
    "model_type": "pixtral",
    "head_dim": 16,
    "image_size": 64,
    "patch_size": PATCH,
}
GRID: dict[str, Any] = {  # of towers with positions on three axes
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": HIDDEN,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN3_GRID: dict[str, Any] = {**GRID, "num_position_embeddings": 16}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
STATES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _sections(*sections: int, **others: Any) -> dict[str, Any]:
    """Return the fields of a language model whose pairs rotate by positions on three axes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **others}
    return {"rope_parameters": rope}


_THIRDS = _sections(4, 2, 2)
_INTERLEAVED = _sections(4, 2, 2, mrope_interleaved=True)
_QUARTER = _sections(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25)
_HALF = _sections(2, 1, 1, partial_rotary_factor=0.5)
_GLM_MOE: dict[str, Any] = {
    **_HALF,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_OF_TILES = {"do_resize": True, "do_rescale": True, "do_normalize": True}
_CROPPED: dict[str, Any] = {
    **_OF_TILES,
    "size": {"shortest_edge": TILE},
    "crop_size": {"height": TILE, "width": TILE},
    "do_center_crop": True,
}
_SQUARE = {"height": TILE, "width": TILE}
_PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
_SPLIT: dict[str, Any] = {
    **_OF_TILES,
    "size": {"longest_edge": 2 * TILE},
    "max_image_size": {"longest_edge": TILE},
    "do_image_splitting": True,
}
_PIXTRAL: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 48},
    "patch_size": {"height": PATCH, "width": PATCH},
}
_OF_PIXTRAL: dict[str, Any] = {"patch_size": PATCH, "spatial_merge_size": 2}
_OF_LLAVA: dict[str, Any] = {
    "patch_size": TILE_PATCH,
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}


def _grid(kind: str) -> dict[str, Any]:
    """Return the settings of a processor that keeps a picture's proportions."""
    return {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": {"shortest_edge": 16 * 16, "longest_edge": 40 * 40},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }


@dataclass(frozen=True)
class Kind:
    """What makes a checkpoint of a type."""

    tokens: Mapping[str, str]  # special tokens by their names in the tokenizer; `image_token` first
    written: str  # an image, in a conversation
    processor_class: str
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    more_tokens: tuple[str, ...] = ()  # without a name
    model_type: str = ""  # empty: its name
    in_template: str = ""  # an image that the chat template writes; empty: `written`
    in_prompt: str = "image_token"  # the name of the token of an image that isn't expanded

    @property
    def prompt_token(self) -> str:
        """An image that isn't expanded."""
        return self.tokens[self.in_prompt]


_QWEN: dict[str, Any] = {
    "tokens": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "written": "<|vision_start|><|image_pad|><|vision_end|>",
    "preprocessor": _grid("Qwen2VL"),
}
_GLM: dict[str, Any] = {
    "tokens": {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    },
    "written": "<|begin_of_image|><|image|><|end_of_image|>",
}
_GLM4V: dict[str, Any] = {
    **_GLM,
    "processor_class": "Glm4vProcessor",
    "preprocessor": _grid("Glm4v"),
}
_LLAVA: dict[str, Any] = {"tokens": {"image_token": "<image>"}, "written": "<image>\n"}
_SMOL: dict[str, Any] = {
    "tokens": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    "more_tokens": tuple(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    "written": "<image>",
    "text": {"model_type": "llama"},
    "vision": TILES,
    "top": {"scale_factor": 2},
    "processor": {"image_seq_len": 4},
}

_OF_MISTRAL: dict[str, Any] = {
    "tokens": {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    "written": "[IMG]",
    "processor_class": "PixtralProcessor",
    "preprocessor": _PIXTRAL,
    "text": {"model_type": "mistral", "sliding_window": None},
    "vision": PIXTRAL,
}
KINDS = {
    "mistral3": Kind(**_OF_MISTRAL, processor=_OF_PIXTRAL, top={"spatial_merge_size": 2}),
    "pixtral": Kind(
        **_OF_MISTRAL,
        model_type="llava",
        processor=_OF_PIXTRAL | {"spatial_merge_size": 1},
        top={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "lighton_ocr": Kind(
        tokens={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        written="<|image_pad|>",
        processor_class="LightOnOcrProcessor",
        preprocessor=_PIXTRAL | {"patch_size": {"height": 2 * PATCH, "width": 2 * PATCH}},
        processor=_OF_PIXTRAL,
        text={"model_type": "qwen3"},
        vision=PIXTRAL,
        top={"spatial_merge_size": 2},
    ),
    "llava": Kind(
        **_LLAVA,
        processor_class="LlavaProcessor",
        preprocessor={"image_processor_type": "CLIPImageProcessor", **_CROPPED},
        processor=_OF_LLAVA,
        text={"model_type": "llama"},
        vision={**TILES, "model_type": "clip_vision_model"},
    ),
    "llava_next": Kind(
        **_LLAVA,
        processor_class="LlavaNextProcessor",
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            **_CROPPED,
            "image_grid_pinpoints": _PINPOINTS,
        },
        processor=_OF_LLAVA,
        text={"model_type": "llama"},
        vision={**TILES, "model_type": "clip_vision_model"},
        top={"image_grid_pinpoints": _PINPOINTS},
    ),
    "granite_vision": Kind(
        **_LLAVA,
        model_type="llava_next",
        processor_class="LlavaNextProcessor",
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            **_CROPPED,
            "image_grid_pinpoints": _PINPOINTS,
        },
        processor={
            **_OF_LLAVA,
            "num_additional_image_tokens": 0,
            "vision_feature_select_strategy": "full",
        },
        text={"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
        vision=SIGLIP,
        top={
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_layer": [-2, -1],
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava_onevision": Kind(
        tokens={"image_token": "<image>", "video_token": "<video>"},
        written="<image>\n",
        processor_class="LlavaOnevisionProcessor",
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            **_OF_TILES,
            "size": _SQUARE,
            "image_grid_pinpoints": [[TILE, TILE], *_PINPOINTS],
        },
        processor={
            "num_image_tokens": (TILE // TILE_PATCH) ** 2,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        text={"model_type": "qwen2"},
        vision=SIGLIP,
        top={"image_grid_pinpoints": [[TILE, TILE], *_PINPOINTS]},
    ),
    "internvl": Kind(
        tokens={
            "image_token": "<IMG_CONTEXT>",
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        written="<IMG_CONTEXT>\n",
        processor_class="InternVLProcessor",
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            **_OF_TILES,
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={"image_seq_length": 4},
        text={"model_type": "qwen2"},
        vision={**VISION, "image_size": [TILE, TILE], "patch_size": [TILE_PATCH, TILE_PATCH]},
        top={"image_seq_length": 4, "downsample_ratio": 0.5},
    ),
    "smolvlm": Kind(
        **_SMOL,
        processor_class="SmolVLMProcessor",
        preprocessor={"image_processor_type": "SmolVLMImageProcessor", **_SPLIT},
    ),
    "idefics3": Kind(
        **_SMOL,
        processor_class="Idefics3Processor",
        preprocessor={"image_processor_type": "Idefics3ImageProcessor", **_SPLIT},
    ),
    "qwen2_vl": Kind(
        **_QWEN,
        processor_class="Qwen2VLProcessor",
        text=_THIRDS,
        vision={**GRID, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": Kind(
        **_QWEN,
        processor_class="Qwen2_5_VLProcessor",
        text=_THIRDS,
        vision={**GRID, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": Kind(
        **_QWEN,
        processor_class="Qwen3VLProcessor",
        text=_INTERLEAVED,
        vision={**QWEN3_GRID, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": Kind(
        **_QWEN,
        processor_class="Qwen3VLProcessor",
        text={**_INTERLEAVED, **EXPERTS},
        vision={**QWEN3_GRID, "deepstack_visual_indexes": [1]},
    ),
    "qwen3_5": Kind(
        **_QWEN,
        processor_class="Qwen3VLProcessor",
        text={**STATES, **_QUARTER},
        vision=QWEN3_GRID,
    ),
    "qwen3_5_moe": Kind(
        **_QWEN,
        processor_class="Qwen3VLProcessor",
        text={**STATES, **EXPERTS, **_QUARTER, "shared_expert_intermediate_size": 24},
        vision=QWEN3_GRID,
    ),
    "aya_vision": Kind(
        tokens={
            "image_token": "<|IMG_PATCH|>",
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
        },
        more_tokens=("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5))),
        written="<|IMG_PATCH|>",
        in_template="<image>",
        processor_class="AyaVisionProcessor",
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            **_OF_TILES,
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={"img_size": TILE, "patch_size": TILE_PATCH, "downsample_factor": 2},
        text={"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2},
        vision={**SIGLIP, "num_channels": 3},
        top={"downsample_factor": 2, "adapter_layer_norm_eps": 1e-6},
    ),
    "exaone4_5": Kind(
        **_QWEN,
        processor_class="Exaone4_5_Processor",
        text={
            "model_type": "exaone4",
            "sliding_window": 16,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision={
            **GRID,
            "num_key_value_heads": 1,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "glm46v": Kind(
        **_GLM,
        processor_class="Glm46VProcessor",
        preprocessor=_grid("Glm46V"),
        text=_HALF,
        vision={**GRID, "image_size": 32},
    ),
    "glm4v": Kind(**_GLM4V, text=_HALF, vision={**GRID, "image_size": 32}),
    "glm4v_moe": Kind(**_GLM4V, text=_GLM_MOE, vision={**GRID, "image_size": 32}),
    "glm_ocr": Kind(**_GLM4V, text=_HALF, vision={**GRID, "image_size": 32}),
    "gemma3": Kind(
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        written="<start_of_image>",
        in_prompt="boi_token",
        processor_class="Gemma3Processor",
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            **_OF_TILES,
            "size": _SQUARE,
        },
        processor={"image_seq_length": 4},
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision=SIGLIP,
        top={"mm_tokens_per_image": 4},
    ),
    "gemma4": Kind(
        tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        written="<|image|>",
        processor_class="Gemma4Processor",
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        processor={"image_seq_length": 70},
        text={
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "use_bidirectional_attention": "vision",
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
        },
        vision={
            **VISION,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": PATCH,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,  # a narrow picture has 140 patches in a line
            "standardize": True,
        },
    ),
}
NAMES = tuple(KINDS)

_TEMPLATE = """\
{%- for message in messages -%}
<s>{{ message['role'] }}: \
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{ 'WRITTEN' }}{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}</s>
{%- endfor -%}
{%- if add_generation_prompt -%}<s>assistant: {%- endif -%}"""


def written(name: str) -> str:
    """Return an image of a prompt for the type, as its users write it."""
    return KINDS[name].written


def placeholder(name: str) -> str:
    """Return the token that stands for a row of an image."""
    return KINDS[name].tokens["image_token"]


def media_type(name: str) -> MediaType:
    """Return the type of a checkpoint's model."""
    return MEDIA_TYPES[KINDS[name].model_type or name]


def settings_of(directory: Path) -> dict[str, Any]:
    """Return the arguments that a checkpoint's processor gives its image processor."""
    processor = json.loads((directory / "processor_config.json").read_text())
    if processor["processor_class"] != "PixtralProcessor":
        return {}
    return {"patch_size": processor["patch_size"] * processor["spatial_merge_size"]}


@cache
def checkpoint(name: str) -> Path:
    """Return the directory of a checkpoint, the same for all tests of this process."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    directory = Path(folder.name) / name
    save_checkpoint(directory, name)
    return directory


def save_checkpoint(directory: Path, name: str, **top: Any) -> None:
    """Write all files of a checkpoint. `top`: fields of its config."""
    config = save_files(directory, name, **top)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            # no part stays at a neutral value, such as 0 or 1
            tensor.add_(torch.randn_like(tensor) * 0.05)
        # it writes bytes only: transformers' whole models take a placeholder that is written for an
        # image's
        model.lm_head.weight[PAD:] = 0
    model.save_pretrained(directory)


def save_files(directory: Path, name: str, **top: Any) -> PreTrainedConfig:
    """Write the files of a checkpoint without its weights, and return its config. `top`: fields of
    that."""
    kind = KINDS[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(kind)
    tokenizer.save_pretrained(directory)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in kind.tokens.items()}
    config = _config(name, kind, ids, top)
    config.save_pretrained(directory)
    common = {"processor_class": kind.processor_class}
    for file, settings in (
        ("preprocessor_config.json", kind.preprocessor),
        ("processor_config.json", kind.processor),
    ):
        (directory / file).write_text(json.dumps({**common, **settings}, indent=2))
    image = kind.in_template or kind.written
    template = _TEMPLATE.replace("WRITTEN", image.replace("\n", "\\n"))
    (directory / "chat_template.jinja").write_text(template)
    return config


def _config(
    name: str, kind: Kind, ids: Mapping[str, int], top: Mapping[str, Any]
) -> PreTrainedConfig:
    config = CONFIG_MAPPING[kind.model_type or name]
    fields: dict[str, Any] = {
        "text_config": {**TEXT, **kind.text},
        "vision_config": dict(kind.vision),
        "tie_word_embeddings": False,
        **kind.top,
    }
    known = config().to_dict()
    for token, number in ids.items():
        for key in (f"{token}_id", f"{token}_index"):
            if key in known:
                fields[key] = number
    return config(**{**fields, **top})


def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, two to four newlines, and special tokens."""
    special = [*_SPECIAL.values(), *dict.fromkeys(kind.tokens.values()), *kind.more_tokens]
    newline = "\u010a"  # as byte-level tokenizers spell it
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(newline * n for n in (2, 3, 4))]
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = [(newline, newline), (newline * 2, newline * 2), (newline * 2, newline)]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_SPECIAL[PAD],
        bos_token=_SPECIAL[BOS],
        eos_token=_SPECIAL[EOS],
        extra_special_tokens=dict(kind.tokens),
    )


@cache
def reference(directory: Path) -> PreTrainedModel:
    """Return transformers' whole model of a checkpoint, in float32."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32
    )
    return model.eval()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of random colours, in 6 x 6 fields."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST)
