"""Tool calls as Hermes and Qwen models write them: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number, perhaps with text around."""

from __future__ import annotations

from dovetail_server.parsers.calls import ClosedCalls


class HermesCalls(ClosedCalls):
    """The marks are ordinary added tokens in Qwen's tokenizers and plain text in others, so that they are always in the answer. A call is complete
    with its last brace."""
