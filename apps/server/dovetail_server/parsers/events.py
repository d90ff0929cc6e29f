"""Events that parsers make of a model's text: content, reasoning and tool calls. Routes turn them into the fields of their API's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer that people read."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. Calls of one answer are counted from 0, and one ends before the next begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`. The pieces together are the JSON value as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """A parser of one answer's text. The events don't depend on how the text was cut, apart from where their pieces are cut."""

    @property
    def needs_special_tokens(self) -> bool:
        """True if the format's marks are special tokens, so that the answer must be detokenized with `skip_special_tokens=False`."""

    @property
    def reasoning(self) -> bool | None:
        """True while the text so far ends within reasoning; None if the parser doesn't look for any."""

    @property
    def in_call(self) -> bool:
        """True while the text so far ends within a tool call whose arguments aren't complete."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain after this next piece of the answer. A piece may be empty."""

    def finish(self) -> list[Event]:
        """Return what was held back until here. The answer is over: neither method is called again."""
