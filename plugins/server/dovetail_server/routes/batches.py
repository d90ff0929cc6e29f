"""`/v1/files` and `/v1/batches`: files of requests that are answered when there is room, as OpenAI's clients send them.

They are there if the server has a folder for them (`--batch-directory`).
"""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.routing import Route

from dovetail.checks import shown
from dovetail_server.batches.store import BatchStore
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.batches import ENDPOINTS, WINDOW, WINDOW_S, Batch, CreateBatchRequest, FileObject

T = TypeVar("T", FileObject, Batch)

LISTED = 20  # of a list, unless `limit` says how many
MOST_LISTED = 10_000
FIELDS, FORM_BYTES = 8, 65_536  # of a form besides its file
HELD_BYTES = MultiPartParser.spool_max_size + FIELDS * FORM_BYTES  # in memory, of a form that is being received: the rest is on disk
MAX_METADATA = 16  # pairs, as OpenAI's
PIECE_BYTES = 2**18  # of a file that is sent


async def upload(exchange: Exchange) -> None:
    """Keep a file."""
    store = _store(exchange)
    exchange.check_open()
    largest = exchange.server.settings.max_file_bytes
    body = _and_end(exchange.received(largest + FORM_BYTES, _too_large(largest), HELD_BYTES))
    parser = MultiPartParser(Request(exchange.scope).headers, body, max_files=1, max_fields=FIELDS, max_part_size=FORM_BYTES)
    if not Request(exchange.scope).headers.get("content-type", "").startswith("multipart/form-data"):
        raise HttpError(400, "the body must be a form (multipart/form-data) with `purpose` and `file`", code="invalid_form")
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(400, f"the body isn't a form: {getattr(error, 'message', error)}", code="invalid_form") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise HttpError(400, "file: it is required", param="file", code="missing_parameter")
        if purpose != "batch":
            raise HttpError(400, f"purpose must be batch, got {shown(purpose)}", param="purpose")
        if (file.size or 0) > largest:
            raise _too_large(largest)
        content = file.file
        name = (file.filename or "file.jsonl")[:200].encode(errors="replace").decode()  # the form's charset may make half a surrogate pair
        kept = await asyncio.to_thread(store.add_file, name, lambda to: shutil.copyfileobj(content, to))
    finally:
        await form.close()
    await exchange.reply(msgspec.json.encode(kept))


async def files(exchange: Exchange) -> None:
    await exchange.reply(_page(exchange, await asyncio.to_thread(_store(exchange).files)))


async def file(exchange: Exchange) -> None:
    await exchange.reply(msgspec.json.encode(_store(exchange).file(exchange.scope["path_params"]["file"])))


async def delete_file(exchange: Exchange) -> None:
    file_id = exchange.scope["path_params"]["file"]
    await asyncio.to_thread(_store(exchange).delete_file, file_id)
    await exchange.reply({"id": file_id, "object": "file", "deleted": True})


async def content(exchange: Exchange) -> None:
    """Send a file, piece by piece."""
    store, file_id = _store(exchange), exchange.scope["path_params"]["file"]
    known = store.file(file_id)
    with store.content(file_id).open("rb") as opened:
        head = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % known.bytes)]
        exchange.started = True
        await exchange.send({"type": "http.response.start", "status": 200, "headers": head})
        left = known.bytes
        while left:
            piece = await asyncio.to_thread(opened.read, min(left, PIECE_BYTES))
            left -= len(piece)
            await exchange.send({"type": "http.response.body", "body": piece, "more_body": bool(left)})
        if not known.bytes:
            await exchange.send({"type": "http.response.body", "body": b""})


async def create(exchange: Exchange) -> None:
    """Take a batch, to be answered when there is room."""
    body = await exchange.body(CreateBatchRequest)
    store = _store(exchange)
    exchange.check_open()
    if body.endpoint not in ENDPOINTS:
        raise HttpError(400, f"endpoint must be one of {', '.join(ENDPOINTS)}, got {shown(body.endpoint)}", param="endpoint")
    if body.completion_window != WINDOW:
        raise HttpError(400, f"completion_window must be {WINDOW}, got {shown(body.completion_window)}", param="completion_window")
    if len(body.metadata or {}) > MAX_METADATA:
        raise HttpError(400, f"metadata must have at most {MAX_METADATA} pairs, got {len(body.metadata or {})}", param="metadata")
    if store.file(body.input_file_id).purpose != "batch":
        raise HttpError(400, "input_file_id: this file holds answers", param="input_file_id")
    now = int(time.time())
    batch = Batch(f"batch_{uuid.uuid4().hex}", body.endpoint, body.input_file_id, now, now + WINDOW_S, metadata=body.metadata)
    await asyncio.to_thread(store.add_batch, batch)
    await exchange.reply(msgspec.json.encode(batch))


async def batches(exchange: Exchange) -> None:
    await exchange.reply(_page(exchange, await asyncio.to_thread(_store(exchange).batches)))


async def batch(exchange: Exchange) -> None:
    await exchange.reply(msgspec.json.encode(_store(exchange).batch(exchange.scope["path_params"]["batch"])))


async def cancel(exchange: Exchange) -> None:
    """Ask for a batch's end. It is `cancelling` until the answers that have come are in its files."""
    await exchange.reply(msgspec.json.encode(await asyncio.to_thread(_store(exchange).cancel, exchange.scope["path_params"]["batch"])))


def _store(exchange: Exchange) -> BatchStore:
    store = exchange.server.batches
    if store is None:
        raise HttpError(404, "this server keeps no files: start it with --batch-directory", code="batches_off")
    return store


def _page(exchange: Exchange, found: Sequence[T]) -> dict[str, Any]:
    """Return a part of a list, newest first: `limit` at most, behind the one whose id is `after`."""
    query = Request(exchange.scope).query_params
    text = query.get("limit", str(LISTED))
    if not text.isascii() or not text.isdecimal() or not 1 <= len(text) <= 6 or not 1 <= int(text) <= MOST_LISTED:
        raise HttpError(400, f"limit must be an integer from 1 to {MOST_LISTED}, got {shown(text)}", param="limit")
    begin = 0
    if (after := query.get("after")) is not None:
        begin = next((place + 1 for place, one in enumerate(found) if one.id == after), len(found))
    some = found[begin : begin + int(text)]
    ends = {"first_id": some[0].id, "last_id": some[-1].id} if some else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [msgspec.to_builtins(one) for one in some], "has_more": begin + len(some) < len(found), **ends}


async def _and_end(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield parts of a body, and an empty one, which `MultiPartParser` waits for."""
    async for part in parts:
        yield part
    yield b""


def _too_large(largest: int) -> HttpError:
    return HttpError(413, f"the file is larger than {largest} bytes (max_file_bytes)", param="file", code="file_too_large")


ROUTES = [
    Route("/v1/files", Endpoint(upload), methods=["POST"]),
    Route("/v1/files", Endpoint(files), methods=["GET"]),
    Route("/v1/files/{file}", Endpoint(file), methods=["GET"]),
    Route("/v1/files/{file}", Endpoint(delete_file), methods=["DELETE"]),
    Route("/v1/files/{file}/content", Endpoint(content), methods=["GET"]),
    Route("/v1/batches", Endpoint(create), methods=["POST"]),
    Route("/v1/batches", Endpoint(batches), methods=["GET"]),
    Route("/v1/batches/{batch}", Endpoint(batch), methods=["GET"]),
    Route("/v1/batches/{batch}/cancel", Endpoint(cancel), methods=["POST"]),
]
