"""Lines of a batch's files: requests, which are all validated before the first is answered, and
answers."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import orjson

from dovetail.errors import shown
from dovetail_server.protocol.batches import BatchError

MAX_REQUESTS = 50_000  # of one batch, as OpenAI's
MAX_TOLD = 100  # reported errors of one batch
MAX_ID_CHARS = 512  # of a `custom_id`: scanning holds all of a batch in memory


class BatchLine(msgspec.Struct):
    """A request of a batch. `body`: raw JSON."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Answered(msgspec.Struct):
    """The part of an answer's line that identifies its request."""

    custom_id: str


_DECODER = msgspec.json.Decoder(BatchLine)
_ANSWERED = msgspec.json.Decoder(_Answered)


class Scan(NamedTuple):
    """Result of scanning a file of requests."""

    requests: int
    errors: list[BatchError]  # if not empty, no request is answered
    left: list[int]  # offsets of the lines without an answer


def scan(path: Path, endpoint: str, max_line_bytes: int, done: Container[str] = ()) -> Scan:
    """Validate the requests in a file, and find those that aren't `done`. Raises `OSError`."""
    names: set[str] = set()
    errors: list[BatchError] = []
    left: list[int] = []
    for number, offset, text in _lines(path, max_line_bytes):
        line = _checked(text, number, endpoint, names, max_line_bytes)
        if isinstance(line, BatchError):
            errors.append(line)
        elif line.custom_id not in done:
            left.append(offset)
        if len(errors) >= MAX_TOLD or len(names) > MAX_REQUESTS:
            break
    if len(names) > MAX_REQUESTS:
        errors = [BatchError("too_many_requests", f"a batch has at most {MAX_REQUESTS} requests")]
    elif not names and not errors:
        errors = [BatchError("empty_file", "there is no request in the file")]
    return Scan(len(names), errors, left)


def request_at(path: Path, offset: int, max_line_bytes: int) -> BatchLine:
    """Return the request at an offset of a validated file.

    Raises `OSError`, and `msgspec.MsgspecError` if the file has changed.
    """
    with path.open("rb") as file:
        file.seek(offset)
        return _DECODER.decode(file.readline(max_line_bytes + 1))


def answered_in(path: Path) -> set[str]:
    """Return the `custom_id`s in a file of answers, which may be missing, and truncate it at the
    first incomplete line. Raises `OSError`."""
    names: set[str] = set()
    whole = 0
    try:
        with path.open("r+b") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n"):
                        break
                    names.add(_ANSWERED.decode(line).custom_id)
                except (
                    msgspec.MsgspecError,
                    UnicodeDecodeError,
                    RecursionError,
                ):  # corrupted by a power loss
                    break
                whole += len(line)
            file.truncate(whole)
    except FileNotFoundError:
        pass
    return names


def answer_line(name: str, request_id: str, status: int, body: bytes) -> bytes:
    """Return the line of an HTTP answer."""
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return (
        orjson.dumps(
            {
                "id": f"batch_req_{request_id}",
                "custom_id": name,
                "response": response,
                "error": None,
            }
        )
        + b"\n"
    )


def error_line(name: str, request_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that wasn't made."""
    line: dict[str, Any] = {
        "id": f"batch_req_{request_id}",
        "custom_id": name,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return orjson.dumps(line) + b"\n"


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield non-blank lines with their numbers from 1 and their offsets.

    A line that is too long is truncated, and ends the iteration.
    """
    with path.open("rb") as file:
        number = offset = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            if text.strip():
                yield number, offset, text
            if len(text) > max_line_bytes:
                return
            offset += len(text)


def _checked(
    text: bytes, number: int, endpoint: str, names: set[str], max_line_bytes: int
) -> BatchLine | BatchError:
    """Return a line's request, or its error, and add its `custom_id` to `names`."""
    if len(text) > max_line_bytes:
        return BatchError(
            "line_too_long",
            f"the line has more than {max_line_bytes} bytes (max_body_bytes)",
            number,
        )
    try:
        line = _DECODER.decode(text)
    except msgspec.ValidationError as error:
        return BatchError("invalid_request", str(error), number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchError("invalid_json_line", f"the line isn't valid JSON: {error}", number)
    if not line.custom_id:
        return BatchError(
            "missing_custom_id", "custom_id must be a non-empty string", number, "custom_id"
        )
    if (length := len(line.custom_id)) > MAX_ID_CHARS:
        message = f"custom_id must have at most {MAX_ID_CHARS} characters, got {length}"
        return BatchError("invalid_custom_id", message, number, "custom_id")
    if line.custom_id in names:
        return BatchError(
            "duplicate_custom_id",
            f"custom_id {shown(line.custom_id)} occurs twice",
            number,
            "custom_id",
        )
    names.add(line.custom_id)
    if line.method != "POST":
        return BatchError(
            "invalid_method", f"method must be POST, got {shown(line.method)}", number, "method"
        )
    if line.url != endpoint:
        return BatchError(
            "mismatched_url",
            f"url must be the batch's endpoint, {endpoint}, got {shown(line.url)}",
            number,
            "url",
        )
    if not bytes(line.body).lstrip().startswith(b"{"):
        return BatchError("invalid_request", "body must be an object", number, "body")
    return line
