"""The checks that hold the clauses of `dovetail.api.grammar`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

CLAUSES: Marks = {
    "module": TOLD,
    "GrammarSpec": {
        "a JSON Schema": held("json_schema"),
        "A backend may allow less": held("json_schema", "white_space"),
        "Any JSON object": held("json_object", "mask", "grammars"),
        "may have bytes": TOLD,
        "A rule that an answer must follow": TOLD,
        "*": held("mask"),
    },
    "GrammarContext": {
        "never text": held("never_text"),
        "perhaps none": held("no_stop_ids", "end"),
        "of the model's logits": held("words"),
        "*": TOLD,
    },
    "GrammarCapabilities": held("refuses", "rollback", "forced", "hygiene.capabilities"),
    "Matcher": {"can't go on": unchecked("no library can be brought to its limit from outside in a way that all share"), "*": TOLD},
    "Matcher.fill": {
        "Write the mask": held("words", "mask"),
        "An id may come": held("mask", "json_schema"),
        "just when the answer may end": held("mask", "end"),
        "beyond the vocabulary": held("words"),
        "stays as it is": held("fill_pure"),
    },
    "Matcher.accept": held("accept", "end"),
    "Matcher.rollback": held("rollback"),
    "Matcher.forced": held("forced"),
    "Matcher.complete": held("complete"),
    "Grammar": {"Requests and threads": held("separate", but="one grammar used by two threads at the same moment isn't tried"), "*": TOLD},
    "Grammar.begin": {"Takes microseconds": unchecked("no suite judges times"), "*": held("mask", "separate")},
    "GrammarBackend": TOLD,
    "GrammarBackend.compile": {
        "Several threads": held("threads"),
        "Raises `RequestError`": held("refuses"),
        "Whatever a library": held("refuses"),
        "*": TOLD,
    },
    "GrammarBackend.fill_many": {
        "Raises `DovetailError`": unchecked("a matcher that has failed can't be staged"),
        "overrides it": TOLD,
        "*": held("fill_many"),
    },
}
