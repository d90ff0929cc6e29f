"""The checks that hold the clauses of `dovetail.api.kv_tier`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "module": TOLD,
    "FrameKey": {"equal keys name equal content": held("names", "again"), "*": TOLD},
    "Frame": {
        "not afterwards": held("lent"),
        "Bytes of a frame": TOLD,
        "*": held("round_trip"),
    },
    "Job": {
        "results that come later": held("reports"),
        "*": held("round_trip", "missing", "replaces"),
    },
    "Done": {
        "costs time only": TOLD,
        "*": held("reports", "missing", "reasons"),
    },
    "TierCapabilities": {
        "survive the process": held("restart"),
        "other engines read": held("together"),
        "unreported jobs": held("busy"),
    },
    "TierContext": {
        "from any thread": held("wake"),
        "sizes": held("round_trip"),
        "*": TOLD,
    },
    "KVTier": {
        "One thread at a time": held("any_thread"),
        "return at once": held("returns", "returns_at_first", "failing", "no_room"),
        "exactly once": held("reports", "wake"),
        "until the tier needs its space": held("round_trip", "bounded", "memory", "keeps_new"),
        "after it has reported": held("lent"),
        "not be visible in part": held("killed", "no_room"),
        "*": held("starts"),
    },
    "KVTier.submit": {
        "too busy": held("busy"),
        "*": held("round_trip"),
    },
    "KVTier.done": held("reports"),
    "KVTier.cancel": held("cancel"),
    "KVTier.drop": held("drop"),
    "KVTier.close": {
        "within `timeout_s`": held("close", "close_hung", "process_untouched", "first_use"),
        "Stores that were": held("restart", "killed"),
        "never uses the frames": TOLD,
        "*": held("close", "close_hung"),
    },
}
