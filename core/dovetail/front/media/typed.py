"""`Typed`: tells the placeholders that a chat template writes for images from those that somebody
typed, which are text.

A template may move, join or trim what it is given. So what was typed is hidden before it is
rendered: the placeholders that are in the result are the template's, in the order of the images.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from dovetail.errors import RequestError


class Typed:
    """Hides the text of a placeholder for one rendering."""

    def __init__(self, placeholder: str) -> None:
        self._placeholder = placeholder
        self._mark = secrets.token_hex(16)

    def hidden(self, value: Any) -> Any:
        """Return plain values in which a mark has the place of each placeholder, also in keys.
        Raises `RequestError` for values that are nested too deeply."""
        try:
            return self._hidden(value)
        except RecursionError:
            raise RequestError("what goes into a chat template is nested too deeply") from None

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(self._placeholder, self._mark)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(one) for one in value]
        return value

    def shown_again(self, text: str, images: int) -> tuple[str, tuple[int, ...], int]:
        """Return a rendered text with what was hidden; of each image, which placeholder in it is
        its own; and their number. Raises `RequestError` if the template wrote more placeholders or
        fewer."""
        pattern = f"{re.escape(self._placeholder)}|{self._mark}"
        found = [match.group() for match in re.finditer(pattern, text)]
        occurrences = [place for place, one in enumerate(found) if one != self._mark]
        if len(occurrences) != images:
            raise RequestError(
                f"the chat template writes {self._placeholder!r} {len(occurrences)} times, and "
                f"the conversation has {images} images"
            )
        return text.replace(self._mark, self._placeholder), tuple(occurrences), len(found)
