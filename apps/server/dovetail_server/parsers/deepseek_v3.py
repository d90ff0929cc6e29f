"""Tool calls of DeepSeek-V3, R1 and V3.1, within `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

V3.1 writes a name and an object, `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`. V3 and
R1 write `function` in place of the name, and then the name and a block of code with the object.
"""

from __future__ import annotations

import re

from pydantic import BaseModel

from dovetail.api.parser import CallForm, Event, ParserCapabilities, ParserContext, ParserExample
from dovetail_server.parsers.json_call import MAX_NAME
from dovetail_server.parsers.pieces import Malformed, after_space
from dovetail_server.parsers.section import SectionCalls
from dovetail_server.parsers.tagged import tag_at

_FENCE = "```"
_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_NAME = rf"[^\s<>{{}}\"`｜]{{1,{MAX_NAME}}}"


class DeepseekV3Calls(SectionCalls):
    """All marks are special tokens, or added tokens."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    head_pattern = re.compile(
        rf"\s*+(?:function\s*+{_SEP}\s*+(?P<name_in_code>{_NAME})\s*(?P<fence>{_FENCE}(?:json)?)?|(?P<name>{_NAME})\s*{_SEP})\s*"
    )
    capabilities = ParserCapabilities(
        calls=True, special_tokens=True, templates=((section_begin,),)
    )
    examples = (
        ParserExample("Hi <｜tool｜>.", "Hi <｜tool｜>."),
        ParserExample(f"{_BEGIN}f{_SEP}{{}}{_END}", calls=(("f", "{}"),)),
        ParserExample(
            f'A\n\n{_BEGIN}f{_SEP}{{"a": '
            f'"}}<"}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g{_SEP}{{}}{_END}',
            "A",
            calls=(("f", '{"a": "}<"}'), ("g", "{}")),
        ),
        ParserExample(
            f'{_BEGIN}function{_SEP}f\n```json\n{{"a": "```"}}\n```<｜tool▁call▁end｜>\n'
            f"<｜tool▁call▁begin｜>function{_SEP}g\n```json\n{{}}\n```{_END}",
            calls=(("f", '{"a": "```"}'), ("g", "{}")),
        ),
        ParserExample(f"{_BEGIN}no", f"{_BEGIN}no"),
    )
    malformed = (
        Malformed(
            "no marks of a section",
            "the marks of a call suffice",
            ParserExample(
                f'<｜tool▁call▁begin｜>f{_SEP}{{"a": 1}}<｜tool▁call▁end｜>B',
                "B",
                calls=(("f", '{"a": 1}'),),
            ),
        ),
        Malformed(
            "no end marks",
            "the call ends with its last brace, and the backticks after it",
            ParserExample(
                f"{_BEGIN}function{_SEP}f\n```json\n{{}}\n```\nB", "B", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no `<｜tool▁sep｜>`",
            "all of it is content",
            ParserExample(f"{_BEGIN}f{{}}", f"{_BEGIN}f{{}}"),
        ),
    )

    def __init__(self, options: BaseModel, context: ParserContext) -> None:
        super().__init__(options, context)
        self._is_fenced = False  # the current call's object is a block of code

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        if f"{_FENCE}json" in template:
            return CallForm(
                lambda name: (f"{_BEGIN}function{_SEP}{name}\n{_FENCE}json\n", f"\n{_FENCE}{_END}"),
                cls.section_begin,
                marked=True,
            )
        return CallForm(
            lambda name: (f"{_BEGIN}{name}{_SEP}", _END), cls.section_begin, marked=True
        )

    def start(self, head: re.Match[str]) -> None:
        """Begin a call in one of the two forms."""
        self._is_fenced = head["fence"] is not None
        self.start_call(head["name_in_code"] or head["name"])

    def after_call(self, *, complete: bool) -> None:
        """Expect the end of a block of code."""
        super().after_call(complete=complete)
        if complete and self._is_fenced:
            self._state = type(self).fence

    def finish(self) -> list[Event]:
        """Return the remaining events. A truncated fence is markup, too."""
        if self._state is DeepseekV3Calls.fence:
            self._held = ""
        return super().finish()

    def fence(self, text: str, pos: int) -> int:
        """State: after an object."""
        begin = after_space(text, pos)
        if begin == len(text):
            return self.hold(text, pos)
        tag = tag_at(text, begin, (_FENCE,))
        if tag == "":
            return self.hold(text, pos)
        self._state = type(self).skip_space
        return pos if tag is None else begin + len(tag)
