"""`AnswerReader` parses one sample's answer and counts its reasoning tokens; `GuardedParser`
protects it from the errors of parsers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from dovetail.api.parser import (
    Content,
    Event,
    Parser,
    ParserCapabilities,
    ParserContext,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail.errors import describe
from dovetail.request.outputs import CompletionOutput

logger = logging.getLogger("dovetail.server")


@dataclass(slots=True)
class ParserChoice:
    """A parser that answers may use."""

    name: str  # as users write it: "hermes", "dovetail-acme:acme"
    component: type[Parser]
    options: BaseModel
    was_found: bool = False  # the log says that a chat template matches it
    has_failed: bool = False  # the log has named it

    @property
    def capabilities(self) -> ParserCapabilities:
        return self.component.capabilities

    def report(self, error: BaseException, what: str) -> None:
        """Log the first error of this parser; ignore further ones."""
        if not self.has_failed:
            self.has_failed = True
            logger.error(
                "parser %s failed, %s: %s", self.name, what, describe(error), exc_info=error
            )


class GuardedParser:
    """Wraps the parser of one answer. If it raises, or emits events that aren't allowed, the text
    after that of the last event and all further text are content."""

    def __init__(self, choice: ParserChoice, context: ParserContext) -> None:
        self._choice = choice
        self._parser: Parser | None = None
        self._unread: list[str] = []  # text after that of the last event
        self._ids: set[str] = set()  # of calls that have begun
        self._was_in_call = False  # when it failed
        try:
            self._parser = choice.component(choice.options, context)
        except (Exception, SystemExit) as error:
            self._give_up(error)

    @property
    def marks(self) -> Sequence[str]:
        """Texts that mark reasoning and calls."""
        can = self._choice.capabilities
        return [*(can.reasoning or ()), *(text for texts in can.templates for text in texts)]

    @property
    def in_reasoning(self) -> bool:
        return self._is("in_reasoning")

    @property
    def in_call(self) -> bool:
        return self._is("in_call") or self._was_in_call

    def feed(self, text: str) -> Sequence[Event]:
        """See `Parser.feed`. Like the other methods, raises nothing."""
        parser = self._parser
        if parser is None:
            return (Content(text),) if text else ()
        self._unread.append(text)
        try:
            events = tuple(parser.feed(text))
            _check(events, self._ids)
        except (Exception, SystemExit) as error:
            return self._give_up(error)
        if events:
            self._unread = [_after("".join(self._unread), events)]
        return events

    def finish(self) -> Sequence[Event]:
        """See `Parser.finish`."""
        if self._parser is None:
            return ()
        try:
            events = tuple(self._parser.finish())
            _check(events, self._ids)
        except (Exception, SystemExit) as error:
            return self._give_up(error)
        return events

    def _is(self, flag: str) -> bool:
        try:
            return self._parser is not None and bool(getattr(self._parser, flag))
        except (Exception, SystemExit) as error:
            self._choice.report(error, f"and its {flag} counts as False")
            return False

    def _give_up(self, error: BaseException) -> Sequence[Event]:
        self._choice.report(error, "and the rest of its answer is content")
        self._was_in_call = self._is("in_call")
        self._parser = None
        text = "".join(self._unread)
        self._unread.clear()
        return (Content(text),) if text else ()


def _check(events: Sequence[Event], ids: set[str]) -> None:
    """Add the ids of calls that begin to those before. Raises `ValueError` for an event that isn't
    allowed there, and for text that isn't Unicode."""
    for event in events:
        match event:
            case Content(str(text)) | Reasoning(str(text)):
                text.encode()
                continue
            case ToolCallStart(index, str(id), str(name)) if (
                index == len(ids) and id and id not in ids and name
            ):
                (id + name).encode()
                ids.add(id)
                continue
            case ToolCallArguments(index, str(text)) if index == len(ids) - 1 >= 0:
                text.encode()
                continue
        raise ValueError(f"it emitted {event!r:.200} after the beginning of {len(ids)} calls")


