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

    def __init__(self, placeholder: str, written: str) -> None:
        """`written`: what a template writes for an image, in whose place `placeholder` is put."""
        self._placeholder = placeholder
        self._written = written
        self._mark = secrets.token_hex(16)
        self._mark_of_written = secrets.token_hex(16)  # if it is another text

    def hidden(self, value: Any) -> Any:
        """Return plain values in which a mark has the place of each placeholder, also in keys.
        Raises `RequestError` for values that are nested too deeply."""
        try:
            return self._hidden(value)
        except RecursionError:
            raise RequestError("what goes into a chat template is nested too deeply") from None

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            hidden = value.replace(self._placeholder, self._mark)
            return hidden.replace(self._written, self._mark_of_written)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(one) for one in value]
        return value

    def shown_again(self, text: str, images: int) -> tuple[str, tuple[int, ...], int]:
        """Return a rendered text with what was hidden; of each image, which placeholder in it is
        its own; and their number. Raises `RequestError` if the template wrote more placeholders or
        fewer."""
        pattern = f"{re.escape(self._written)}|{self._mark}"
        found = [match.group() for match in re.finditer(pattern, text)]
        occurrences = [place for place, one in enumerate(found) if one != self._mark]
        if len(occurrences) != images:
            raise RequestError(
                f"the chat template writes {self._written!r} {len(occurrences)} times, and "
                f"the conversation has {images} images"
            )
        shown = text.replace(self._written, self._placeholder)
        shown = shown.replace(self._mark, self._placeholder)
        shown = shown.replace(self._mark_of_written, self._written)
        return shown, tuple(occurrences), len(found)
