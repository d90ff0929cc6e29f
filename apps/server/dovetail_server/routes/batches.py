"""`/v1/files` and `/v1/batches`: OpenAI's batch API, available with `--batch-directory`."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.datastructures import FormData, QueryParams, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.routing import Route

from dovetail.errors import shown
from dovetail_server.batches.store import BatchStore, Page, new_id
from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.batches import (
    ENDPOINTS,
    WINDOW,
    WINDOW_S,
    Batch,
    CreateBatchRequest,
    ExpiresAfter,
)

MOST_FILES_LISTED = 10_000  # per page, and the default, like OpenAI's
BATCHES_LISTED = 20
MOST_BATCHES_LISTED = 100
# form fields besides the file
FIELDS = 8
FORM_BYTES = 65_536
# of a form in memory; the rest is on disk
HELD_BYTES = MultiPartParser.spool_max_size + FIELDS * FORM_BYTES
PIECE_BYTES = 2**18  # chunk size of downloads


async def upload(exchange: Exchange) -> None:
    """Store an uploaded file."""
    store = _store(exchange)
    exchange.check_open()
    largest = exchange.server.settings.max_file_bytes
    body = _and_end(exchange.received(largest + FORM_BYTES, _too_large(largest), HELD_BYTES))
    parser = MultiPartParser(
        Request(exchange.scope).headers,
        body,
        max_files=1,
        max_fields=FIELDS,
        max_part_size=FORM_BYTES,
    )
    if (
        not Request(exchange.scope)
        .headers.get("content-type", "")
        .startswith("multipart/form-data")
    ):
        raise HttpError(
            400,
            "the body must be a form (multipart/form-data) with `purpose` and `file`",
            code="invalid_form",
        )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError, ValueError) as error:
        raise HttpError(
            400, f"the body isn't a form: {getattr(error, 'message', error)}", code="invalid_form"
        ) from None
    try:
        file = form.get("file")
        purpose = form.get("purpose")
        if not isinstance(file, UploadFile):
            raise HttpError(400, "file: it is required", param="file", code="missing_parameter")
        if purpose != "batch":
            raise HttpError(400, f"purpose must be batch, got {shown(purpose)}", param="purpose")
        if (file.size or 0) > largest:
            raise _too_large(largest)
        content = file.file
        expires = _expires_after(form)
        # the form's charset may produce lone surrogates
        name = (file.filename or "file.jsonl")[:200].encode(errors="replace").decode()
        kept = await asyncio.to_thread(
            store.add_file, name, lambda to: shutil.copyfileobj(content, to), expires
        )
    finally:
        await form.close()
    await exchange.reply(msgspec.json.encode(kept))


async def files(exchange: Exchange) -> None:
    """List files, with OpenAI's `limit`, `after`, `order` and `purpose`."""
    query = Request(exchange.scope).query_params
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise HttpError(400, f"order must be asc or desc, got {shown(order)}", param="order")
    limit = _limit(query, MOST_FILES_LISTED, MOST_FILES_LISTED)
    store = _store(exchange)
    page = await asyncio.to_thread(
        store.files,
        query.get("after"),
        limit,
        ascending=order == "asc",
        purpose=query.get("purpose"),
    )
    await exchange.reply(_as_list(page))


async def file(exchange: Exchange) -> None:
    await exchange.reply(
        msgspec.json.encode(
            await asyncio.to_thread(_store(exchange).file, exchange.scope["path_params"]["file"])
        )
    )


async def delete_file(exchange: Exchange) -> None:
    file_id = exchange.scope["path_params"]["file"]
    await asyncio.to_thread(_store(exchange).delete_file, file_id)
    await exchange.reply({"id": file_id, "object": "file", "deleted": True})


async def content(exchange: Exchange) -> None:
    """Send a file in chunks."""
    with await asyncio.to_thread(
        _store(exchange).open_content, exchange.scope["path_params"]["file"]
    ) as opened:
        left = os.fstat(opened.fileno()).st_size
        head = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % left)]
        exchange.started = True
        await exchange.send({"type": "http.response.start", "status": 200, "headers": head})
        more = True
        while more:
            piece = await asyncio.to_thread(opened.read, min(left, PIECE_BYTES))
            if left and not piece:
                raise HttpError(500, "the file was truncated while it was sent")
            left -= len(piece)
            more = left > 0
            await exchange.send({"type": "http.response.body", "body": piece, "more_body": more})


