"""Other hosts for tests: `dovetail ranks` in a process of its own, at another address of this
machine or in a network namespace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.executors.ranks import children_of, processes_of_ranks, wait_until
from tests.support import FULL

HERE, THERE = "127.0.0.1", "127.0.0.2"  # two addresses of loopback
TOKEN = "a token for the tests"
# a host that is lost is named within this time: 5 s where the processors are free
NOTICED_S = 15.0 if FULL else 60.0


def environment(token: str = TOKEN) -> dict[str, str]:
    return {
        **os.environ,
        "DOVETAIL_RANKS_TOKEN": token,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }


def free_port(address: str = HERE) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Agent:
    """`dovetail ranks` on another host."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process, self._output = process, output

    def told(self) -> str:
        return self._output.read_text()

    def ranks(self) -> list[int]:
        return processes_of_ranks(children_of(self.process.pid))

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def wait_until_told(self, text: str, times: int = 1) -> None:
        wait_until(
            lambda: self.told().count(text) >= times or self.process.poll() is not None,
            f"the other host says {text!r}",
        )
        assert self.told().count(text) >= times, self.told()


@contextmanager
def agent(
    folder: Path, engine: str, *options: str, inside: tuple[str, ...] = (), token: str = TOKEN
) -> Iterator[Agent]:
    """`engine` is HOST:PORT; `inside` is a command that runs the agent's own elsewhere."""
    output = folder / "agent.txt"
    command = [*inside, sys.executable, "-m", "dovetail", "ranks", engine, *options]
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(token),
            text=True,
        )
    try:
        yield Agent(process, output)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
