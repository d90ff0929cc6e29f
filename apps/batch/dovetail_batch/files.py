"""The folder of a job: what keeps us from writing to it, and its lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail_batch.errors import GO_ON, UnwritableOutput

LOCK = ".lock"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a full disk, and all else that keeps us from writing a file, an `UnwritableOutput`."""
    try:
        yield
    except OSError as error:
        raise UnwritableOutput(f"{path}: can't be written: {error.strerror or error}; once it can be, {GO_ON}") from None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make the folder if need be, and keep it for this process, which the kernel sees to even if it is killed. Raises `ConfigError` if another has
    it, or if it can't be written to."""
    import fcntl

    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("w")
    except (OSError, ValueError) as error:  # ValueError: a NUL in its name
        raise ConfigError(f"output: {directory}: can't be written to: {getattr(error, 'strerror', None) or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output: {directory}: another run of a job is writing to it: wait for its end, or end it") from None
        except OSError as error:
            raise ConfigError(f"output: {directory}: can't be locked: {error.strerror or error}; a local disk can") from None
        yield
