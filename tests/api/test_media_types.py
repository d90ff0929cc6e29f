"""The table of models that read images agrees with transformers' configs, and reads files with
care."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from dovetail.api.media_types import MEDIA_TYPES, MediaType, media_type_of
from dovetail.errors import ModelLoadError

SERVED = [name for name, each in MEDIA_TYPES.items() if not each.refused]


def default(name: str) -> Any:
    """Return transformers' default config, with its vision model's."""
    config = CONFIG_MAPPING[name]()
    return type(config)(vision_config={}) if config.vision_config is None else config


@pytest.mark.parametrize("name", SERVED)
def test_facts_of_a_type_are_those_of_transformers_config(name: str) -> None:
    config = default(name)
    raw = config.to_dict()
    media = media_type_of(raw)
    assert media is MEDIA_TYPES[name]
    assert media.placeholder(raw) == config.image_token_id
    if media.axes:
        assert media.merged(raw) == config.vision_config.spatial_merge_size
    indexes = getattr(config.vision_config, "deepstack_visual_indexes", None) or []
    assert media.levels(raw) == 1 + len(indexes)


def test_gemma4_is_whole_only_where_its_config_says_so() -> None:
    media = MEDIA_TYPES["gemma4"]
    assert not media.whole(default("gemma4").to_dict())
    assert media.whole({"text_config": {"use_bidirectional_attention": "vision"}})
    assert not media.whole({"text_config": {"use_bidirectional_attention": "all"}})
    assert MEDIA_TYPES["gemma3"].whole({})
    assert not MEDIA_TYPES["llava"].whole({})


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3"}, {"vision_config": {}}])
def test_a_config_without_a_vision_model_is_none(config: dict[str, Any]) -> None:
    assert media_type_of(config) is None
    assert media_type_of({"model_type": "gemma4", "vision_config": None}) is None


def test_a_type_that_the_table_lacks_is_refused() -> None:
    media = media_type_of({"model_type": "seer", "vision_config": {}})
    assert media == MediaType(model_type="seer", refused="this type isn't supported")


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "7", 2**31])
def test_a_malformed_placeholder_is_named(wrong: Any) -> None:
    with pytest.raises(ModelLoadError, match="image_token_id"):
        MEDIA_TYPES["llava"].placeholder({"image_token_id": wrong})


def test_a_malformed_vision_config_is_named() -> None:
    media = MEDIA_TYPES["qwen3_vl"]
    with pytest.raises(ModelLoadError, match="deepstack_visual_indexes"):
        media.levels({"vision_config": {"deepstack_visual_indexes": 3}})
    with pytest.raises(ModelLoadError, match="spatial_merge_size"):
        media.merged({"vision_config": {"spatial_merge_size": "2"}})
