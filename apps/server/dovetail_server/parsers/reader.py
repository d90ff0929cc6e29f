"""`AnswerReader`: parses one sample's answer and counts its reasoning tokens. For the chat APIs."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.request import CompletionOutput
from dovetail_server.parsers.events import Content, Event
from dovetail_server.parsers.pieces import OutputParser


class AnswerReader:
    """Reads one sample's outputs, which are deltas."""

    __slots__ = ("_parser", "_tokens", "reasoning_tokens")

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self._tokens = 0
        self.reasoning_tokens: int | None = None if parser is None or parser.reasoning is None else 0
        """Tokens up to the end of the reasoning, including marks; None without a reasoning parser."""

    @property
    def in_call(self) -> bool:
        """See `OutputParser.in_call`."""
        return self._parser is not None and self._parser.in_call

    def read(self, sample: CompletionOutput) -> Sequence[Event]:
        """Return the events that are certain after an output; all of them after the last one."""
        parser = self._parser
        if parser is None:
            return (Content(sample.text),) if sample.text else ()
        self._tokens += len(sample.token_ids)
        was_inside = parser.reasoning
        events = parser.feed(sample.text)
        if was_inside or parser.reasoning:
            self.reasoning_tokens = self._tokens
        return events if sample.finish_reason is None else [*events, *parser.finish()]


def reasoning_tokens_of(readers: Sequence[AnswerReader]) -> int | None:
    """Return the sum of all readers' reasoning tokens; None without reasoning parsers."""
    counts = [reader.reasoning_tokens for reader in readers if reader.reasoning_tokens is not None]
    return sum(counts) if counts else None
