"""`JobRow`: one request of a job. `RowReader` makes it from the fields of a record; an invalid row
fails alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from dovetail.api.json_files import MAX_DEPTH, is_deep
from dovetail.errors import RequestError, shown
from dovetail.request.pooling import PoolingParams
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail.serving import FIELD_KEYS, PARAMS_KEYS, fields_of, make_params, unknown_key

Form = Literal["prompt", "messages", "token_ids"]
FORMS: tuple[Form, ...] = ("prompt", "messages", "token_ids")
JobTask = Literal["generate", "embed"]
KEYS = ("id", *FORMS, "sampling", "pooling", *FIELD_KEYS)
POOLING_KEYS = ("dimensions", "truncate_prompt_tokens", "use_activation", "prompt_name")
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class JobRow:
    """A request of a job."""

    number: int  # of the input's row, from 1
    id: str
    form: Form
    content: Any  # text, messages or token ids, as `form` says
    params: SamplingParams | PoolingParams
    fields: Mapping[str, Any]  # other arguments of `LLMEngine.add_request`
    # of a prompt stored in the checkpoint, for a text to be embedded
    prompt_name: str | None = None
    size: int = 0  # characters of its content

    @property
    def has_images(self) -> bool:
        """True if its messages may have images."""
        return self.form == "messages" and any(
            isinstance(part, Mapping) and part.get("type") != "text"
            for message in self.content
            if isinstance(message, Mapping) and isinstance(message.get("content"), list)
            for part in message["content"]
        )


class RowReader:
    """Makes rows from their fields. A row without a seed gets one derived from the job's seed and
    its own number, so that its answer depends neither on the engine nor on interruptions."""

    def __init__(
        self,
        sampling: Mapping[str, Any],
        seed: int,
        *,
        has_logprobs: bool = True,
        task: JobTask = "generate",
        pooling: Mapping[str, Any] | None = None,
    ) -> None:
        """`sampling`, or `pooling` of a job that embeds: default parameters of rows;
        `has_logprobs`: whether the format of the answers has log-probabilities. Raises
        `RequestError` if the parameters are invalid."""
        self._sampling = dict(sampling)
        self._seed = seed
        self._has_logprobs = has_logprobs
        self._task, self._pooling = task, dict(pooling or {})
        if task == "embed" and sampling:
            raise RequestError("sampling: a job that embeds has `pooling` instead")
        if task == "generate" and pooling:
            raise RequestError("pooling: it is for jobs with `task: embed`")
        self._params = self._read_sampling(self._sampling)
        self._read_pooling(self._pooling)

    def read(self, number: int, fields: Mapping[str, Any]) -> JobRow:
        """Return the row. Raises `RequestError` if it is invalid as far as can be checked without
        an engine."""
        for key in fields:
            if key not in KEYS:
                belongs = (
                    "a sampling parameter, which belongs in the row's `sampling`"
                    if key in PARAMS_KEYS
                    else unknown_key(key, KEYS, "key")
                )
                hint = (
                    "; is this OpenAI's batch format? Then say `format: openai` of the input"
                    if key == "custom_id"
                    else ""
                )
                raise RequestError(f"{key}: {belongs}{hint}")
        forms = [form for form in FORMS if form in fields]
        if len(forms) != 1:
            raise RequestError(
                f"expected exactly one of {', '.join(FORMS)}, got {' and '.join(forms) or 'none'}"
            )
        [form] = forms
        if (other := "sampling" if self._task == "embed" else "pooling") in fields:
            raise RequestError(f"{other}: this job's task is {self._task}")
        if self._task == "embed":
            if not isinstance(given := fields.get("pooling", {}), Mapping):
                raise RequestError(
                    f'pooling must be an object like {{"dimensions": 256}}, got {shown(given)}'
                )
            pooling, name = self._read_pooling({**self._pooling, **given})
            content = _content(form, fields[form])
            return JobRow(
                number,
                id_of(fields, number),
                form,
                content,
                pooling,
                fields_of(fields),
                name,
                _chars(content),
            )
        params = self._params
        if "sampling" in fields:
            if not isinstance(given := fields["sampling"], Mapping):
                raise RequestError(
                    f'sampling must be an object like {{"max_tokens": 100}}, got {shown(given)}'
                )
            params = self._read_sampling({**self._sampling, **given})
        if params.seed is None:
            params = changed_unchecked(
                params, seed=xxhash.xxh3_64_intdigest(f"{self._seed}:{number}".encode()) >> 1
            )
        content = _content(form, fields[form])
        return JobRow(
            number,
            id_of(fields, number),
            form,
            content,
            params,
            fields_of(fields),
            size=_chars(content),
        )

    def _read_sampling(self, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a row. Raises `RequestError` with the prefix "sampling: "."""
        try:
            if "output_kind" in fields:
                raise RequestError("output_kind: a job writes whole answers")
            params = make_params(fields)
            if not self._has_logprobs and (
                params.logprobs is not None or params.prompt_logprobs is not None
            ):
                raise RequestError(
                    "logprobs: answers in the format openai have none; those in jsonl do"
                )
            return params
        except (RequestError, TypeError) as error:
            raise RequestError(f"sampling: {error}") from None

    def _read_pooling(self, fields: Mapping[str, Any]) -> tuple[PoolingParams, str | None]:
        """Return the parameters of a row to embed, and the name of its stored prompt. Raises
        `RequestError` with the prefix "pooling: "."""
        given = dict(fields)
        try:
            for key in given:
                if key not in POOLING_KEYS:
                    raise RequestError(f"{key}: {unknown_key(key, POOLING_KEYS, 'key')}")
            if not isinstance(name := given.pop("prompt_name", None), str | None):
                raise RequestError(f"prompt_name must be a string, got {shown(name)}")
            return PoolingParams(task="embed", **given), name
        except RequestError as error:
            raise RequestError(f"pooling: {error}") from None


def id_of(fields: Mapping[str, Any], number: int, key: str = "id") -> str:
    """Return a row's id, by default its number. Raises `RequestError` if it is neither text nor an
    integer."""
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
        raise RequestError(f"{form} must be a non-empty list, got {shown(value)}")
    if is_deep(value):  # it couldn't be pickled for an engine's process
        raise RequestError(f"{form}: more than {MAX_DEPTH} lists and objects in one another")
    return value


def _chars(content: Any) -> int:
    """Return the number of characters of all texts of a content. Numbers count one each."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Mapping):
        return sum(_chars(one) for one in content.values())
    return sum(_chars(one) for one in content) if isinstance(content, list) else 1
