"""Parser: finds tool calls or reasoning in the text of an answer. The server creates one per
answer, and feeds it the text as it arrives.

What a parser emits, concatenated, is a function of the whole text: it doesn't depend on how the
text was cut into pieces. Text that is neither a call nor reasoning is content, and none of it is
lost. This module doesn't need torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

MAX_HELD = 65_536  # characters that a parser holds back while it is uncertain what they are


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's content, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer, not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call. Calls of an answer are numbered from 0, and one ends before the
    next begins."""

    index: int
    id: str  # no other call of the answer has it
    name: str  # of the function, not empty


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`, the last one that has begun; not empty.
    Concatenated, the pieces are a JSON object, unless the model wrote something else or the answer
    was cut off."""

    index: int
    text: str


# Later versions may add events; a parser emits those that it knows
Event = Content | Reasoning | ToolCallStart | ToolCallArguments


@dataclass(frozen=True, slots=True)
class ParserContext:
    """Values passed to a parser's constructor."""

    # Tools that the model may call, in OpenAI's chat format. They come from the client, so schemas
    # may be wrong. Empty: no text is a call.
    tools: Sequence[Mapping[str, Any]] = ()
    starts_in_reasoning: bool = False  # the prompt ends with the mark that begins reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserCapabilities:
    """Features of a parser: the kinds of text it finds, and how its format is detected. Later
    versions may add some, which are off by default."""

    calls: bool = False  # it finds tool calls: `--tool-parser` may name it
    # the marks around reasoning, if it finds any: `--reasoning-parser` may name it
    reasoning: tuple[str, str] | None = None
    special_tokens: bool = False  # its marks may be special tokens, so these are kept in the text
    # Alternative groups: a chat template matches if it has all texts of one. `auto` selects the
    # parser by them; empty: it must be named.
    templates: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise `TypeError` for a text where a tuple of texts belongs, such as `(("<call>"),)`:
        each of its letters would be a text."""
        groups = self.templates if self.reasoning is None else (self.reasoning, *self.templates)
        are_groups = all(isinstance(texts, list | tuple) and texts for texts in groups)
        texts = [text for group in groups for text in group] if are_groups else [None]
        if not all(isinstance(text, str) and text for text in texts):
            raise TypeError(
                f"templates must be tuples of texts, and reasoning two texts, got "
                f"{self.templates!r:.200} and {self.reasoning!r:.200}"
            )
        if self.reasoning is not None and len(self.reasoning) != 2:
            raise TypeError(f"reasoning must be two texts, got {self.reasoning!r:.200}")


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes calls whose arguments are JSON, so that a model can be constrained to
    valid ones."""

    # by the function's name, the texts before and after the arguments
    around: Callable[[str], tuple[str, str]]
    trigger: str  # that every call begins with
    separator: str = ""  # between two calls
    # no other text begins like a call; otherwise calls are constrained only if one is demanded
    marked: bool = False
    single: bool = False  # an answer has one call in this form; several look different


@dataclass(frozen=True, slots=True)
class ParserExample:
    """An answer in a parser's format, and what is in it."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments of each


class Parser(ABC):
    """Parser of one answer's text. Made in each front end, as `cls(options, ParserContext(…))`;
    called by one thread at a time, which other answers share.

    Time and memory are proportional to the length of the text. At most a little more than MAX_HELD
    characters are held back.

    If the reasoning parser and the tool parser differ, the content of the first is the text of the
    second. A parser that raises, or emits events in a wrong order, is named in the log and no
    longer used: the rest of its answer is content.
    """

    capabilities: ClassVar[ParserCapabilities] = ParserCapabilities()
    # Some of what it finds, and of text that only looks like it. The suite cuts and mixes them.
    examples: ClassVar[tuple[ParserExample, ...]] = ()
    options: BaseModel

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        self.options = options
        self.context = context

    @property
    def in_reasoning(self) -> bool:
        """True while the text so far ends within reasoning; a mark belongs to it until it is
        complete."""
        return False

    @property
    def in_call(self) -> bool:
        """True while the text so far ends within a call that has begun and whose arguments are
        incomplete; after `finish`, too."""
        return False

    @abstractmethod
    def feed(self, text: str) -> Sequence[Event]:
        """Return the events that are certain after the next piece of the text, which may be empty.
        Text that can't belong to a mark or a call any more isn't held back."""

    @abstractmethod
    def finish(self) -> Sequence[Event]:
        """Return the remaining events at the end of the text. A call that is cut off before its
        name is complete is content. Called once, last; not if the answer is aborted."""

    @classmethod
    def call_form(cls, template: str) -> CallForm | None:
        """Return the form of calls with a chat template, which this parser must be able to read;
        None: calls can't be constrained."""
        return None
