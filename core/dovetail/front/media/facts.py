"""`MediaFacts`: how an engine's model reads images, for those that prepare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Images that are fetched or prepared at a time, and of a list of prompts before its first ones are
# computed: threads that wait, and processes, if there are as many cores.
IMAGES_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFacts:
    """The properties of an engine by which images are prepared. They are plain values, so that
    they can be sent to another process of the same host."""

    model_dir: str  # of the checkpoint, whose image processor prepares images
    config: Mapping[str, Any] = field(repr=False)  # its config.json, of a type in `MEDIA_TYPES`
    cache_rows: int  # an image with more rows is refused
    step_tokens: int  # that a step computes: a run of an image that isn't divided must fit
    kept_bytes: int = 0  # memory for prepared images that may come again
    hosts: tuple[str, ...] = ()  # from which images are fetched by URL
    options: Mapping[str, Any] = field(default_factory=dict)  # of the image processor
