"""Holds what one request asks for against `Limits`, at the door: `LLMEngine` calls it before anything is made of the request."""

from __future__ import annotations

from typing import Any

from dovetail.checks import is_larger
from dovetail.errors import RequestError
from dovetail.limits import Limits
from dovetail.sampling_params import SamplingParams
from dovetail.structured import Structured

_COUNTS = {  # of lists and mappings: what an error calls their length, and its limit
    "stop": ("the number of strings", "max_stop_strings"),
    "stop_sequences": ("the number of strings", "max_stop_strings"),  # Anthropic's name
    "stop_token_ids": ("their number", "max_stop_token_ids"),
    "bad_words": ("their number", "max_bad_words"),
    "logit_bias": ("the number of tokens", "max_logit_bias"),
    "allowed_token_ids": ("their number", "max_allowed_token_ids"),
}


def check_counts(asked: Any, limits: Limits) -> None:
    """Raise `RequestError` if a list of `SamplingParams`, or of an HTTP body with fields of the same names, is too long. Looks at no entry, so that a
    body of megabytes is refused before anything is made of it."""
    for name, (what, limit) in _COUNTS.items():
        value = getattr(asked, name, None)
        if value is not None and not isinstance(value, str):
            at_most(f"{name}: {what}", len(value), limits, limit)


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raises `RequestError` naming the parameter, the limit and its value. `max_bad_word_tokens` is known only later."""
    at_most("n", params.n, limits, "max_n")
    check_counts(params, limits)
    if params.stop:
        at_most("stop: the characters of all strings together", sum(map(len, params.stop)), limits, "max_stop_chars")
    if params.bad_words:
        at_most("bad_words: the characters of all together", sum(map(len, params.bad_words)), limits, "max_bad_word_chars")
    if params.logprobs:
        at_most("logprobs", params.logprobs, limits, "max_logprobs")
    if params.prompt_logprobs:
        at_most("prompt_logprobs", params.prompt_logprobs, limits, "max_logprobs")
    if params.structured is not None:
        check_structured(Structured.of(params.structured), limits)
    check_size("extra_args", params.extra_args, limits)


def check_structured(structured: Structured, limits: Limits) -> None:
    """Hold the rule of an answer against its limits. Whether it can be compiled is known only later."""
    at_most(f"structured.{structured.kind}: its characters", len(structured.text), limits, "max_grammar_chars")
    at_most(f"structured.{structured.kind}: brackets within each other", structured.depth(), limits, "max_grammar_depth")
    if structured.after is not None:
        at_most("structured.after: its characters", len(structured.after), limits, "max_stop_chars")


def check_size(name: str, value: Any, limits: Limits) -> None:
    """For `extra_args` and `extra`. Raises `RequestError`."""
    if value and is_larger(value, limits.max_extra_size):
        raise RequestError(f"{name}: all items and characters in it must be at most {limits.max_extra_size} (limits.max_extra_size) together")


def at_most(what: str, value: int, limits: Limits, limit: str) -> None:
    """Raises `RequestError` if `value` is more than that limit."""
    most = getattr(limits, limit)
    if most is not None and value > most:
        raise RequestError(f"{what} must be at most {most} (limits.{limit}), got {value}")
