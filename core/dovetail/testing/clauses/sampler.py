"""The checks that hold the clauses of `dovetail.api.sampler`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

UNPROCESSED = unchecked("the suite makes no logits processors; the engine's own tests do")

CLAUSES: Marks = {
    "module": {
        "each row by its own": held("batch", "row"),
        "counter-based": held("seed", "row", "batch", "preemption"),
        "*": TOLD,
    },
    "RowSampling": {
        "in this order": held("rules_together", "rules_before_temperature", "filter_order"),
        "0: greedy": held("greedy", "ties", "temperature"),
        "0: all": held("top_k", "top_p", "min_p"),
        "64 bits": held("seed"),
        "never sampled after the others": held("bad_words", "bans_lifted"),
        "never sampled before min_tokens": held("min_tokens", "bans_lifted"),
        "full names of the logits processors": TOLD,
        "keys that the request sets": held(
            "extra_args", but="the meaning of a key is up to the sampler"
        ),
        "`dovetail.request.sampling_params": held(
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
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
    "SamplerContext.max_drafts": held("lines"),
    "SamplerContext": held(
        "large_vocabulary", but="vocabularies of more than 147,456 tokens aren't tested"
    ),
    "SamplerCapabilities": {
        "`processors`": UNPROCESSED,
        "`cuda_graph`": held(
            "captured",
            "graph",
            "fully_captured",
            "full_graph",
            but="without a GPU no graph is captured",
        ),
        "`logprobs`": held("logprobs"),
        "`drafts`": held("lines"),
        "keys of": TOLD,
        "`extra_args_model`": held("extra_args"),
        "any plain value": TOLD,
        "It is used only": TOLD,
        "*": held("hygiene.capabilities"),
    },
    "Capture": TOLD,
    "TopLogprobs": held("logprobs", but="dtypes are checked by the executor's suite"),
    "SampledTokens": {
        "if any row requests": held("logprobs", "logprobs_harmless", "reused_rows"),
        "*": held("output"),
    },
    "Sampler": TOLD,
    "Sampler.prepare": held("row"),
    "Sampler.update": {
        "Forget the rows": held("reused_rows", "preemption", "extra_args"),
        "*": TOLD,
    },
    "Sampler.sample": {
        "Sample one token": held("output", "dtypes", "extremes"),
        "until the sampler is called again": TOLD,
        "output position": held("seed", "lines"),
        "The history of a line": held("lines", "stale_history", "preemption"),
        "A line's result": held("lines", "lines_apart", "batch"),
        "With a `capture`": held(
            "captured",
            "graph",
            "fully_captured",
            "full_graph",
            but="without a GPU no graph is captured",
        ),
        "Each replay": held("captured_again", "fully_captured_again", "graph", "full_graph"),
        "any valid id": held("captured", "fully_captured"),
        "any number of columns": held("fully_captured", "full_graph"),
        "Raises `UnsupportedError`": unchecked("a device that lacks a feature can't be simulated"),
        "A `process`": UNPROCESSED,
        "those of the given logits": UNPROCESSED,
        "`SamplerCapabilities.processors`": UNPROCESSED,
        "replays that graph": UNPROCESSED,
    },
    "Sampler.capture_for": held("capturable", "captured", "fully_captured"),
}
