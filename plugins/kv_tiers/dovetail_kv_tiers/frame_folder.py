"""`FrameFolder`: frames as files of a folder, within a size.

    v1/<namespace>/<first byte of chain>/<chain>   the bytes of a frame, and nothing else
    v1/temporary/<random name>                     what is being written or removed

Names are in hexadecimal. A file is written under a temporary name and renamed, so that it is there
whole or not at all after a crash of the process. The files are the only index: their sizes are
counted by scans, and their modification times, which a load renews, are the order of eviction.
Several processes may use a folder; a file that another one removed is a miss.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dovetail.api.kv_tier import FrameKey, Why

SCAN_S = 60.0  # the sizes are counted again after this time,
SCAN_SHARE = 32  # or once a 32nd of the size has been stored: other processes store, too
ABANDONED_S = 600.0  # a temporary file this old is of a process that was killed
DIGITS = 64  # of a name
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not block
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class FrameFolder:
    """Files of frames, of at most `limit` bytes together. All methods may be called by several
    threads at a time, block, and raise `OSError` if the folder can't be used."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.limit = limit
        self._root = folder / "v1"
        self._temporary = self._root / "temporary"
        self._lock = threading.Lock()  # guards what follows; held while files are removed, too
        self._stored = 0  # bytes, as known here
        self._reserved = 0  # bytes of files that are being written
        self._since_scan = 0  # bytes stored
        self._scanned_at: float | None = None
        self._oldest: list[tuple[int, int, str]] = []  # time, size, path: the oldest last

    def size_of(self, key: FrameKey) -> int | None:
        """Return the bytes of a frame; None: there is none."""
        try:
            status = os.stat(self._path(key), follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def load(self, key: FrameKey, data: memoryview) -> Why | None:
        """Fill `data`, and renew the file's time. A file of another size is removed."""
        path = self._path(key)
        try:
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            return "missing"
        try:
            status = os.fstat(descriptor)
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == len(data)
            if is_whole and _read(descriptor, data):
                with suppress(OSError):  # of another user, or read-only
                    os.utime(descriptor)
                return None
        finally:
            os.close(descriptor)
        with suppress(OSError):
            os.unlink(path)
        return "damaged"

    def store(self, key: FrameKey, data: memoryview) -> Why | None:
        """Write a frame, after removing old ones if there is no room."""
        size = len(data)
        if not self._reserve(size):
            return "full"
        replaced = None
        try:
            replaced = self._write(key, data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            if error.errno != errno.EFBIG:
                self._make_way(size)
            return "full"
        finally:
            with self._lock:
                self._reserved -= size
                if replaced is not None:
                    self._stored += size - replaced
                    self._since_scan += size
        return None

    def forget(self, namespace: bytes) -> None:
        """Remove all frames of a namespace."""
        removed = self._temporary_path()
        try:
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            os.rename(self._root / namespace.hex(), removed)
        except FileNotFoundError:
            return
        shutil.rmtree(removed, ignore_errors=True)
        with self._lock:
            self._scanned_at = None

    def _path(self, key: FrameKey) -> str:
        chain = key.chain.hex()
        return f"{self._root}/{key.namespace.hex()}/{chain[:2]}/{chain}"

    def _temporary_path(self) -> str:
        return f"{self._temporary}/{uuid.uuid4().hex}"

    def _write(self, key: FrameKey, data: memoryview) -> int:
        """Write a file whole, and return the bytes of the one that it replaced."""
        temporary = self._temporary_path()
        path = self._path(key)
        try:
            descriptor = self._opened(temporary)
            try:
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            finally:
                os.close(descriptor)
            replaced = self.size_of(key) or 0
            self._rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return replaced

    def _opened(self, temporary: str) -> int:
        try:
            return os.open(temporary, _WRITE, 0o600)
        except FileNotFoundError:
            # not the folder itself: it may be the place of a disk that isn't mounted any more
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            return os.open(temporary, _WRITE, 0o600)

    def _rename(self, temporary: str, path: str) -> None:
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            folder = Path(path).parent
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            os.replace(temporary, path)

    def _reserve(self, size: int) -> bool:
        """Set bytes aside for a file, after removing old files if need be. Returns False if there
        is no room."""
        with self._lock:
            if size > self.limit:
                return False
            if self._is_scan_due():
                self._scan()
            while self._stored + self._reserved + size > self.limit:
                if not self._remove_oldest():
                    return False
            self._reserved += size
        return True

    def _make_way(self, size: int) -> None:
        """Remove old files, since the disk is full before they reach the limit."""
        with self._lock:
            wanted = self._stored - 2 * size
            while self._stored > wanted and self._remove_oldest():
                pass

    def _remove_oldest(self) -> bool:
        """Remove the file that wasn't used for the longest time. Returns False if there is none."""
        if self._remove_listed():
            return True
        self._scan()  # finds those that were stored or used since the last one
        return self._remove_listed()

    def _remove_listed(self) -> bool:
        while self._oldest:
            modified, size, path = self._oldest.pop()
            with suppress(FileNotFoundError):
                if os.stat(path).st_mtime_ns != modified:  # used since, or written again
                    continue
                os.unlink(path)
            self._stored -= size
            return True
        return False

    def _is_scan_due(self) -> bool:
        return (
            self._scanned_at is None
            or self._since_scan > self.limit // SCAN_SHARE
            or time.monotonic() - self._scanned_at > SCAN_S
        )

    def _scan(self) -> None:
        """Count the files, and remove what killed processes left."""
        self._oldest = sorted(self._files(), reverse=True)
        self._stored = sum(size for _, size, _ in self._oldest)
        self._since_scan = 0
        self._scanned_at = time.monotonic()
        for entry in _entries(self._temporary):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S:
                    _remove(entry)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        for namespace in _entries(self._root, DIGITS):
            for part in _entries(namespace.path, 2):
                for file in _entries(part.path, DIGITS):
                    with suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_size, file.path


def _entries(path: str | Path, digits: int | None = None) -> list[os.DirEntry[str]]:
    """Return what is in a folder, with names of so many digits; nothing if it doesn't exist."""
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if digits is None or len(entry.name) == digits]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        os.unlink(entry.path)


def _read(descriptor: int, data: memoryview) -> bool:
    """Fill `data` from a file's beginning. Returns False if the file ends before."""
    filled = 0
    while filled < len(data):
        count = os.preadv(descriptor, [data[filled:]], filled)
        if not count:
            return False
        filled += count
    return True
