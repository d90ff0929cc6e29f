"""Control socket of `dovetail cluster up`, for `status`, `restart` and `down`: a Unix socket in a
private folder of the user.

The process holds a file lock on the cluster's name, which the kernel releases however the process
ends, so that stale sockets are recognised. Request and response are a line of JSON each.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dovetail.errors import ConfigError, DovetailError

Answer = Mapping[str, Any]
PATIENCE_S = 5.0
# attempts to take a lock, and seconds between them
LOCK_ATTEMPTS = 10
LOCK_RETRY_S = 0.03
_MOST_BYTES = 1 << 20


class NotUp(DovetailError):
    """No cluster of this name is up."""


def runtime_folder() -> Path:
    """Return the private folder of this user's clusters, creating it if needed. Raises
    `ConfigError` if it isn't private."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "dovetail" if base else Path(tempfile.gettempdir()) / f"dovetail-{os.getuid()}"
    )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}: set XDG_RUNTIME_DIR to a folder that you may write to"
        ) from None
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: isn't a private folder of this user: set XDG_RUNTIME_DIR to one"
        )
    return folder


def names_up() -> list[str]:
    """Return the names of this user's clusters that are up."""
    return sorted(path.stem for path in runtime_folder().glob("*.lock") if _is_locked(path))


class ControlSocket:
    """Server end, in the process that runs a cluster. Its loop calls `serve_once`; nothing blocks
    for long."""

    def __init__(self, name: str) -> None:
        """Take the name. Raises `ConfigError` if a cluster of this name is up."""
        folder = runtime_folder()
        self._path = folder / f"{name}.sock"
        self._lock: IO[str] = (folder / f"{name}.lock").open("a")
        if not self._takes_lock():
            self._lock.close()
            raise ConfigError(
                f"a cluster named {name} is up: end it with `dovetail cluster down {name}`, or "
                f"give this one another `name`"
            ) from None
        self._path.unlink(missing_ok=True)  # stale: its process was killed
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(self._path))
        except OSError as error:
            raise ConfigError(
                f"{self._path}: {error.strerror or error}: set XDG_RUNTIME_DIR to a shorter folder "
                f"that you may write to"
            ) from None
        self._socket.listen(8)

    def _takes_lock(self) -> bool:
        """Acquire the lock of the name. Return False if another cluster holds it: `names_up` of
        other commands holds it for a moment only."""
        for _ in range(LOCK_ATTEMPTS):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(LOCK_RETRY_S)
        return False

    def serve_once(self, wait_s: float, answer: Callable[[str], Answer]) -> None:
        """Wait up to `wait_s` seconds for a request, and answer it."""
        self._socket.settimeout(wait_s)
        with suppress(OSError, ValueError, RecursionError):
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(PATIENCE_S / 5)
                with connection.makefile("rb") as lines:
                    asked = json.loads(lines.readline(_MOST_BYTES))
                answered = (
                    answer(str(asked.get("do")))
                    if isinstance(asked, dict)
                    else {"error": "expected an object"}
                )
                connection.sendall(json.dumps(answered).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._lock.close()


def tell(name: str, what: str) -> dict[str, Any]:
    """Send a command to a cluster and return its response. Raises `NotUp`, or `DovetailError` if it
    doesn't answer or refuses."""
    folder = runtime_folder()
    if not _is_locked(folder / f"{name}.lock"):
        raise NotUp(
            f"no cluster named {name} is up"
            + (f"; up are {', '.join(up)}" if (up := names_up()) else "")
        )
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(folder / f"{name}.sock"))
            connection.sendall(json.dumps({"do": what}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                found: dict[str, Any] = json.loads(lines.readline(_MOST_BYTES))
    except (OSError, ValueError) as error:
        raise DovetailError(f"the cluster {name} doesn't answer: {error}") from None
    if "error" in found:
        raise DovetailError(f"the cluster {name}: {found['error']}")
    return found


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # no such file, or its name is too long
        return False
