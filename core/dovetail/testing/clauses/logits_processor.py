"""The checks that hold the clauses of `dovetail.api.logits_processor`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": {"allows none of them": held("banned"), "*": TOLD},
    "LogitsProcessorContext": {
        "only read": held("read_only"),
        "most that": held("lines", "many_drafts", "sizes"),
        "*": TOLD,
    },
    "LogitsProcessorCapabilities": {
        "`cuda_graph`": held("replayed", "graph"),
        "Otherwise steps": TOLD,
        "*": held("hygiene.capabilities"),
    },
    "ProcessedRow": {"`seed`": held("stateless", "batch", "row", "seed"), "*": TOLD},
    "ArgumentContext": TOLD,
    "ArgumentContext.of": TOLD,
    "LogitsProcessor": TOLD,
    "LogitsProcessor.Arguments": {
        "validated when the request arrives": held("bad_arguments"),
        "a model must accept": held("arguments"),
        "*": TOLD,
    },
    "LogitsProcessor.prepare": {
        "Allocate all buffers": held("sizes", "others", "replayed"),
        "temporary": held("stateless"),
    },
    "LogitsProcessor.update": {
        "Forget the rows": held("reused_rows", "preemption", "long_use"),
        "fixed buffers": held("replayed", "graph"),
        "called again for each row": promised(
            "e2e/test_logits_processors.py::"
            "test_a_processor_that_fails_ends_the_request_and_no_other",
            by=("reused_rows",),
        ),
        "forgotten": TOLD,
    },
    "LogitsProcessor.apply": {
        "Change logits": held("examples", "read_only", "sizes", "ids_outside"),
        "bitwise as they are": held("others"),
        "The history of a line": held("lines", "stale_history", "large_ids"),
        "What a line gets": held(
            "batch",
            "row",
            "lines",
            "stateless",
            "extremes",
            "argument_ids",
            "process_untouched",
            "first_use",
        ),
        "no undo": held("stateless", "preemption"),
        "ends with an error": promised(
            "e2e/test_logits_processors.py::"
            "test_a_processor_that_fails_ends_the_request_and_no_other",
            by=("examples", "bad_arguments"),
        ),
    },
}
