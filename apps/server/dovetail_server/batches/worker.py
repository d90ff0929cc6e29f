"""`BatchWorker`: processes batches concurrently, in one of the front ends that share a
`BatchStore`.

Answers are appended to a batch's files as they arrive, so that a restarted server continues with
the missing ones. The event loop never waits for the disk: a few threads do. No error ends the
worker: errors of a batch fail that batch, errors of the disk are retried.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.types import Message

from dovetail.errors import describe
from dovetail_server.batches.lines import (
    BatchLine,
    answer_line,
    answered_in,
    error_line,
    request_at,
    scan,
)
from dovetail_server.batches.store import AnswersKind, BatchStore, derived_file_id, is_transient
from dovetail_server.errors import HttpError, openai_shape, without_paths
from dovetail_server.protocol.batches import Batch, BatchError, BatchErrors, Counts
from dovetail_server.settings import ServerSettings

T = TypeVar("T")

logger = logging.getLogger("dovetail.batches")  # separate from request logs, which are JSON

POLL_S = 0.5  # interval of polling for new batches and cancellations, and of writing counts
# exponential backoff of a batch whose requests are rejected for now
TRY_AGAIN_S = 1.0
MOST_PAUSE_S = 30.0
TIDY_S = 3600.0  # interval of removing expired files
STALLED_S = 60.0  # time without polling after which /health reports it
AT_ONCE = 8  # batches processed concurrently
MOST_OPEN = 256  # including those that are backing off
GATHER_S = 0.05  # time over which answers are collected for one write
READ_BYTES = 2**18  # of requests read at once
_THREADS = AT_ONCE + 4
_NO_STREAM = HttpError(400, "stream: not supported in batches", param="stream").body(openai_shape)
_BUSY = (429, 503)  # overloaded, shutting down, or engine dead: retried
_REJECTED = "rejected"  # code of a final 503: the scheduler rejected this request

End = Literal["completed", "failed", "cancelled", "expired"]


class _Ready(NamedTuple):
    """A request that has been read."""

    offset: int
    line: BatchLine
    is_stream: bool


class BatchWorker:
    """One per front end. All methods are called in its event loop."""

    def __init__(self, app: Starlette, store: BatchStore, settings: ServerSettings) -> None:
        self.app = app
        self.store = store
        self.settings = settings
        self._threads = ThreadPoolExecutor(_THREADS, "batches")
        # fair: each batch waits for one slot at a time
        self.slots = asyncio.Semaphore(settings.batch_requests)
        self._works: dict[str, _Work] = {}
        self._polled_at = time.monotonic()
        self._status = "ok"

    @property
    def status(self) -> str:
        """State for /health: "ok", "standby" while another front end processes batches, or an
        error."""
        if time.monotonic() - self._polled_at > STALLED_S:
            return "stalled: the disk doesn't answer"
        return next((work.trouble for work in self._works.values() if work.trouble), self._status)

    async def run(self) -> None:
        """Process batches until cancelled, whenever no other front end does."""
        try:
            while True:
                try:
                    with self.store.owned() as owned:
                        if owned:
                            await self._work()
                    self._polled("standby")
                except Exception as error:
                    self._failed(error)
                await asyncio.sleep(POLL_S)
        finally:
            self._threads.shutdown(wait=False)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work in a thread, and return its result.

        On cancellation it waits for the work to end, so that no write goes unnoticed.
        """
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def _work(self) -> None:
        """Process batches until cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        tidied_at = -TIDY_S
        try:
            while True:
                try:
                    if time.monotonic() - tidied_at >= TIDY_S:
                        # set first, so that failures don't delay batches
                        tidied_at = time.monotonic()
                        await self.in_thread(self.store.tidy)
                    tasks |= await self._poll_batches()
                    self._polled("ok")
                    if not tasks:
                        await asyncio.sleep(POLL_S)
                        continue
                    ended, tasks = await asyncio.wait(
                        tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
                except Exception as error:
                    self._failed(error)
                    await asyncio.sleep(TRY_AGAIN_S)
        finally:
            await _end_all(tasks)

    async def _poll_batches(self) -> set[asyncio.Task[None]]:
        """Start new batches, and notify cancelled ones."""
        opened = await self.in_thread(self.store.open_batches)
        busy = sum(not work.waits for work in self._works.values())
        begun = set()
        for batch_id in opened.batches:
            is_cancelled = batch_id in opened.cancelled
            if (work := self._works.get(batch_id)) is not None:
                work.is_cancelled = is_cancelled
            elif is_cancelled or (busy < AT_ONCE and len(self._works) < MOST_OPEN):
                work = _Work(self, batch_id, is_cancelled)
                self._works[batch_id] = work
                begun.add(task := asyncio.create_task(work.run()))
                task.add_done_callback(partial(self._forget, batch_id))
                busy += 1
        return begun

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        del self._works[batch_id]

    def _polled(self, status: str) -> None:
        self._polled_at = time.monotonic()
        self._status = status

    def _failed(self, error: Exception) -> None:
        logger.warning(
            "batches are waiting: %s",
            describe(error),
            exc_info=None if is_transient(error) else error,
        )
        self._polled(f"failing: {reason_of(error)}")


class _Work:
    """Processing of one batch."""

    def __init__(self, worker: BatchWorker, batch_id: str, is_cancelled: bool) -> None:
        self._app = worker.app
        self._store = worker.store
        self._settings = worker.settings
        self._slots = worker.slots
        self._in_thread = worker.in_thread
        self._id = batch_id
        self.is_cancelled = is_cancelled
        self.trouble: str | None = None  # current error of the disk
        self._left: deque[int] = deque()  # offsets of pending requests
        self._ready: deque[_Ready] = deque()  # the next ones, already read
        self._unwritten: dict[AnswersKind, list[bytes]] = {"output": [], "error": []}  # answers
        self._kept: Counts | None = None  # counts last written
        self._pause_s = self._resumes_at = self._kept_at = self._used_disk_at = 0.0

    @property
    def _has_work(self) -> bool:
        """True while requests are to be sent, or answers to be written."""
        return bool(self._left or self._ready or any(self._unwritten.values()))

    @property
    def waits(self) -> bool:
        """True while backing off."""
        return time.monotonic() < self._resumes_at

    async def run(self) -> None:
        """Process the batch to its end, retrying on errors of the disk."""
        while True:
            try:
                return await self._run_once()
            except Exception as error:
                self._note(error)
                await asyncio.sleep(self._pause_s)

    async def _run_once(self) -> None:
        """Answer pending requests until the batch completes or expires.

        Raises errors of the disk.
        """
        try:
            batch = await self._in_thread(self._store.batch, self._id)
        except HttpError as error:
            if error.status == 404:  # removed manually
                return
            raise
        try:
            end = await self._answer_all(batch)
        except Exception as error:
            if is_transient(error):
                raise
            logger.exception("%s has failed", self._id)  # retrying would fail again
            reason = reason_of(error) if isinstance(error, OSError) else describe(error)
            batch.errors = BatchErrors(
                [BatchError("internal_error", without_paths(f"the server failed: {reason}"))]
            )
            end = "failed"
        await self._in_thread(self._end, batch, end)

    async def _answer_all(self, batch: Batch) -> End:
        """Answer the batch, and return how it ended."""
        if batch.status == "failed":  # damaged
            return "failed"
        if errors := await self._in_thread(self._scan, batch):
            batch.errors = BatchErrors(errors)
            return "failed"
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        batch.status = "in_progress"
        batch.cancelling_at = None
        await self._in_thread(self._store.keep_batch, batch)
        end = await self._answer_left(batch)
        batch.finalizing_at = int(time.time())
        if end == "expired":
            await self._in_thread(self._expire_left, batch)
        return end

    async def _answer_left(self, batch: Batch) -> End:
        """Send requests as slots become free, until all are answered or the batch must end.

        One slot at a time: if the server is overloaded, one request is rejected and the others
        wait.
        """
        under_way: set[asyncio.Task[None]] = set()
        slot: asyncio.Task[Any] | None = None
        try:
            while self._has_work or under_way:
                is_over = self.is_cancelled or time.time() >= batch.expires_at
                is_due = (
                    time.monotonic() >= self._used_disk_at + GATHER_S
                    or not under_way
                    or (self._left and not self._ready)
                )
                if not self.waits and (is_due or is_over):
                    await self._use_disk(batch)
                if is_over:
                    return "cancelled" if self.is_cancelled else "expired"
                if slot is None and self._ready and not self.waits:
                    slot = asyncio.create_task(self._slots.acquire())
                tasks: set[asyncio.Task[Any]] = under_way if slot is None else {slot, *under_way}
                if not tasks:
                    await asyncio.sleep(POLL_S if self.waits else 0)
                    continue
                ended, _ = await asyncio.wait(
                    tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended & under_way:
                    under_way.discard(task)
                    task.result()
                if slot in ended:
                    slot = None
                    if self._ready and not self.waits:
                        under_way.add(
                            task := asyncio.create_task(self._answer(self._ready.popleft()))
                        )
                        # even if cancelled before it begins
                        task.add_done_callback(lambda _: self._slots.release())
                    else:
                        self._slots.release()
            return "completed"
        finally:
            if slot is not None and not slot.cancel():
                self._slots.release()
            await _end_all(under_way)  # nothing may write any more

    async def _answer(self, request: _Ready) -> None:
        """Send a request, and queue its answer for writing."""
        line = request.line
        request_id = _request_id()
        status, answer = (
            (400, _NO_STREAM)
            if request.is_stream
            else await call(self._app, line.url, bytes(line.body), request_id)
        )
        if status in _BUSY and _code_of(answer) != _REJECTED:
            self._left.append(request.offset)
            self._pause()
            return
        self._pause_s = 0.0
        self._unwritten["output" if status == 200 else "error"].append(
            answer_line(line.custom_id, request_id, status, answer)
        )

    async def _use_disk(self, batch: Batch) -> None:
        """Write queued answers and, periodically, the counts; read the next requests.

        Transient errors are retried later.
        """
        counts = batch.request_counts
        try:
            for kind, lines in self._unwritten.items():
                if number := len(lines):
                    await self._in_thread(
                        self._store.append, derived_file_id(self._id, kind), b"".join(lines)
                    )
                    del lines[:number]  # more may have been queued meanwhile
                    counts.completed += number if kind == "output" else 0
                    counts.failed += number if kind == "error" else 0
            if time.monotonic() - self._kept_at >= POLL_S and counts != self._kept:
                self._kept_at, self._kept = time.monotonic(), copy(counts)
                await self._in_thread(self._store.keep_batch, batch)
            if self._left and not self._ready:
                await self._in_thread(self._read, batch)
            self._used_disk_at = time.monotonic()
            self.trouble = None
        except OSError as error:
            if not is_transient(error):
                raise
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Log an error of the disk, and back off."""
        reason = reason_of(error)
        if self.trouble != reason:
            logger.warning(
                "%s is waiting: %s",
                self._id,
                describe(error),
                exc_info=None if isinstance(error, OSError | HttpError) else error,
            )
        self.trouble = reason
        self._pause()

    def _pause(self) -> None:
        """Back off exponentially until a request succeeds."""
        if not self.waits:
            self._pause_s = min(2 * self._pause_s or TRY_AGAIN_S, MOST_PAUSE_S)
            self._resumes_at = time.monotonic() + self._pause_s

    # In a thread

    def _scan(self, batch: Batch) -> list[BatchError]:
        """Return the errors of the input, and collect its pending requests."""
        well, badly = (
            answered_in(self._store.content(derived_file_id(self._id, kind)))
            for kind in self._unwritten
        )
        try:
            total, errors, left = scan(
                self._input(batch), batch.endpoint, self._settings.max_body_bytes, well | badly
            )
        except FileNotFoundError:
            total = 0
            errors = [BatchError("file_not_found", "the input file is gone")]
            left = []
        batch.request_counts = Counts(total, len(well), len(badly))
        self._left, self._ready = deque(left), deque()
        self._unwritten = {"output": [], "error": []}
        self._kept = None
        return errors

    def _read(self, batch: Batch) -> None:
        """Read the next requests."""
        size = 0
        while self._left and size < READ_BYTES:
            line = request_at(self._input(batch), self._left[0], self._settings.max_body_bytes)
            size += len(body := bytes(line.body))
            self._ready.append(_Ready(self._left.popleft(), line, _asks_for_stream(body)))

    def _expire_left(self, batch: Batch) -> None:
        """Write an error for each unanswered request."""
        if errors := self._scan(batch):
            raise RuntimeError(f"the input file has changed: {errors[0].message}")
        while self._left:
            self._read(batch)
            lines = [
                error_line(
                    one.line.custom_id,
                    _request_id(),
                    "batch_expired",
                    "there was no time left for this request",
                )
                for one in self._ready
            ]
            self._store.append(derived_file_id(self._id, "error"), b"".join(lines))
            batch.request_counts.failed += len(lines)
            self._ready.clear()

    def _end(self, batch: Batch, status: End) -> None:
        """Store the batch as finished, with the answers so far."""
        batch.output_file_id, batch.error_file_id = (
            self._store.finish_answers(batch, kind) for kind in self._unwritten
        )
        setattr(batch, f"{status}_at", int(time.time()))
        batch.status = status
        self._store.end_batch(batch)

    def _input(self, batch: Batch) -> Path:
        return self._store.content(batch.input_file_id)


