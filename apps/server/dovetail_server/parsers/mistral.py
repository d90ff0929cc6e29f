"""Tool calls of Mistral's models, after the token `[TOOL_CALLS]`.

Older models write an array, `[TOOL_CALLS][{"name": …, "arguments": …}, …]`; newer ones a name and
an object, `[TOOL_CALLS]name{…}` or `[TOOL_CALLS]name[ARGS]{…}`, perhaps with `[CALL_ID]id` after
the name, and a mark for each further call.
"""

from __future__ import annotations

import json
import re
import secrets
import string

from dovetail.api.parser import CallForm, ParserCapabilities, ParserExample
from dovetail_server.parsers.calls import ArrayCalls, NamedCalls
from dovetail_server.parsers.pieces import Malformed, Marks

MAX_HEAD = 512  # characters of name, id and marks
_HEAD = re.compile(
    r"([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*([A-Za-z0-9_-]+)\s*)?(?:\[ARGS\]\s*)?", re.ASCII
)
_NOT_IN_HEAD = re.compile(r"[^A-Za-z0-9_.\-\[\] \t\r\n]")


class MistralCalls(ArrayCalls, NamedCalls):
    """All marks are special tokens. Ids are nine letters and digits: the templates reject others
    when the call is part of a conversation."""

    capabilities = ParserCapabilities(
        calls=True, special_tokens=True, templates=(("[TOOL_CALLS]",),)
    )
    examples = (
        ParserExample("Hi [TOOL_CALL].", "Hi [TOOL_CALL]."),
        ParserExample('[TOOL_CALLS][{"name":"f","arguments":{}}]', calls=(("f", "{}"),)),
        ParserExample(
            '[TOOL_CALLS] [{"name":"f","arguments":{"a":"]"}}, {"arguments":{},"name":"g"}] B',
            "B",
            calls=(("f", '{"a":"]"}'), ("g", "{}")),
        ),
        ParserExample(
            "A [TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]{}", "A", calls=(("f", "{}"), ("g", "{}"))
        ),
        ParserExample(
            '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a":"}"}B', "B", calls=(("f", '{"a":"}"}'),)
        ),
        ParserExample("[TOOL_CALLS]Hello, you", "[TOOL_CALLS]Hello, you"),
        ParserExample("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
    )
    malformed = (
        Malformed(
            "no bracket after the array",
            "the last call ends with its last brace",
            ParserExample(
                '[TOOL_CALLS][{"name": "f", "arguments": {}} B', "B", calls=(("f", "{}"),)
            ),
        ),
        Malformed(
            "no mark before a further call with a name and an object",
            "it is content",
            ParserExample("[TOOL_CALLS]f{}, g{}", ", g{}", calls=(("f", "{}"),)),
        ),
        Malformed(
            "an empty array",
            "all of it is content",
            ParserExample("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
        ),
        Malformed(
            "a name without an object",
            "all of it is content",
            ParserExample("[TOOL_CALLS]f and so on", "[TOOL_CALLS]f and so on"),
        ),
        Malformed(
            "invalid JSON after the name in an array",
            "the call ends there, and the rest is content",
            ParserExample('[TOOL_CALLS][{"name": "f", oops}]', "oops}]", calls=(("f", ""),)),
        ),
    )
    marks = Marks("[TOOL_CALLS]")

    @classmethod
    def call_form(cls, template: str) -> CallForm:
        if "[ARGS]" in template:
            return CallForm(
                lambda name: (f"[TOOL_CALLS]{name}[ARGS]", ""), "[TOOL_CALLS]", marked=True
            )
        return CallForm(_around_in_array, "[TOOL_CALLS]", marked=True, single=True)

    def new_id(self) -> str:
        """Return an id for a call without one."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def begins_call(self, char: str) -> bool:
        """Distinguish the two formats, and begin the objects of an array."""
        if self.in_array:
            return super().begins_call(char)
        self._state = type(self).open_array if char == "[" else type(self).head
        return True

    def head(self, text: str, pos: int) -> int:
        """State: the name, and optional marks before the arguments."""
        stop = min(len(text), pos + MAX_HEAD)
        brace = text.find("{", pos, stop)
        end = brace if brace >= 0 else stop
        stranger = _NOT_IN_HEAD.search(text, pos, end)
        if stranger is None and brace < 0 and stop < pos + MAX_HEAD:
            return self.hold(text, pos)
        head = _HEAD.fullmatch(text, pos, end) if brace >= 0 else None
        if head is None:
            end = stranger.start() if stranger else end
            self.refuse(text[pos:end])
            return end
        self.start_call(head[1], head[2])
        return end


def _around_in_array(name: str) -> tuple[str, str]:
    return f'[TOOL_CALLS][{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}]"
