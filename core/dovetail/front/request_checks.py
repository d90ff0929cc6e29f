"""Validation of a request against `Limits`, before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.api.json_files import MAX_DEPTH, is_deep
from dovetail.base.checks import is_larger
from dovetail.config.limits import MAX_CUT_CHARS, Limits
from dovetail.end_reason import EndReason
from dovetail.errors import RequestError, shown
from dovetail.front.tokenizer import Tokenizer
from dovetail.request.sampling_params import SamplingParams
from dovetail.request.structured import Structured

_COUNTS = {  # of lists and mappings: what an error calls their length, and its limit
    "stop": ("the number of strings", "max_stop_strings"),
    "stop_sequences": ("the number of strings", "max_stop_strings"),  # Anthropic's name
    "stop_token_ids": ("their number", "max_stop_token_ids"),
    "bad_words": ("their number", "max_bad_words"),
    "logit_bias": ("the number of tokens", "max_logit_bias"),
    "allowed_token_ids": ("their number", "max_allowed_token_ids"),
}


def check_counts(asked: Any, limits: Limits) -> None:
    """Raise `RequestError` if a list in `SamplingParams`, or in an HTTP body with fields of the
    same names, is too long. Reads no entry: a body of megabytes is rejected early."""
    for name, (what, limit) in _COUNTS.items():
        value = getattr(asked, name, None)
        if value is not None and not isinstance(value, str):
            at_most(f"{name}: {what}", len(value), limits, limit)


def check_template_chars(text: str, limits: Limits) -> None:
    """Raise `RequestError` if a chat template is too long.

    Call it before anything else reads one of a request.
    """
    if (chars := len(text)) > (most := limits.max_template_chars):
        raise RequestError(
            f"a chat template must have at most {most:,} characters (limits.max_template_chars), "
            f"got {chars:,}"
        )


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raise `RequestError` naming the parameter, the limit and its value.

    `max_bad_word_tokens` is checked later.
    """
    at_most("n", params.n, limits, "max_n")
    check_counts(params, limits)
    if params.stop:
        at_most(
            "stop: the characters of all strings together",
            sum(map(len, params.stop)),
            limits,
            "max_stop_chars",
        )
    if params.bad_words:
        at_most(
            "bad_words: the characters of all together",
            sum(map(len, params.bad_words)),
            limits,
            "max_bad_word_chars",
        )
    if params.logprobs:
        at_most("logprobs", params.logprobs, limits, "max_logprobs")
    if params.prompt_logprobs:
        at_most("prompt_logprobs", params.prompt_logprobs, limits, "max_logprobs")
    if params.structured is not None:
        check_structured(Structured.of(params.structured), limits)
    _check_size("extra_args", params.extra_args, limits)
    _check_size("logits_processors", params.logits_processors, limits)


def check_with_images(params: SamplingParams, *, always: bool = False) -> None:
    """Raise `RequestError` for parameters that a prompt with images can't be served with.
    `always`: all requests are deterministic."""
    if params.deterministic or always:
        raise RequestError("deterministic: not with images, whose encoders compute them together")
    if params.truncate_prompt_tokens is not None:
        raise RequestError("truncate_prompt_tokens: a prompt with images can't be truncated")


def check_structured(structured: Structured, limits: Limits) -> None:
    """Check a structured-output spec against its limits.

    Whether it compiles is known only later.
    """
    if structured.kind is not None:
        at_most(
            f"structured.{structured.kind}: its characters",
            len(structured.text),
            limits,
            "max_grammar_chars",
        )
        at_most(
            f"structured.{structured.kind}: brackets within each other",
            structured.depth(),
            limits,
            "max_grammar_depth",
        )
    if structured.after is not None:
        at_most("structured.after: its characters", len(structured.after), limits, "max_stop_chars")


def check_prompt_chars(
    chars: int, limits: Limits, max_model_len: int, tokenizer: Tokenizer, *, cut: bool = False
) -> None:
    """Raise `RequestError` if a prompt's text of `chars` characters is too long to be tokenized.

    `cut`: `truncate_prompt_tokens` cuts it to what fits.
    """
    most = limits.max_prompt_chars
    if most is None and chars > max_model_len:  # otherwise the vocabulary isn't searched
        most = _most_chars(max_model_len, tokenizer, cut=cut)
    if most is not None and chars > most:
        raise RequestError(
            f"the prompt has {chars} characters: at most {most} are tokenized "
            "(limits.max_prompt_chars)"
        )


def _most_chars(max_model_len: int, tokenizer: Tokenizer, *, cut: bool) -> int:
    fits = max_model_len * tokenizer.longest_token
    return max(fits, MAX_CUT_CHARS) if cut else fits


def check_conversation_chars(
    source: Any, limits: Limits, max_model_len: int, tokenizer: Tokenizer, *, cut: bool = False
) -> None:
    """Raise `RequestError` if a conversation is too long to be rendered.

    `source`: its messages, tools and variables. They may have twice the characters of a prompt,
    since they hold roles, too, and text that the chat template leaves out. `cut`: as in
    `check_prompt_chars`.
    """
    most = limits.max_prompt_chars
    if most is None and _has_more_chars(source, 2 * max_model_len):
        most = _most_chars(max_model_len, tokenizer, cut=cut)
    if most is not None and _has_more_chars(source, 2 * most):
        raise RequestError(
            f"the prompt's conversation has more than {2 * most} characters: of a prompt, at most "
            f"{most} are tokenized (limits.max_prompt_chars)"
        )


def _has_more_chars(value: Any, most: int) -> bool:
    """Return True if a value holds more than `most` characters and items, nested ones included.

    Unlike `is_larger` it leaves out keys, which templates seldom write.
    """
    left = [value]
    counted = 0
    while left and counted <= most:
        one = left.pop()
        if isinstance(one, Mapping | Sequence):
            counted += len(one)
            if counted <= most and not isinstance(one, str | bytes | bytearray | memoryview):
                left += one.values() if isinstance(one, Mapping) else one
    return counted > most


def check_extra(extra: Any, limits: Limits) -> None:
    """Raise `RequestError` if `extra` isn't a mapping, or is too large or nested too deeply.

    Reads no more of it than the limit allows.
    """
    if extra is None:
        return
    if not isinstance(extra, Mapping):
        raise RequestError(
            "extra must map distributions to what their components want to know, got "
            f"{shown(extra)}"
        )
    _check_size("extra", extra, limits)
    if is_deep(extra):
        raise RequestError(f"extra: more than {MAX_DEPTH} containers within each other")


def _check_size(name: str, value: Any, limits: Limits) -> None:
    if value and is_larger(value, limits.max_extra_size):
        raise RequestError(
            f"{name}: all items and characters in it must be at most {limits.max_extra_size} "
            "(limits.max_extra_size) together"
        )


def check_name(what: str, name: str, limits: Limits) -> None:
    """Raise `RequestError` if a name is too long."""
    at_most(f"{what}: its characters", len(name), limits, "max_name_chars")


def at_most(
    what: str,
    value: int,
    limits: Limits,
    limit: str,
    reason: EndReason = EndReason.INVALID,
) -> None:
    """Raise `RequestError` for that reason if `value` exceeds that limit."""
    most = getattr(limits, limit)
    if most is not None and value > most:
        raise RequestError(f"{what} must be at most {most} (limits.{limit}), got {value}", reason)
