"""`BatchWorker`: has batches answered, the oldest first, in one of the front ends that share a `BatchStore`.

A batch's answers are appended to its files as they come, so that a server which starts again goes on with those that are missing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
import uuid
from collections.abc import Iterator
from typing import IO, Literal

import orjson
from starlette.applications import Starlette

from dovetail.errors import DovetailError, describe
from dovetail_server.batches.calls import call
from dovetail_server.batches.lines import BatchLine, answer_line, answered_in, checked, error_line, requests_in
from dovetail_server.batches.store import BatchStore, derived_file_id
from dovetail_server.errors import HttpError, openai_shape
from dovetail_server.protocol.batches import ENDED, Batch, BatchError, BatchErrors, Counts
from dovetail_server.settings import ServerSettings

logger = logging.getLogger("dovetail.batches")  # not among the lines of requests, which are JSON

LOOK_S = 0.5  # between looks for new batches, for an end that was asked for, and for the counts to be written
TRY_AGAIN_S = 1.0  # after an answer that says so
TROUBLE_S = 10.0  # after the disk refused something
_NO_STREAM = HttpError(400, "stream: a batch's answers are whole", param="stream").body(openai_shape)
TRY_AGAIN = (429, 503)  # full, shutting down, or the engine has died: none of them is the request's fault


class BatchWorker:
    """One for each front end."""

    def __init__(self, app: Starlette, store: BatchStore, settings: ServerSettings) -> None:
        self._app, self._store, self._settings = app, store, settings

    async def run(self) -> None:
        """Work until cancelled, whenever no other front end does."""
        while True:
            with self._store.owned() as owned:
                if owned:
                    self._store.remove_abandoned()
                while owned:
                    batch = self._oldest()
                    if batch is None:
                        await asyncio.sleep(LOOK_S)
                        continue
                    await self._work_on(batch)
            await asyncio.sleep(LOOK_S)

    async def _work_on(self, batch: Batch) -> None:
        """Have a batch answered, or fail it, so that those behind it get their turn."""
        work = _Work(self._app, self._store, self._settings, batch)
        try:
            try:
                await work.run()
            except (OSError, DovetailError):
                raise
            except Exception as error:  # our own fault, which would be met again at each start
                logger.exception("%s is given up", batch.id)
                work.fail([BatchError("internal_error", f"the server failed: {describe(error)}")])
        except (OSError, DovetailError) as error:  # the disk is full: the next try may find room
            logger.warning("%s waits: %s", batch.id, describe(error))
            await asyncio.sleep(TROUBLE_S)

    def _oldest(self) -> Batch | None:
        waiting = [batch for batch in self._store.batches() if batch.status not in ENDED]
        return min(waiting, key=lambda batch: (batch.created_at, batch.id), default=None)


class _Work:
    """One batch."""

    def __init__(self, app: Starlette, store: BatchStore, settings: ServerSettings, batch: Batch) -> None:
        self._app, self._store, self._settings, self._batch = app, store, settings, batch
        self._source = store.content(batch.input_file_id)
        self._output_id, self._error_id = derived_file_id(batch.id, "output"), derived_file_id(batch.id, "error")
        self._looked = 0.0

    async def run(self) -> None:
        """Have all requests answered that are not, or as many as there is time for. Raises `OSError`."""
        batch = self._batch
        try:
            total, errors = await asyncio.to_thread(checked, self._source, batch.endpoint, self._settings.max_body_bytes)
        except FileNotFoundError:
            total, errors = 0, [BatchError("file_not_found", "the input file is gone")]
        batch.request_counts = Counts(total)
        if errors:
            self.fail(errors)
            return
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        batch.status, batch.cancelling_at = "in_progress", None
        with self._store.appended(self._output_id) as output, self._store.appended(self._error_id) as failures:
            end = await self._answer_all(self._left(), output, failures)
        batch.finalizing_at = int(time.time())
        if end == "expired":
            with self._store.appended(self._error_id) as failures:
                for line in self._left():
                    self._failed(failures, error_line(line.custom_id, _request_id(), "batch_expired", "there was no time left for this request"))
        self._end(end)

    def fail(self, errors: list[BatchError]) -> None:
        """End the batch without answering what is left. Raises `OSError`."""
        self._batch.errors = BatchErrors(errors)
        self._end("failed")

    def _left(self) -> Iterator[BatchLine]:
        """Count the requests that are answered, and yield the others."""
        well, badly = (answered_in(self._store.content(one)) for one in (self._output_id, self._error_id))
        self._batch.request_counts = Counts(self._batch.request_counts.total, len(well), len(badly))
        return requests_in(self._source, well | badly, self._settings.max_body_bytes)

    def _end(self, status: Literal["completed", "failed", "expired", "cancelled"]) -> None:
        """Keep the batch as ended, with what has come of its answers."""
        batch, store = self._batch, self._store
        batch.output_file_id = store.finish_answers(self._output_id, f"{batch.id}_output.jsonl")
        batch.error_file_id = store.finish_answers(self._error_id, f"{batch.id}_error.jsonl")
        setattr(batch, f"{status}_at", int(time.time()))
        batch.status = status
        store.ended(batch)

    async def _answer_all(self, lines: Iterator[BatchLine], output: IO[bytes], failures: IO[bytes]) -> Literal["completed", "cancelled", "expired"]:
        """Return how it came to its end."""
        under_way: set[asyncio.Task[None]] = set()
        more = True
        try:
            while more or under_way:
                while more and len(under_way) < self._settings.batch_requests:
                    if (line := next(lines, None)) is None:
                        more = False
                    else:
                        under_way.add(asyncio.create_task(self._answer(line, output, failures)))
                if (end := self._look()) is not None:
                    return end
                if under_way:
                    ended, under_way = await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    errors = [error for task in ended if (error := task.exception()) is not None]  # of all: one left unread would be told later
                    if errors:
                        raise errors[0]
            return "completed"
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)  # none may write any more

    def _look(self) -> Literal["cancelled", "expired"] | None:
        """Now and then, write the counts, and see whether the batch is to end."""
        if time.monotonic() - self._looked < LOOK_S:
            return None
        self._looked = time.monotonic()
        self._store.keep_batch(self._batch)
        if self._store.wants_end(self._batch.id):
            return "cancelled"
        return "expired" if time.time() >= self._batch.expires_at else None

    async def _answer(self, line: BatchLine, output: IO[bytes], failures: IO[bytes]) -> None:
        body, request_id = bytes(line.body), _request_id()
        status, answer = 400, _NO_STREAM
        if not _asks_for_stream(body):
            status, answer = await call(self._app, line.url, body, request_id)
            while status in TRY_AGAIN:
                await asyncio.sleep(TRY_AGAIN_S)
                status, answer = await call(self._app, line.url, body, request_id)
        told = answer_line(line.custom_id, request_id, status, answer)
        if status == 200:
            _append(output, told)
            self._batch.request_counts.completed += 1
        else:
            self._failed(failures, told)

    def _failed(self, failures: IO[bytes], told: bytes) -> None:
        _append(failures, told)
        self._batch.request_counts.failed += 1


def _asks_for_stream(body: bytes) -> bool:
    """True if a body, which begins as an object does, wants its answer in pieces. What else is wrong with it the endpoint says."""
    try:
        return b'"stream"' in body and bool(orjson.loads(body).get("stream"))
    except orjson.JSONDecodeError:  # `checked` has looked at the line, not into the body
        return False


def _append(file: IO[bytes], line: bytes) -> None:
    """Add a line. Raises `OSError`, also if only a part of it found room: who goes on with the file cuts that off."""
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _request_id() -> str:
    return uuid.uuid4().hex
