"""Error messages for methods of vLLM's and nano-vllm's engines that Dovetail's engines lack. Each says what to use instead."""

from __future__ import annotations

from typing import Any

from dovetail.errors import UnsupportedError

METHOD_TABLE = {  # a method or attribute of their engines -> what to do instead
    **dict.fromkeys(
        ("sleep", "wake_up", "is_sleeping"),
        "nothing sleeps: `close()` gives the device's memory back; make a new engine then",
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "observers=['perfetto'] writes a trace of steps and requests from the beginning",
    ),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "code that works on the model belongs into a plugin: write a model, sampler or executor",
    ),
    **dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused"),
        "nothing pauses: abort the requests, and send them again later",
    ),
    **dict.fromkeys(
        (
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ),
        "weights are loaded once: close the engine, and make one of the new checkpoint",
    ),
    **dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), "models of text alone are served"),
    **dict.fromkeys(
        ("enqueue", "wait_for_completion"),
        "`generate` takes a list of prompts; `stream` returns at once, and its outputs as they come",
    ),
    "renderer": "`generate` takes the text, or its token ids",
    "preprocess_chat": "the tokenizer renders chat templates: get_tokenizer().apply_chat_template(…)",
    "set_tokenizer": "name it when the engine is made: tokenizer",
    "get_world_size": "get_parallel_config().world_size of an LLMEngine",
    **dict.fromkeys(
        ("model_config", "vllm_config"),
        "an LLMEngine's get_model_config() and get_scheduler_config() tell such facts",
    ),
    **dict.fromkeys(
        ("engine_core", "model_executor"),
        "that is inside of vLLM; an LLMEngine has `core`, `config` and `capacity`",
    ),
}
NANOVLLM_TABLE = dict.fromkeys(  # those of nano-vllm's `LLM`, which is the engine itself
    ("add_request", "step", "is_finished", "exit"),
    "dovetail.compat.nanovllm.LLM has nano-vllm's methods; an LLM's `llm_engine` has add_request, step and has_unfinished_requests",
)


class MissingMethodError(UnsupportedError, AttributeError):
    """A method of another engine that isn't there; the text says what to do instead. `hasattr` is false."""


class SaysWhatIsMissing:
    """Base of classes that answer the names in the tables with a sentence."""

    def __getattr__(self, name: str) -> Any:
        instead = METHOD_TABLE.get(name) or NANOVLLM_TABLE.get(name)
        if instead is not None:
            raise MissingMethodError(f"{type(self).__name__}.{name}: {instead}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
