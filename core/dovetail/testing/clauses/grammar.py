"""The checks that hold the clauses of `dovetail.api.grammar`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": TOLD,
    "GrammarSpec": {
        "a JSON Schema": held("json_schema", "keywords"),
        "A backend may allow less": held("json_schema", "keywords", "white_space"),
        "Any JSON object": held("json_object", "mask", "grammars", "regexes"),
        "may have bytes": TOLD,
        "one of the structures that begin": held("mask", "structural_tags"),
        "answer begins with a structure": held("structural_tags"),
        "there is no free text": held("structural_tags"),
        "Constraint on an answer": TOLD,
        "*": held("mask"),
    },
    "GrammarContext": {
        "never text": held("never_text"),
        "may be empty": held("no_stop_ids", "end"),
        "of the model's logits": held("words"),
        "*": TOLD,
    },
    "GrammarCapabilities": {
        "later versions": TOLD,
        "*": held("refuses", "rollback", "forced", "hygiene.capabilities"),
    },
    "Matcher": {
        "can't continue": promised(
            "structured/test_in_engine.py::test_a_panic_of_the_library_ends_its_request_alone",
            by=("failed",),
        ),
        "*": TOLD,
    },
    "Matcher.fill": {
        "Write the mask": held("words", "mask"),
        "An id is allowed": held("mask", "json_schema"),
        "exactly if the answer may end": held("mask", "end"),
        "beyond the vocabulary": held("words"),
        "doesn't change": held("fill_pure"),
    },
    "Matcher.accept": held("accept", "end"),
    "Matcher.rollback": held("rollback", "forced_again"),
    "Matcher.forced": held("forced", "forced_again", "end"),
    "Matcher.complete": held("complete", "end", "no_stop_ids", "failed"),
    "Grammar": held("separate", "end", "shared"),
    "Grammar.begin": {
        "Takes microseconds": held("begin"),
        "*": held("mask", "separate"),
    },
    "GrammarBackend": TOLD,
    "GrammarBackend.compile": {
        "Several threads": held("threads"),
        "Raises `RequestError`": held("refuses", "keywords", "structural_tags"),
        "exception that a library": held("refuses"),
        "Compile `spec`": held("same_text"),
    },
    "GrammarBackend.accept_many": {
        "Override it": TOLD,
        "*": held("accept_many"),
    },
    "GrammarBackend.start_fill": {
        "Begin what": held("start_fill"),
        "*": TOLD,
    },
    "GrammarBackend.fill_many": {
        "Raises `DovetailError`": held("failed"),
        "Override it": TOLD,
        "*": held("fill_many", "fill_numbers"),
    },
}
