"""Parsers with one thing wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel

from dovetail.api.parser import (
    CallForm,
    Content,
    Event,
    ParserCapabilities,
    ParserContext,
    ParserExample,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail_server.parsers.harmony import HarmonyAnswer
from dovetail_server.parsers.hermes import HermesCalls
from dovetail_server.parsers.minimax_m2 import MinimaxM2Calls
from dovetail_server.parsers.pieces import Marks, OutputParser
from dovetail_server.parsers.think import ThinkReasoning
from tests.conformance.mutants import mutant
from tests.conformance.odd_parsers import WholeCalls


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


@mutant(caught_by="parser.linear", soon=True)
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


@mutant(caught_by="parser.separate")
class KeepsItsParsers(HermesCalls):
    known: ClassVar[list[Any]] = []

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.known.append(self)


@mutant(caught_by="parser.separate", soon=True)
class TiresAfterAThousandAnswers(HermesCalls):
    answers: ClassVar[list[int]] = [0]

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        self.answers[0] += 1
        super().__init__(
            options, replace(context, tools=()) if self.answers[0] > 1_000 else context
        )


@mutant(caught_by="parser.tools")
class KnowsToolsByName(MinimaxM2Calls):
    """Keeps the schema that a name had first."""

    known: ClassVar[dict[str, Any]] = {}

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        tools = [self.first_known(tool) for tool in context.tools]
        super().__init__(options, replace(context, tools=tools))

    def first_known(self, tool: Any) -> Any:
        name = tool.get("function", {}).get("name")
        return self.known.setdefault(name, tool)


@mutant(caught_by="parser.tools", soon=True)
class TakesTheFirstSimilarTool(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [
            replace(event, name=self.known(event.name))
            if isinstance(event, ToolCallStart)
            else event
            for event in super().feed(text)
        ]

    def known(self, called: str) -> str:
        names = [tool["function"]["name"] for tool in self.context.tools]
        return next((name for name in names if name.lower().startswith(called.lower())), called)


@mutant(caught_by="parser.tools")
class AddsATool(HermesCalls):
    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        for tool in context.tools:
            tool["function"].setdefault("strict", False)


@mutant(caught_by="parser.content")
class PutsContentFirst(Waits):
    def feed(self, text: str) -> list[Event]:
        self.text += text
        return []

    def finish(self) -> list[Event]:
        return sorted(super().finish(), key=lambda event: not isinstance(event, Content))


@mutant(caught_by="parser.raises_nothing", soon=True)
class ReadsIntegers(WholeCalls):
    def feed(self, text: str) -> Sequence[Event]:
        for number in re.findall("[0-9]+", text):
            int(number)
        return super().feed(text)


@mutant(caught_by="parser.raises_nothing")
class ReadsNestedArguments(WholeCalls):
    def feed(self, text: str) -> Sequence[Event]:
        self._depth(text, 0)
        return super().feed(text)

    def _depth(self, text: str, begin: int) -> int:
        """Return how deep the first brackets are."""
        begin = text.find("[", begin)
        return 0 if begin < 0 else 1 + self._depth(text, begin + 1)


@mutant(caught_by="parser.events")
class DecodesHalfMarks(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        return [
            replace(event, text=re.sub(r"\\u(d[89ab]..)", _char, event.text))
            if isinstance(event, ToolCallArguments)
            else event
            for event in super().feed(text)
        ]


def _char(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))


@mutant(caught_by="parser.events")
class FindsWhatItDoesNotDeclare(ThinkReasoning):
    capabilities = ParserCapabilities(calls=True, templates=(("<think>",),))


@mutant(caught_by="parser.long")
class FindsAHundredCalls(HermesCalls):
    def search(self, text: str, pos: int) -> int:
        if self.index < 100:
            return super().search(text, pos)
        self.content(text[pos:])
        return len(text)


@mutant(caught_by="parser.long")
class NumbersCallsBySmallIds(HermesCalls):
    def new_id(self) -> str:
        return f"call_{self.index % 100:02}"


@mutant(caught_by="parser.long", soon=True)
class LooksOnlyAtTheBeginning(HermesCalls):
    seen = 0

    def feed(self, text: str) -> list[Event]:
        self.seen += len(text)
        if self.seen > 50_000 and not self.index and self._state == HermesCalls.search:
            self.context = replace(self.context, tools=())
        return super().feed(text)


@mutant(caught_by="parser.streams")
class HoldsWhatFollowsACall(DropsTextBetweenCalls):
    """Content after a call waits for the end."""

    def feed(self, text: str) -> list[Event]:
        before = self.after
        out = super().feed(text)
        return [*before, *out] if before and not self.after else out


@mutant(caught_by="parser.streams", soon=True)
class LagsBehind(Waits):
    def feed(self, text: str) -> list[Event]:
        self.text += text
        text, self.text = self.text[:-500], self.text[-500:]
        return super().feed(text)


@mutant(caught_by="parser.linear")
class ReadsArgumentsAgain(HermesCalls):
    arguments = ""

    def feed(self, text: str) -> list[Event]:
        events = super().feed(text)
        if self.in_call:
            self.arguments += text
            re.search(r'["x]\s*}\s*$', self.arguments)
        return events


@mutant(caught_by="parser.verbatim", soon=True)
class ReadsLines(WholeCalls):
    def feed(self, text: str) -> Sequence[Event]:
        return super().feed("\n".join(re.split("[\n\u2028\x85]", text)))


@mutant(caught_by="parser.verbatim")
class KnowsShortNames(WholeCalls):
    """Takes names of letters alone."""

    def feed(self, text: str) -> Sequence[Event]:
        return [
            Content(event.name) if isinstance(event, ToolCallStart) and "-" in event.name else event
            for event in super().feed(text)
        ]


@mutant(caught_by="parser.call_form")
class EndsAtAMarkInAText(WholeCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        return CallForm(lambda name: (f"<call>{name} ", "</call>"), "<call>", marked=True)


@mutant(caught_by="parser.call_form")
class CallsOnlyAtTheBeginning(HermesCalls):
    examples = HermesCalls.examples[:3]
    begun = False

    def feed(self, text: str) -> list[Event]:
        events = super().feed(text)
        if any(isinstance(event, Content) for event in events):
            self.context = replace(self.context, tools=())
        return events


@mutant(caught_by="parser.call_form", error=ValueError, soon=True)
class KnowsOneTemplate(HermesCalls):
    @classmethod
    def call_form(cls, template: str) -> CallForm:
        template.index("<tool_call>")
        return super().call_form(template)


@mutant(caught_by="parser.in_call")
class IsInCallAtTheEnd(HermesCalls):
    has_ended = False

    @property
    def in_call(self) -> bool:
        return self.has_ended and super().in_call

    def finish(self) -> list[Event]:
        self.has_ended = True
        return super().finish()


@mutant(caught_by="parser.in_call", soon=True)
class CompletesNames(HermesCalls):
    """Calls what a cut name begins."""

    def finish(self) -> list[Event]:
        cut = re.search(r'"name": "([^"]+)$', self.cut)
        return [ToolCallStart(self.index, "cut", cut[1])] if cut else super().finish()

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.cut = ""

    def feed(self, text: str) -> list[Event]:
        self.cut = (self.cut + text)[-200:]
        return super().feed(text)


@mutant(caught_by="parser.reasoning")
class TidiesReasoning(ThinkReasoning):
    def feed(self, text: str) -> list[Event]:
        return [
            replace(event, text=event.text.replace("\xa0", " "))
            if isinstance(event, Reasoning)
            else event
            for event in super().feed(text)
        ]


@mutant(caught_by="parser.reasoning", soon=True)
class ForgetsReasoningAtTheEnd(ThinkReasoning):
    def finish(self) -> list[Event]:
        events = super().finish()
        self._inside = False
        return events


@mutant(caught_by="parser.chunking")
class EndsAtAnEmptyPiece(HermesCalls):
    def feed(self, text: str) -> list[Event]:
        if not text:
            self.context = replace(self.context, tools=())
        return super().feed(text)


@mutant(caught_by="parser.processes")
class TriesMarksOfASet(HermesCalls):
    """Looks for whichever mark a set gives first."""

    begin = next(iter({"<tool_call>", "<call>", "<function>", "[call]"}))
    marks = Marks(begin)


@mutant(caught_by="parser.no_tools")
class LosesArgumentsWithoutTools(HarmonyAnswer):
    def _begin(self, channel: str, recipient: str | None) -> None:
        super()._begin(channel, recipient)
        if recipient is not None and not self.context.tools:
            self._event = lambda text: Content(text[:1])


@mutant(caught_by="parser.chunking")
class ReadsTheStateOnce(HermesCalls):
    """Asking for it drops what is held."""

    @property
    def in_call(self) -> bool:
        if self._state == HermesCalls.search:
            self._held = ""
        return super().in_call


@mutant(caught_by="parser.events")
class GivesAnIterator(HermesCalls):
    def feed(self, text: str) -> Any:
        return iter(super().feed(text))


@mutant(caught_by="parser.raises_nothing", soon=True)
class MapsTypes(MinimaxM2Calls):
    """Looks types of arguments up."""

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        for tool in context.tools:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            for one in properties.values() if isinstance(properties, dict) else ():
                hash(one.get("type") if isinstance(one, dict) else None)


@mutant(caught_by="parser.broken_marks")
class HoldsLinesAfterABracket(HermesCalls):
    """After "<", a line is held back until ">", its end, or 200 characters."""

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self.line = ""

    def feed(self, text: str) -> list[Event]:
        events = list[Event]()
        for character in text:
            self.line += character
            if character in ">\n" or "<" not in self.line or len(self.line) > 200:
                events += super().feed(self.line)
                self.line = ""
        return events

    def finish(self) -> list[Event]:
        line = self.line
        self.line = ""
        return [*super().feed(line), *super().finish()]
