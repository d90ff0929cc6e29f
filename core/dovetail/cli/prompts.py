"""Reading prompts from a JSONL file: each line is a string, or an object with a prompt, any
`SamplingParams` field, any of `FIELD_KEYS` and an id."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.api.json_files import MAX_DEPTH, is_deep
from dovetail.base.bounded_json import WrongJsonError, read_json
from dovetail.base.where import Where, unknown_key
from dovetail.errors import RequestError, shown
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import BEAM_NAMES, BEAM_SEARCH, OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.front.media.prompts import ImagePrompt
    from dovetail.front.tokenizer import TokenizedText

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
PLAIN_TEXT = "quote each line, or use --plain for a file whose lines are prompts as they stand"
# one spelling of each number, so that no two keys mean the same token
_INTEGER = re.compile("0|-?[1-9][0-9]{0,19}")
FIELD_KEYS = ("extra", "predicted_tokens")  # for components; arguments of `LLMEngine.add_request`
PARAMS_KEYS = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name != "output_kind"
)


class Prompt(NamedTuple):
    """One request of a file. `messages` need the model's chat template, so they are kept until
    there is an engine."""

    id: str
    params: SamplingParams
    # as `LLMEngine.add_request` takes it
    prompt: str | Mapping[str, Any] | TokenizedText | ImagePrompt = ""
    messages: list[dict[str, Any]] | None = None  # instead of `prompt`
    fields: Mapping[str, Any] = MappingProxyType({})  # those of `FIELD_KEYS` that are given


def read_prompts(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[Prompt]:
    """All prompts of a file, read before anything runs; `defaults` are sampling parameters and
    `FIELD_KEYS` that a line may override. Empty lines are skipped.

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
            raise RequestError(f"{place}: id {shown(prompt.id)} is taken by {places[prompt.id]}")
        prompts[prompt.id], places[prompt.id] = prompt, place
    if not prompts:
        raise RequestError(f"{name}: no prompts in it")
    return list(prompts.values())


def read_plain(lines: Iterable[str], name: str, defaults: Mapping[str, Any]) -> list[Prompt]:
    """Return each line that isn't empty as a prompt, unchanged. Raises `RequestError` if there is
    none."""
    params, fields = make_params_and_fields(defaults)
    prompts = [
        Prompt(str(number), params, line, fields=fields)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise RequestError(f"{name}: no prompts in it")
    return prompts


def as_chat(prompt: Prompt, images: Sequence[str] = ()) -> Prompt:
    """Return the prompt with its text as a user's message, after images in these files; messages
    stay as they are. Raises `RequestError` for token ids."""
    if prompt.messages is not None:
        return prompt
    if not isinstance(prompt.prompt, str):
        raise RequestError(
            f"request {shown(prompt.id)}: --chat makes a message of a text, and this prompt is "
            f"token ids"
        )
    content: Any = prompt.prompt
    if images:
        parts = [{"type": "image", "image": name} for name in images]
        content = [*parts, {"type": "text", "text": content}]
    return prompt._replace(prompt="", messages=[{"role": "user", "content": content}])


def _read_line(line: str, default_id: str, defaults: Mapping[str, Any]) -> Prompt:
    given = parse_json(line, "" if line.lstrip().startswith(("{", "[")) else f"; {PLAIN_TEXT}")
    if isinstance(given, str):
        params, fields = make_params_and_fields(defaults)
        return Prompt(default_id, params, given, fields=fields)
    if not isinstance(given, dict):
        raise RequestError(f"expected a string or an object, got {shown(given)}; {PLAIN_TEXT}")
    known = (*PROMPT_KEYS, *PARAMS_KEYS, *FIELD_KEYS, "id")
    for key in given:
        if key not in known:
            raise RequestError(
                Where((key,)).says(
                    BEAM_SEARCH if key in BEAM_NAMES else unknown_key(key, known, "key")
                )
            )
    forms = [key for key in PROMPT_KEYS if key in given]
    if len(forms) != 1:
        raise RequestError(
            f"expected exactly one of {', '.join(PROMPT_KEYS)}, got {' and '.join(forms) or 'none'}"
        )
    identity = given.get("id", default_id)
    if type(identity) not in (str, int) or identity == "":
        raise RequestError(f"id must be a string or an integer, got {shown(identity)}")
    own = {key: value for key, value in given.items() if key in (*PARAMS_KEYS, *FIELD_KEYS)}
    params, fields = make_params_and_fields({**defaults, **own})
    return Prompt(str(identity), params, *_prompt_and_messages(forms[0], given[forms[0]]), fields)


def parse_json(line: str, hint: str = "") -> Any:
    """Return the JSON value of a line. Raises `RequestError`, also for a repeated key; `hint` ends
    what it says of a line that isn't JSON."""
    try:
        return read_json(line, object_pairs_hook=_object)
    except WrongJsonError as error:
        raise RequestError(f"{error}{hint}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = {}
    for key, value in pairs:
        if key in keys:
            raise RequestError(f"key {shown(key)} is given twice")
        keys[key] = value
    return keys


def _prompt_and_messages(
    form: str, value: Any
) -> tuple[str | Mapping[str, Any], list[dict[str, Any]] | None]:
    if form == "prompt":
        if not isinstance(value, str):
            raise RequestError(f"prompt must be a string, got {shown(value)}")
        return value, None
    if not isinstance(value, list) or not value:
        raise RequestError(f"{form} must be a list with something in it, got {shown(value)}")
    if form == "messages":
        if not all(isinstance(message, dict) and "role" in message for message in value):
            raise RequestError(
                f'messages must be objects like {{"role": "user", "content": "…"}}, got '
                f"{shown(value)}"
            )
        return "", value
    return {"prompt_token_ids": value}, None


def make_params_and_fields(values: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the parameters and the `FIELD_KEYS` in plain JSON values, as `make_params` and
    `fields_of` do."""
    return make_params(
        {key: value for key, value in values.items() if key not in FIELD_KEYS}
    ), fields_of(values)


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `FIELD_KEYS` that are given. Raises `RequestError` for a wrong type, and for
    values nested too deeply to be sent on."""
    fields = {key: values[key] for key in FIELD_KEYS if values.get(key) is not None}
    RequestFields(predicted_tokens=fields.get("predicted_tokens")).checked()
    if not isinstance(extra := fields.get("extra", {}), dict):
        raise RequestError(
            f"extra must be an object of distributions and their values, got {shown(extra)}"
        )
    if is_deep(extra):
        raise RequestError(f"extra: more than {MAX_DEPTH} lists and objects in one another")
    return fields


def make_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Make `SamplingParams` from plain JSON values, with one output at the end. Raises
    `RequestError`."""
    fields = dict(fields)
    if isinstance(fields.get("logit_bias"), dict):  # keys in JSON are strings
        fields["logit_bias"] = {
            int(key) if _INTEGER.fullmatch(str(key)) else key: bias
            for key, bias in fields["logit_bias"].items()
        }
    if not isinstance(fields.get("extra_args", {}), dict):
        raise RequestError(f"extra_args must be an object, got {shown(fields['extra_args'])}")
    return SamplingParams.of({**fields, "output_kind": OutputKind.FINAL})