def _after(text: str, events: Sequence[Event]) -> str:
    """Return what follows the content in a text, which a parser holds back; nothing after other
    events, as marks may follow these."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    if text.startswith(content) and all(isinstance(event, Content) for event in events):
        return text[len(content) :]
    last = events[-1]
    return text.rpartition(last.text)[2] if isinstance(last, Content) and last.text in text else ""


class AnswerParser:
    """The parsers of one answer, chained: the content of one is the text of the next."""

    def __init__(self, stages: Sequence[GuardedParser], *, reasons: bool) -> None:
        """`reasons`: the first detects reasoning."""
        self._stages = stages
        self.reasons = reasons

    def is_part_of_mark(self, text: str) -> bool:
        """Return True if a text, apart from whitespace around it, is the beginning of a mark."""
        begun = text.strip()
        return begun != "" and any(
            mark.startswith(begun) for stage in self._stages for mark in stage.marks
        )

    @property
    def in_reasoning(self) -> bool:
        return self.reasons and self._stages[0].in_reasoning

    @property
    def in_call(self) -> bool:
        return any(stage.in_call for stage in self._stages)

    def feed(self, text: str) -> Sequence[Event]:
        """Return the events that are certain after the next piece."""
        events: Sequence[Event] = (Content(text),)
        for stage in self._stages:
            events = _through(stage, events)
        return events

    def finish(self) -> Sequence[Event]:
        """Return the remaining events."""
        events: Sequence[Event] = ()
        for stage in self._stages:
            events = [*_through(stage, events), *stage.finish()]
        return events


def _through(stage: GuardedParser, events: Sequence[Event]) -> Sequence[Event]:
    return [
        after
        for event in events
        for after in (stage.feed(event.text) if type(event) is Content else (event,))
    ]


class AnswerReader:
    """Reads one sample's outputs, which are deltas."""

    __slots__ = ("_cut", "_only_calls", "_parser", "_single", "_tokens", "reasoning_tokens")

    def __init__(
        self, parser: AnswerParser | None, *, single: bool = False, only_calls: bool = False
    ) -> None:
        """`single`: the answer ends after its first tool call; what the model writes after it is
        dropped. `only_calls`: it has no content, so the beginning of a call that was cut off is
        dropped."""
        self._parser = parser
        self._single = single
        self._cut = False
        self._only_calls = only_calls
        self._tokens = 0
        self.reasoning_tokens: int | None = None if parser is None or not parser.reasons else 0
        """Tokens up to the end of the reasoning, including marks; None without a reasoning
        parser."""

    @property
    def in_call(self) -> bool:
        """See `Parser.in_call`."""
        return self._parser is not None and self._parser.in_call and not self._cut

    def read(self, sample: CompletionOutput) -> Sequence[Event]:
        """Return the events that are certain after an output; all of them after the last one."""
        parser = self._parser
        if parser is None:
            return (Content(sample.text),) if sample.text else ()
        self._tokens += len(sample.token_ids)
        was_inside = parser.in_reasoning
        events = parser.feed(sample.text)
        if was_inside or parser.in_reasoning:
            self.reasoning_tokens = self._tokens
        if sample.finish_reason is not None:
            rest = parser.finish()
            events = [
                *events,
                *(
                    rest
                    if sample.finish_reason == "stop" and not self._only_calls
                    else self._uncut(parser, rest)
                ),
            ]
        return list(self._until_second_call(events)) if self._single else events

    def _uncut(self, parser: AnswerParser, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the last events without the mark within which the answer was cut off."""
        for event in events:
            if self._only_calls and isinstance(event, Content):
                continue
            if isinstance(event, Content | Reasoning) and parser.is_part_of_mark(event.text):
                continue
            yield event

    def _until_second_call(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            self._cut = self._cut or (type(event) is ToolCallStart and event.index > 0)
            if not self._cut:
                yield event


def reasoning_tokens_of(readers: Sequence[AnswerReader]) -> int | None:
    """Return the sum of all readers' reasoning tokens; None without reasoning parsers."""
    counts = [reader.reasoning_tokens for reader in readers if reader.reasoning_tokens is not None]
    return sum(counts) if counts else None
