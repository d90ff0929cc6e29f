"""Advisory fields: fields of requests that can't change what an answer means, and that the server
accepts without acting on them.

This is the only list of them, for all APIs. The header `x-dovetail-ignored` of an answer names
those of its request, and the log names each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

HEADER = b"x-dovetail-ignored"


class Advisory(NamedTuple):
    """One field. `path`: its name, below its parents: `tools[].defer_loading`."""

    path: str
    reason: str  # why ignoring it is right
    neutral: tuple[Any, ...] = ()  # values besides null that ask for nothing
    # it asks for something; False: a label of the request or its prompt, accepted even where hints
    # are refused
    hint: bool = True
    # it steers reasoning: ignored only if the model has none that can be steered
    steers: bool = False
    # it is the content of a tool's result: ignored only if the model doesn't read its type
    is_content: bool = False


def _label(path: str, reason: str) -> Advisory:
    return Advisory(path, reason, hint=False)


_CACHED = "the prefix cache keeps all prompts while there is room"
_UNSTEERED = "the model has no reasoning, or none that can be limited"
_NOT_DEFERRED = "the model sees all tools from the beginning"
_LEFT_OUT = "the model doesn't read it: the result says in its place that it can't be shown"
_OWN_SIZE = "the model's image processor decides on the size of an image"
_FULL_SIZE = ("auto", "high", "original")  # as it is without the field
# types of blocks that are read, by models that read images
_IMAGES = frozenset({"image", "input_image"})
LEFT_OUT = "[{} that can't be shown here: this model reads only text]"  # of a tool's result

_OPENAI = (
    _label("user", "it identifies the user"),
    _label("metadata", "it describes the request"),
    _label("safety_identifier", "it identifies the user"),
    _label("prompt_cache_key", _CACHED),
    _label("prompt_cache_retention", _CACHED),
    Advisory("store", "answers are never stored", (False,)),
    Advisory(
        "service_tier",
        "all requests are of one tier; schedulers use `priority`",
        ("auto", "default"),
    ),
    Advisory("stream_options.include_obfuscation", "padding is never added", (False,)),
)
COMPLETIONS = (
    *_OPENAI,
    Advisory(
        "guided_decoding_backend",
        "the engine's config names the grammar backend, and all follow the same rule",
        ("auto",),
    ),
)
POOLING = (_label("user", "it identifies the user"),)
CHAT = (
    *COMPLETIONS,
    Advisory("verbosity", "models here know no verbosity", ("medium",)),
    Advisory("reasoning_effort", _UNSTEERED, steers=True),
    Advisory("messages[].content[].image_url.detail", _OWN_SIZE, _FULL_SIZE),
)
RESPONSES = (
    *_OPENAI,
    _label("client_metadata", "it describes the request"),
    _label("prompt_cache_options", _CACHED),
    Advisory("text.verbosity", "models here know no verbosity", ("medium",)),
    Advisory("reasoning.effort", _UNSTEERED, steers=True),
    Advisory("reasoning.summary", "reasoning is returned in full", ("auto",)),
    Advisory("reasoning.generate_summary", "reasoning is returned in full", ("auto",)),
    Advisory("tools[].defer_loading", _NOT_DEFERRED, (False,)),
    Advisory("tools[].tools[].defer_loading", _NOT_DEFERRED, (False,)),
    *(
        Advisory(f"input[].output[].{name}", _LEFT_OUT, is_content=True)
        for name in ("image_url", "file_id", "file_data", "file_url")
    ),
    Advisory("input[].content[].detail", _OWN_SIZE, _FULL_SIZE),
    Advisory("input[].output[].detail", _OWN_SIZE, _FULL_SIZE),
)
MESSAGES = (
    _label("metadata", "it describes the request"),
    _label("inference_geo", "the server computes where it is"),
    *(
        _label(f"{place}cache_control", _CACHED)
        for place in ("", "system[].", "messages[].content[].", "tools[].")
    ),
    Advisory("messages[].content[].content[].source", _LEFT_OUT, is_content=True),
    Advisory("messages[].content[].transformations", _OWN_SIZE),
    Advisory("messages[].content[].content[].transformations", _OWN_SIZE),
    Advisory("speed", "the server has one speed", ("standard",)),
    Advisory("context_management", "the conversation is used as sent"),
    Advisory("thinking", _UNSTEERED, steers=True),
    Advisory(
        "thinking.display",
        "reasoning is returned in full, so that it can be sent back",
        ("summarized",),
    ),
    Advisory("output_config.effort", _UNSTEERED, steers=True),
    Advisory("tools[].defer_loading", _NOT_DEFERRED, (False,)),
    Advisory(
        "tools[].eager_input_streaming",
        "arguments are always streamed as they are generated",
        (False,),
    ),
)


def ignored_fields(body: Any, table: Sequence[Advisory], *, images: bool = False) -> list[Advisory]:
    """Return the fields of a body that ask for something that isn't done, apart from those that
    steer reasoning. `images`: the model reads them."""
    none: frozenset[str] = frozenset()
    return [
        field
        for field in table
        if not field.steers
        and _asks(
            body,
            field.path.replace("[]", ".[]").split("."),
            field.neutral,
            _IMAGES if images and field.is_content else none,
        )
    ]


def _asks(value: Any, path: Sequence[str], neutral: tuple[Any, ...], read: frozenset[str]) -> bool:
    """`read`: types of blocks whose content isn't ignored."""
    if value is None:
        return False
    if not path:
        return value not in neutral
    if path[0] == "[]":
        return isinstance(value, list) and any(_asks(one, path[1:], neutral, read) for one in value)
    if len(path) == 1 and read and _type_of(value) in read:
        return False
    inner = value.get(path[0]) if isinstance(value, Mapping) else getattr(value, path[0], None)
    return _asks(inner, path[1:], neutral, read)


def _type_of(block: Any) -> str | None:
    if isinstance(block, Struct):
        return str(block.__struct_config__.tag)
    found = block.get("type") if isinstance(block, Mapping) else None
    return found if isinstance(found, str) else None
