"""`AnswerReader`: one sample's answer as it comes, read by its parser if it has one, with a count of its reasoning's tokens. For the chat APIs."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.request import CompletionOutput
from dovetail_server.parsers.events import Content, Event, OutputParser


class AnswerReader:
    """Reads the outputs of one sample, which are deltas."""

    __slots__ = ("_parser", "_tokens", "reasoning_tokens")

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self._tokens = 0
        self.reasoning_tokens: int | None = None if parser is None or parser.reasoning is None else 0
        """Tokens up to the end of the reasoning, marks included; None if nobody looks for reasoning."""

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return self._parser is None

    @property
    def in_call(self) -> bool:
        """True if the text so far ends within a tool call whose arguments aren't complete."""
        return self._parser is not None and self._parser.in_call

    def read(self, sample: CompletionOutput) -> Sequence[Event]:
        """Return what is certain after an output; after the last one, all."""
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
    """Return the sum of all readers' reasoning tokens; None if nobody looks for reasoning."""
    counts = [reader.reasoning_tokens for reader in readers if reader.reasoning_tokens is not None]
    return sum(counts) if counts else None
