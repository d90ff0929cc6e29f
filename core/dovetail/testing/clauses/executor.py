"""The checks that hold the clauses of `dovetail.api.executor`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

# Settings and parts that only Dovetail's executors for models have, with their tests.
STATES = promised(
    "runtime/test_states.py::test_states_of_different_rows_and_layers_never_overlap",
    "runtime/test_states.py::test_chunks_cover_each_row_in_order_and_end_at_its_checkpoint",
    "models/test_hybrids_in_engine.py::test_greedy_tokens_are_those_of_transformers",
    "models/test_hybrids_in_engine.py::test_preempted_requests_write_the_same_tokens",
)
DRAFT_MODEL = held("draft_model")
DRAFT_HEAD = promised(
    "runtime/test_draft_head.py::test_drafts_are_those_of_the_head_alone",
    "e2e/test_draft_heads.py::test_answers_are_those_without_drafts",
)
FEATURES = promised(
    "features/steering/test_tokens.py::test_tokens_are_those_of_a_hook",
    "features/steering/test_tokens.py::test_tokens_over_two_ranks_are_those_of_a_hook",
)
LINE_COSTS = promised(
    "runtime/test_line_costs.py::"
    "test_the_median_of_some_replays_is_taken_for_each_number_of_lines_that_a_step_may_have",
    "engine/test_speculation.py::test_the_cost_of_lines_is_learned_if_it_was_not_measured",
)
DRAFT_COSTS = promised(
    "runtime/test_worker.py::test_the_time_of_a_draft_is_measured",
    "engine/test_speculation.py::test_the_time_of_a_draft_model_counts",
)
PROMPT_RATE = promised(
    "engine/test_slow_devices.py::test_a_long_prompt_is_computed_in_steps_of_some_seconds",
    "engine/test_slow_devices.py::test_other_devices_get_what_their_budget_allows",
)
ENCODERS = promised(
    "models/test_encoders.py::test_an_encoder_embeds_by_the_mean_of_its_states",
    "models/test_encoders.py::test_part_of_a_prompt_is_refused",
)
HIDDEN_TAILS = promised(
    "models/test_late_interaction.py::test_tokens_that_fill_a_query_are_not_seen"
)
M3 = promised("models/test_late_interaction.py::test_bge_m3_has_three_outputs")

CLAUSES: Marks = {
    "module": {"token ids stay": held("ids_stay"), "order of submission": held("order"), "*": TOLD},
    "ComponentRef": TOLD,
    "QuantizationRef": TOLD,
    "ExecutorConfig": promised(
        "config/test_config.py::test_every_setting_of_an_executor_is_that_of_the_config",
        by=("limits", "capacity", "settings", "settings_used", "memory"),
    ),
    "ExecutorConfig.kv_cache_dtype": promised(
        "runtime/test_kv_scales.py::test_the_pool_holds_as_many_more_tokens_as_fp8_is_smaller",
        "runtime/test_kv_scales.py::"
        "test_a_cache_dtype_that_no_backend_keeps_is_refused_with_each_ones_reason",
        by=("settings",),
    ),
    "ExecutorConfig.kv_cache_scales": promised(
        "runtime/test_kv_scales.py::"
        "test_scales_of_a_checkpoint_are_taken_by_layer_whoever_wrote_it",
        "runtime/test_kv_scales.py::test_the_first_prompts_calibrate_and_nothing_after_them_does",
        "runtime/test_kv_scales.py::test_without_any_the_scales_are_one_and_that_is_said",
    ),
    "ExecutorConfig.cpu_memory_utilization": promised(
        "runtime/test_kv_pool.py::test_a_share_of_the_ram_is_taken_and_twice_that_for_one_sequence"
    ),
    "ExecutorConfig.state_dtype": STATES,
    "ExecutorConfig.max_drafts": held("drafts", "drafts_limits"),
    "ExecutorConfig.pooling": held("pooled_beside", "pooled_settings"),
    "ExecutorConfig.max_adapters": held("adapters", "adapter_slots", "adapter_merged"),
    "ExecutorConfig.draft_model": DRAFT_MODEL,
    "ExecutorConfig.draft_head": DRAFT_HEAD,
    "ExecutorConfig.features": FEATURES,
    "ExecutorConfig.quantization": promised(
        "models/test_quantized_checkpoints.py::"
        "test_a_quantized_checkpoint_writes_what_its_dequantized_weights_do",
        "models/test_quantization_config.py::"
        "test_what_is_asked_for_must_be_what_the_checkpoint_has",
        by=("settings",),
    ),
    "ExecutorContext": TOLD,
    "ExecutorCapabilities": {
        "later versions": TOLD,
        "`virtual_clock`": held("virtual_clock"),
        "`logprobs`": held("logprobs", "prompt_logprobs"),
        "`masks`": held("late", "masks"),
        "`samples`": held("sampling", "seed", "returned_rows"),
        "`draft_model`": DRAFT_MODEL,
        "`draft_head`": DRAFT_HEAD,
        "`logits_processors`": held("processors", "drafts_processors"),
    },
    "RowPooling": held("pooled", "pooled_settings"),
    "RowPooling.of_pair": promised(
        "models/test_pooling.py::test_a_stored_activation_is_that_of_pairs_and_of_labels"
    ),
    "RowPooling.seen": HIDDEN_TAILS,
    "RowPooling.second": promised(
        "models/test_encoders.py::test_the_second_text_of_a_pair_has_another_token_type"
    ),
    "PoolingCapacity": {
        "can serve `tasks`": held("pooled", "pooled_beside"),
        "numbers of an embedding": held("pooled"),
        "of a classifier": promised(
            "models/test_pooling.py::test_a_classifier_scores_by_its_head",
            "models/test_encoders.py::test_a_classifier_scores_as_transformers_does",
            by=("pooled",),
        ),
        "can generate": held("pooled_beside"),
        "sizes to which": held("pooled_settings"),
        "skips tokens": promised(
            "models/test_stored_lengths.py::"
            "test_a_classifier_skips_the_pad_token_at_the_end_as_transformers_does"
        ),
        "numbers of a token's vector": M3,
        "`RowPooling.seen`": HIDDEN_TAILS,
        "the one score": M3,
        "How a model pools": TOLD,
        "*": ENCODERS,
    },
    "PoolingCapacity.size_of": held("pooled"),
    "PoolingCapacity.needs_all_states": held("pooled_again"),
    "AdapterCapacity": held("adapters", "adapter_slots", "adapter_merged"),
    "AdapterLoad": held("adapters", "adapter_slots", "adapter_merged"),
    "ExtraContext": TOLD,
    "ExtraContext.of": TOLD,
    "Capacity.pooling": held("pooled", "pooled_beside"),
    "Capacity.adapters": held("adapters", "adapter_slots", "adapter_merged"),
    "Capacity.max_lines": held("drafts_limits", "drafts"),
    "Capacity.line_costs": LINE_COSTS,
    "Capacity.draft_costs": DRAFT_COSTS,
    "Capacity.parts": FEATURES,
    "Capacity.prompt_rate": PROMPT_RATE,
    "Capacity.not_deterministic": held("deterministic"),
    "Capacity.deterministic_window": held("deterministic"),
    "Capacity.changes_rows": held("row_changes", "deterministic"),
    "RowChanges": held("row_changes", "deterministic"),
    "Capacity": {
        "may be submitted": held("order", "capacity"),
        "it can use": held("shared_prefix"),
        "*": held("capacity", "limits"),
    },
    "NewRow": {
        "Its tokens are sampled by": held("sampling", "sampling_lists", "seed"),
        "It may have run before": held("ids_stay", "returned_rows", "processors"),
        "in its blocks already": held("cached"),
        "Of a recurrent group": STATES,
        "yields no token": held("pooled", "pooled_beside", "pooled_again"),
        "*": held("row_reuse"),
    },
    "RowCheckpoint": STATES,
    "Drafts": {
        "-1:": promised(
            "engine/test_speculation.py::test_the_executors_own_drafts_are_checked",
            "runtime/test_draft_model.py::"
            "test_drafts_of_a_row_that_are_only_partly_the_models_are_refused",
            by=("draft_model",),
        ),
        "*": held("drafts", "drafts_beside"),
    },
    "Batch.drafts": held("drafts"),
    "Batch.changes": held("row_changes", "deterministic"),
    "PoolingRows": held("pooled", "pooled_beside", "pooled_again"),
    "AdapterRows": held("adapters", "adapter_slots", "adapter_merged"),
    "Pooled": held("pooled", "pooled_failed"),
    "PromptLogprobs": held("prompt_logprobs"),
    "Capacity.part": TOLD,
    "Batch.part": TOLD,
    "Result.part": TOLD,
    "Result.values": TOLD,
    "Batch.num_lines": TOLD,
    "Batch": {
        "Drafts (speculative decoding)": held("drafts", "drafts_beside"),
        "It has 1 + d": held("drafts_sampling", "drafts_masks"),
        "The row yields the tokens": held("drafts"),
        "They become known": held("drafts", "drafts_beside"),
        "K and V of other drafts": held("drafts", "drafts_beside"),
        "Each token is what": held("drafts", "drafts_sampling", "drafts_processors"),
        "A batch with drafts is submitted": TOLD,
        "carried out in this order": held(
            "row_reuse", "new_blocks", "copies", "cached", "long_use"
        ),
        "next known token": held("ids_stay", "results"),
        "only read": held("batch_untouched", "ownership"),
        "leading blocks": held("shared_prefix"),
        "`submit` runs the model": held("late", "late_overlap"),
        "The state of a row": STATES,
        "at most one per row": STATES,
        "(group, row, page)": held("new_blocks"),
        "distinct rows": held("neighbours", "idle"),
        "*": held("chunks", "limits"),
    },
    "Masks": {"A line after": TOLD, "*": held("masks", "drafts_masks")},
    "HostLogprobs": held("logprobs", "prompt_logprobs"),
    "Result": {
        "owned by the core": held("ownership", "kept_results"),
        "began and ended": held("times", "durations"),
        "-1: none": held("results"),
        "one row per yielded token": held("logprobs", "drafts_logprobs"),
        "tokens that each row yielded": held("drafts", "drafts_beside"),
        "Given exactly if": held("drafts", "results"),
        "results of features": held("pooled", "prompt_logprobs"),
        "recorded graphs that the step replayed": TOLD,
        "why this row failed": held("results", "failed_row", "pooled_failed", "impossible_step"),
    },
    "Executor": {"One thread at a time": held("any_thread"), "*": TOLD},
    "Executor.forecast": {"Only the model's config": TOLD, "*": held("forecast")},
    "Executor.start": held("failed_start", "capacity"),
    "Executor.submit": {
        "Enqueue a step": TOLD,
        "uncollected": held("order"),
    },
    "Executor.mask_words": held("masks"),
    "Executor.sample": {
        "samples a token that its mask": held("masks", "masked_draws", "drafts_masks"),
        "Log-probabilities": held("masked_logprobs"),
        "Raises `UnsupportedError`": promised(
            "api/test_capabilities.py::test_an_executor_without_masks_refuses_to_sample",
            "structured/test_in_engine.py::test_an_executor_without_masks_is_named",
        ),
        "*": held("late", "late_overlap", "masks"),
    },
    "Executor.transfers": {
        "Return the interface": held(
            "transfers",
            "transfers_order",
            "transfers_bytes",
            "transfers_pages",
            "transfers_slabs",
        ),
        "*": TOLD,
    },
    "Executor.collect": held("order", "results"),
    "Executor.check": promised(
        "executors/test_hosts.py::test_a_host_that_is_lost_while_nothing_is_asked_is_found_by_check",
        by=("healthy", "dead_worker", "failure"),
    ),
    "Executor.stop": held("stop", "leaves_nothing", "unstarted", "failed_start"),
}
