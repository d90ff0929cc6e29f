"""`BatchStore`: files and batches in a persistent folder. All front ends read and write it; one of them processes the batches.

file-<id>               a file's content, incomplete for answers of an unfinished batch
file-<id>.json          metadata of a complete file
open/batch_<id>.json    an unfinished batch: written by its creator, then by the process that answers it
open/batch_<id>.cancel  cancellation requested
batch_<id>.json         a finished batch

The folder is its own index: ids begin with their creation time, so that names determine the order of lists, and `open` contains only unfinished
batches. A JSON file that can't be decoded is treated as a failed batch, or a file in error, so that it can be listed and deleted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from dovetail.api.whole_files import BESIDE, write_whole
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

MAX_STORED = 200_000  # files in the folder: lists and counts read all of their names
MAX_OPEN = 10_000  # unfinished batches: the worker reads all of their names twice a second
DAY_S = 24 * 3600
COUNT_AGAIN_S = 60.0  # between two counts of the stored bytes
LEFT_BEHIND_S = 3600.0  # age at which a partial file counts as abandoned
_ANSWERS: tuple[AnswersKind, ...] = get_args(AnswersKind)
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_MOST_BYTES = 2**20  # of a JSON file here
_LOCK = ".lock"
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
    """The folder. Methods block on the disk: call them in a thread. Those for clients raise `HttpError`: 404 for unknown ids, 507 if the disk is
    full, and 503 for other failures. Those for `BatchWorker` raise `OSError`."""

    def __init__(
        self, directory: Path, max_stored_bytes: int, keep_days: float | None = None
    ) -> None:
        """Create the folder if missing, accessible to this user only. `keep_days`: retention of files and finished batches; None: until deleted.
        Raises `ConfigError` if the folder isn't writable."""
        self._directory, self._max_stored_bytes = directory, max_stored_bytes
        self._keep_s = None if keep_days is None else int(keep_days * DAY_S)
        self._open_directory = directory / "open"
        self._counted_at = -COUNT_AGAIN_S
        self._stored_bytes = 0
        self._stored_files = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open_directory.mkdir(mode=0o700, exist_ok=True)
            (directory / _LOCK).touch(mode=0o600)
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
                    fcntl.flock(
                        file, fcntl.LOCK_EX
                    )  # until its metadata exists: see `_remove_abandoned`
                    if not os.fstat(file.fileno()).st_nlink:  # `_remove_abandoned` was faster
                        return self.add_file(name, copy, expires)
                    copy(file)
                    file.flush()
                    known = self._finish_file(file_id, name, "batch", expires)
                    self._stored_bytes += known.bytes
                    self._stored_files += 2
                    return known
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
        """Sync and publish a batch's file of answers, and return its id; None if it is empty. Raises `OSError`."""
        file_id = derived_file_id(batch.id, kind)
        content = self.content(file_id)
        try:
            with content.open("rb") as file:
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except (FileNotFoundError, IsADirectoryError):
            return None
        if not size:
            content.unlink()
            return None
        return self._finish_file(
            file_id, f"{batch.id}_{kind}.jsonl", "batch_output", batch.output_expires_after
        ).id

    def file(self, file_id: str) -> FileObject:
        """Return the metadata of a complete file."""
        with _disk():
            return _found(self._file(file_id), "file", file_id)

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
        with _disk():
            return _page(
                _ids(os.listdir(self._directory), "file-"),
                self._file,
                after,
                limit,
                ascending,
                lambda file: purpose in (None, file.purpose),
            )

    def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises `HttpError` 409 while a batch uses it."""
        self.file(file_id)
        with _disk():
            if using := next(
                (batch.id for batch in self._open_batches() if batch.input_file_id == file_id), None
            ):
                raise HttpError(
                    409, f"{using} needs this file: cancel it first", code="file_in_use"
                )
            self._remove_file(file_id)

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Store a new batch for processing. Raises `HttpError` 400 for an unusable input file."""
        file = self.file(batch.input_file_id)
        if file.purpose != "batch" or file.status == "error":
            told = (
                "this file holds answers"
                if file.status != "error"
                else "what the server kept of this file can't be read any more: upload it again"
            )
            raise HttpError(400, f"input_file_id: {told}", param="input_file_id")
        with _disk():
            self._check_room()
            if sum(1 for _ in os.scandir(self._open_directory)) >= MAX_OPEN:
                message = f"there are {MAX_OPEN} unfinished batches: wait until some end"
                raise HttpError(
                    429, message, code="too_many_batches", headers={"Retry-After": "60"}
                )
            self._write(self._open_path(batch.id), batch)
            self._stored_files += 1

    def batch(self, batch_id: str) -> Batch:
        """Return a batch in its current state."""
        with _disk():
            return _found(self._batch(batch_id), "batch", batch_id)

    def batches(self, after: str | None = None, limit: int = 100) -> Page[Batch]:
        """Return a page of batches after the id `after`, newest first."""
        with _disk():
            return _page(
                {
                    *_ids(os.listdir(self._open_directory), "batch_"),
                    *_ids(os.listdir(self._directory), "batch_"),
                },
                self._batch,
                after,
                limit,
            )

    def cancel(self, batch_id: str) -> Batch:
        """Request a batch's cancellation, and return it. Raises `HttpError` 409 if it has ended."""
        batch = self.batch(batch_id)
        if batch.status in ENDED:
            raise HttpError(
                409,
                f"{batch_id} is {batch.status}: it can't be cancelled any more",
                code="batch_ended",
            )
        with _disk():
            self._cancel_path(batch_id).touch(mode=0o600)
        batch = self.batch(batch_id)
        if batch.status in ENDED:  # meanwhile
            with _disk():
                self._cancel_path(batch_id).unlink(missing_ok=True)
        return batch

    def delete_batch(self, batch_id: str) -> None:
        """Delete a finished batch and its answers. Raises `HttpError` 409 if it is unfinished."""
        batch = self.batch(batch_id)
        if batch.status not in ENDED:
            raise HttpError(
                409, f"{batch_id} is {batch.status}: cancel it first", code="batch_not_ended"
            )
        with _disk():
            for kind in _ANSWERS:
                self._remove_file(derived_file_id(batch_id, kind))
            self._path(batch_id).unlink(missing_ok=True)
            self._leave_open(batch_id)

    # For `BatchWorker`

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Try to lock the folder for processing batches, and yield whether that succeeded. The kernel releases the lock if the process dies."""
        with open(self._directory / _LOCK, "a", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def open_batches(self) -> Open:
        """Return the unfinished batches."""
        names = os.listdir(self._open_directory)
        return Open(sorted(_ids(names, "batch_")), set(_ids(names, "batch_", ".cancel")))

    def keep_batch(self, batch: Batch) -> None:
        """Write the state of an unfinished batch."""
        self._write(self._open_path(batch.id), batch)

    def end_batch(self, batch: Batch) -> None:
        """Write a finished batch."""
        self._write(self._path(batch.id), batch)
        self._leave_open(batch.id)

    def tidy(self) -> None:
        """Remove leftovers of killed processes, and expired files and batches, as far as possible."""
        opened = self.open_batches()
        for batch_id in {*opened.batches, *opened.cancelled}:
            if (
                self._path(batch_id).exists() or batch_id not in opened.batches
            ):  # killed during `end_batch`, or cancelled while ending
                self._leave_open(batch_id)
        self._remove_abandoned(opened.batches)
        self._remove_expired()
        for entry in (*os.scandir(self._directory), *os.scandir(self._open_directory)):
            with suppress(OSError):
                if (
                    entry.name.endswith(BESIDE)
                    and entry.stat().st_mtime < time.time() - LEFT_BEHIND_S
                ):
                    os.unlink(entry)

    def _remove_abandoned(self, open_batches: list[str]) -> None:
        """Remove the content of uploads whose process was killed: files without metadata or writer."""
        answers = {
            derived_file_id(batch_id, kind) for batch_id in open_batches for kind in _ANSWERS
        }
        names = {entry.name for entry in os.scandir(self._directory)}
        for name in names:
            if not _ID.fullmatch(name) or name in answers or f"{name}.json" in names:
                continue
            with suppress(OSError), self.content(name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._path(name).exists():  # still without metadata
                    self.content(name).unlink()

    def _remove_expired(self) -> None:
        now = int(time.time())
        used = {batch.input_file_id for batch in self._open_batches()}
        for file_id in _ids(os.listdir(self._directory), "file-"):
            with suppress(OSError):
                if (
                    file_id not in used
                    and (file := self._file(file_id)) is not None
                    and (file.expires_at or now + 1) <= now
                ):
                    self._remove_file(file_id)
        if self._keep_s is None:
            return
        for batch_id in _ids(os.listdir(self._directory), "batch_"):
            with suppress(OSError):
                if (batch := self._batch_at(self._path(batch_id))) is not None and (
                    batch.ended_at or now
                ) + self._keep_s <= now:
                    self._path(batch_id).unlink()

    # The folder

    def _check_room(self) -> None:
        """Raise `HttpError` 507 if a storage limit is reached. Files of other processes are counted
        within a minute."""
        if time.monotonic() - self._counted_at >= COUNT_AGAIN_S or self._is_full:
            sizes = [
                _size(entry)
                for folder in (self._directory, self._open_directory)
                for entry in os.scandir(folder)
            ]
            self._stored_bytes = sum(sizes)
            self._stored_files = len(sizes)
            self._counted_at = time.monotonic()
        if self._is_full:
            told = (
                f"{self._stored_files} files have {self._stored_bytes} bytes, and the server stores "
                f"at most {MAX_STORED} files and {self._max_stored_bytes} bytes (max_stored_bytes): "
                "delete some"
            )
            raise HttpError(507, told, code="storage_full")

    @property
    def _is_full(self) -> bool:
        return self._stored_bytes >= self._max_stored_bytes or self._stored_files >= MAX_STORED

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
        known = FileObject(
            file_id,
            self.content(file_id).stat().st_size,
            _made_at(file_id),
            name,
            purpose,
            expires_at=expires_at,
        )
        self._write(self._path(file_id), known)
        return known

    def _file(self, file_id: str) -> FileObject | None:
        """Return the metadata of a file, or None if there is none."""
        if not _ID.fullmatch(file_id) or not file_id.startswith("file-"):
            return None
        path = self._path(file_id)
        try:
            found = _read(path, FileObject)
            if found is None or found.id == file_id:
                return found
        except ValueError:
            pass
        with suppress(FileNotFoundError):
            made = int(path.lstat().st_mtime)
            return FileObject(
                file_id,
                0,
                made,
                file_id,
                status="error",
                expires_at=None if self._keep_s is None else made + self._keep_s,
            )
        return None

    def _batch(self, batch_id: str) -> Batch | None:
        """Return a batch in its current state, or None if there is none."""
        if not _ID.fullmatch(batch_id) or not batch_id.startswith("batch_"):
            return None
        batch = self._batch_at(self._open_path(batch_id))
        if batch is None:
            return self._batch_at(self._path(batch_id))  # written before it leaves `open`
        with suppress(FileNotFoundError):
            if batch.status not in ENDED:
                batch.cancelling_at = int(self._cancel_path(batch_id).stat().st_mtime)
                batch.status = "cancelling"
        return batch

    def _batch_at(self, path: Path) -> Batch | None:
        try:
            found = _read(path, Batch)
            if found is None or (found.id == path.stem and _ID.fullmatch(found.input_file_id)):
                return found
        except ValueError:
            pass
        with suppress(FileNotFoundError):
            made = int(path.lstat().st_mtime)
            errors = BatchErrors(
                [
                    BatchError(
                        "damaged_batch", "what the server kept of this batch can't be read any more"
                    )
                ]
            )
            return Batch(
                path.stem,
                ENDPOINTS[0],
                "",
                made,
                made + WINDOW_S,
                status="failed",
                errors=errors,
                failed_at=made,
            )
        return None

    def _open_batches(self) -> Iterator[Batch]:
        return (
            batch
            for batch_id in _ids(os.listdir(self._open_directory), "batch_")
            if (batch := self._batch(batch_id)) is not None
        )

    def _remove_file(self, file_id: str) -> None:
        """Remove a file, its content last: without metadata it counts as abandoned."""
        self._path(file_id).unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def _leave_open(self, batch_id: str) -> None:
        self._open_path(batch_id).unlink(missing_ok=True)
        self._cancel_path(batch_id).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _open_path(self, batch_id: str) -> Path:
        return self._open_directory / f"{batch_id}.json"

    def _cancel_path(self, batch_id: str) -> Path:
        return self._open_directory / f"{batch_id}.cancel"

    def _write(self, path: Path, value: Batch | FileObject) -> None:
        def write(beside: Path) -> None:
            with open(beside, "wb", opener=_private) as file:
                file.write(msgspec.json.encode(value))

        write_whole(path, write)


def new_id(prefix: Literal["file-", "batch_"]) -> str:
    """Return an unguessable id. Ids sort by creation time."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def derived_file_id(batch_id: str, kind: AnswersKind) -> str:
    """Return the id of a batch's file of answers or errors. It is deterministic, and sorts with its batch."""
    return f"file-{batch_id[6:22]}{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:16]}"


