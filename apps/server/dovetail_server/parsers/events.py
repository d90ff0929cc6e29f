"""Events that parsers emit for a model's text: content, reasoning and tool calls. Routes convert them to their API's answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. Calls of an answer are numbered from 0, and one ends before the next begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`. Concatenated, the pieces are the JSON value as the model wrote it."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments
