"""The checks that hold the clauses of `dovetail.api.attention`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": {
        "ragged batch": held("values"),
        "then divides K and V": held("cache_dtypes", "cache_saturates"),
        "share block tables": held("groups", "group_pages", "group_block_sizes"),
        "decides how a page": held("pages"),
        "*": TOLD,
    },
    "AttentionCapabilities": {
        "`cuda_graph`: ": held("graph"),
        "`DECODE`: ": held("graph"),
        "`ALL`: ": held("graph", "mixed_graph"),
        "separate graphs": TOLD,
        "Features that": held("hygiene.capabilities", "dtypes", "head_sizes", "block_sizes"),
        "the engine rejects": held("refusals"),
        "*": TOLD,
    },
    "AttentionCapabilities.window": held("window", "refusals"),
    "AttentionCapabilities.sinks": held("sinks", "refusals"),
    "AttentionCapabilities.softcap": held("softcap", "refusals"),
    "AttentionCapabilities.v_in_k": held("v_in_k", "refusals"),
    "AttentionCapabilities.indexer": held("indexer", "refusals"),
    "Indexer": {
        "Every rank has all": TOLD,
        "*": held("indexer"),
    },
    "AttentionCapabilities.causal": held("causal", "refusals"),
    "AttentionCapabilities.bidirectional": held("bidirectional", "refusals"),
    "AttentionCapabilities.both_ways": held(
        "both_ways", but="that an engine without it refuses images isn't a backend's"
    ),
    "AttentionCapabilities.hidden_tails": held("hidden_tails"),
    "AttentionCapabilities.groups": held("groups", "group_pages", "group_block_sizes", "refusals"),
    "AttentionCapabilities.cache_dtypes": held("cache_dtypes", "cache_saturates", "cache_places"),
    "LayerSpec": {
        "multiplies the scores": held("scale"),
        "itself included": held("window"),
        "each token attends to all": held("bidirectional"),
        "in the softmax's denominator": held("sinks"),
        "a scaled score s": held("softcap"),
        "attend in both directions": held("both_ways"),
        "tokens that it selects": held("indexer"),
        "numbers of K": held("v_in_k", "v_in_k_memory"),
        "with `v_in_k`": held("v_in_k"),
        "an earlier layer whose cache": held("shares"),
        "*": held("gqa", "head_sizes", "unlike_layers"),
    },
    "AttentionContext": held("dtypes", "block_sizes"),
    "AttentionContext.block_size": held("block_sizes", "group_block_sizes"),
    "AttentionContext.cache_dtype": held("cache_dtypes", "cache_places"),
    "KVScales": {
        "divided by before": held("cache_dtypes", "cache_saturates"),
        "whenever they run": held(
            "cache_dtypes",
            but="scales that change between two replays of a captured graph aren't tried",
        ),
        "change only while": TOLD,
    },
    "AttentionBatch": {
        "only reads them": held("read_only", "replan"),
        "must not change any page": held("padding"),
        "entries that no query sees": held("block_table", "unseen_pages", "group_pages"),
        "page * block_size": held(
            "block_table",
            "group_pages",
            "large_pool",
            but="pools of 2^31 elements take more memory than machines for tests have",
        ),
        "that all rows share": held("shared_prefix"),
        "with `GraphSupport.ALL`": held("mixed_graph"),
        "see all of the row's": held("both_ways"),
        "not on the other rows": held("fixed_shapes", "fixed_shapes_beside_others"),
        "the queries of a row see": held("hidden_tails"),
        "*": TOLD,
    },
    "LayerCache": {
        "zeroed at first": promised(
            "runtime/test_kv_pool.py::test_the_memory_of_caches_is_zeroed_at_first",
            by=("pages", "values"),
        ),
        "what page i holds": held("pages"),
        "The last page is waste": held("padding", "values"),
        "Other layers may use": held("groups", "pages", "group_block_sizes"),
        "tokens": held("group_block_sizes"),
        "index in `AttentionBatch": held("groups"),
        "which page of a block": held("group_pages"),
        "*": TOLD,
    },
    "FusedCache": {
        "Token i's K": held("fused_write", "group_block_sizes"),
        "keep their addresses": held("fused_write", "graph"),
        "With `scales`": held("cache_places"),
        "*": held("fused_write"),
    },
    "FusedCache.scales": held("cache_places"),
    "AttentionLayer": held("read_only", "strides", "layers", "cache_places"),
    "AttentionLayer.cache": held("pages"),
    "AttentionLayer.kv_scales": held("cache_dtypes"),
    "AttentionLayer.sinks": held("sinks"),
    "AttentionLayer.bind_sinks": {
        "kernels read it whenever": held(
            "sinks", but="sinks that change between two replays of a captured graph aren't tried"
        ),
        "*": held("sinks"),
    },
    "AttentionLayer.bind": {
        "in place of an earlier one": held("memory", "pages"),
        "`LayerSpec.shares`": held("shares"),
    },
    "AttentionLayer.write": held(
        "v_in_k", "values", "block_table", "write_first", "cache_dtypes", "cache_saturates"
    ),
    "AttentionLayer.write_index": held("indexer_keys", "indexer"),
    "AttentionLayer.select": held("indexer"),
    "AttentionLayer.cache_for_fused_write": held("fused_write"),
    "AttentionLayer.attend": {
        "causal attention": held(
            "values", "causal", "write_first", "huge_scores", "dtypes", "again"
        ),
        "selected tokens only": held("indexer"),
        "K and V of others": held("indexer_reads"),
        "With `LayerSpec.causal` False": held("bidirectional"),
        "No other layer is written": TOLD,
        "values of padding tokens": held("values"),
        "until the next `attend`": held("layers"),
    },
    "AttentionBackend": TOLD,
    "AttentionBackend.reasons_against": held("refusals", "head_sizes", "block_sizes"),
    "AttentionBackend.make_layer": held("layers"),
    "AttentionBackend.tensor_bytes": {
        "one tensor more": held("indexer", "indexer_keys"),
        "*": held("memory", "cache_places", "v_in_k_memory"),
    },
    "AttentionBackend.prepare": {"bound again": held("memory", "pages"), "*": held("limits")},
    "AttentionBackend.plan": {
        "Fill the buffers": held("replan", "again"),
        "On a GPU": held(
            "graph",
            but="an allocation or a wait that changes no value isn't detected",
        ),
    },
}
