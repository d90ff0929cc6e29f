"""The checks that hold the clauses of `dovetail.api.parser`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "module": {
        "is a function of the whole text": held("chunking", "held", "long", "processes"),
        "none of it is lost": held(
            "content",
            but="what belongs to a call or a mark is the format's, and only the examples test it",
        ),
        "*": TOLD,
    },
    "Content": held("events"),
    "Reasoning": held("events", "reasoning"),
    "ToolCallStart": held("events", "verbatim", "long"),
    "ToolCallArguments": {
        "Concatenated": held("examples", "in_call", "verbatim"),
        "*": held("events"),
    },
    "ParserContext": {
        "schemas may be wrong": held("raises_nothing"),
        "no text is a call": held("no_tools"),
        "Tools that the model may call": held("tools"),
        "the prompt ends": held("reasoning"),
        "*": TOLD,
    },
    "ParserCapabilities": {
        "tool calls": held("examples", "hygiene.capabilities"),
        "the marks around reasoning": held("reasoning", "examples"),
        "*": TOLD,
    },
    "CallForm": {
        "texts before and after": held("call_form"),
        "every call begins with": held("call_form"),
        "between two calls": held("call_form"),
        "begins like a call": held("call_marked"),
        "*": TOLD,
    },
    "ParserExample": held("examples"),
    "Parser": {
        "Made in each front end": held("separate", "processes", "tools"),
        "Time and memory": held("linear", "held", "separate"),
        "held back": held("held"),
        "Some of what it finds": held("examples"),
        "The suite cuts": TOLD,
        "A parser that raises": held("raises_nothing", "events"),
        "*": TOLD,
    },
    "Parser.in_reasoning": held("reasoning"),
    "Parser.in_call": held("in_call"),
    "Parser.feed": {
        "may be empty": held("chunking"),
        "isn't held back": held("streams", "broken_marks"),
    },
    "Parser.finish": {"cut off before its name": held("content", "in_call"), "*": held("content")},
    "Parser.call_form": held("call_form"),
}
