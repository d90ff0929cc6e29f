"""Processes of suites for `dovetail.testing.runner`, forked from one that has imported what each of
them imports: that takes as long as a short suite."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from tests.preloaded import Ended, Preloaded

MODULES = ("dovetail.testing.child", "dovetail.testing.suites.observer", "pytest")
WAIT_S = 600.0  # of a caller that names no limit


class ForkedSuites:
    """Stands for the module `subprocess` in the runner."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, imported: Preloaded) -> None:
        self._imported = imported

    def Popen(  # noqa: N802 (the name in `subprocess`)
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
    ) -> ForkedSuite:
        assert (stdin, start_new_session) == (subprocess.DEVNULL, True)  # as a fork has them
        files = (None, stdout, stderr)
        return ForkedSuite(
            self._imported, self._imported.start(command[1:], files=files, cwd=cwd, environ=env)
        )


class ForkedSuite:
    """A process of a suite, with what the runner uses of `subprocess.Popen`."""

    def __init__(self, imported: Preloaded, pid: int) -> None:
        self._imported = imported
        self._ended: Ended | None = None
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        return None if self._ended is None else self._ended.exit_code

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        if self._ended is None:
            self._ended = self._imported.ended(self.pid, timeout)
        if self._ended is None:
            raise subprocess.TimeoutExpired("the process of a suite", timeout)
        return self._ended.exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
