"""Right parsers in styles that a suite might take for wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import ClassVar

from pydantic import BaseModel

from dovetail.api.parser import (
    MAX_HELD,
    Content,
    Event,
    Parser,
    ParserCapabilities,
    ParserContext,
    ParserExample,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)


class Word(str):
    """A text of its own type."""

    __slots__ = ()


class WholeCalls(Parser):
    """Calls are `<call>name {…}</call>`. Emits a call in one piece when it has ended, as a tuple;
    keeps its state in a generator."""

    begin: ClassVar[str] = "<call>"
    end: ClassVar[str] = "</call>"
    capabilities = ParserCapabilities(calls=True, templates=((begin, end),))
    examples = (
        ParserExample("Hi.", "Hi."),
        ParserExample('A <call>f {"a": 1}</call> B', "A  B", calls=(("f", '{"a": 1}'),)),
        ParserExample("<call>f {}</call><call>g {}</call>", calls=(("f", "{}"), ("g", "{}"))),
        ParserExample("<call>f {</call><cal", "<call>f {</call><cal"),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._reader = self._read()
        next(self._reader)
        self._asks: Callable[[str | None], Sequence[Event]] = self._reader.send

    def feed(self, text: str) -> Sequence[Event]:
        return self._asks(text)

    def finish(self) -> Sequence[Event]:
        return self._asks(None)

    def _read(self) -> Generator[Sequence[Event], str | None, None]:
        events = list[Event]()
        held = ""
        searched = 0  # how much of what is held has no end
        calls = 0
        while True:
            text = yield tuple(events)
            events = []
            held += text or ""
            if text is None or not self.context.tools:
                events += [Content(held)] if held else []
                held = ""
                continue
            while held:
                begin = held.find(self.begin)
                if begin < 0:
                    begin = _tail(held, self.begin)
                    events += [Content(held[:begin])] if begin else []
                    held = held[begin:]
                    break
                if begin:
                    events.append(Content(held[:begin]))
                    held = held[begin:]
                end = held.find(self.end, max(0, searched - len(self.end)), MAX_HELD)
                if end < 0 and len(held) < MAX_HELD:
                    searched = len(held)
                    break
                searched = 0
                call = held[len(self.begin) : end] if end > 0 else ""
                name, _, arguments = call.partition(" ")
                if not name or not _is_object(arguments):
                    stop = end + len(self.end) if end > 0 else MAX_HELD
                    events.append(Content(held[:stop]))
                    held = held[stop:]
                    continue
                events.append(ToolCallStart(calls, f"id{calls}", name))
                events.append(ToolCallArguments(calls, arguments))
                calls += 1
                held = held[end + len(self.end) :]


class CharByChar(WholeCalls):
    """Emits each character as an event of its own, with a text of its own type; ids aren't
    numbers."""

    def feed(self, text: str) -> Sequence[Event]:
        return list(_split(super().feed(text)))

    def finish(self) -> Sequence[Event]:
        return list(_split(super().finish()))


class Thoughts(Parser):
    """Reasoning is all before the last mark of its kind, on one line or many. Made of functions."""

    capabilities = ParserCapabilities(reasoning=("((", "))"))
    examples = (
        ParserExample("Hi (a).", "Hi (a)."),
        ParserExample("((a) b))\nc((d))", "\nc((d))", "a) b"),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        begun = context.starts_in_reasoning
        state = {"held": "", "at": "inside" if begun else "before"}
        begin, end = "((", "))"

        def step(text: str, is_last: bool) -> Iterator[Event]:
            state["held"] += text
            if state["at"] == "before":
                if begin.startswith(state["held"]) and state["held"] != begin and not is_last:
                    return
                inside = state["held"].startswith(begin)
                state["at"] = "inside" if inside else "after"
                state["held"] = state["held"].removeprefix(begin) if inside else state["held"]
            if state["at"] == "inside":
                place = state["held"].find(end)
                stop = place if place >= 0 else _tail(state["held"], end)
                stop = len(state["held"]) if is_last and place < 0 else stop
                if stop:
                    yield Reasoning(state["held"][:stop])
                state["held"] = state["held"][stop:]
                if place >= 0:
                    state["held"] = state["held"][len(end) :]
                    state["at"] = "after"
            if state["at"] == "after" and state["held"]:
                yield Content(state["held"])
                state["held"] = ""

        self.step = step
        self.state = state

    @property
    def in_reasoning(self) -> bool:
        return self.state["at"] == "inside"

    def feed(self, text: str) -> Sequence[Event]:
        return list(self.step(text, False))

    def finish(self) -> Sequence[Event]:
        return list(self.step("", True))


def _tail(text: str, mark: str) -> int:
    """Return where a beginning of `mark` at the end of the text begins, or its end."""
    for size in range(min(len(mark), len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _split(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        match event:
            case ToolCallStart(index, id, name):
                yield ToolCallStart(index, Word(f"call-{id}"), Word(name))
            case ToolCallArguments(index, text):
                yield from (ToolCallArguments(index, Word(char)) for char in text)
            case Content(text):
                yield from (Content(Word(char)) for char in text)
