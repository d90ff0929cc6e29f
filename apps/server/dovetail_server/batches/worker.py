"""`BatchWorker`: has batches answered, several side by side, in one of the front ends that share a `BatchStore`.

A batch's answers are appended to its files as they come, so that a server which starts again goes on with those that are missing. The event loop
never waits for the disk: a few threads do. No error ends the worker: one of a batch fails that batch, one of the disk is retried.
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
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import orjson
from starlette.applications import Starlette

from dovetail.errors import describe
from dovetail_server.batches.calls import call
from dovetail_server.batches.lines import BatchLine, answer_line, answered_in, error_line, request_at, scan
from dovetail_server.batches.store import AnswersKind, BatchStore, derived_file_id, is_transient
from dovetail_server.errors import HttpError, openai_shape
from dovetail_server.protocol.batches import Batch, BatchError, BatchErrors, Counts
from dovetail_server.settings import ServerSettings

T = TypeVar("T")

logger = logging.getLogger("dovetail.batches")  # not among the lines of requests, which are JSON

LOOK_S = 0.5  # between looks for new batches, for an end that was asked for, and for the counts to be written
TRY_AGAIN_S, MOST_PAUSE_S = 1.0, 30.0  # before a batch goes on that was told to come again: twice as long each time
TIDY_S = 3600.0  # between two looks for what has expired
STALLED_S = 60.0  # without a look before /health says so
AT_ONCE = 8  # batches that are answered side by side
MOST_OPEN = 256  # those included that wait before they try again
GATHER_S = 0.05  # so long answers are gathered to be written at once
READ_BYTES = 2**18  # of requests that are read at once
_THREADS = AT_ONCE + 4
_NO_STREAM = HttpError(400, "stream: a batch's answers are whole", param="stream").body(openai_shape)
_BUSY = (429, 503)  # full, shutting down, or the engine has died: none of them is the request's fault
_REJECTED = "rejected"  # the code of a 503 that is final: the scheduler's decision about this very request

End = Literal["completed", "failed", "cancelled", "expired"]


class _Ready(NamedTuple):
    """A request that has been read."""

    offset: int
    line: BatchLine
    is_stream: bool


class InThread(Protocol):
    """Calls something that blocks in a thread."""

    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T: ...


class BatchWorker:
    """One for each front end; all methods are called in its event loop."""

    def __init__(self, app: Starlette, store: BatchStore, settings: ServerSettings) -> None:
        self._app, self._store, self._settings = app, store, settings
        self._threads = ThreadPoolExecutor(_THREADS, "batches")
        self._seats = asyncio.Semaphore(settings.batch_requests)  # fair: each batch waits for one at a time
        self._works: dict[str, _Work] = {}
        self._looked_at = time.monotonic()
        self._status = "ok"

    @property
    def status(self) -> str:
        """What /health says: "ok", "standby" while another front end has batches answered, or what is wrong."""
        if time.monotonic() - self._looked_at > STALLED_S:
            return "stalled: the disk doesn't answer"
        return next((work.trouble for work in self._works.values() if work.trouble), self._status)

    async def run(self) -> None:
        """Work until cancelled, whenever no other front end does."""
        try:
            while True:
                try:
                    with self._store.owned() as owned:
                        if owned:
                            await self._work()
                    self._looked("standby")
                except Exception as error:
                    self._failed(error)
                await asyncio.sleep(LOOK_S)
        finally:
            self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call something that blocks, and return what it does. Cancelled, it waits for its end first: nothing writes unseen."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def _work(self) -> None:
        """Have batches answered until cancelled."""
        tasks: set[asyncio.Task[None]] = set()
        tidied_at = -TIDY_S
        try:
            while True:
                try:
                    if time.monotonic() - tidied_at >= TIDY_S:
                        tidied_at = time.monotonic()  # before: what can't be tidied holds no batch up
                        await self._in_thread(self._store.tidy)
                    tasks |= await self._look()
                    self._looked("ok")
                    if not tasks:
                        await asyncio.sleep(LOOK_S)
                        continue
                    ended, tasks = await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()
                except Exception as error:
                    self._failed(error)
                    await asyncio.sleep(TRY_AGAIN_S)
        finally:
            await _end_all(tasks)

    async def _look(self) -> set[asyncio.Task[None]]:
        """Begin with batches that are due, and tell those that are cancelled."""
        opened = await self._in_thread(self._store.open_batches)
        busy = sum(not work.waits for work in self._works.values())
        begun = set()
        for batch_id in opened.batches:
            is_cancelled = batch_id in opened.cancelled
            if (work := self._works.get(batch_id)) is not None:
                work.is_cancelled = is_cancelled
            elif is_cancelled or (busy < AT_ONCE and len(self._works) < MOST_OPEN):
                work = _Work(self._app, self._store, self._settings, self._seats, self._in_thread, batch_id, is_cancelled)
                self._works[batch_id] = work
                begun.add(task := asyncio.create_task(work.run()))
                task.add_done_callback(partial(self._forget, batch_id))
                busy += 1
        return begun

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        del self._works[batch_id]

    def _looked(self, status: str) -> None:
        self._looked_at, self._status = time.monotonic(), status

    def _failed(self, error: Exception) -> None:
        logger.warning("batches wait: %s", describe(error), exc_info=None if is_transient(error) else error)
        self._looked(f"failing: {reason_of(error)}")


class _Work:
    """One batch."""

    def __init__(
        self,
        app: Starlette,
        store: BatchStore,
        settings: ServerSettings,
        seats: asyncio.Semaphore,
        in_thread: InThread,
        batch_id: str,
        is_cancelled: bool,
    ) -> None:
        self._app, self._store, self._settings, self._seats, self._in_thread = app, store, settings, seats, in_thread
        self._id, self.is_cancelled = batch_id, is_cancelled
        self.trouble: str | None = None  # the reason why the disk doesn't take or give something now
        self._left: deque[int] = deque()  # offsets of the requests that are to be made
        self._ready: deque[_Ready] = deque()  # the next ones, which have been read
        self._unwritten: dict[AnswersKind, list[bytes]] = {"output": [], "error": []}  # answers
        self._kept: Counts | None = None  # as written
        self._pause_s = self._resumes_at = self._kept_at = self._used_disk_at = 0.0

    @property
    def waits(self) -> bool:
        """True while it begins nothing, because it was told to try again later."""
        return time.monotonic() < self._resumes_at

    async def run(self) -> None:
        """Have the batch ended, however long the disk refuses that."""
        while True:
            try:
                return await self._run_once()
            except Exception as error:
                self._note(error)
                await asyncio.sleep(self._pause_s)

    async def _run_once(self) -> None:
        """Have those requests answered that are not, as far as there is time. Raises what the disk does."""
        try:
            batch = await self._in_thread(self._store.batch, self._id)
        except HttpError as error:
            if error.status == 404:  # it was removed by hand
                return
            raise
        try:
            end = await self._answer_all(batch)
        except Exception as error:
            if is_transient(error):
                raise
            logger.exception("%s is given up", self._id)  # it would fail again at each start
            reason = reason_of(error) if isinstance(error, OSError) else describe(error)
            batch.errors = BatchErrors([BatchError("internal_error", f"the server failed: {reason}")])
            end = "failed"
        await self._in_thread(self._end, batch, end)

    async def _answer_all(self, batch: Batch) -> End:
        """Return how the batch came to its end."""
        if batch.status == "failed":  # it is damaged
            return "failed"
        if errors := await self._in_thread(self._scan, batch):
            batch.errors = BatchErrors(errors)
            return "failed"
        batch.in_progress_at = batch.in_progress_at or int(time.time())
        batch.status, batch.cancelling_at = "in_progress", None
        await self._in_thread(self._store.keep_batch, batch)
        end = await self._answer_left(batch)
        batch.finalizing_at = int(time.time())
        if end == "expired":
            await self._in_thread(self._expire_left, batch)
        return end

    async def _answer_left(self, batch: Batch) -> End:
        """Make the requests, one more for each seat, until all are answered or the batch is to end. One at a time: when the server is full, one is
        refused and the others wait."""
        under_way: set[asyncio.Task[None]] = set()
        seat: asyncio.Task[Any] | None = None
        try:
            while self._left or self._ready or under_way or any(self._unwritten.values()):
                is_over = self.is_cancelled or time.time() >= batch.expires_at
                is_due = time.monotonic() >= self._used_disk_at + GATHER_S or not under_way or (self._left and not self._ready)
                if not self.waits and (is_due or is_over):
                    await self._use_disk(batch)
                if is_over:
                    return "cancelled" if self.is_cancelled else "expired"
                if seat is None and self._ready and not self.waits:
                    seat = asyncio.create_task(self._seats.acquire())
                tasks: set[asyncio.Task[Any]] = under_way if seat is None else {seat, *under_way}
                if not tasks:
                    await asyncio.sleep(LOOK_S if self.waits else 0)
                    continue
                ended, _ = await asyncio.wait(tasks, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in ended & under_way:
                    under_way.discard(task)
                    task.result()
                if seat in ended:
                    seat = None
                    if self._ready and not self.waits:
                        under_way.add(task := asyncio.create_task(self._answer(self._ready.popleft())))
                        task.add_done_callback(lambda _: self._seats.release())  # also if it is cancelled before it begins
                    else:
                        self._seats.release()
            return "completed"
        finally:
            if seat is not None and not seat.cancel():
                self._seats.release()
            await _end_all(under_way)  # none may write any more

    async def _answer(self, request: _Ready) -> None:
        """Make a request, and keep its answer to be written."""
        line, request_id = request.line, _request_id()
        status, answer = (400, _NO_STREAM) if request.is_stream else await call(self._app, line.url, bytes(line.body), request_id)
        if status in _BUSY and _code_of(answer) != _REJECTED:
            self._left.append(request.offset)
            self._pause()
            return
        self._pause_s = 0.0
        self._unwritten["output" if status == 200 else "error"].append(answer_line(line.custom_id, request_id, status, answer))

    async def _use_disk(self, batch: Batch) -> None:
        """Write the answers that have come, and now and then the counts; read the next requests. What the disk refuses now waits."""
        counts = batch.request_counts
        try:
            for kind, lines in self._unwritten.items():
                if number := len(lines):
                    await self._in_thread(self._store.append, derived_file_id(self._id, kind), b"".join(lines))
                    del lines[:number]  # others may have come meanwhile
                    counts.completed += number if kind == "output" else 0
                    counts.failed += number if kind == "error" else 0
            if time.monotonic() - self._kept_at >= LOOK_S and counts != self._kept:
                self._kept_at, self._kept = time.monotonic(), copy(counts)
                await self._in_thread(self._store.keep_batch, batch)
            if self._left and not self._ready:
                await self._in_thread(self._read, batch)
            self._used_disk_at, self.trouble = time.monotonic(), None
        except OSError as error:
            if not is_transient(error):
                raise
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Say that the disk has failed, and pause."""
        reason = reason_of(error)
        if self.trouble != reason:
            logger.warning("%s waits: %s", self._id, describe(error), exc_info=None if isinstance(error, OSError | HttpError) else error)
        self.trouble = reason
        self._pause()

    def _pause(self) -> None:
        """Begin nothing for a while, longer each time until a request is answered."""
        if not self.waits:
            self._pause_s = min(2 * self._pause_s or TRY_AGAIN_S, MOST_PAUSE_S)
            self._resumes_at = time.monotonic() + self._pause_s

    # In a thread

    def _scan(self, batch: Batch) -> list[BatchError]:
        """Return what is wrong with the input, and note which of its requests are to be made."""
        well, badly = (answered_in(self._store.content(derived_file_id(self._id, kind))) for kind in self._unwritten)
        try:
            total, errors, left = scan(self._input(batch), batch.endpoint, self._settings.max_body_bytes, well | badly)
        except FileNotFoundError:
            total, errors, left = 0, [BatchError("file_not_found", "the input file is gone")], []
        batch.request_counts = Counts(total, len(well), len(badly))
        self._left, self._ready = deque(left), deque()
        self._unwritten, self._kept = {"output": [], "error": []}, None
        return errors

    def _read(self, batch: Batch) -> None:
        """Read the next requests, some at once."""
        size = 0
        while self._left and size < READ_BYTES:
            line = request_at(self._input(batch), self._left[0], self._settings.max_body_bytes)
            size += len(body := bytes(line.body))
            self._ready.append(_Ready(self._left.popleft(), line, _asks_for_stream(body)))

    def _expire_left(self, batch: Batch) -> None:
        """Write a failure for each request without an answer."""
        if errors := self._scan(batch):
            raise RuntimeError(f"the input file has changed: {errors[0].message}")
        while self._left:
            self._read(batch)
            lines = [error_line(one.line.custom_id, _request_id(), "batch_expired", "there was no time left for this request") for one in self._ready]
            self._store.append(derived_file_id(self._id, "error"), b"".join(lines))
            batch.request_counts.failed += len(lines)
            self._ready.clear()

    def _end(self, batch: Batch, status: End) -> None:
        """Keep the batch as ended, with what has come of its answers."""
        batch.output_file_id, batch.error_file_id = (self._store.finish_answers(batch, kind) for kind in self._unwritten)
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
    """Return an error's reason without names of files or batches: /health is open to all."""
    if isinstance(error, HttpError):  # of the store: it names none
        return error.message
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _asks_for_stream(body: bytes) -> bool:
    """True if a body, which begins as an object does, wants its answer in pieces. What else is wrong with it the endpoint says."""
    try:
        return b'"stream"' in body and bool(orjson.loads(body).get("stream"))
    except orjson.JSONDecodeError:  # `scan` has looked at the line, not into the body
        return False


def _code_of(answer: bytes) -> str | None:
    """Return the code of an error in OpenAI's shape."""
    with suppress(ValueError, KeyError, TypeError):
        code: str | None = orjson.loads(answer)["error"]["code"]
        return code
    return None


def _request_id() -> str:
    return uuid.uuid4().hex
