"""The parser: it gets an answer's text piece by piece, and separates tool calls from content. The result must not depend on the pieces."""

import json
import re
import uuid
from collections.abc import Sequence

from dovetail.api.parser import (
    MAX_HELD,
    Content,
    Event,
    Parser,
    ParserCapabilities,
    ParserContext,
    ParserExample,
    ToolCallArguments,
    ToolCallStart,
)
from pydantic import BaseModel, ConfigDict, Field

MARK = "@call "


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    max_line: int = Field(MAX_HELD, ge=1, le=MAX_HELD, description="Longer lines are never calls, in characters.")


class AcmeParser(Parser):
    """Calls are lines like `@call name {"argument": 1}`. Such a line is held back until its end; all other text is emitted at once."""

    capabilities = ParserCapabilities(calls=True, templates=((MARK,),))
    examples = (
        ParserExample("Hello.\nYou.", content="Hello.\nYou."),
        ParserExample('Let me see.\n@call find {"what": "a cat"}\n', "Let me see.\n", calls=(("find", '{"what": "a cat"}'),)),
        ParserExample("@call f {}\n@call g {}\nDone.", "Done.", calls=(("f", "{}"), ("g", "{}"))),
        ParserExample("an @call f {}\n@call f {\n@calls", content="an @call f {}\n@call f {\n@calls"),
    )
    options: AcmeOptions

    def __init__(self, options: AcmeOptions, context: ParserContext) -> None:
        super().__init__(options, context)
        self._line = ""  # what may be a call, so far
        self._plain = not context.tools  # True: the rest of this line is content
        self._calls = 0

    def feed(self, text: str) -> Sequence[Event]:
        return [event for part in re.findall(r"[^\n]*\n|[^\n]+", text) for event in self._read(part)]

    def finish(self) -> Sequence[Event]:
        return self._end_line()

    def _read(self, part: str) -> Sequence[Event]:
        """Read part of a line, or its end with the line break."""
        if self._plain:
            self._plain = not (part.endswith("\n") and self.context.tools)
            return [Content(part)]
        self._line += part
        line = self._line.rstrip("\n")
        if MARK.startswith(line[: len(MARK)]) and len(line) <= self.options.max_line:
            return self._end_line() if part.endswith("\n") else []
        self._plain = not part.endswith("\n")
        text, self._line = self._line, ""
        return [Content(text)]

    def _end_line(self) -> Sequence[Event]:
        line, self._line = self._line, ""
        name, _, arguments = line[len(MARK) :].strip().partition(" ")
        if not line.startswith(MARK) or not name or not _is_object(arguments):
            return [Content(line)] if line else []
        self._calls += 1
        index = self._calls - 1
        return [ToolCallStart(index, f"call_{uuid.uuid4().hex}", name), ToolCallArguments(index, arguments.strip())]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
