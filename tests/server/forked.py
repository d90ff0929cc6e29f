"""`dovetail serve` without the time of its processes' imports, and with shorter limits: a program
for `tests/preloaded.py`, whose processes are all forks.

What isn't about these processes' start is tested with it. The full profile starts them by `exec`,
with the limits that servers have.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO

from tests.forking import forking, name_process
from tests.preloaded import TIME_LIMIT_S, Ended, Preloaded

# What the processes of a server import, but torch.
MODULES = (
    "bench.toy",
    "bench.toy_plugin",
    "dovetail.cli.app",
    "dovetail.cli.main",
    "dovetail.front.assembly",
    "dovetail_schedulers.fcfs",
    "dovetail_server.command",
    "dovetail_server.engine_process",
    "dovetail_server.engine_sources",
    "dovetail_server.front_end",
    "dovetail_server.host",
    "dovetail_server.one_process",
    "dovetail_server.step_watch",
    "dovetail_server.supervisor",
    "tests.server.forked",
    "transformers.tokenization_utils_tokenizers",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)
# In seconds. Heartbeats come each quarter of a second.
SHORTER: Mapping[str, Mapping[str, float]] = {
    "dovetail.api.process_watch": {"STOPPED_S": 2.0},
    "dovetail_server.child": {"PAUSE_S": 0.25},
    "dovetail_server.front_end": {"SUPERVISOR_SILENT_S": 2.0},
    "dovetail_server.supervisor": {"FRONT_END_HANGS_S": 6.0, "STOPPED_S": 2.0},
}


class ForkedProcess:
    """The program as a process, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        preloaded: Preloaded,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        errors: IO[bytes],
    ) -> None:
        self._preloaded = preloaded
        self._ended: Ended | None = None
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, "rb")
        try:
            self.pid = preloaded.start(
                ["-m", "tests.server.forked", *arguments],
                files=(None, writing, errors),
                environ=environ,
            )
        finally:
            os.close(writing)

    def poll(self) -> int | None:
        if self._ended is None:
            self._ended = self._preloaded.ended(self.pid, 0.0)
        return None if self._ended is None else self._ended.exit_code

    def wait(self, timeout: float = TIME_LIMIT_S) -> int:
        if self._ended is None:
            self._ended = self._preloaded.wait(self.pid, timeout)
        return self._ended.exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    from dovetail.cli.main import main as run_command
    from dovetail_server import supervisor

    for name in MODULES:  # unless it has them
        import_module(name)
    for name, limits in SHORTER.items():
        vars(import_module(name)).update(limits)
    tempfile.tempdir = None  # TMPDIR is another now
    name_process("serve")
    sys.argv[:] = ["dovetail", *sys.argv[1:]]
    with forking(supervisor):
        run_command()


if __name__ == "__main__":
    main()
