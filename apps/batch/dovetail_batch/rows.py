"""`Row`: one request of a job, and `RowReader`, which makes it of the fields that a file has. What is wrong with a row is its own failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from dovetail.checks import shown
from dovetail.cli.prompts import PARAMS_KEYS, make_params
from dovetail.errors import RequestError
from dovetail.json_files import MAX_DEPTH, is_deep
from dovetail.sampling_params import SamplingParams, changed_unchecked
from dovetail.where import unknown_key

Form = Literal["prompt", "messages", "token_ids"]
FORMS: tuple[Form, ...] = ("prompt", "messages", "token_ids")
KEYS = ("id", *FORMS, "sampling")
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a job. `number` counts the input's rows from 1."""

    number: int
    id: str
    form: Form
    content: Any  # text, messages or token ids, as `form` says
    params: SamplingParams


class RowReader:
    """Makes rows of their fields. A row that names no seed gets one that follows from the job's and its number, so that its answer is the same
    whichever engine computes it and however often the job was interrupted."""

    def __init__(self, sampling: Mapping[str, Any], seed: int, *, tells_logprobs: bool = True) -> None:
        """`sampling` are the parameters of rows that don't say otherwise; `tells_logprobs`: the format of the answers has a place for
        log-probabilities. Raises `RequestError` if the parameters are wrong."""
        self._sampling, self._seed, self._tells_logprobs = dict(sampling), seed, tells_logprobs
        self._params = self._read_sampling(self._sampling)

    def read(self, number: int, fields: Mapping[str, Any]) -> Row:
        """Return the row. Raises `RequestError` if something is wrong with it that can be seen without an engine."""
        for key in fields:
            if key not in KEYS:
                belongs = "a sampling parameter, which belongs into the row's `sampling`" if key in PARAMS_KEYS else unknown_key(key, KEYS, "key")
                hint = "; is this OpenAI's batch format? Then say `format: openai` of the input" if key == "custom_id" else ""
                raise RequestError(f"{key}: {belongs}{hint}")
        forms = [form for form in FORMS if form in fields]
        if len(forms) != 1:
            raise RequestError(f"expected exactly one of {', '.join(FORMS)}, got {' and '.join(forms) or 'none'}")
        [form] = forms
        params = self._params
        if "sampling" in fields:
            if not isinstance(given := fields["sampling"], Mapping):
                raise RequestError(f'sampling must be an object like {{"max_tokens": 100}}, got {shown(given)}')
            params = self._read_sampling({**self._sampling, **given})
        if params.seed is None:
            params = changed_unchecked(params, seed=xxhash.xxh3_64_intdigest(f"{self._seed}:{number}".encode()) >> 1)
        return Row(number, id_of(fields, number), form, _content(form, fields[form]), params)

    def _read_sampling(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Make the parameters of a row. Raises `RequestError`, with "sampling" before what is wrong."""
        try:
            if "output_kind" in fields:
                raise RequestError("output_kind: a job writes whole answers")
            params = make_params(fields)
            if not self._tells_logprobs and (params.logprobs is not None or params.prompt_logprobs is not None):
                raise RequestError("logprobs: answers in the format openai have none; those in jsonl do")
            return params
        except (RequestError, TypeError) as error:
            raise RequestError(f"sampling: {error}") from None


def id_of(fields: Mapping[str, Any], number: int, key: str = "id") -> str:
    """Return a row's id; of one that names none, its number. Raises `RequestError` if it is neither text nor an integer."""
    value = fields.get(key, number)
    if type(value) not in (str, int) or value == "":
        raise RequestError(f"{key} must be a string or an integer, got {shown(value)}")
    if len(text := str(value)) > MAX_ID_CHARS:
        raise RequestError(f"{key} must have at most {MAX_ID_CHARS} characters, got {len(text)}")
    return text


def _content(form: Form, value: Any) -> Any:
    if form == "prompt":
        if not isinstance(value, str):
            raise RequestError(f"prompt must be a string, got {shown(value)}")
        return value
    if not isinstance(value, list) or not value:
        raise RequestError(f"{form} must be a list with something in it, got {shown(value)}")
    if is_deep(value):  # and couldn't be sent to an engine's process
        raise RequestError(f"{form}: more than {MAX_DEPTH} lists and objects in one another")
    return value