async def _end_all(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reason_of(error: Exception) -> str:
    """Return an error's reason without file or batch names, since /health is public."""
    if isinstance(error, HttpError):  # the store's errors contain none
        return error.message
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


class _Streams(msgspec.Struct):
    """The part of a body that asks for a stream. The others are skipped, not built."""

    stream: msgspec.Raw = msgspec.Raw(b"false")


_STREAMS = msgspec.json.Decoder(_Streams)


def _asks_for_stream(body: bytes) -> bool:
    """Return True if a body asks for a stream. Other errors in it are left to the endpoint."""
    try:
        return b'"stream"' in body and bytes(_STREAMS.decode(body).stream) == b"true"
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
    ):  # `scan` doesn't validate bodies
        return False


def _code_of(answer: bytes) -> str | None:
    """Return the code of an error in OpenAI's format."""
    with suppress(ValueError, KeyError, TypeError):
        code: str | None = orjson.loads(answer)["error"]["code"]
        return code
    return None


def _request_id() -> str:
    return uuid.uuid4().hex


async def call(app: Starlette, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """POST a body to a path, bypassing the middleware for keys and logs.

    Return the response's status and body. Cancellation leaves nothing behind.
    """
    status = 0
    parts = []
    asked = False
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await never.wait()  # for a disconnect
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "dovetail.request_id": request_id,
    }
    await app.router(scope, receive, send)
    return status, b"".join(parts)
