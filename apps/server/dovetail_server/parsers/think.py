"""Reasoning between `<think>` and `</think>` at the beginning of an answer, as written by Qwen3, DeepSeek-R1 and many other models."""

from __future__ import annotations

from dovetail_server.parsers.pieces import MAX_SPACE, Event, Marks, OutputParser, Reasoning, after_space, without_space

THINK = "<think>"
THINK_MARKS = (THINK, "</think>")

_END = Marks("</think>")


class ThinkReasoning(OutputParser):
    """Parser of reasoning that passes the rest of the answer to a parser of tool calls, if there is one.

    Whitespace directly inside and after the marks belongs to them. An answer that doesn't begin with the mark has no reasoning, and later marks are
    content. An answer that ends before `</think>` is all reasoning. Both marks are ordinary added tokens.
    """

    def __init__(self, calls: OutputParser | None = None, *, starts_inside: bool = False) -> None:
        """`starts_inside`: the prompt ended with `<think>`. If the model repeats it, the repetition is dropped."""
        super().__init__()
        self._calls = calls
        self._inside = starts_inside

    @property
    def needs_special_tokens(self) -> bool:
        return self._calls is not None and self._calls.needs_special_tokens

    @property
    def reasoning(self) -> bool | None:
        return self._inside

    @property
    def in_call(self) -> bool:
        return self._calls is not None and self._calls.in_call

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._inside:
            self._reason(held)
        else:
            self.rest(held, 0)
        if self._calls is not None:
            self._events += self._calls.finish()
        return self._events

    def search(self, text: str, pos: int) -> int:
        """State: the beginning of the answer."""
        begin = after_space(text, pos)
        head = text[begin : begin + len(THINK)]
        if head == THINK:
            self._inside = True
            self._state = type(self).skip_space_inside
            return begin + len(THINK)
        if begin - pos <= MAX_SPACE and THINK.startswith(head) and begin + len(head) == len(text):
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
        match = _END.find(text, pos)
        end = without_space(text, pos, match.start() if match else _END.certain(text, pos))
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
        if self._calls is None:
            self.content(text[pos:])
        else:
            self._events += self._calls.feed(text[pos:])
        return len(text)

    def _reason(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))
