"""`BatchStore`: files and batches in a folder, which outlives the server. All front ends read and write it; one of them has the batches answered.

file-<32 digits>        a file's content; of answers that are still coming, as far as they have come
file-<32 digits>.json   what is known of a file that is whole
batch_<32 digits>.json  a batch: written by who made it, and from then on by who has it answered
batch_<32 digits>.cancel  somebody wants it to end
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, TypeVar, get_args

import msgspec

from dovetail.errors import ConfigError
from dovetail.whole_files import write_whole
from dovetail_server.errors import HttpError, lack_of
from dovetail_server.protocol.batches import ENDED, Batch, FileObject

T = TypeVar("T")

AnswersKind = Literal["output", "error"]

_ANSWERS: tuple[AnswersKind, ...] = get_args(AnswersKind)
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_LOCK = ".lock"


class BatchStore:
    """The folder. Raises `HttpError` 404 for ids that it doesn't know, and 507 if the disk takes no more."""

    def __init__(self, directory: Path, max_stored_bytes: int) -> None:
        """Make the folder if it isn't there, for this user alone. Raises `ConfigError` if it can't be written to."""
        self._directory, self._max_stored_bytes = directory, max_stored_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / _LOCK).touch(mode=0o600)
        except OSError as error:
            raise ConfigError(f"--batch-directory: {directory}: can't be written to: {error.strerror or error}") from None

    # Files

    def add_file(self, name: str, copy: Callable[[IO[bytes]], object]) -> FileObject:
        """Keep an uploaded file, whose content `copy` writes."""
        self.check_room()
        file_id = f"file-{uuid.uuid4().hex}"
        with self._writing():
            try:
                with open(self.content(file_id), "xb", opener=_private) as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # until it is known: see `remove_abandoned`
                    if not os.fstat(file.fileno()).st_nlink:  # which was quicker
                        return self.add_file(name, copy)
                    copy(file)
                    file.flush()
                    return self.finish_file(file_id, name, "batch")
            except BaseException:
                self.content(file_id).unlink(missing_ok=True)
                raise

    def finish_file(self, file_id: str, name: str, purpose: Literal["batch", "batch_output"]) -> FileObject:
        """Make known that a file is whole."""
        known = FileObject(file_id, self.content(file_id).stat().st_size, int(time.time()), name, purpose)
        self._write(file_id, known)
        return known

    @contextmanager
    def appended(self, file_id: str) -> Iterator[IO[bytes]]:
        """Open a file of answers to add some: each `write` is with the kernel when it returns, and all are on the disk at the end."""
        with open(self.content(file_id), "ab", buffering=0, opener=_private) as file:
            yield file
            os.fsync(file.fileno())

    def finish_answers(self, file_id: str, name: str) -> str | None:
        """Make known that a batch's file is whole, and return its id; None if there is nothing in it, which removes it, or if it was never begun."""
        if not (content := self.content(file_id)).exists():
            return None
        if content.stat().st_size == 0:
            content.unlink()
            return None
        return self.finish_file(file_id, name, "batch_output").id

    def file(self, file_id: str) -> FileObject:
        """Return what is known of a file that is whole."""
        return self._read(file_id, "file-", FileObject)

    def content(self, file_id: str) -> Path:
        """Return where a file's content is, or will be."""
        return self._directory / file_id

    def files(self) -> list[FileObject]:
        """Return all files that are whole, the newest first."""
        return sorted(self._all("file-", FileObject), key=lambda file: (-file.created_at, file.id))

    def delete_file(self, file_id: str) -> None:
        """Forget a file. Raises `HttpError` 409 while a batch needs it."""
        self.file(file_id)
        if using := next((batch.id for batch in self.batches() if batch.status not in ENDED and batch.input_file_id == file_id), None):
            raise HttpError(409, f"{using} needs this file: cancel it first", code="file_in_use")
        self._path(file_id).unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def remove_abandoned(self) -> None:
        """Remove the content of uploads whose process was killed: of files that nobody knows, and nobody writes. For who has batches answered."""
        answers = {derived_file_id(batch.id, kind) for batch in self.batches() for kind in _ANSWERS}
        for content in self._directory.glob("file-*"):
            if not _ID.fullmatch(content.name) or content.name in answers or self._path(content.name).exists():
                continue
            with suppress(OSError), content.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._path(content.name).exists():  # nor has it become known meanwhile
                    content.unlink()

    def check_room(self) -> None:
        """Raise `HttpError` 507 if the files are as large together as they may be."""
        stored = sum(entry.stat().st_size for entry in os.scandir(self._directory))
        if stored >= self._max_stored_bytes:
            told = f"the files here have {stored} bytes, and max_stored_bytes is {self._max_stored_bytes}: delete some"
            raise HttpError(507, told, code="storage_full")

    # Batches

    def add_batch(self, batch: Batch) -> None:
        self.check_room()
        with self._writing():
            self._write(batch.id, batch)

    def keep_batch(self, batch: Batch) -> None:
        """Write what has become of a batch. Raises `OSError`."""
        self._write(batch.id, batch)

    def batch(self, batch_id: str) -> Batch:
        """Return a batch as it stands."""
        return self._cancelling(self._read(batch_id, "batch_", Batch))

    def batches(self) -> list[Batch]:
        """Return all batches, the newest first."""
        return sorted(map(self._cancelling, self._all("batch_", Batch)), key=lambda batch: (-batch.created_at, batch.id))

    def cancel(self, batch_id: str) -> Batch:
        """Ask for a batch's end, and return it. Raises `HttpError` 409 if it has ended."""
        batch = self.batch(batch_id)
        if batch.status in ENDED:
            raise HttpError(409, f"{batch_id} is {batch.status}: it can't be cancelled any more", code="batch_ended")
        with self._writing():
            self._cancel_path(batch_id).touch(mode=0o600)
        return self.batch(batch_id)

    def wants_end(self, batch_id: str) -> bool:
        """Return True if somebody has asked for a batch's end."""
        return self._cancel_path(batch_id).exists()

    def ended(self, batch: Batch) -> None:
        """Write a batch that has ended. Raises `OSError`."""
        self.keep_batch(batch)
        self._cancel_path(batch.id).unlink(missing_ok=True)

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Within, True if no other process has batches answered: the kernel sees to it, and to its end."""
        with open(self._directory / _LOCK, "w", opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True

    def _cancelling(self, batch: Batch) -> Batch:
        with suppress(OSError):
            if batch.status not in ENDED:
                batch.cancelling_at = int(self._cancel_path(batch.id).stat().st_mtime)
                batch.status = "cancelling"
        return batch

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _cancel_path(self, batch_id: str) -> Path:
        return self._directory / f"{batch_id}.cancel"

    def _read(self, name: str, prefix: str, kind: type[T]) -> T:
        if _ID.fullmatch(name) and name.startswith(prefix):
            with suppress(OSError):
                return msgspec.json.decode(self._path(name).read_bytes(), type=kind)
        what = "file" if prefix == "file-" else "batch"
        raise HttpError(404, f"there is no {what} {name[:100]!r} here", code=f"{what}_not_found")

    def _all(self, prefix: str, kind: type[T]) -> Iterator[T]:
        for path in self._directory.glob(f"{prefix}*.json"):
            with suppress(HttpError):  # it was deleted meanwhile
                yield self._read(path.stem, prefix, kind)

    def _write(self, name: str, value: object) -> None:
        def write(path: Path) -> None:
            with open(path, "wb", opener=_private) as file:
                file.write(msgspec.json.encode(value))

        write_whole(self._path(name), write)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if lack_of(error) is not None:
                raise
            raise HttpError(507, f"the server can't store this: {error.strerror or error}", code="storage_full") from None


def derived_file_id(batch_id: str, kind: AnswersKind) -> str:
    """Return the id of a batch's file of answers, or of errors: the same whenever it is asked for."""
    return f"file-{hashlib.sha256(f'{batch_id} {kind}'.encode()).hexdigest()[:32]}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
