"""`EngineLink`: starts and ends an engine's process (`engine_process`), and is the command's end of its connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from dovetail.process_watch import how_ended
from dovetail_batch.errors import GO_ON, BatchEngineFailed
from dovetail_batch.rows import JobRow

SPARE_ROWS = 1024  # queued in an engine's process beyond two full steps, to be computed while the command writes a file
ENDS_S = 30.0  # how long the process may take to end after its last row


class EngineLink:
    """An engine's process and the number of its rows."""

    def __init__(self, index: int, source: str | Mapping[str, Any], gpus: str | None) -> None:
        """Start the process, which then loads its model. `gpus`: its CUDA_VISIBLE_DEVICES; None: inherited."""
        self._index = index
        self.connection, theirs = Pipe()
        environment = os.environ if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dovetail_batch.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C comes to the command alone
                env=environment,
            )
        self._send(source)
        self._window = 0  # upper bound of `rows`; 0 until it is ready
        self.rows = 0  # sent and not yet answered
        self._ended_in_order = False
        self._given_up: str | None = None  # why it was killed, if it was

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def room(self) -> int:
        """The number of rows to send now."""
        return self._window - self.rows

    def ready(self, max_num_seqs: int) -> None:
        """Note that the engine is ready."""
        self._window = 2 * max_num_seqs + SPARE_ROWS

    def send(self, rows: Sequence[JobRow]) -> None:
        """Send rows."""
        self.rows += len(rows)
        self._send(rows)

    def finish(self) -> None:
        """Announce that there are no more rows, and wait up to `ENDS_S` for the process to end."""
        self._send(None)
        with suppress(subprocess.TimeoutExpired):
            self._ended_in_order = self._process.wait(ENDS_S) == 0

    def ended(self, why: str | None = None) -> BatchEngineFailed:
        """Return the error of a process that ended early; `why`: the reason that it sent."""
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)
            code = self._process.returncode
            why = self._given_up or ("it sends nothing more" if code is None else f"it {how_ended(code)}")
        return BatchEngineFailed(f"engine {self._index} has failed: {why}; {GO_ON}")

    def give_up(self, why: str) -> None:
        """Kill a hung process; `ended` gives the reason. Any thread may call it."""
        self._given_up = why
        self._kill()

    def close(self) -> None:
        """Kill the process and its children. Idempotent."""
        self.connection.close()
        if self._ended_in_order:
            return  # its id may be reused
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.ended() from None
