"""The checks that hold the clauses of `dovetail.api.sampler`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": {
        "each row by its own": held("batch", "row"),
        "counter-based": held("seed", "row", "batch", "preemption"),
        "*": TOLD,
    },
    "RowSampling": {
        "in this order": held(
            "rules_together", "rules_before_temperature", "rules_before_filters", "filter_order"
        ),
        "0: greedy": held("greedy", "ties", "temperature"),
        "0: all": held("top_k", "top_p", "min_p"),
        "64 bits": held("seed"),
        "never sampled after the others": held("bad_words", "bans_lifted"),
        "never sampled before min_tokens": held("min_tokens", "bans_lifted"),
        "full names of the logits processors": held("not_for_it"),
        "keys that the request sets": held("extra_args"),
        "`dovetail.request.sampling_params": held(
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "many_repeats",
            "logit_bias",
            "allowed_token_ids",
        ),
        "*": TOLD,
    },
    "SampledRow": TOLD,
    "Lines": held("lines", "lines_apart"),
    "Lines.take": TOLD,
    "SampleInputs": held("read_only"),
    "RowHistory.lengths": held("lines"),
    "RowHistory": {
        "only reads them": held("read_only"),
        "prompt, then generated": held("stale_history"),
        "*": TOLD,
    },
    "SamplerContext.max_drafts": held("lines", "draft_rules"),
    "SamplerContext": held("large_vocabulary", "large_ids"),
    "SamplerCapabilities": {
        "`processors`": promised(
            "e2e/test_logits_processors.py::test_what_cannot_be_used_is_refused_at_load",
            by=("processed", "fully_processed"),
        ),
        "`cuda_graph`": held("captured", "graph", "fully_captured", "full_graph"),
        "`logprobs`": held("logprobs"),
        "`drafts`": held("lines", "draft_rules"),
        "keys of": TOLD,
        "`extra_args_model`": held("extra_args"),
        "any plain value": TOLD,
        "It is used only": TOLD,
        "*": held("hygiene.capabilities"),
    },
    "Capture": TOLD,
    "TopLogprobs": held("logprobs", "logprobs_form"),
    "SampledTokens": {
        "if any row requests": held("logprobs", "logprobs_harmless", "reused_rows"),
        "*": held("output"),
    },
    "Sampler": TOLD,
    "Sampler.prepare": held("row"),
    "Sampler.update": {
        "Forget the rows": held("reused_rows", "other_rows", "preemption", "extra_args", "forgets"),
        "*": TOLD,
    },
    "Sampler.sample": {
        "Sample one token": held("output", "dtypes", "extremes"),
        "until the sampler is called again": TOLD,
        "output position": held("seed", "lines"),
        "The history of a line": held("lines", "stale_history", "preemption"),
        "A line's result": held(
            "lines", "lines_apart", "batch", "many_calls", "process_untouched", "first_use"
        ),
        "With a `capture`": held("captured", "graph", "fully_captured", "full_graph"),
        "Each replay": held("captured_again", "fully_captured_again", "graph", "full_graph"),
        "any valid id": held("captured", "fully_captured"),
        "any number of columns": held("fully_captured", "full_graph"),
        "Raises `UnsupportedError`": promised(
            "samplers/test_changes.py::test_without_kernels_nothing_is_captured_in_full",
            "runtime/test_full_sampling.py::"
            "test_what_the_device_cannot_sample_in_a_graph_is_sampled_as_it_is",
        ),
        "A `process`": held("processed", "processed_lines", "fully_processed"),
        "those of the given logits": held("processed_logprobs"),
        "`SamplerCapabilities.processors`": promised(
            "runtime/test_logits.py::"
            "test_steps_in_which_nobody_asks_replay_what_they_do_without_processors",
            by=("fully_processed",),
        ),
        "replays that graph": promised(
            "runtime/test_logits.py::test_tokens_in_graphs_are_those_without"
        ),
    },
    "Sampler.capture_for": held("capturable", "captured", "fully_captured"),
}
