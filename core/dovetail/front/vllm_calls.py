"""vLLM-only arguments of methods, and the positions of vLLM's arguments.

One table serves all methods: vLLM's default is accepted, and any other value is rejected with an
alternative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from dovetail.errors import RequestError, shown
from dovetail.front.vllm_args import SOFT_PROMPTS
from dovetail.front.vllm_groups import MACHINES
from dovetail.front.vllm_only import VllmOnly
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import BEAM_SEARCH, SamplingParams

_OBSERVERS = "write an observer plugin, and add its name to observers"
_TOKENIZED = (
    "set truncate_prompt_tokens in the request's parameters; for other options pass token ids"
)
_IN_PROMPT = "only requests that generate take images, in the prompt: see docs/images.md"

CALL_TABLE: Mapping[str, VllmOnly] = {
    "prompt_adapter_request": VllmOnly(SOFT_PROMPTS),
    "use_beam_search": VllmOnly(BEAM_SEARCH, (False,)),
    "guided_options_request": VllmOnly("set structured_outputs in the sampling parameters"),
    "tokenization_kwargs": VllmOnly(_TOKENIZED, ({},)),
    "chat_template_content_format": VllmOnly(
        "it is detected from the template: leave it out", ("auto",)
    ),
    "mm_processor_kwargs": VllmOnly(_IN_PROMPT, ({},)),
    "multi_modal_data": VllmOnly(_IN_PROMPT, ({},)),
    "trace_headers": VllmOnly("pass them to LLMEngine.add_request", ({},)),
    "data_parallel_rank": VllmOnly(MACHINES),
    "prompt_text": VllmOnly("pass the text or its token ids as the prompt"),
    "reasoning_ended": VllmOnly("set structured={'after': …} to the text that ends the reasoning"),
    "reasoning_parser_kwargs": VllmOnly("only the server parses text", ({},)),
    "session_id": VllmOnly("pass `client` to LLMEngine.add_request: schedulers can read it"),
    "kv_hints": VllmOnly("the prefix cache evicts blocks automatically: leave it out"),
    "usage_context": VllmOnly("usage isn't reported: leave it out", advisory=True),
    "stat_loggers": VllmOnly(_OBSERVERS, ([], {})),
    "enable_multiprocessing": VllmOnly("the engine runs in the calling process", (False,)),
    "start_engine_loop": VllmOnly("the engine starts its thread: leave it out", (True,)),
}

# arguments that follow our positional ones, in vLLM's order
POSITIONS: Mapping[str, Sequence[str]] = {
    "chat": (
        "lora_request",
        "chat_template",
        "chat_template_content_format",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "chat_template_kwargs",
        "tokenization_kwargs",
        "mm_processor_kwargs",
    ),
    "beam_search": ("lora_request", "use_tqdm", "concurrency_limit"),
    "generate": ("lora_request", "trace_headers", "priority", "data_parallel_rank"),
    "encode": ("lora_request", "trace_headers", "priority", "tokenization_kwargs"),
    "add_request": ("lora_request", "tokenization_kwargs", "trace_headers", "priority"),
}
_TRACE_HEADERS = {"traceparent", "tracestate"}


def check_call(
    method: str,
    others: Mapping[str, Any],
    kind: type[SamplingParams | PoolingParams] = SamplingParams,
) -> None:
    """Reject vLLM-only arguments unless they have vLLM's default.

    `kind` is the class of the call's parameters. Raises `RequestError`, also for unknown names.
    """
    for name, value in others.items():
        row = CALL_TABLE.get(name)
        if row is None:
            known = name in {field.name for field in fields(kind)}
            given = "sampling_params" if kind is SamplingParams else "pooling_params"
            field = f"it is a field of {kind.__name__}: {given}={kind.__name__}({name}=…)"
            hint = field if known else "unknown argument"
            raise RequestError(f"{method}(): {name[:80]}: {hint}")
        if not row.accepts(value):
            raise RequestError(f"{method}(): {name}={shown(value)}: {row.instead}")


def by_position(method: str, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return `named` with vLLM's further positional arguments `given` by name.

    Raises `RequestError` for too many arguments, and for one that is given twice.
    """
    names = POSITIONS[method]
    if method == "add_request" and _is_older(given):
        names = ("lora_request", "trace_headers", "prompt_adapter_request", "priority")
    if len(given) > len(names):
        raise RequestError(
            f"{method}() takes at most {len(names)} more arguments by position, "
            f"{', '.join(names)}, got {len(given)}"
        )
    placed = dict(zip(names, given, strict=False))
    if twice := placed.keys() & named.keys():
        raise RequestError(f"{method}(): {min(twice)} is given by position and by name")
    return {**placed, **named}


def _is_older(given: Sequence[Any]) -> bool:
    """Return True for the order of vLLM releases without `tokenization_kwargs`: headers are
    second."""
    second = given[1] if len(given) > 1 else None
    return isinstance(second, Mapping) and bool(second.keys() & _TRACE_HEADERS)
