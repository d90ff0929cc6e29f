"""`LocalLauncher`: replicas as processes of this machine (`place: here`), which end with the
controller's. Ray actors use `ServerProcess` and its command line, `serve_command`, too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from dovetail.api.process_watch import how_ended
from dovetail.errors import ConfigError, DovetailError
from dovetail_cluster.bound_process import start_bound
from dovetail_cluster.interfaces import Replica, ReplicaStatus
from dovetail_cluster.settings import ClusterSettings
from dovetail_server.command import NULL, option_name
from dovetail_server.settings import API_KEYS_VARIABLE

QUIET = {"log_requests": False}  # health checks would fill the log
LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LAST_LINES = 5  # of a replica's log, reported when it ends
ENDS_S = 10.0  # that a killed process may take to end
_URL = re.compile(r"^dovetail serves .* at (https?://\S+)$")
_GPUS = Path("/proc/driver/nvidia/gpus")


def serve_command(settings: ClusterSettings, host: str) -> list[str]:
    """Return the module and arguments of a replica at a free port of `host`."""
    command = ["dovetail", "serve"]
    if isinstance(settings.engine, str):
        command.append(settings.engine)
    else:
        keys = dict(settings.engine)
        command.append(str(keys.pop("model", "demo")))
        for key, value in keys.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
    for name, value in {**QUIET, **settings.serve}.items():
        command += _option(name, value)
    return [*command, "--host", host, "--port", "0"]


def _option(name: str, value: Any) -> list[str]:
    option = option_name(name)
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (option, str(one))]
    return [option, NULL if value is None else str(value)]


def keys_variable(keys: tuple[str, ...]) -> Mapping[str, str]:
    """Return the environment with a server's API keys: every user of the machine may read command
    lines."""
    return {**os.environ, API_KEYS_VARIABLE: ",".join(keys)}


class ServerProcess:
    """A replica as a process of `dovetail serve`, which is killed, with its children, when the
    calling process ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        gpus: Sequence[str] = (),
    ) -> None:
        """`gpus`: those that it uses until it ends."""
        self.gpus = gpus
        self._process = start_bound(
            command,
            environment={**environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._name = name
        self._url: str | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> ReplicaStatus:
        code = self._process.poll()
        if code is None:
            return ReplicaStatus(self._url)
        self._reader.join(timeout=0.2)  # for its last lines; its children may keep the pipe open
        how = how_ended(code)
        return ReplicaStatus(
            self._url,
            f"{how}: {' | '.join(self._last_lines)}" if self._last_lines and code else how,
        )

    def drain(self) -> None:
        with suppress(OSError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        children = _children(self.pid) if self._process.poll() is None else []
        with suppress(OSError):
            self._process.kill()
        for child in children:  # they end with it unless they hang, and would keep their GPUs
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDS_S)

    def _read(self) -> None:
        """Copy the server's log, and find its URL in it."""
        lines: IO[bytes] | None = self._process.stdout
        for line in lines or ():
            text = line.decode(errors="replace").rstrip()
            if found := _URL.match(text):
                self._url = found[1]
            if text:
                self._last_lines.append(text)
                with suppress(
                    OSError, ValueError
                ):  # our log is closed: the server's pipe must be drained all the same
                    print(f"{self._name}: {text}", file=sys.stderr, flush=True)


class LocalLauncher:
    """Starts replicas on this machine and assigns its GPUs."""

    def __init__(
        self,
        settings: ClusterSettings,
        api_keys: tuple[str, ...] = (),
        gpus: Sequence[str] | None = None,
    ) -> None:
        """`gpus`: those to assign; None: all visible ones. Raises `ConfigError` if `min` replicas
        need more."""
        self._settings = settings
        self._keys = api_keys
        self._gpus = list(visible_gpus() if gpus is None else gpus) if settings.gpus else []
        self._replicas: list[ServerProcess] = []
        if len(self._gpus) < (needed := settings.gpus * settings.replicas.min):
            raise ConfigError(
                f"gpus: {settings.replicas.min} replicas of {settings.gpus} need {needed}, and "
                f"this machine has {len(self._gpus)}"
            )

    def start(self, name: str) -> Replica:
        gpus = self._free()[: self._settings.gpus]
        if len(gpus) < self._settings.gpus:
            raise DovetailError(f"no {self._settings.gpus} GPUs are free")
        environment = {**keys_variable(self._keys), **({VISIBLE: ",".join(gpus)} if gpus else {})}
        try:
            replica = ServerProcess(
                name, serve_command(self._settings, LOOPBACK), environment, gpus
            )
        except OSError as error:
            raise DovetailError(
                f"its process can't be started: {error.strerror or error}"
            ) from None
        self._replicas.append(replica)
        return replica

    def has_room(self) -> bool:
        return len(self._free()) >= self._settings.gpus

    def close(self) -> None:
        for replica in self._replicas:
            replica.kill()

    def _free(self) -> list[str]:
        self._replicas = [replica for replica in self._replicas if replica.poll().ended is None]
        taken = {gpu for replica in self._replicas for gpu in replica.gpus}
        return [gpu for gpu in self._gpus if gpu not in taken]


def _children(pid: int) -> list[int]:
    """Return the child processes of a process; none if the kernel doesn't list them."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, listed.read_text().split())
    return found


def visible_gpus() -> list[str]:
    """Return the names of the GPUs visible to this process, as in CUDA_VISIBLE_DEVICES."""
    if (names := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    return [str(number) for number in range(len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0)]