async def create(exchange: Exchange) -> None:
    """Create a batch."""
    body = await exchange.body(CreateBatchRequest)
    store = _store(exchange)
    exchange.check_open()
    if body.endpoint not in ENDPOINTS:
        raise HttpError(
            400,
            f"endpoint must be one of {', '.join(ENDPOINTS)}, got {shown(body.endpoint)}",
            param="endpoint",
        )
    if body.completion_window != WINDOW:
        raise HttpError(
            400,
            f"completion_window must be {WINDOW}, got {shown(body.completion_window)}",
            param="completion_window",
        )
    now = int(time.time())
    batch = Batch(new_id("batch_"), body.endpoint, body.input_file_id, now, now + WINDOW_S)
    batch.metadata = body.metadata
    batch.output_expires_after = body.output_expires_after
    await asyncio.to_thread(store.add_batch, batch)
    await exchange.reply(msgspec.json.encode(batch))


async def batches(exchange: Exchange) -> None:
    """List batches, with OpenAI's `limit` and `after`."""
    query = Request(exchange.scope).query_params
    limit = _limit(query, BATCHES_LISTED, MOST_BATCHES_LISTED)
    store = _store(exchange)
    await exchange.reply(
        _as_list(await asyncio.to_thread(store.batches, query.get("after"), limit))
    )


async def batch(exchange: Exchange) -> None:
    await exchange.reply(
        msgspec.json.encode(
            await asyncio.to_thread(_store(exchange).batch, exchange.scope["path_params"]["batch"])
        )
    )


async def delete_batch(exchange: Exchange) -> None:
    """Delete a finished batch and its answers. Not in OpenAI's API."""
    batch_id = exchange.scope["path_params"]["batch"]
    await asyncio.to_thread(_store(exchange).delete_batch, batch_id)
    await exchange.reply({"id": batch_id, "object": "batch", "deleted": True})


async def cancel(exchange: Exchange) -> None:
    """Cancel a batch. It is `cancelling` until finished answers are in its files."""
    await exchange.reply(
        msgspec.json.encode(
            await asyncio.to_thread(_store(exchange).cancel, exchange.scope["path_params"]["batch"])
        )
    )


def _store(exchange: Exchange) -> BatchStore:
    store = exchange.server.batches
    if store is None:
        raise HttpError(
            404, "batches are disabled: start the server with --batch-directory", code="batches_off"
        )
    return store


def _limit(query: QueryParams, default: int, most: int) -> int:
    """Return the requested page size."""
    text = query.get("limit", str(default))
    is_number = text.isascii() and text.isdecimal() and len(text) <= 6
    if not is_number or not 1 <= int(text) <= most:
        raise HttpError(
            400, f"limit must be an integer from 1 to {most}, got {shown(text)}", param="limit"
        )
    return int(text)


def _as_list(page: Page[Any]) -> bytes:
    ends = (
        {"first_id": page.items[0].id, "last_id": page.items[-1].id}
        if page.items
        else {"first_id": None, "last_id": None}
    )
    return msgspec.json.encode(
        {"object": "list", "data": page.items, "has_more": page.has_more, **ends}
    )


def _expires_after(form: FormData) -> ExpiresAfter | None:
    """Return `expires_after` from the form fields that OpenAI's client sends."""
    given = {
        name[len("expires_after[") : -1]: value
        for name, value in form.items()
        if name.startswith("expires_after[")
    }
    if not given:
        return None
    try:
        return msgspec.convert(given, ExpiresAfter, strict=False)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"expires_after: {error}", param="expires_after") from None


async def _and_end(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Append the empty chunk that `MultiPartParser` expects."""
    async for part in parts:
        yield part
    yield b""


def _too_large(largest: int) -> HttpError:
    return HttpError(
        413,
        f"the file is larger than {largest} bytes (max_file_bytes)",
        param="file",
        code="file_too_large",
    )


ROUTES = [
    Route("/v1/files", Endpoint(upload), methods=["POST"]),
    Route("/v1/files", Endpoint(files), methods=["GET"]),
    Route("/v1/files/{file}", Endpoint(file), methods=["GET"]),
    Route("/v1/files/{file}", Endpoint(delete_file), methods=["DELETE"]),
    Route("/v1/files/{file}/content", Endpoint(content), methods=["GET"]),
    Route("/v1/batches", Endpoint(create), methods=["POST"]),
    Route("/v1/batches", Endpoint(batches), methods=["GET"]),
    Route("/v1/batches/{batch}", Endpoint(batch), methods=["GET"]),
    Route("/v1/batches/{batch}", Endpoint(delete_batch), methods=["DELETE"]),
    Route("/v1/batches/{batch}/cancel", Endpoint(cancel), methods=["POST"]),
]
