"""Errors for methods of vLLM's and nano-vllm's engines that Dovetail lacks, with alternatives."""

from __future__ import annotations

from typing import Any

from dovetail.errors import UnsupportedError

METHOD_TABLE = {  # method or attribute -> alternative
    **dict.fromkeys(
        ("sleep", "wake_up", "is_sleeping"),
        "engines don't sleep: `close()` releases the device's memory; then create a new engine",
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "observers=['perfetto'] writes a trace of steps and requests from the beginning",
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "code that accesses the model belongs in a plugin: write a model, sampler or executor",
    ),
    **dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused"),
        "engines don't pause: abort the requests, and submit them again later",
    ),
    **dict.fromkeys(
        (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ),
        "weights are loaded once: close the engine, and create one with the new checkpoint",
    ),
    **dict.fromkeys(
        ("reset_mm_cache", "reset_encoder_cache"),
        "the rows of an image are known by its pixels: leave it out",
    ),
    **dict.fromkeys(
        ("enqueue", "wait_for_completion"),
        "`generate` takes a list of prompts; `stream` yields outputs as they are generated",
    ),
    "renderer": "`generate` takes the text, or its token ids",
    "preprocess_chat": "the tokenizer renders chat templates: "
    "get_tokenizer().apply_chat_template(…)",
    "set_tokenizer": "pass it when the engine is created: tokenizer",
    "get_world_size": "get_parallel_config().world_size of an LLMEngine",
    **dict.fromkeys(
        ("model_config", "vllm_config"),
        "use get_model_config() and get_scheduler_config() of an LLMEngine",
    ),
    **dict.fromkeys(
        ("engine_core", "model_executor"),
        "internal to vLLM; an LLMEngine has `core`, `config` and `capacity`",
    ),
}
NANOVLLM_TABLE = dict.fromkeys(  # of nano-vllm's `LLM`, which is also the engine
    ("add_request", "step", "is_finished", "exit"),
    "use dovetail.compat.nanovllm.LLM; or add_request, step and has_unfinished_requests of "
    "`llm_engine`",
)


class MissingMethodError(UnsupportedError, AttributeError):
    """A method of another engine that Dovetail lacks. An `AttributeError`: `hasattr` is false."""


class SaysWhatIsMissing:
    """Mixin that raises `MissingMethodError` for the names in the tables."""

    def __getattr__(self, name: str) -> Any:
        instead = METHOD_TABLE.get(name) or NANOVLLM_TABLE.get(name)
        if instead is not None:
            raise MissingMethodError(f"{type(self).__name__}.{name}: {instead}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
