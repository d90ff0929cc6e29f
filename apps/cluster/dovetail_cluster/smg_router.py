"""`SmgRouter`: runs the router of the package `smg` behind a `gate` in a process, restarts it when
it dies, and controls it over HTTP."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from dovetail.errors import ConfigError, DovetailError, MissingExtraError
from dovetail_cluster.bound_process import start_bound
from dovetail_cluster.interfaces import Listed
from dovetail_cluster.probes import ask
from dovetail_cluster.settings import ClusterSettings

# environment variable; a command line would expose the keys
ARGUMENTS = "DOVETAIL_ROUTER_ARGUMENTS"
RESTART_S = 1.0  # minimum time between two starts
STOPS_S = 5.0
FUTILE_STARTS = 3  # starts in a row without an answer: then it is given up
HANGS_S = 15.0  # without an answer, a running router is killed


class SmgRouter:
    """The router in front of the replicas."""

    def __init__(
        self,
        settings: ClusterSettings,
        api_keys: tuple[str, ...] = (),
        replica_key: str | None = None,
    ) -> None:
        """`api_keys`: of clients. `replica_key`: the router's own for the replicas.

        Raises `MissingExtraError` without the package, `ConfigError` if a port is taken.
        """
        check_installed()
        self._settings = settings
        self._keys = api_keys
        self._replica_key = replica_key
        self._admin_key = secrets.token_urlsafe(32)
        # The replicas' own, if they need one: of the caller's key and the replica's, smg forwards
        # the caller's since 1.13, and both before.
        self._gate_key = replica_key or secrets.token_urlsafe(32)
        self.metrics_port = settings.router.metrics_port or _free_port()
        self._address = _free_address(settings.router.host, settings.router.port)
        _free_address("127.0.0.1", self.metrics_port)
        host = settings.router.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{settings.router.port}"
        self._gate = f"http://{_reached_at(self._address)}:{settings.router.port}"
        self._port = 0  # of the router on loopback; a new one at each start
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._answered = -RESTART_S
        self._has_answered = False
        self._starts = 0
        self._ids: dict[str, str] = {}  # the router's ids of replicas, by URL

    @property
    def _base(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def poll(self) -> Mapping[str, Listed] | None:
        if not self._is_running():
            return None
        status, text = ask(f"{self._base}/workers", key=self._admin_key)
        try:
            if status == 200 and ask(f"{self._gate}/health")[0] == 200:
                workers = json.loads(text)["workers"]
                self._ids = {worker["url"]: worker["id"] for worker in workers}
                self._answered = time.monotonic()
                self._has_answered = True
                return {worker["url"]: _listed(worker["status"]) for worker in workers}
        except (ValueError, KeyError, TypeError):  # another program, or another version of this one
            pass
        self._kill_if_hung()  # only after asking: this process may have been suspended
        return None

    def add(self, url: str) -> None:
        body = {"url": url} | ({"api_key": self._replica_key} if self._replica_key else {})
        ask(f"{self._base}/workers", key=self._admin_key, method="POST", body=body)

    def remove(self, url: str) -> None:
        if url in self._ids:
            ask(f"{self._base}/workers/{self._ids[url]}", key=self._admin_key, method="DELETE")

    def close(self) -> None:
        """End the router."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOPS_S)
        self._process.kill()
        self._process.wait()

    def _is_running(self) -> bool:
        """Return True if it runs; otherwise restart it, at most every `RESTART_S`. Raises
        `DovetailError` if it keeps ending without an answer."""
        if self._process is not None and self._process.poll() is None:
            return True
        if time.monotonic() - self._started >= RESTART_S:
            if self._process is not None:
                with suppress(OSError):  # the log is closed
                    print(
                        f"dovetail cluster: the router ended with {self._process.returncode}; it "
                        f"is started again",
                        file=sys.stderr,
                        flush=True,
                    )
            if self._starts >= FUTILE_STARTS and not self._has_answered:
                raise DovetailError("the router ends before it answers: its last words are above")
            self._started = time.monotonic()
            with suppress(OSError):  # no process or file can be created now: retried later
                self._port = _free_port()
                arguments = {"router": self._arguments(), "gate": self._gate_arguments()}
                environment = {**os.environ, ARGUMENTS: json.dumps(arguments)}
                self._process = start_bound(
                    ["dovetail_cluster.router_process"],
                    environment=environment,
                    stdout=subprocess.DEVNULL,
                )
                self._starts += 1
        return False

    def _kill_if_hung(self) -> None:
        """Kill the router if it hasn't answered for `HANGS_S`: the next look restarts it."""
        if (
            self._process is not None
            and time.monotonic() - max(self._started, self._answered) > HANGS_S
        ):
            self._process.kill()

    def _arguments(self) -> list[str]:
        router = self._settings.router
        arguments = {
            "--host": "127.0.0.1",
            "--port": self._port,
            "--policy": router.policy,
            "--prometheus-host": "127.0.0.1",  # otherwise it listens on all addresses
            "--prometheus-port": self.metrics_port,
            "--health-check-endpoint": "/ready",  # 503 while a server drains
            "--health-check-interval-secs": 5,
            "--health-failure-threshold": 2,
            "--load-monitor-interval": 1,
            "--shutdown-grace-period-secs": 1,
            "--max-payload-size": self._settings.server.max_body_bytes,
            "--history-backend": "none",  # answers aren't stored
            "--log-level": "warn",
            "--control-plane-api-keys": f"cluster:cluster:admin:{self._admin_key}",
            "--tenant-api-key": f"gate:{self._gate_key}",
        }
        words = [str(word) for pair in arguments.items() for word in pair]
        if self._settings.server.request_timeout_s is not None:
            words += [
                "--request-timeout-secs",
                str(int(self._settings.server.request_timeout_s) + 1),
            ]
        return ["launch", *words, "--disable-tokenizer-autoload"]

    def _gate_arguments(self) -> dict[str, Any]:
        """Return the arguments of `serve_gate`."""
        settings = {**self._settings.serve, "api_keys": self._keys, "page": False}
        return {
            "host": self._address,
            "port": self._settings.router.port,
            "settings": settings,
            "router_port": self._port,
            "key": self._gate_key,
        }


def check_installed() -> None:
    """Raise `MissingExtraError` without the router's package."""
    if find_spec("smg") is None:
        raise MissingExtraError.naming("router", "dovetail cluster needs the router smg")


def _listed(status: str) -> Listed:
    return {"ready": Listed.READY, "draining": Listed.LEAVING}.get(status, Listed.JOINING)


def _reached_at(host: str) -> str:
    """Return the address under which this machine reaches a server listening on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _free_address(host: str, port: int) -> str:
    """Return a host's IP address. Raises `ConfigError` if it has none, or the port is taken
    there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return str(address[0])
    except OSError as error:
        raise ConfigError(
            f"router: {host}:{port}: {error.strerror or error}: give another host or port"
        ) from None
