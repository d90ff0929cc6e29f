"""A tokenizer's ids, to be compared with those of another, or of one in another process."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dovetail.api.tokenizer import Chat, Tokenizer, TokenizerContext
from dovetail.errors import RequestError
from dovetail.testing.binding import Binding


def summary(made: Tokenizer, texts: Sequence[str], chats: Sequence[Chat] = ()) -> dict[str, Any]:
    """Return the ids of texts and conversations (None: it is refused), and of the rest of a
    tokenizer what front ends must agree on."""
    return {
        "vocabulary": hashlib.sha256(repr(list(made.vocabulary())).encode()).hexdigest(),
        "special_ids": sorted(map(int, made.special_ids)),
        "eos_ids": sorted(map(int, made.eos_ids)),
        "around": [list(map(int, ids)) for ids in made.around],
        "ids": [ids_or_none(made.encode, text) for text in texts],
        "chats": [ids_or_none(made.encode_chat, chat) for chat in chats],
    }


def made_summary(
    suite: Binding, directory: str | None, texts: Sequence[str], chats: Sequence[Chat]
) -> dict[str, Any]:
    """Return the summary of a new tokenizer of the suite's. `directory`: None for an empty one."""
    with tempfile.TemporaryDirectory(prefix="dovetail-test-") as folder:
        return summary(suite.make(TokenizerContext(Path(directory or folder))), texts, chats)


def ids_or_none(encode: Callable[[Any], Sequence[int]], given: Any) -> list[int] | None:
    """Return the ids of a text or conversation; None if it is refused."""
    try:
        return list(map(int, encode(given)))
    except RequestError:
        return None
