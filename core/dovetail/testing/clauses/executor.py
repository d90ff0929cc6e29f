"""The checks that hold the clauses of `dovetail.api.executor`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

NO_STATES = (
    "no model of the suite has recurrent layers; models' suites and the engine's own tests do"
)

CLAUSES: Marks = {
    "module": {"token ids stay": held("ids_stay"), "order of submission": held("order"), "*": TOLD},
    "ComponentRef": TOLD,
    "QuantizationRef": TOLD,
    "ExecutorConfig": held("limits", "capacity", but="only lengths and sizes are tested"),
    "ExecutorConfig.kv_cache_dtype": unchecked(
        "the suite's executors keep K and V in the dtype of the activations"
    ),
    "ExecutorConfig.kv_cache_scales": unchecked("no cache of the suite's executors has scales"),
    "ExecutorConfig.state_dtype": unchecked(NO_STATES),
    "ExecutorConfig.max_drafts": held("drafts", "drafts_limits"),
    "ExecutorConfig.pooling": held("pooled_beside", "pooled_settings"),
    "ExecutorConfig.max_adapters": held("adapters", "adapter_slots", "adapter_merged"),
    "ExecutorConfig.draft_model": unchecked("no executor of the suite runs one"),
    "ExecutorConfig.draft_head": unchecked("no executor of the suite runs one"),
    "ExecutorConfig.features": unchecked("the suite gives none; the engine's own tests do"),
    "ExecutorConfig.quantization": unchecked("the suite's checkpoint is plain"),
    "ExecutorContext": TOLD,
    "ExecutorCapabilities": {
        "later versions": TOLD,
        "`virtual_clock`": held("virtual_clock"),
        "`logprobs`": held("logprobs", "prompt_logprobs"),
        "`masks`": held("late", "masks"),
        "`samples`": held("sampling"),
        "`draft_model`": unchecked("no executor of the suite runs one"),
        "`draft_head`": unchecked("no executor of the suite runs one"),
        "`logits_processors`": unchecked("the suite makes none; the engine's own tests do"),
    },
    "RowPooling": held("pooled", "pooled_settings"),
    "RowPooling.of_pair": unchecked("most models activate both alike"),
    "RowPooling.second": unchecked("no model of the suite has token types"),
    "PoolingCapacity": {
        "can serve `tasks`": held("pooled", "pooled_beside"),
        "numbers of an embedding": held("pooled"),
        "of a classifier": held("pooled", but="the suite's model isn't one"),
        "can generate": held("pooled_beside"),
        "sizes to which": held("pooled_settings"),
        "skips tokens": unchecked("the core leaves them out before an executor sees them"),
        "*": unchecked("no model of the suite attends to later tokens"),
    },
    "PoolingCapacity.needs_all_states": held("pooled_again"),
    "AdapterCapacity": held("adapters", "adapter_slots", "adapter_merged"),
    "AdapterLoad": held("adapters", "adapter_slots", "adapter_merged"),
    "ExtraContext": TOLD,
    "ExtraContext.of": TOLD,
    "Capacity.pooling": held("pooled", "pooled_beside"),
    "Capacity.adapters": held("adapters", "adapter_slots", "adapter_merged"),
    "Capacity.max_lines": held("drafts_limits", "drafts"),
    "Capacity.line_costs": unchecked("suites don't judge times"),
    "Capacity.draft_costs": unchecked("suites don't judge times"),
    "Capacity.parts": unchecked("the suite's executors have no features of their own"),
    "Capacity.prompt_rate": unchecked("suites don't judge times"),
    "Capacity": {
        "may be submitted": held("order", "capacity"),
        "it can use": held("shared_prefix"),
        "*": held("capacity", "limits"),
    },
    "NewRow": {
        "Its tokens are sampled by": held("sampling"),
        "It may have run before": held("ids_stay"),
        "in its blocks already": held("cached"),
        "Of a recurrent group": unchecked(NO_STATES),
        "yields no token": held("pooled", "pooled_beside", "pooled_again"),
        "*": held("row_reuse"),
    },
    "RowCheckpoint": unchecked(NO_STATES),
    "Drafts": {
        "-1:": unchecked("no executor of the suite runs a draft model"),
        "*": held("drafts", "drafts_beside"),
    },
    "Batch.drafts": held("drafts"),
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
        "Each token is what": held("drafts", "drafts_sampling"),
        "A batch with drafts is submitted": TOLD,
        "carried out in this order": held("row_reuse", "new_blocks", "copies", "cached"),
        "next known token": held("ids_stay", "results"),
        "only read": held("batch_untouched", "ownership"),
        "leading blocks": held("shared_prefix"),
        "`submit` runs the model": held("late", "late_overlap"),
        "The state of a row": unchecked(NO_STATES),
        "at most one per row": unchecked(NO_STATES),
        "(group, row, page)": held("new_blocks"),
        "distinct rows": held("neighbours", "idle"),
        "*": held("chunks", "limits"),
    },
    "Masks": {"A line after": TOLD, "*": held("masks", "drafts_masks")},
    "HostLogprobs": held("logprobs", "prompt_logprobs"),
    "Result": {
        "owned by the core": held("ownership"),
        "began and ended": held(
            "times", "durations", but="a duration fails only below a hundredth of the elapsed time"
        ),
        "-1: none": held("results"),
        "one row per yielded token": held("logprobs", "drafts_logprobs"),
        "tokens that each row yielded": held("drafts", "drafts_beside"),
        "Given exactly if": held("drafts", "results"),
        "results of features": held("pooled", "prompt_logprobs"),
        "recorded graphs that the step replayed": TOLD,
        "why this row failed": held(
            "results",
            "failed_row",
            "pooled_failed",
            but="detecting NaN isn't required of rows that sample, only that no other row is "
            "reported",
        ),
    },
    "Executor": TOLD,
    "Executor.start": held("failed_start", "capacity"),
    "Executor.submit": {
        "as soon as possible": unchecked("suites don't judge times"),
        "uncollected": held("order"),
    },
    "Executor.mask_words": held("masks"),
    "Executor.sample": {
        "samples a token that its mask": held("masks", "masked_draws", "drafts_masks"),
        "Log-probabilities": held("masked_logprobs"),
        "Raises `UnsupportedError`": unchecked(
            "the default does, and the core doesn't call it without the capability `masks`"
        ),
        "*": held("late", "late_overlap", "masks"),
    },
    "Executor.collect": held("order", "results"),
    "Executor.check": held(
        "healthy", "dead_worker", "failure", but="a lost device can't be simulated"
    ),
    "Executor.stop": held("stop", "leaves_nothing", "failed_start"),
}
