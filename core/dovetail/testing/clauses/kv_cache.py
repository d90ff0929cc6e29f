"""The checks that hold the clauses of `dovetail.api.kv_cache`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "module": TOLD,
    "KVGroup": TOLD,
    "KVLayout": {"so that no block can be trimmed": TOLD, "*": TOLD},
    "KVContext": held("pure"),
    "KVCapabilities": {"`reuse`": held("hit", "reuse"), "`fork`": held("fork"), "`trim`": held("trim"), "*": held("hygiene.capabilities")},
    "Allocation": {"The result": TOLD, "are appended": held("table", "private"), "always 0 but": held("hit")},
    "BlockCopy": held("fork_copies"),
    "BlockCounts": {"they always add up": held("counts"), "taken when free ones run out": held("no_leak"), "*": held("counts")},
    "KVCacheManager": {
        "Misuse": held("misuse", but="more tokens than there are, in commit and fork, aren't tried"),
        "Requests are only read": held("request_untouched", "forgets", "lawful"),
        "What it returns": held("answers"),
        "*": TOLD,
    },
    "KVCacheManager.lookup": {
        "a multiple of the block size": held("hit_length", "prompt_logprobs", "reuse", "generated"),
        "under equal": held("cache_keys"),
        "Changes nothing": held("pure"),
    },
    "KVCacheManager.blocks_needed": {
        "after freeing": held("blocks_needed", "blocks_needed_without"),
        "It fits if": held("blocks_needed"),
        "a prefix hit": held("blocks_needed"),
        "Changes nothing": held("pure"),
    },
    "KVCacheManager.allocate": {
        "exactly as many": held("table", "exclusive"),
        "takes hold": held("hit", "private"),
        "with nothing changed": held("failed_allocate", "blocks_needed"),
    },
    "KVCacheManager.commit": {
        "Let `lookup` find": held("same_step", "reuse", "hit"),
        "committed again": held("lawful", "reuse", "uncommit"),
        "The core calls it": held("generated", "same_step"),
        "*": TOLD,
    },
    "KVCacheManager.uncommit": held("uncommit"),
    "KVCacheManager.fork": {"which holds no blocks": held("fork", "fork_copies", "misuse"), "with nothing changed": held("fork", "failed_fork")},
    "KVCacheManager.take_copies": held("fork_copies", "private"),
    "KVCacheManager.free": {"can be found": held("no_leak", "generated", "reuse"), "even if it holds no blocks": held("lawful", "forgets")},
    "KVCacheManager.trim": {
        "wholly before": held("trim", "lawful"),
        "keeps its length": held("table"),
        "without the capability": held("lawful", but="only of managers without `trim`"),
    },
    "KVCacheManager.reset": held("reset"),
    "KVCacheManager.counts": held("counts", but="that it takes O(1) isn't measured"),
    "KVCacheManager.check_integrity": {
        "contradict themselves": held("integrity", but="that it raises where books are wrong can't be tried from outside"),
        "*": TOLD,
    },
    "KVCacheManager.available_blocks": held("counts"),
}
