"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number, perhaps with text around."""

from __future__ import annotations

from dovetail_server.parsers.calls import CallParser
from dovetail_server.parsers.events import Event
from dovetail_server.parsers.pieces import Marks

_BEGIN = "<tool_call>"
_END = "</tool_call>"


class HermesCalls(CallParser):
    """The marks are ordinary added tokens in Qwen's tokenizers and plain text in others, so that they are always in the answer.

    A call is complete with its last brace: models forget the end mark. It is dropped where it comes, and what is between is content.
    """

    marks = Marks(_BEGIN)
    _marks_after_call = Marks(_BEGIN, _END)

    def found(self, mark: str, lead: str) -> None:
        """Begin a call, or drop the end mark of the last one."""
        self.marks_now = self.marks
        if mark == _BEGIN:
            super().found(mark, lead)
        else:
            self._state = type(self).skip_space

    def after_call(self, *, complete: bool) -> None:
        """Look for the end mark from here on."""
        self.marks_now = self._marks_after_call
        super().after_call(complete=complete)

    def finish(self) -> list[Event]:
        """Return what was held. The beginning of an end mark that was cut off is markup too."""
        begun = self._held.strip()
        if self.marks_now is self._marks_after_call and begun and _END.startswith(begun):
            self._held = ""
        return super().finish()
