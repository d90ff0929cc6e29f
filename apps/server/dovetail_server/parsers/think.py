"""Reasoning between two marks at the beginning of an answer: `<think>` and `</think>`, as written
by Qwen3, DeepSeek-R1 and many other models."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from dovetail.api.parser import Event, ParserCapabilities, ParserContext, ParserExample, Reasoning
from dovetail_server.parsers.pieces import (
    MAX_SPACE,
    Marks,
    OutputParser,
    after_space,
    without_space,
)


class ThinkReasoning(OutputParser):
    """Whitespace directly inside and after the marks belongs to them. An answer that doesn't begin
    with the mark has no reasoning, and later marks are content. An answer that ends before
    `</think>` is all reasoning. Both marks are ordinary added tokens.

    If the prompt ended with `<think>` and the model repeats it, the repetition is dropped.
    """

    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    capabilities = ParserCapabilities(reasoning=(begin, end), templates=((begin,), (end,)))
    examples: ClassVar[tuple[ParserExample, ...]] = (
        ParserExample("Hi.", "Hi."),
        ParserExample("<think>\na\n</think>\n\nb", "b", "a"),
        ParserExample("<think></th </think> <think>c</think>", "<think>c</think>", "</th"),
        ParserExample(" a <think>b</think>", " a <think>b</think>"),
        ParserExample("<think>\n\n</think>\n\n"),
        ParserExample("<think>a<tool_call>", reasoning="a<tool_call>"),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._inside = context.starts_in_reasoning
        self._end_mark = Marks(self.end)

    @property
    def in_reasoning(self) -> bool:
        return self._inside

    def finish(self) -> list[Event]:
        held = self._held
        self._held = ""
        if self._inside:
            self._reason(held)
        else:
            self.content(held)
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: the beginning of the answer."""
        begin = after_space(text, pos)
        head = text[begin : begin + len(self.begin)]
        if head == self.begin:
            self._inside = True
            self._state = type(self).skip_space_inside
            return begin + len(self.begin)
        if (
            begin - pos <= MAX_SPACE
            and self.begin.startswith(head)
            and begin + len(head) == len(text)
        ):
            return self.hold(text, pos)
        self._state = type(self).skip_space_inside if self._inside else type(self).rest
        return pos

    def skip_space_inside(self, text: str, pos: int) -> int:
        """State: whitespace before the reasoning."""
        pos = after_space(text, pos)
        if pos < len(text):
            self._state = type(self).reason
        return pos

    def reason(self, text: str, pos: int) -> int:
        """State: reasoning, up to its end mark."""
        match = self._end_mark.find(text, pos)
        end = without_space(
            text, pos, match.start() if match else self._end_mark.certain(text, pos)
        )
        self._reason(text[pos:end])
        if match is None:
            return self.hold(text, end)
        self._inside = False
        self._state = type(self).skip_space
        return match.end()

    def skip_space(self, text: str, pos: int) -> int:
        """State: whitespace after the reasoning."""
        pos = after_space(text, pos)
        if pos < len(text):
            self._state = type(self).rest
        return pos

    def rest(self, text: str, pos: int) -> int:
        """State: everything after the reasoning."""
        self.content(text[pos:])
        return len(text)

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))
