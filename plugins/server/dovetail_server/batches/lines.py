"""The lines of a batch's files: requests, each checked before the first is answered, and answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from dovetail.checks import shown
from dovetail_server.protocol.batches import BatchError

MAX_REQUESTS = 50_000  # of one batch, as OpenAI's
MAX_TOLD = 100  # errors of one batch


class BatchLine(msgspec.Struct):
    """A request of a batch. `body` is its JSON as it stands."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


_DECODER = msgspec.json.Decoder(BatchLine)


def checked(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[BatchError]]:
    """Return the number of requests in a file, and what is wrong with them: then none is answered."""
    names: set[str] = set()
    errors: list[BatchError] = []
    for number, text in _lines(path, max_line_bytes):
        if (error := _error_in(text, number, endpoint, names, max_line_bytes)) is not None:
            errors.append(error)
        if len(errors) >= MAX_TOLD or len(names) > MAX_REQUESTS:
            break
    if len(names) > MAX_REQUESTS:
        errors = [BatchError("too_many_requests", f"a batch has at most {MAX_REQUESTS} requests")]
    elif not names and not errors:
        errors = [BatchError("empty_file", "there is no request in the file")]
    return len(names), errors


def requests_in(path: Path, done: set[str], max_line_bytes: int) -> Iterator[BatchLine]:
    """Yield the requests of a checked file, without those that have been answered."""
    for _, text in _lines(path, max_line_bytes):
        if (line := _DECODER.decode(text)).custom_id not in done:
            yield line


def answered_in(path: Path) -> set[str]:
    """Return the `custom_id`s in a file of answers, whose last line, if it was cut short, is cut off. It needn't be there."""
    names: set[str] = set()
    whole = 0
    try:
        with path.open("r+b") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n"):
                        break
                    names.add(orjson.loads(line)["custom_id"])
                except (ValueError, KeyError, TypeError):  # blocks of a disk that lost its power
                    break
                whole += len(line)
            file.truncate(whole)
    except FileNotFoundError:
        pass
    return names


def answer_line(name: str, request_id: str, status: int, body: bytes) -> bytes:
    """Return the line of an answer over HTTP."""
    response = {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}
    return orjson.dumps({"id": f"batch_req_{request_id}", "custom_id": name, "response": response, "error": None}) + b"\n"


def error_line(name: str, request_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that wasn't made."""
    line: dict[str, Any] = {"id": f"batch_req_{request_id}", "custom_id": name, "response": None, "error": {"code": code, "message": message}}
    return orjson.dumps(line) + b"\n"


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines that aren't blank with their numbers from 1; one that is too long is cut."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            if text.strip():
                yield number, text
            if len(text) > max_line_bytes:
                return


def _error_in(text: bytes, number: int, endpoint: str, names: set[str], max_line_bytes: int) -> BatchError | None:
    """Return what is wrong with a line, and note its `custom_id`."""
    if len(text) > max_line_bytes:
        return BatchError("line_too_long", f"the line has more than {max_line_bytes} bytes (max_body_bytes)", number)
    try:
        line = _DECODER.decode(text)
    except msgspec.ValidationError as error:
        return BatchError("invalid_request", str(error), number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchError("invalid_json_line", f"the line isn't valid JSON: {error}", number)
    if not line.custom_id:
        return BatchError("missing_custom_id", "custom_id must be a non-empty string", number, "custom_id")
    if line.custom_id in names:
        return BatchError("duplicate_custom_id", f"custom_id {shown(line.custom_id)} is there twice", number, "custom_id")
    names.add(line.custom_id)
    if line.method != "POST":
        return BatchError("invalid_method", f"method must be POST, got {shown(line.method)}", number, "method")
    if line.url != endpoint:
        return BatchError("mismatched_url", f"url must be the batch's endpoint, {endpoint}, got {shown(line.url)}", number, "url")
    if not bytes(line.body).lstrip().startswith(b"{"):
        return BatchError("invalid_request", "body must be an object", number, "body")
    return None
