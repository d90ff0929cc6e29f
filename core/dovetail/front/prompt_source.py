"""`PromptSource`: prompts whose texts have been measured, but neither joined nor tokenized.

Joining and tokenizing take time and memory by the character. The library does all at once, a server does it in slices, so that clients
share its threads fairly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dovetail.front.request_checks import Prompt

PROMPT_COST = 32  # of a prompt beside its characters, in characters


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts to make, in order."""

    chars: Sequence[
        int
    ]  # of each prompt's text, 0 for token ids; checked against the limits of one prompt
    make: Callable[
        [slice], list[Prompt]
    ]  # returns some of them; thread safe; raises `RequestError`

    @property
    def total_chars(self) -> int:
        """The characters of all texts, once joined."""
        return sum(self.chars)

    @property
    def cost(self) -> int:
        """The work of making all prompts, in characters."""
        return self.total_chars + PROMPT_COST * len(self.chars)

    def all(self) -> list[Prompt]:
        """Make all prompts."""
        return self.make(slice(None))

    def slices(self, most: int) -> Iterator[tuple[slice, int]]:
        """Yield consecutive slices, each with its cost: at most `most`, unless a slice is a single prompt."""
        start, cost = 0, 0
        for place, chars in enumerate(self.chars):
            one = chars + PROMPT_COST
            if place > start and cost + one > most:
                yield slice(start, place), cost
                start, cost = place, 0
            cost += one
        if start < len(self.chars):
            yield slice(start, len(self.chars)), cost