def _ids(names: Iterable[str], prefix: str, suffix: str = ".json") -> list[str]:
    """Return the ids in file names."""
    found = (
        name.removesuffix(suffix)
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    )
    return [name for name in found if _ID.fullmatch(name)]


def _made_at(name: str) -> int:
    """Return an id's creation time, in seconds since 1970."""
    return int(name[-32:-16], 16) // 10**9


def _page(
    ids: Iterable[str],
    read: Callable[[str], T | None],
    after: str | None,
    limit: int,
    ascending: bool = False,
    wanted: Callable[[T], bool] = lambda _: True,
) -> Page[T]:
    """Read one page of a list."""
    if after is not None and not _ID.fullmatch(after):
        raise HttpError(400, f"after must be an id of this list, got {shown(after)}", param="after")
    found: list[T] = []
    for name in sorted(ids, reverse=not ascending):
        if after is not None and (name <= after if ascending else name >= after):
            continue
        if (one := read(name)) is None or not wanted(one):  # None: deleted meanwhile
            continue
        if len(found) == limit:
            return Page(found, True)
        found.append(one)
    return Page(found, False)


def is_transient(error: BaseException) -> bool:
    """Return True if retrying may succeed."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def _found(value: T | None, what: str, name: str) -> T:
    if value is None:
        raise HttpError(404, f"there is no {what} {name[:100]!r} here", code=f"{what}_not_found")
    return value


def _read(path: Path, kind: type[T]) -> T | None:
    """Decode a JSON file; None if it is missing. Raises `ValueError` if it is damaged, and `OSError`."""
    try:
        with open(path, "rb", opener=_regular) as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_transient(error):
            raise
        raise ValueError from error
    if len(data) > _MOST_BYTES:
        raise ValueError
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError from error


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
        headers = {"Retry-After": "1"}
        raise HttpError(
            503,
            f"the folder of batches is unavailable: {reason}",
            code="storage_failed",
            headers=headers,
        ) from None


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size if entry.is_file() else 0
    except FileNotFoundError:  # deleted meanwhile
        return 0


def _regular(path: str, flags: int) -> int:
    """Open without blocking, even for a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
