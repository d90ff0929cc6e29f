"""`dovetail serve` without the time of its processes' imports, and with shorter limits: a program
for `tests/preloaded.py`, whose processes are all forks.

What isn't about these processes' start is tested with it. The full profile starts them by `exec`,
with the limits that servers have.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from tests.preloaded import TIME_LIMIT_S, Ended, Preloaded

# What the processes of a server import, but torch.
MODULES = (
    "bench.toy",
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
            self._ended = self._preloaded.poll(self.pid)
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


def name_process(name: str) -> None:
    """Let the system know the process by this name, of at most 15 characters: its command line is
    that of the process it was forked from."""
    Path("/proc/self/comm").write_text(name)


def start_by_fork(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen` for `python -m MODULE DESCRIPTOR`, where this process has that module."""
    become = partial(_become, list(command), how["pass_fds"])
    return subprocess.Popen(command, preexec_fn=become, **how)


def _become(command: list[str], descriptors: Sequence[int]) -> NoReturn:
    """Run the module's program in a new process, in place of `exec`."""
    kept = {0, 1, 2, *descriptors}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    _, _, module, *arguments = command
    code = 1
    try:
        name_process(module.rpartition(".")[2])
        sys.orig_argv[:] = command
        sys.argv[:] = [module, *arguments]
        customize()
        code = import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def customize() -> None:
    """Run the `sitecustomize.py` that the path has, as Python does at its start."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (path := Path(folder) / "sitecustomize.py").is_file():
            runpy.run_path(str(path))


def main() -> None:
    from dovetail.cli.main import main as run_command
    from dovetail_server import supervisor

    for name, limits in SHORTER.items():
        vars(import_module(name)).update(limits)
    forking = SimpleNamespace(Popen=start_by_fork, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    vars(supervisor).update(subprocess=forking)
    tempfile.tempdir = None  # TMPDIR is another now
    name_process("serve")
    sys.argv[:] = ["dovetail", *sys.argv[1:]]
    run_command()


if __name__ == "__main__":
    main()
