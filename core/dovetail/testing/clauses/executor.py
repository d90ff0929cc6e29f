"""The checks that hold the clauses of `dovetail.api.executor`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

NO_STATES = "no model of the suite has recurrent layers; models' suites and the engine's own tests do"

CLAUSES: Marks = {
    "module": {"token ids stay": held("ids_stay"), "order of submission": held("order"), "*": TOLD},
    "ComponentRef": TOLD,
    "QuantizationRef": TOLD,
    "ExecutorConfig": held("limits", "capacity", but="only lengths and sizes are tested"),
    "ExecutorConfig.kv_cache_dtype": unchecked("the suite's executors keep K and V in the dtype of the activations"),
    "ExecutorConfig.kv_cache_scales": unchecked("no cache of the suite's executors has scales"),
    "ExecutorConfig.state_dtype": unchecked(NO_STATES),
    "ExecutorConfig.quantization": unchecked("the suite's checkpoint is plain"),
    "ExecutorContext": TOLD,
    "ExecutorCapabilities": {
        "`virtual_clock`": held("virtual_clock"),
        "`logprobs`": held("logprobs", "prompt_logprobs"),
        "`masks`": held("late", "masks"),
        "`samples`": held("sampling"),
        "*": held("hygiene.capabilities"),
    },
    "Capacity": {"may be submitted": held("order", "capacity"), "it can use": held("shared_prefix"), "*": held("capacity", "limits")},
    "NewRow": {
        "Its tokens are sampled by": held("sampling"),
        "It may have run before": held("ids_stay"),
        "in its blocks already": held("cached"),
        "Of a recurrent group": unchecked(NO_STATES),
        "*": held("row_reuse"),
    },
    "RowCheckpoint": unchecked(NO_STATES),
    "Batch": {
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
    "Masks": held("masks"),
    "HostLogprobs": held("logprobs", "prompt_logprobs"),
    "Result": {
        "owned by the core": held("ownership"),
        "began and ended": held("times", "durations", but="a duration fails only below a hundredth of the elapsed time"),
        "-1: none": held("results"),
        "one row per row": held("logprobs"),
        "index in the batch -> logprobs": held("prompt_logprobs"),
        "why this row failed": held("results", "failed_row", but="detecting a row with NaN isn't required, only that no other row is reported"),
    },
    "Executor": TOLD,
    "Executor.start": held("failed_start", "capacity"),
    "Executor.submit": {"as soon as possible": unchecked("suites don't judge times"), "uncollected": held("order")},
    "Executor.mask_words": held("masks"),
    "Executor.sample": {
        "samples one that its mask": held("masks", "masked_draws"),
        "Log-probabilities": held("masked_logprobs"),
        "Raises `UnsupportedError`": unchecked("the default does, and the core doesn't call it without the capability `masks`"),
        "*": held("late", "late_overlap", "masks"),
    },
    "Executor.collect": held("order", "results"),
    "Executor.check": held("healthy", "dead_worker", "failure", but="a lost device can't be simulated"),
    "Executor.stop": held("stop", "leaves_nothing", "failed_start"),
}
