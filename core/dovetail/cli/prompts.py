"""Prompts in a JSONL file: a string a line, or an object with a prompt, any `SamplingParams` field and an id."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.errors import RequestError
from dovetail.sampling_params import OutputKind, SamplingParams
from dovetail.where import unknown_key

if TYPE_CHECKING:
    from dovetail.front.tokenizer import TokenizedText

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
PARAMS_KEYS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "output_kind")


class Prompt(NamedTuple):
    """One request. `messages` go through the model's chat template, so they are kept until there is an engine."""

    id: str
    params: SamplingParams
    prompt: str | Mapping[str, Any] | TokenizedText = ""  # as `LLMEngine.add_request` takes it
    messages: list[dict[str, Any]] | None = None  # instead of `prompt`


def read_prompts(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[Prompt]:
    """All prompts of a file, read before anything runs; `defaults` are sampling parameters that a line may override. Empty lines are skipped.

    Raises `RequestError` naming file and line.
    """
    prompts: dict[str, Prompt] = {}
    places: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            prompt = _read_line(line, str(number), defaults)
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from None
        if prompt.id in prompts:
            raise RequestError(f"{place}: id {prompt.id!r} is taken by {places[prompt.id]}")
        prompts[prompt.id], places[prompt.id] = prompt, place
    if not prompts:
        raise RequestError(f"{name}: no prompts in it")
    return list(prompts.values())


def _read_line(line: str, default_id: str, defaults: Mapping[str, Any]) -> Prompt:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}") from None
    if isinstance(given, str):
        return Prompt(default_id, make_params(defaults), given)
    if not isinstance(given, dict):
        raise RequestError(f"expected a string or an object, got {given!r}")
    for key in given:
        if key not in (*PROMPT_KEYS, *PARAMS_KEYS, "id"):
            raise RequestError(f"{key}: {unknown_key(key, (*PROMPT_KEYS, *PARAMS_KEYS, 'id'), 'key')}")
    forms = [key for key in PROMPT_KEYS if key in given]
    if len(forms) != 1:
        raise RequestError(f"expected exactly one of {', '.join(PROMPT_KEYS)}, got {' and '.join(forms) or 'none'}")
    identity = given.get("id", default_id)
    if type(identity) not in (str, int) or identity == "":
        raise RequestError(f"id must be a string or an integer, got {identity!r}")
    params = make_params({**defaults, **{key: value for key, value in given.items() if key in PARAMS_KEYS}})
    return Prompt(str(identity), params, *_prompt_and_messages(forms[0], given[forms[0]]))


def _prompt_and_messages(form: str, value: Any) -> tuple[str | Mapping[str, Any], list[dict[str, Any]] | None]:
    if form == "prompt":
        if not isinstance(value, str):
            raise RequestError(f"prompt must be a string, got {value!r}")
        return value, None
    if not isinstance(value, list) or not value:
        raise RequestError(f"{form} must be a list with something in it, got {value!r}")
    if form == "messages":
        if not all(isinstance(message, dict) and "role" in message for message in value):
            raise RequestError(f'messages must be objects like {{"role": "user", "content": "…"}}, got {value!r}')
        return "", value
    return {"prompt_token_ids": value}, None


def make_params(fields: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` of plain JSON values, reported once at the end. Raises `RequestError`."""
    fields = dict(fields)
    if isinstance(fields.get("logit_bias"), dict):  # JSON has only strings for keys
        fields["logit_bias"] = {int(key) if str(key).lstrip("-").isdecimal() else key: bias for key, bias in fields["logit_bias"].items()}
    if not isinstance(fields.get("extra_args", {}), dict):
        raise RequestError(f"extra_args must be an object, got {fields['extra_args']!r}")
    return SamplingParams(**fields, output_kind=OutputKind.FINAL)
