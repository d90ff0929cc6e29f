"""Parsing of prompts: text, token ids, or a mapping that says which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.checks import BINARY, is_integer, shown
from dovetail.errors import RequestError
from dovetail.front.tokenizer import TokenizedText

Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedText  # text, token ids, or {"prompt": …} / {"prompt_token_ids": …}


def is_text(prompt: Any) -> bool:
    """Tell whether a prompt is still to be tokenized. Raises `RequestError` for what can't be a prompt."""
    return isinstance(content_of(prompt), str)


def content_of(prompt: Any) -> Any:
    """Return the text of a prompt that is text, else what should be token ids. Raises `RequestError` for a mapping that is neither."""
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or next(iter(prompt)) not in ("prompt", "prompt_token_ids"):
        keys = shown(list(prompt))
        raise RequestError(f'a prompt given as a mapping must be {{"prompt": …}} or {{"prompt_token_ids": …}}, got the keys {keys}')
    [(key, content)] = prompt.items()
    if (key == "prompt") != isinstance(content, str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(f'the prompt\'s "{key}" must be {expected}, got {shown(content)}')
    return content


def as_sequence(prompt: Any) -> Sequence[Any]:
    """Return a list, tuple, numpy array or torch tensor as a sequence that can be cut and counted. Raises `RequestError` for anything else."""
    ids = prompt if isinstance(prompt, BINARY) or not hasattr(prompt, "tolist") else prompt.tolist()
    if isinstance(ids, BINARY) or not isinstance(ids, Sequence):
        raise RequestError(f"the prompt must be text or a list of token ids, got {shown(prompt)}")
    return ids if isinstance(ids, list | tuple | range) else tuple(ids)


def as_ids(ids: Sequence[Any]) -> tuple[int, ...]:
    """Return integers of any kind as ints. Raises `RequestError` if one is none."""
    if [type(token) for token in ids].count(int) == len(ids):  # nearly always, and quickly seen
        return tuple(ids)
    for token in ids:
        if not is_integer(token):
            raise RequestError(f"the prompt's token ids must be integers, got {shown(token)}")
    return tuple(int(token) for token in ids)
