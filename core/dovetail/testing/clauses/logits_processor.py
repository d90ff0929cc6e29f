"""The checks that hold the clauses of `dovetail.api.logits_processor`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

CLAUSES: Marks = {
    "module": {"allows none of them": held("banned"), "*": TOLD},
    "LogitsProcessorContext": {
        "only read": held("read_only"),
        "most that": held("lines", "sizes"),
        "*": TOLD,
    },
    "LogitsProcessorCapabilities": {
        "`cuda_graph`": held(
            "replayed",
            "graph",
            but="without a GPU no graph is captured; a recording of the operations is replayed on "
            "the CPU",
        ),
        "Otherwise steps": TOLD,
        "*": held("hygiene.capabilities"),
    },
    "ProcessedRow": {"`seed`": held("stateless", "batch", "row"), "*": TOLD},
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
        "temporary": unchecked(
            "memory isn't measured; what `apply` keeps and reads again, `stateless` finds"
        ),
    },
    "LogitsProcessor.update": {
        "Forget the rows": held("reused_rows", "preemption"),
        "fixed buffers": held(
            "replayed", "graph", but="only of processors that declare `cuda_graph`"
        ),
        "called again for each row": held(
            "reused_rows", but="no row of the suite makes `update` raise"
        ),
        "forgotten": TOLD,
    },
    "LogitsProcessor.apply": {
        "Change logits": held("examples", "read_only", "sizes"),
        "bitwise as they are": held("others"),
        "The history of a line": held("lines", "stale_history"),
        "What a line gets": held("batch", "row", "lines", "stateless", "extremes"),
        "no undo": held("stateless", "preemption"),
        "ends with an error": held(
            "examples", "bad_arguments", but="only for the suite's examples and invalid values"
        ),
    },
}
