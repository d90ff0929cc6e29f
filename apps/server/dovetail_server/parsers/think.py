"""Reasoning between `<think>` and `</think>` at the beginning of an answer, as written by Qwen3, DeepSeek-R1 and many other models."""

from __future__ import annotations

from pydantic import BaseModel

from dovetail.api.parser import Event, ParserCapabilities, ParserContext, ParserExample, Reasoning
from dovetail_server.parsers.pieces import MAX_SPACE, Marks, OutputParser, after_space, without_space

_BEGIN, _END = "<think>", "</think>"
_END_MARK = Marks(_END)


class ThinkReasoning(OutputParser):
    """Whitespace directly inside and after the marks belongs to them. An answer that doesn't begin with the mark has no reasoning, and later marks
    are content. An answer that ends before `</think>` is all reasoning. Both marks are ordinary added tokens.

    If the prompt ended with `<think>` and the model repeats it, the repetition is dropped.
    """

    capabilities = ParserCapabilities(reasoning=(_BEGIN, _END), templates=((_BEGIN,), (_END,)))
    examples = (
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

    @property
    def in_reasoning(self) -> bool:
        return self._inside

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._inside:
            self._reason(held)
        else:
            self.content(held)
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: the beginning of the answer."""
        begin = after_space(text, pos)
        head = text[begin : begin + len(_BEGIN)]
        if head == _BEGIN:
            self._inside = True
            self._state = type(self).skip_space_inside
            return begin + len(_BEGIN)
        if begin - pos <= MAX_SPACE and _BEGIN.startswith(head) and begin + len(head) == len(text):
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
        match = _END_MARK.find(text, pos)
        end = without_space(text, pos, match.start() if match else _END_MARK.certain(text, pos))
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
