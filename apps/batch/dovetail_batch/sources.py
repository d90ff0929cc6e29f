"""Input files of jobs: `Source`, and its implementations for JSONL, CSV and OpenAI's batch format.
Parquet's is in `parquet`.

Sources are streamed: `records` starts at any *position* that the source has returned before (bytes,
or rows of Parquet).
"""

from __future__ import annotations

import csv
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError, RequestError, shown
from dovetail.request.sampling_params import BEAM_NAMES, BEAM_SEARCH
from dovetail.serving import (
    FIELD_KEYS,
    PARAMS_KEYS,
    WrongJsonError,
    did_you_mean,
    parse_json,
    read_json,
)
from dovetail_batch.rows import KEYS

MAX_LINE_BYTES = 64 * 2**20  # longer lines are rejected
# columns that hold JSON where cells are text
JSON_CELLS = (
    "messages",
    "token_ids",
    "sampling",
    "pooling",
    *FIELD_KEYS,
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
OPENAI_KEYS = ("custom_id", "method", "url", "body")
NO_EFFECT = (
    "model",
    "user",
    "metadata",
    "store",
    "stream",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)
_BOM = b"\xef\xbb\xbf"

Fields = dict[str, Any]


class Source(ABC):
    """The rows of one file."""

    id_key = "id"
    first = 0  # position of the first row

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """`columns`: the file's names of columns by ours; empty: the same. Raises `ConfigError` if
        the file can't be read in this format."""
        self.path = path
        self.columns = columns

    @abstractmethod
    def records(self, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the unparsed rows from a position on, each with the position after it. Raises
        `ConfigError` where the format is broken."""

    @abstractmethod
    def fields(self, record: Any) -> Fields:
        """Return the fields of a record, with its id under `id_key`. Raises `RequestError` if it is
        unreadable."""

    def convert(self, fields: Fields) -> Fields:
        """Convert the fields to the names and types of `RowReader`. Raises `RequestError`."""
        return fields

    def stamp(self) -> tuple[int, int, int]:
        """Return the file's inode, size in bytes and modification time, to detect changes. Raises
        `ConfigError`."""
        found = self._stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def opened(self) -> BufferedReader:
        """Open the file. Raises `ConfigError`, also for pipes and devices: they can't be reread,
        and opening one may block forever."""
        mode = self._stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(
            mode
        ):  # opening a folder raises a clear error
            reason = (
                "a pipe or a device: a job reads its rows twice, and again when it goes on: "
                "write them to a file first"
            )
            raise ConfigError(f"input: {self.path}: {reason}")
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(self.path, error) from None

    def _stat(self) -> os.stat_result:
        try:
            return self.path.stat()
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            raise unreadable(self.path, error) from None


class Jsonl(Source):
    """A JSON object per line. Blank lines are skipped."""

    def records(self, position: int) -> Iterator[tuple[bytes, int]]:
        return ((line, behind) for line, behind in lines(self, position) if line.strip())

    def fields(self, record: bytes) -> Fields:
        try:
            given = parse_json(record.decode("utf-8-sig").strip())
        except UnicodeDecodeError as error:
            raise RequestError(f"not UTF-8: {error.reason} at byte {error.start}") from None
        if not isinstance(given, dict):
            raise RequestError(
                f'expected an object like {{"id": "1", "prompt": "…"}}, got {shown(given)}'
            )
        return (
            {ours: given[theirs] for ours, theirs in self.columns.items() if theirs in given}
            if self.columns
            else given
        )


class Csv(Source):
    """Comma-separated values with a header (RFC 4180). Cells of `JSON_CELLS` hold JSON; an empty
    one is left out."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        csv.field_size_limit(MAX_LINE_BYTES)
        self._header, self.first = next(self._cells(0), ([], 0))
        self._names = names_of_columns(path, self._header, columns)

    def records(self, position: int) -> Iterator[tuple[list[str], int]]:
        return ((cells, end) for cells, end in self._cells(position) if cells)

    def fields(self, record: list[str]) -> Fields:
        if len(record) != len(self._header):
            raise RequestError(f"{len(record)} cells, where the header has {len(self._header)}")
        cells = dict(zip(self._header, record, strict=True))
        return {ours: cells[theirs] for ours, theirs in self._names.items() if cells[theirs] != ""}

    def convert(self, fields: Fields) -> Fields:
        return with_json_parsed(fields)

    def _cells(self, position: int) -> Iterator[tuple[list[str], int]]:
        """Yield rows with the position after each, which is that of the lines: `csv.reader` reads
        no line ahead."""
        behind = position

        def texts() -> Iterator[str]:
            nonlocal behind
            for line, end in lines(self, position):
                if behind == 0:
                    # otherwise a quote after it wouldn't begin a cell
                    line = line.removeprefix(_BOM)
                behind = end
                # text that isn't UTF-8 fails with its row
                yield line.decode("utf-8", "surrogateescape")

        reader = csv.reader(texts(), strict=True)
        try:
            for cells in reader:
                yield cells, behind
        except csv.Error as error:
            raise ConfigError(f"{self.path}: not CSV from byte {behind} on: {error}") from None


def lines(source: Source, position: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file with the position after each. Raises `ConfigError` for an overlong
    line."""
    with source.opened() as file:
        try:
            file.seek(position)
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{source.path}: the line at byte {position} has more than "
                        f"{MAX_LINE_BYTES} bytes: that is no row"
                    )
                position += len(line)
                yield line, position
        except OSError as error:
            raise unreadable(source.path, error) from None


def names_of_columns(path: Path, header: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the file's names of columns by ours. Raises `ConfigError` for missing, duplicate and,
    without `columns`, unknown ones."""
    for name in columns.values() if columns else header:
        if header.count(name) > 1:
            raise ConfigError(f"{path}: the header has the column {shown(name)} twice")
    if columns:
        for ours, theirs in columns.items():
            if theirs not in header:
                hint = (
                    did_you_mean(theirs, header) or f"; there are {', '.join(map(shown, header))}"
                )
                raise ConfigError(
                    f"{path}: no column {shown(theirs)}, which is to be the {ours}{hint}"
                )
        return dict(columns)
    for name in header:
        if name not in KEYS:
            hint = did_you_mean(name, KEYS) or f"; known are {', '.join(KEYS)}."
            raise ConfigError(
                f"{path}: unknown column {shown(name)}{hint} Say with `columns` of the input which "
                f"are to be used"
            )
    return {name: name for name in header}


def with_json_parsed(fields: Fields) -> Fields:
    """Parse the texts of `JSON_CELLS` as JSON. Raises `RequestError`."""
    read = {}
    for name in JSON_CELLS:
        if isinstance(text := fields.get(name), str):
            try:
                read[name] = read_json(text)
            except WrongJsonError:
                raise RequestError(f"{name} must be JSON, got {shown(text)}") from None
    return {**fields, **read}


def unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    return ConfigError(f"input: {path}: can't be read: {getattr(error, 'strerror', None) or error}")


class OpenAIBatch(Jsonl):
    """A file of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a line per row:

        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "…", "messages": […], "max_tokens": 100}}

    Fields of the body that are sampling parameters are used. Others that would change the answer
    fail the row.
    """

    id_key = "custom_id"

    def __init__(self, path: Path, *, limited: bool) -> None:
        """`limited`: the job sets `max_tokens`; otherwise chats are limited by the model's length
        only, as with OpenAI."""
        super().__init__(path, {})
        self._limited = limited

    def convert(self, fields: Fields) -> Fields:
        return fields_of(fields, self._limited)


def fields_of(line: Mapping[str, Any], limited: bool) -> Fields:
    """Convert the fields of a line to a row's; `limited` as for `OpenAIBatch`. Raises
    `RequestError`."""
    for key in line:
        if key not in OPENAI_KEYS:
            raise RequestError(f"{key}: unknown key; OpenAI's format has {', '.join(OPENAI_KEYS)}")
    if not isinstance(name := line.get("custom_id"), str) or not name:
        raise RequestError(f"custom_id must be a non-empty string, got {shown(name)}")
    if line.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, got {shown(line['method'])}")
    if (url := line.get("url")) not in (CHAT, COMPLETIONS, EMBEDDINGS):
        raise RequestError(f"url must be {CHAT}, {COMPLETIONS} or {EMBEDDINGS}, got {shown(url)}")
    if not isinstance(body := line.get("body"), Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    own = {key: body[key] for key in FIELD_KEYS if key in body}
    read = (
        _embedding(body)
        if url == EMBEDDINGS
        else _chat(body, limited)
        if url == CHAT
        else _completion(body)
    )
    return {"id": name, **own, **read}


def _chat(body: Mapping[str, Any], limited: bool) -> Fields:
    sampling = _sampling(body, "messages")
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    elif "max_tokens" not in sampling and not limited:
        sampling["max_tokens"] = None
    top = sampling.pop("top_logprobs", 0)
    if (asked := sampling.pop("logprobs", False)) is not False:
        if asked is not True:
            raise RequestError(f"logprobs must be true or false, got {shown(asked)}")
        sampling["logprobs"] = top
    return {"messages": body.get("messages"), "sampling": sampling}


def _completion(body: Mapping[str, Any]) -> Fields:
    sampling = _sampling(body, "prompt")
    if not isinstance(prompt := body.get("prompt"), str | list) or (
        isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    ):
        raise RequestError(f"prompt must be one text or one list of token ids, got {shown(prompt)}")
    return {"prompt" if isinstance(prompt, str) else "token_ids": prompt, "sampling": sampling}


def _embedding(body: Mapping[str, Any]) -> Fields:
    prompt = body.get("input")
    if not isinstance(prompt, str | list) or (
        isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    ):
        raise RequestError(f"input must be one text or one list of token ids, got {shown(prompt)}")
    if body.get("encoding_format") not in (None, "float"):
        raise RequestError("encoding_format: a job writes floats")
    left = {
        key: value
        for key, value in body.items()
        if key not in ("input", "encoding_format", *NO_EFFECT, *FIELD_KEYS) and value is not None
    }
    return {"prompt" if isinstance(prompt, str) else "token_ids": prompt, "pooling": left}


def _sampling(body: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the sampling parameters, including those of chats that the caller converts."""
    if body.get("stream"):
        raise RequestError("stream: a job writes whole answers")
    sampling = {}
    for key, value in body.items():
        if key in (content, "max_completion_tokens", *NO_EFFECT, *FIELD_KEYS) or value is None:
            continue
        if key in BEAM_NAMES:
            raise RequestError(f"{key}: {BEAM_SEARCH}")
        if key == "vllm_xargs":
            if body.get("extra_args") is not None:
                raise RequestError(
                    "vllm_xargs: another name of extra_args, which is also given: leave one of "
                    "them out"
                )
            key = "extra_args"
        if key not in (*PARAMS_KEYS, "top_logprobs"):
            raise RequestError(
                f"{key}: `dovetail batch` doesn't read it, and it would change the answer; "
                f"/v1/batches of `dovetail serve` does"
            )
        sampling[key] = value
    return sampling
