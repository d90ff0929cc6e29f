"""`EngineLink`: the command's end of an engine's process (`engine_process`), which it starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from dovetail_batch.errors import GO_ON, BatchEngineFailed
from dovetail_batch.rows import Row

SPARE_ROWS = 1024  # in the engine's process beyond two full steps: what it computes while the command writes a file
ENDS_S = 30.0  # how long the process may take to end after its last row


class EngineLink:
    """A process and the rows that it has."""

    def __init__(self, place: int, source: str | Mapping[str, Any], gpus: str | None) -> None:
        """Start the process; its model is loaded while other things are done. `gpus` is what it is to see of them; None: all."""
        self._place = place
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(True)  # also where the program has given all sockets a time limit
        environment = os.environ if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dovetail_batch.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C comes to the command alone
                env=environment,
            )
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self._send(("start", source))
        self._window = 0  # the most rows that it may have; 0 until it is ready
        self.rows = 0  # that it has
        self._ended_in_order = False
        self._given_up: str | None = None  # why it was killed

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def room(self) -> int:
        """The number of rows that it should be given now."""
        return self._window - self.rows

    def ready(self, facts: Mapping[str, Any]) -> None:
        """The process has said that its engine is ready."""
        self._window = 2 * int(facts["max_num_seqs"]) + SPARE_ROWS

    def send(self, rows: Sequence[Row]) -> None:
        """Give it rows."""
        self.rows += len(rows)
        self._send(rows)

    def finish(self) -> None:
        """Tell it that there will be no more rows, and wait for its end, but not for long."""
        self._send(None)
        with suppress(subprocess.TimeoutExpired):
            self._ended_in_order = self._process.wait(ENDS_S) == 0

    def ended(self, why: str | None = None) -> BatchEngineFailed:
        """Return the error of a process that has ended before its work; `why` is what it said of that."""
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)
            code = self._process.returncode
            if self._given_up is not None:
                why = self._given_up
            elif code is None:
                why = "it says nothing more"
            else:
                why = f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        return BatchEngineFailed(f"engine {self._place} has failed: {why}; {GO_ON}")

    def give_up(self, why: str) -> None:
        """Kill a process that hangs; `ended` tells why. Any thread may call it."""
        self._given_up = why
        self._kill()

    def close(self) -> None:
        """End the process at once, with all that it has started. Twice is as good as once."""
        self.connection.close()
        if self._ended_in_order:
            return  # its id may be another's by now
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
