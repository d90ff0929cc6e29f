"""The checks that hold the clauses of `dovetail.api.kv_cache`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": TOLD,
    "CacheGroup": TOLD,
    "CacheGroup.blocks": held("table"),
    "CacheGroup.first_visible_block": held("trim", "holes"),
    "KVLayout": TOLD,
    "KVContext": held("pure"),
    "KVCapabilities": {
        "`reuse`": held("hit", "reuse"),
        "`fork`": held("fork"),
        "`trim`": held("trim"),
        "`groups`": held("table", "private"),
        "`states`": held("states", "state_copies"),
        "`place`": promised(
            "kv_cache/test_states.py::test_a_placed_checkpoint_is_found", by=("states",)
        ),
        "`media`": promised(
            "kv_cache/test_media.py::test_a_hit_ends_before_another_picture", by=("media",)
        ),
        "later versions": TOLD,
    },
    "Allocation": {
        "Result of": TOLD,
        "are appended": held("table", "private"),
        "except in the first call": held("hit"),
        "holds `HOLE`": held("holes"),
    },
    "PageCopy": held("fork_copies", "state_copies"),
    "Checkpoint": held("checkpoints"),
    "PageCounts": {
        "they always add up": held("counts"),
        "taken when empty ones run out": held("no_leak"),
        "by group": held("held_by_group"),
        "*": held("counts"),
    },
    "KVCacheManager": {
        "Misuse": held("misuse"),
        "Requests are only read": held("request_untouched", "forgets", "lawful", "ids", "long_use"),
        "What it returns": held("answers"),
        "*": TOLD,
    },
    "KVCacheManager.lookup": {
        "a multiple of every": held("hit_length", "hit", "reuse", "generated"),
        "Fewer than": held("hit_length", "prompt_logprobs"),
        "between equal": held("cache_keys", "joined_keys"),
        "Changes nothing": held("pure"),
    },
    "KVCacheManager.pages_needed": {
        "that freeing the requests": held("pages_needed", "pages_needed_without"),
        "It fits if": held("pages_needed"),
        "a prefix hit": held("pages_needed"),
        "Changes nothing": held("pure"),
    },
    "KVCacheManager.allocate": {
        "exactly as many": held("table", "exclusive"),
        "acquires the prefix": held("hit", "private", "state_copies"),
        "with nothing changed": held("failed_allocate", "pages_needed"),
    },
    "KVCacheManager.tables": {"one per group": held("tables"), "O(blocks)": TOLD},
    "KVCacheManager.commit": {
        "Let `lookup` find": held("same_step", "reuse", "hit"),
        "committed again": held("lawful", "reuse", "uncommit"),
        "The core calls it": held("generated", "same_step"),
        "may also decide on a checkpoint": held("checkpoints", "checkpoint_found"),
        "Only calls for tokens known": held("checkpoints"),
        "*": TOLD,
    },
    "KVCacheManager.distrust": TOLD,
    "KVCacheManager.uncommit": {
        "Checkpoints of this request": held("checkpoint_dropped"),
        "*": held("uncommit"),
    },
    "KVCacheManager.fork": {
        "which holds no blocks": held("fork", "fork_copies", "misuse"),
        "with nothing changed": held("fork", "failed_fork"),
        "Not called for layouts": TOLD,
    },
    "KVCacheManager.take_copies": held("fork_copies", "state_copies", "private"),
    "KVCacheManager.take_checkpoints": {
        "at most one": held("checkpoints", "checkpoint_dropped"),
        "from now on": held("checkpoint_found"),
        "count as held": held("counts", "checkpoint_found", "no_leak"),
        "*": TOLD,
    },
    "KVCacheManager.place_checkpoint": promised(
        "kv_cache/test_states.py::test_a_placed_checkpoint_is_found", by=("states",)
    ),
    "KVCacheManager.free": {
        "can be found": held("no_leak", "generated", "reuse"),
        "even if it holds no blocks": held("lawful", "forgets"),
    },
    "KVCacheManager.trim": {
        "in each group": held("trim", "lawful"),
        "keep their length": held("tables"),
        "without the capability": held("lawful", "trim"),
    },
    "KVCacheManager.reset": held("reset"),
    "KVCacheManager.counts": {"in each step": TOLD, "*": held("counts")},
    "KVCacheManager.check_integrity": {
        "is inconsistent": held(
            "integrity", but="that it raises on an inconsistent state can't be tested from outside"
        ),
        "*": TOLD,
    },
    "KVCacheManager.available_pages": held("counts"),
}
