"""Parsers with one thing wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel

from dovetail.api.parser import (
    CallForm,
    Content,
    Event,
    ParserContext,
    ParserExample,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail_server.parsers.hermes import HermesCalls
from dovetail_server.parsers.pieces import OutputParser
from dovetail_server.parsers.think import ThinkReasoning
from tests.conformance.mutants import mutant


@mutant(caught_by="parser.examples")
class SaysSomethingElse(HermesCalls):
    examples = (*HermesCalls.examples, ParserExample("Hi", "Hello"))


@mutant(caught_by="parser.examples")
class ForgetsTheSecondCall(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [
            event
            for event in super().feed(text)
            if not isinstance(event, ToolCallStart | ToolCallArguments) or event.index == 0
        ]


@mutant(caught_by="parser.raises_nothing")
class TrustsSchemas(HermesCalls):
    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.known = {
            tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
            for tool in context.tools
        }


@mutant(caught_by="parser.raises_nothing")
class WantsWholeCalls(HermesCalls):
    def finish(self) -> list[Event]:
        if self.in_call:
            raise ValueError("the answer ends within a call")
        return super().finish()


@mutant(caught_by="parser.chunking")
class DropsBlankPieces(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [] if text.isspace() else super().feed(text)


@mutant(caught_by="parser.events")
class BeginsEachCallTwice(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [
            event
            for event in super().feed(text)
            for _ in range(1 + isinstance(event, ToolCallStart))
        ]


@mutant(caught_by="parser.events")
class GivesAllCallsOneId(HermesCalls):
    def new_id(self) -> str:
        return "the only one"


@mutant(caught_by="parser.content")
class DropsWhatItHolds(HermesCalls):
    def finish(self) -> list[Event]:
        return []


@mutant(caught_by="parser.content", soon=True)
class DropsTextBetweenCalls(HermesCalls):
    """Keeps content after a call until it knows that no other follows."""

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.after: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        for event in super().feed(text):
            if isinstance(event, ToolCallStart):
                self.after = []
            (self.after if self.index and isinstance(event, Content) else out).append(event)
        return out

    def finish(self) -> list[Event]:
        return [*self.after, *super().finish()]


@mutant(caught_by="parser.no_tools")
class CallsWhatIsNotThere(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return OutputParser.feed(self, text)


@mutant(caught_by="parser.in_call")
class NeverCutsACallOff(HermesCalls):
    in_call = False


@mutant(caught_by="parser.reasoning")
class OverlooksThePrompt(ThinkReasoning):
    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, replace(context, starts_in_reasoning=False))


@mutant(caught_by="parser.separate")
class SharesWhatIsHeld(HermesCalls):
    shared: ClassVar[list[str]] = [""]

    @property
    def _held(self) -> str:
        return self.shared[0]

    @_held.setter
    def _held(self, text: str) -> None:
        self.shared[0] = text


class Waits(HermesCalls):
    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.text = ""

    def finish(self) -> list[Event]:
        return [*super().feed(self.text), *super().finish()]


@mutant(caught_by="parser.streams")
class WaitsForTheEnd(Waits):
    def feed(self, text: str) -> list[Event]:
        self.text += text
        return []


@mutant(caught_by="parser.held")
class WaitsForTheEndMark(Waits):
    def feed(self, text: str) -> list[Event]:
        self.text += text
        if "<tool_call>" in self.text and "</tool_call>" not in self.text:
            return []
        text, self.text = self.text, ""
        return super().feed(text)


@mutant(caught_by="parser.linear")
class SearchesAllOfItAgain(Waits):
    def feed(self, text: str) -> list[Event]:
        self.text += text
        re.findall("<tool_call>|<think>", self.text)
        return super().feed(text)

    def finish(self) -> list[Event]:
        return OutputParser.feed(self, "")


@mutant(caught_by="parser.call_form")
class WritesAnotherKey(HermesCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(
            lambda name: (f'<tool_call>{{"name": {json.dumps(name)}, "args": ', "}</tool_call>"),
            "<tool_call>",
        )


@mutant(caught_by="parser.call_form")
class TriggersTooLate(HermesCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return replace(super().call_form(template), trigger='{"name"')


@mutant(caught_by="parser.call_marked")
class TakesABraceForAMark(HermesCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(
            lambda name: (f'{{"name": {json.dumps(name)}, "arguments": ', "}"), "{", marked=True
        )


@mutant(caught_by="parser.call_marked")
class TakesAnythingForAMark(HermesCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return replace(super().call_form(template), trigger="")


@mutant(caught_by="parser.chunking")
class EndsAtThePiecesEnd(ThinkReasoning):
    """Takes a mark for one only if it comes whole."""

    def feed(self, text: str) -> Sequence[Event]:  # type: ignore[override]
        events = super().feed(text)
        self.content(self._held)
        self._held = ""
        return [*events, *super().feed("")]


@mutant(caught_by="parser.verbatim")
class CutsNames(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [
            replace(event, name=event.name[:64]) if isinstance(event, ToolCallStart) else event
            for event in super().feed(text)
        ]


@mutant(caught_by="parser.verbatim")
class WritesArgumentsAgain(Waits):
    """Emits a call's arguments at its end, as a library writes them."""

    def feed(self, text: str) -> list[Event]:
        self.text += text
        return []

    def finish(self) -> list[Event]:
        events = super().finish()
        whole = "".join(one.text for one in events if isinstance(one, ToolCallArguments))
        rest = [one for one in events if not isinstance(one, ToolCallArguments)]
        with suppress(ValueError):
            whole = json.dumps(json.loads(whole))
        return [*rest, ToolCallArguments(0, whole)] if whole else rest


@mutant(caught_by="parser.content")
class DropsAByteOrderMark(HermesCalls):
    begun = False

    def feed(self, text: str) -> list[Event]:
        if text and not self.begun:
            self.begun = True
            text = text.removeprefix("\ufeff")
        return super().feed(text)


@mutant(caught_by="parser.reasoning")
class LeavesAtTheBeginningOfTheMark(ThinkReasoning):
    @property
    def in_reasoning(self) -> bool:
        return super().in_reasoning and not self._held
