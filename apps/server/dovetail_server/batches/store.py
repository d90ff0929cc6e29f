"""`BatchStore`: files and batches in a persistent folder. All front ends read and write it; one of
them processes the batches.

batches.db   what is known of complete files and of batches, in SQLite
file-<id>    a file's content; for answers of an unfinished batch, what has come so far
.lock        locked by the process that answers batches

Ids begin with their creation time, so that they are in the order of lists. A file's content is
complete before its row is written, and removed after it: a killed process leaves at most content
without a row, which `tidy` removes. A batch that can't be decoded is treated as a failed one, so
that it can be listed and deleted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from dovetail.errors import ConfigError, shown
from dovetail_server.errors import HttpError
from dovetail_server.protocol.batches import (
    ENDED,
    ENDPOINTS,
    WINDOW_S,
    Batch,
    BatchError,
    BatchErrors,
    ExpiresAfter,
    FileObject,
)

T = TypeVar("T", Batch, FileObject)

AnswersKind = Literal["output", "error"]

MAX_STORED = 200_000  # files and batches
MAX_OPEN = 10_000  # unfinished batches: the worker reads all of their ids twice a second
DAY_S = 24 * 3600
LEFT_BEHIND_S = 3600.0  # age at which content without a row counts as abandoned
BUSY_S = 10.0  # for which a change waits for those of other processes
_ANSWERS: tuple[AnswersKind, ...] = get_args(AnswersKind)
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_LOCK = ".lock"
_DATABASE = "batches.db"
_DAMAGED = "what the server kept of this batch can't be read any more"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TRANSIENT = (
    *_FULL,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOLCK,
)
_ERRNO_OF = {  # by SQLite's result codes; others are EIO
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_BUSY: errno.EAGAIN,
    sqlite3.SQLITE_LOCKED: errno.EAGAIN,
    sqlite3.SQLITE_CANTOPEN: errno.EAGAIN,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
# `batches.value` is the struct as JSON; the other columns are what queries need of it. `bytes`: of
# its answers so far; those of a finished batch are files. `cancelling_at`: when it was asked for.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, expires_at INTEGER
);
CREATE INDEX IF NOT EXISTS bytes_of_files ON files (bytes);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, input_file_id TEXT NOT NULL, bytes INTEGER NOT NULL DEFAULT 0,
    ended_at INTEGER, cancelling_at INTEGER, value BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS bytes_of_batches ON batches (bytes);
CREATE INDEX IF NOT EXISTS open_batches ON batches (id, cancelling_at, input_file_id)
    WHERE ended_at IS NULL;
"""
_FILE = "SELECT id, bytes, created_at, filename, purpose, expires_at FROM files"
_STORED = """
SELECT (SELECT count(*) FROM files) + (SELECT count(*) FROM batches),
    (SELECT coalesce(sum(bytes), 0) FROM files) + (SELECT coalesce(sum(bytes), 0) FROM batches)
"""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Page of a list."""

    items: list[T]
    has_more: bool


class Open(NamedTuple):
    """Ids of unfinished batches, oldest first, and of those to be cancelled."""

    batches: list[str]
    cancelled: set[str]


class BatchStore:
    """The folder. Methods block on the disk: call them in a thread.

    Those for clients raise `HttpError`: 404 for unknown ids, 507 if the disk is full, and 503 for
    other failures. Those for `BatchWorker` raise `OSError`.
    """

    def __init__(
        self, directory: Path, max_stored_bytes: int, keep_days: float | None = None
    ) -> None:
        """Create the folder if missing, accessible to this user only.

        `keep_days`: retention of files and finished batches; None: until deleted. Raises
        `ConfigError` if the folder isn't writable, or its database isn't one.
        """
        self._directory = directory
        self._max_stored_bytes = max_stored_bytes
        self._keep_s = None if keep_days is None else int(keep_days * DAY_S)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in (_LOCK, _DATABASE):
                (directory / name).touch(mode=0o600)
            with self._connected() as database:
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except OSError as error:
            raise ConfigError(
                f"--batch-directory: {directory}: can't be written to: {error.strerror or error}"
            ) from None

    # Files

    def add_file(
        self, name: str, copy: Callable[[IO[bytes]], object], expires: ExpiresAfter | None = None
    ) -> FileObject:
        """Store an uploaded file, whose content `copy` writes."""
        with _disk():
            self._check_room()
            file_id = new_id("file-")
            try:
                with open(self.content(file_id), "xb", opener=_private) as file:
                    copy(file)
                    file.flush()
                    os.fsync(file.fileno())
                return self._finish_file(file_id, name, "batch", expires)
            except BaseException:
                self.content(file_id).unlink(missing_ok=True)
                raise

    def append(self, file_id: str, lines: bytes) -> None:
        """Append lines to a file of answers, atomically. Raises `OSError`."""
        with open(self.content(file_id), "ab", buffering=0, opener=_private) as file:
            size = os.fstat(file.fileno()).st_size
            try:
                if file.write(lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise

    def finish_answers(self, batch: Batch, kind: AnswersKind) -> str | None:
        """Sync and publish a batch's file of answers, and return its id; None if it is empty.
        Raises `OSError`."""
        file_id = derived_file_id(batch.id, kind)
        content = self.content(file_id)
        try:
            with content.open("rb") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None
        if not size:
            content.unlink()
            return None
        name = f"{batch.id}_{kind}.jsonl"
        return self._finish_file(file_id, name, "batch_output", batch.output_expires_after).id

    def file(self, file_id: str) -> FileObject:
        """Return the metadata of a complete file."""
        return _file_of(*self._found(f"{_FILE} WHERE id = ?", file_id, "file"))

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._directory / file_id

    def open_content(self, file_id: str) -> IO[bytes]:
        """Open the content of a complete file."""
        self.file(file_id)
        with _disk():
            try:
                return self.content(file_id).open("rb")
            except FileNotFoundError:
                raise HttpError(
                    404, f"the content of {file_id} is gone", code="file_not_found"
                ) from None

    def files(
        self,
        after: str | None = None,
        limit: int = 10_000,
        *,
        ascending: bool = False,
        purpose: str | None = None,
    ) -> Page[FileObject]:
        """Return a page of complete files after the id `after`, newest first unless `ascending`."""
        order = "> ? ORDER BY id" if ascending else "< ? ORDER BY id DESC"
        query = f"{_FILE} WHERE ? IN ('', purpose) AND id {order} LIMIT ?"
        start = _start(after, "" if ascending else "~")
        with _disk():
            rows = self._rows(query, purpose or "", start, limit + 1)
        items = [_file_of(*row) for row in rows[:limit]]
        return Page(items, len(rows) > limit)

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises `HttpError` 409 while a batch uses it."""
        self.file(file_id)
        with _disk():
            with self._changing() as database:
                using = database.execute(
                    "SELECT id FROM batches WHERE ended_at IS NULL AND input_file_id = ?",
                    (file_id,),
                ).fetchone()
                if using is not None:
                    raise HttpError(
                        409, f"{using[0]} needs this file: cancel it first", code="file_in_use"
                    )
                database.execute("DELETE FROM files WHERE id = ?", (file_id,))
            self.content(file_id).unlink(missing_ok=True)

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Store a new batch for processing. Raises `HttpError` 400 for an unusable input file."""
        file = self.file(batch.input_file_id)
        if file.purpose != "batch":
            why = "input_file_id: this file holds answers"
            raise HttpError(400, why, param="input_file_id")
        with _disk():
            self._check_room()
            with self._changing() as database:
                count = "SELECT count(*) FROM batches WHERE ended_at IS NULL"
                if database.execute(count).fetchone()[0] >= MAX_OPEN:
                    raise HttpError(
                        429,
                        f"there are {MAX_OPEN} unfinished batches: wait until some end",
                        code="too_many_batches",
                        headers={"Retry-After": "60"},
                    )
                database.execute(
                    "INSERT INTO batches (id, input_file_id, value) VALUES (?, ?, ?)",
                    (batch.id, batch.input_file_id, msgspec.json.encode(batch)),
                )

    def batch(self, batch_id: str) -> Batch:
        """Return a batch in its current state."""
        query = "SELECT id, cancelling_at, value FROM batches WHERE id = ?"
        return _read_batch(*self._found(query, batch_id, "batch"))

    def batches(self, after: str | None = None, limit: int = 100) -> Page[Batch]:
        """Return a page of batches after the id `after`, newest first."""
        query = "SELECT id, cancelling_at, value FROM batches WHERE id < ? ORDER BY id DESC LIMIT ?"
        start = _start(after, "~")
        with _disk():
            rows = self._rows(query, start, limit + 1)
        return Page([_read_batch(*row) for row in rows[:limit]], len(rows) > limit)

    def cancel(self, batch_id: str) -> Batch:
        """Request a batch's cancellation, and return it. Raises `HttpError` 409 if it has ended."""
        with _disk(), self._changing() as database:
            asked = database.execute(
                "UPDATE batches SET cancelling_at = coalesce(cancelling_at, ?)"
                " WHERE id = ? AND ended_at IS NULL",
                (int(time.time()), _checked_id(batch_id, "batch")),
            ).rowcount
        batch = self.batch(batch_id)
        if not asked:
            raise HttpError(
                409,
                f"{batch_id} is {batch.status}: it can't be cancelled any more",
                code="batch_ended",
            )
        return batch

    def delete_batch(self, batch_id: str) -> None:
        """Delete a finished batch and its answers. Raises `HttpError` 409 if it is unfinished."""
        batch = self.batch(batch_id)
        if batch.status not in ENDED:
            raise HttpError(
                409, f"{batch_id} is {batch.status}: cancel it first", code="batch_not_ended"
            )
        answers = [derived_file_id(batch_id, kind) for kind in _ANSWERS]
        with _disk():
            with self._changing() as database:
                database.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
                database.executemany("DELETE FROM files WHERE id = ?", [(one,) for one in answers])
            for file_id in answers:
                self.content(file_id).unlink(missing_ok=True)

    # For `BatchWorker`

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Try to lock the folder for processing batches, and yield whether that succeeded. The
        kernel releases the lock if the process dies."""
        with open(self._directory / _LOCK, "a", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def open_batches(self) -> Open:
        """Return the unfinished batches."""
        rows = self._rows(
            "SELECT id, cancelling_at FROM batches WHERE ended_at IS NULL ORDER BY id"
        )
        cancelled = {batch_id for batch_id, cancelling_at in rows if cancelling_at is not None}
        return Open([batch_id for batch_id, _ in rows], cancelled)

    def keep_batch(self, batch: Batch) -> None:
        """Write the state of an unfinished batch, and the size of its answers so far."""
        size = 0
        for kind in _ANSWERS:
            with suppress(FileNotFoundError):
                size += self.content(derived_file_id(batch.id, kind)).stat().st_size
        with self._changing() as database:
            database.execute(
                "UPDATE batches SET value = ?, bytes = ? WHERE id = ?",
                (msgspec.json.encode(batch), size, batch.id),
            )

    def end_batch(self, batch: Batch) -> None:
        """Write a finished batch."""
        with self._changing() as database:
            database.execute(
                "UPDATE batches SET value = ?, bytes = 0, ended_at = ?, cancelling_at = NULL"
                " WHERE id = ?",
                (msgspec.json.encode(batch), batch.ended_at or int(time.time()), batch.id),
            )

    def tidy(self) -> None:
        """Remove expired files and batches, and content that killed processes left."""
        now = int(time.time())
        unused = "id NOT IN (SELECT input_file_id FROM batches WHERE ended_at IS NULL)"
        with self._changing() as database:
            expired = database.execute(
                f"SELECT id FROM files WHERE expires_at <= ? AND {unused}", (now,)
            ).fetchall()
            database.executemany("DELETE FROM files WHERE id = ?", expired)
            if self._keep_s is not None:
                database.execute("DELETE FROM batches WHERE ended_at <= ?", (now - self._keep_s,))
        for (file_id,) in expired:
            self.content(file_id).unlink(missing_ok=True)
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Remove old content without a row, but for answers of unfinished batches."""
        found = [entry for entry in os.scandir(self._directory) if _ID.fullmatch(entry.name)]
        known = {file_id for (file_id,) in self._rows("SELECT id FROM files")}
        for batch_id in self.open_batches().batches:
            known.update(derived_file_id(batch_id, kind) for kind in _ANSWERS)
        for entry in found:
            with suppress(FileNotFoundError):
                age_s = time.time() - entry.stat().st_mtime
                if entry.name not in known and age_s > LEFT_BEHIND_S:
                    os.unlink(entry)

    # The database

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection. SQLite's errors become `OSError`s."""
        path = self._directory / _DATABASE
        try:
            with closing(sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)) as connection:
                yield connection
        except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
            raise
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code == sqlite3.SQLITE_CANTOPEN:
                path.open("rb").close()  # raises with the reason, which SQLite doesn't tell
            raise OSError(_ERRNO_OF.get(code, errno.EIO), str(error)) from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction, which is committed unless the body raises."""
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    def _rows(self, query: str, *arguments: Any) -> list[Any]:
        with self._connected() as connection:
            return connection.execute(query, arguments).fetchall()

    def _found(self, query: str, name: str, what: str) -> tuple[Any, ...]:
        """Return the row of an id. Raises `HttpError` 404 if there is none."""
        with _disk():
            rows = self._rows(query, _checked_id(name, what))
        if not rows:
            raise _not_found(name, what)
        return tuple(rows[0])

    def _check_room(self) -> None:
        """Raise `HttpError` 507 if a storage limit is reached."""
        [(stored, size)] = self._rows(_STORED)
        if size >= self._max_stored_bytes or stored >= MAX_STORED:
            told = (
                f"{stored} files and batches have {size} bytes, and the server stores at most "
                f"{MAX_STORED} of them and {self._max_stored_bytes} bytes (max_stored_bytes): "
                "delete some"
            )
            raise HttpError(507, told, code="storage_full")

    def _finish_file(
        self,
        file_id: str,
        name: str,
        purpose: Literal["batch", "batch_output"],
        expires: ExpiresAfter | None,
    ) -> FileObject:
        """Write the metadata of a complete file."""
        keep_s = self._keep_s if expires is None else expires.seconds
        expires_at = None if keep_s is None else int(time.time()) + keep_s
        size = self.content(file_id).stat().st_size
        row = (file_id, size, _made_at(file_id), name, purpose, expires_at)
        with self._changing() as database:
            database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        return _file_of(*row)


def _file_of(
    file_id: str,
    size: int,
    created_at: int,
    name: str,
    purpose: Literal["batch", "batch_output"],
    expires_at: int | None,
) -> FileObject:
    return FileObject(file_id, size, created_at, name, purpose, expires_at=expires_at)


def _read_batch(batch_id: str, cancelling_at: int | None, value: bytes) -> Batch:
    try:
        batch = msgspec.json.decode(value, type=Batch)
    except (msgspec.MsgspecError, RecursionError):
        made = _made_at(batch_id)
        errors = BatchErrors([BatchError("damaged_batch", _DAMAGED)])
        return Batch(
            batch_id,
            ENDPOINTS[0],
            "",
            made,
            made + WINDOW_S,
            status="failed",
            errors=errors,
            failed_at=made,
        )
    if cancelling_at is not None:
        batch.status = "cancelling"
        batch.cancelling_at = cancelling_at
    return batch


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Return an unguessable id. Ids sort by creation time."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def derived_file_id(batch_id: str, kind: AnswersKind) -> str:
    """Return the id of a batch's file of answers or errors. It is deterministic, and sorts with
    its batch."""
    return f"file-{batch_id[6:22]}{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:16]}"


def _made_at(name: str) -> int:
    """Return an id's creation time, in seconds since 1970."""
    return int(name[-32:-16], 16) // 10**9


def _start(after: str | None, otherwise: str) -> str:
    """Return the id after which a page begins. Raises `HttpError` 400 for what isn't an id."""
    if after is not None and not _ID.fullmatch(after):
        raise HttpError(400, f"after must be an id of this list, got {shown(after)}", param="after")
    return otherwise if after is None else after


def is_transient(error: BaseException) -> bool:
    """Return True if retrying may succeed."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def _checked_id(name: str, what: str) -> str:
    """Return an id. Raises `HttpError` 404 for what can't be one."""
    if not _ID.fullmatch(name):
        raise _not_found(name, what)
    return name


def _not_found(name: str, what: str) -> HttpError:
    return HttpError(404, f"there is no {what} {name[:100]!r} here", code=f"{what}_not_found")


@contextmanager
def _disk() -> Iterator[None]:
    """Convert `OSError` to `HttpError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in _FULL:
            raise HttpError(
                507, f"the server can't store this: {reason}", code="storage_full"
            ) from None
        raise HttpError(
            503,
            f"the folder of batches is unavailable: {reason}",
            code="storage_failed",
            headers={"Retry-After": "1"},
        ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
