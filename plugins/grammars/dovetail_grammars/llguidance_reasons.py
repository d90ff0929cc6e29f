"""Translates llguidance's errors for users."""

from __future__ import annotations

import re

HEAD = '%llguidance {"no_forcing": true}\n'  # of each grammar, before the user's text
_IN_PLAIN_WORDS = (  # the library's message -> its meaning to the author of a spec
    (r"oneOf constraints are not supported.*", "oneOf: the backend llguidance can't verify that its parts exclude each other; try anyOf"),
    (r"Unsatisfiable schema: .*|NoExtensionBias", "nothing follows it"),
    (r"Failed to generate regex for .*", "the bounds are too large for the backend llguidance"),
    (r"decimal literal invalid.*", "the count of a repetition is too large"),
    (r"(fuel exhausted|initial lexer configuration|lexer error: too many expressions).*", "it is too large for the backend llguidance"),
    (r"Parser Error: Current row has .*", "more alternatives at one place than the backend llguidance follows (2000)"),
    (r"lexer error", "not valid Lark from here on"),
)


def reason(error: str) -> str:
    """Return the message of the library's error, without positions in and excerpts of generated Lark."""
    lines = [re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", line.strip()) for line in error.splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    sentence = said[0] if said else next(iter(lines), "it failed without a message")
    place, sentence = re.fullmatch(r"(\d+\(\d+\): )?(.*)", sentence, re.DOTALL).groups("")  # type: ignore[union-attr]  # it matches anything
    if place:  # in a user's grammar, which follows `HEAD`
        line, column = map(int, re.findall(r"\d+", place))
        place = f"line {line - HEAD.count(chr(10))}, column {column}: "
    return place + next((words for theirs, words in _IN_PLAIN_WORDS if re.fullmatch(theirs, sentence, re.DOTALL)), sentence)
