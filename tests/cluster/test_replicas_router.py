"""The router `smg` with workers that only say that they are there, and the whole cluster with the
demo model. Ray isn't needed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from bench.soak import free_port
from bench.toy import installed_in

from dovetail.errors import ConfigError, DovetailError, MissingExtraError
from dovetail_cluster import smg_router
from dovetail_cluster.interfaces import Listed
from dovetail_cluster.local_launcher import ServerProcess
from dovetail_cluster.probes import ask
from dovetail_cluster.settings import ClusterSettings
from dovetail_cluster.smg_router import SmgRouter
from tests.http_server import http_server
from tests.support import FULL

PATIENCE_S = 60.0
needs_smg = pytest.mark.skipif(
    find_spec("smg") is None, reason='needs the router: pip install "dovetail-llm[router]"'
)


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is so, and return it. Fails if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


class Worker(BaseHTTPRequestHandler):
    """Says what a server of Dovetail says where the router asks, and completes everything with yes,
    for those who have its key."""

    key: ClassVar[str | None] = None
    answers: ClassVar[dict[str, Any]] = {
        "/health": {},
        "/ready": {},
        "/version": {"version": "1"},
        "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    }

    def do_GET(self) -> None:
        self._reply(self.answers.get(self.path))

    def _is_allowed(self) -> bool:
        return self.key is None or self.headers.get_all("Authorization") == [f"Bearer {self.key}"]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._reply({"choices": [{"text": "yes"}]} if self.path == "/v1/completions" else None)

    def _reply(self, value: Any) -> None:
        data = json.dumps(value).encode()
        found = 404 if value is None else 200
        self.send_response(
            found if self.path in ("/health", "/ready") or self._is_allowed() else 401
        )
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class KeyedWorker(Worker):
    key = "internal"


@pytest.fixture
def worker() -> Iterator[str]:
    with http_server(Worker) as url:
        yield url


def settings(**keys: Any) -> ClusterSettings:
    usual = {"engine": "demo", "router": {"port": free_port()}}
    return ClusterSettings.model_validate(usual | keys)


@pytest.fixture(scope="module")
def open_router() -> Iterator[SmgRouter]:
    """A router without keys, which listens on a name. It has no replicas, or that of a test that
    adds one."""
    with closing(SmgRouter(settings(router={"host": "localhost", "port": free_port()}))) as router:
        until(lambda: router.poll() is not None)
        yield router


@pytest.fixture(scope="module")
def keyed_router() -> Iterator[tuple[SmgRouter, str]]:
    """A router with the keys "mine" and "yours", and the URL of its replica, which requires the key
    "internal" and takes bodies of 10 kB."""
    keys = (("mine", "yours"), "internal")
    with (
        http_server(KeyedWorker) as worker,
        closing(SmgRouter(settings(serve={"max_body_bytes": 10_000}), *keys)) as router,
    ):
        until(lambda: router.poll() is not None)
        router.add(worker)
        until(lambda: router.poll() == {worker: Listed.READY})
        yield router, worker


def complete(url: str, key: str | None = None) -> int:
    return ask(
        f"{url}/v1/completions",
        key=key,
        method="POST",
        body={"model": "m", "prompt": "a"},
        timeout_s=20,
    )[0]


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_replicas_come_and_go(open_router: SmgRouter, worker: str) -> None:
    router = open_router
    assert router.poll() == {}
    router.add(worker)
    until(lambda: router.poll() == {worker: Listed.READY})
    assert complete(router.url) == 200
    router.remove(worker)
    # it forgets a replica some seconds later
    until(lambda: router.poll() in ({}, {worker: Listed.LEAVING}))
    assert complete(router.url) in (404, 503)


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_the_router_takes_no_larger_bodies_than_its_replicas(
    keyed_router: tuple[SmgRouter, str],
) -> None:
    router, _ = keyed_router
    assert complete(router.url, "mine") == 200
    body = {"model": "m", "prompt": "a" * 10_000}
    url = f"{router.url}/v1/completions"
    assert ask(url, key="mine", method="POST", body=body, timeout_s=20)[0] == 413


@needs_smg
@pytest.mark.full
def test_a_router_that_was_killed_is_started_again_without_replicas(worker: str) -> None:
    with closing(SmgRouter(settings())) as router:
        until(lambda: router.poll() is not None)
        router.add(worker)
        until(lambda: router.poll() == {worker: Listed.READY})
        os.kill(router.pid or 0, signal.SIGKILL)
        until(lambda: router.poll() is None)
        until(lambda: router.poll() == {})


@needs_smg
@pytest.mark.full
def test_a_router_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SmgRouter(settings())) as router:
        until(lambda: router.poll() is not None)
        hung = router.pid or 0
        monkeypatch.setattr(smg_router, "HANGS_S", 1.0)
        os.kill(hung, signal.SIGSTOP)
        until(lambda: router.poll() is not None and router.pid != hung)


def test_a_router_is_killed_only_once_it_has_not_answered_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Mock(poll=lambda: None)
    answers = (200, '{"workers": []}')
    now = 100.0
    monkeypatch.setattr(smg_router, "find_spec", lambda name: name)
    monkeypatch.setattr(smg_router, "start_bound", lambda *_, **__: process)
    monkeypatch.setattr(smg_router, "ask", lambda *_, **__: answers)
    monkeypatch.setattr(smg_router, "time", SimpleNamespace(monotonic=lambda: now))
    router = SmgRouter(settings())
    assert router.poll() is None  # starts it
    now += smg_router.HANGS_S
    assert router.poll() == {}
    answers = (0, "")
    now += smg_router.HANGS_S
    assert router.poll() is None
    process.kill.assert_not_called()
    now += 0.5
    assert router.poll() is None
    process.kill.assert_called_once_with()


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")]
)
def test_a_router_is_asked_at_its_host_or_over_loopback_if_it_listens_on_all_addresses(
    host: str, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(url: str, **_: Any) -> tuple[int, str]:
        asked.append(url)
        return 200, '{"workers": []}'

    monkeypatch.setattr(smg_router, "find_spec", lambda name: name)
    monkeypatch.setattr(smg_router, "start_bound", lambda *_, **__: Mock(poll=lambda: None))
    monkeypatch.setattr(smg_router, "ask", answer)
    port = free_port()
    router = SmgRouter(
        ClusterSettings.model_validate({"engine": "demo", "router": {"host": host, "port": port}})
    )
    assert router.poll() is None  # starts it
    assert router.poll() == {}
    assert asked[1:] == [f"http://{reached}:{port}/health"]


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_a_router_may_listen_on_a_name(open_router: SmgRouter) -> None:
    assert open_router.url.startswith("http://localhost:")
    assert ask(f"{open_router.url}/health")[0] == 200


@pytest.mark.slow("starts a server's processes")
def test_a_router_that_ends_each_time_before_it_answers_ends_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smg_router, "find_spec", lambda name: name)
    monkeypatch.setattr(smg_router, "RESTART_S", 0.0)
    monkeypatch.setattr(SmgRouter, "_arguments", lambda self: ["--no-such-option"])
    if not FULL:  # without the imports of three routers
        ending = partial(subprocess.Popen, [sys.executable, "-S", "-c", "raise SystemExit(2)"])
        monkeypatch.setattr(smg_router, "start_bound", lambda *_, **__: ending())
    with (
        closing(SmgRouter(settings())) as router,
        pytest.raises(DovetailError, match="the router ends before it answers"),
    ):
        until(router.poll)


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_clients_need_their_own_key_and_may_not_change_the_replicas(
    keyed_router: tuple[SmgRouter, str],
) -> None:
    router, worker = keyed_router
    assert [complete(router.url, key) for key in (None, "other", "internal", "mine", "yours")] == [
        401,
        401,
        401,
        200,
        200,
    ]
    for key in (None, "mine", "internal"):
        status, _ = ask(
            f"{router.url}/workers", key=key, method="POST", body={"url": "http://127.0.0.1:1"}
        )
        assert status in (401, 404)
    assert router.poll() == {worker: Listed.READY}
    command, environment = (
        Path(f"/proc/{router.pid}/{name}").read_bytes() for name in ("cmdline", "environ")
    )
    found = re.search(rb"cluster:cluster:admin:([\w-]+)", environment)
    assert found, (
        "the key that changes the replicas is in the environment, which only this user can read"
    )
    assert not any(secret in command for secret in (b"mine", b"internal", found[1]))


SMG_ROUTES = [
    "/health",
    "/ready",
    "/readiness",
    "/liveness",
    "/health_generate",
    "/engine_metrics",
    "/get_model_info",
    "/get_server_info",
    "/server_info",
    "/model_info",
    "/loads",
    "/get_loads",
    "/v1/loads",
    "/v1/models",
    "/v1/models/m",
    "/metrics",
    "/workers",
    "/workers/w",
    "/wasm",
    "/wasm/m",
    "/v1/tokenizers",
    "/v1/tokenizers/t",
    "/v1/rl",
    "/flush_cache",
    "/start_profile",
    "/stop_profile",
    "/heap_profile",
    "/parse/function_call",
    "/parse/reasoning",
    "/generate",
    "/rerank",
    "/v1/rerank",
    "/v1/classify",
    "/v1/decisions",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/r",
    "/v1/responses/r/cancel",
    "/v1/conversations",
    "/v1/conversations/c",
    "/v1/conversations/c/items",
    "/v1/interactions",
    "/v1/realtime",
    "/v1/realtime/sessions",
    "/v1/realtime/calls",
    "/v1/audio/transcriptions",
    "/",
    "/openapi.json",
    "/v1/batches",
    "/v1/files",
    "/version",
    "/tokenize",
    "//health",
    "/v1/models/..%2F..%2Floads",
]
SERVED = (
    "/v1/chat/completions",
    "/v1/classify",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/models",
    "/v1/models/m",
    "/v1/models/..%2F..%2Floads",
)


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_every_route_of_the_router_but_health_and_readiness_needs_a_key_and_clients_reach_those_of_replicas_only(
    keyed_router: tuple[SmgRouter, str],
) -> None:
    router, worker = keyed_router
    for path in SMG_ROUTES:
        for method, body in (("GET", None), ("POST", {}), ("DELETE", None)):
            told = {
                key: ask(f"{router.url}{path}", key=key, method=method, body=body)
                for key in (None, "other", "internal", "mine")
            }
            assert worker not in str(told)
            if path in ("/health", "/ready"):
                assert {status for status, _ in told.values()} == {200 if method == "GET" else 405}
                continue
            assert [told[key][0] for key in (None, "other", "internal")] == [401, 401, 401], path
            if path not in SERVED:
                assert told["mine"][0] == 404, path


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_without_keys_too_strangers_may_not_change_the_replicas(open_router: SmgRouter) -> None:
    body = {"url": "http://127.0.0.1:1"}
    assert ask(f"{open_router.url}/workers", method="POST", body=body)[0] == 404


def test_without_the_router_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smg_router, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "dovetail-llm\[router\]"'):
        SmgRouter(settings())


def test_a_port_that_is_taken_is_reported_before_anything_starts(
    worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smg_router, "find_spec", lambda name: name)
    port = int(worker.rpartition(":")[2])
    with pytest.raises(
        ConfigError, match=f"router: 127.0.0.1:{port}: .* give another host or port"
    ):
        SmgRouter(ClusterSettings.model_validate({"engine": "demo", "router": {"port": port}}))
    with pytest.raises(
        ConfigError, match=f"router: 127.0.0.1:{port}: .* give another host or port"
    ):
        SmgRouter(
            ClusterSettings.model_validate(
                {"engine": "demo", "router": {"port": free_port(), "metrics_port": port}}
            )
        )


@pytest.fixture(scope="module")
def keyed_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a whole cluster of one replica, with the keys "mine" and "yours". Its executor
    imports no torch."""
    folder, port = tmp_path_factory.mktemp("keyed"), free_port()
    (folder / "toy").mkdir()
    installed_in(folder / "toy")
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "DOVETAIL_API_KEYS": "mine, yours",
        "PYTHONPATH": os.pathsep.join([str(folder / "toy"), *sys.path]),
    }
    file, url = folder / "cluster.yaml", f"http://127.0.0.1:{port}"
    engine = {"model": "demo", "sampler": "toy", "executor": {"name": "toy"}}
    (folder / "engine.yaml").write_text(json.dumps(engine))
    cluster = {
        "engine": str(folder / "engine.yaml"),
        "name": "keyed",
        "replicas": 1,
        "router": {"port": port},
    }
    file.write_text(json.dumps(cluster))
    command = [sys.executable, "-m", "dovetail", "cluster", "up", str(file)]
    up = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: ask(f"{url}/ready")[0] == 200)
        until(lambda: ask(f"{url}/v1/models", key="mine")[0] == 200)
        yield url
    finally:
        up.terminate()
        up.wait(PATIENCE_S)


@needs_smg
@pytest.mark.slow("starts a server's processes")
def test_a_cluster_with_keys_serves_their_owners_in_every_api(keyed_cluster: str) -> None:
    message = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    bodies = {
        "/v1/completions": {"model": "demo", "prompt": "ROMEO:", "max_tokens": 2},
        "/v1/chat/completions": message,
        "/v1/messages": message,
        "/v1/responses": {"model": "demo", "input": "hi", "max_output_tokens": 2, "store": False},
    }
    for path, body in bodies.items():
        told = {
            key: ask(f"{keyed_cluster}{path}", key=key, method="POST", body=body, timeout_s=60)[0]
            for key in (None, "other", "mine", "yours")
        }
        assert told == {None: 401, "other": 401, "mine": 200, "yours": 200}, path


@needs_smg
@pytest.mark.full
def test_up_serves_status_tells_a_killed_replica_is_replaced_and_nothing_outlives_a_killed_cluster(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    file = tmp_path / "cluster.yaml"
    file.write_text(
        json.dumps(
            {
                "engine": "demo",
                "name": "live",
                "replicas": 1,
                "unhealthy_after_s": 4,
                "router": {"port": free_port()},
            }
        )
    )

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "dovetail", "cluster", *words]

    def status() -> dict[str, Any]:
        done = subprocess.run(
            command("status", "live", "--json"), env=environment, capture_output=True, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout or b'{"replicas": []}')
        return found

    def serving() -> dict[str, Any] | None:
        found = status()
        return found if [one["state"] for one in found["replicas"]] == ["serving"] else None

    up = subprocess.Popen(
        command("up", str(file)),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        found = until(serving)
        body = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 2}
        assert (
            ask(f"{found['router']['url']}/v1/completions", method="POST", body=body, timeout_s=60)[
                0
            ]
            == 200
        )
        first = found["replicas"][0]["pid"]
        up.send_signal(signal.SIGSTOP)
        time.sleep(8)  # after a suspension, nobody is blamed for the answers that weren't read
        up.send_signal(signal.SIGCONT)
        assert until(serving)["deaths"] == 0
        os.kill(first, signal.SIGKILL)
        again = until(lambda: (now := serving()) and now["replicas"][0]["pid"] != first and now)
        assert again["deaths"] == 1
        assert "SIGKILL" in again["last_death"]
    finally:
        up.kill()
        up.wait()
    pids = [again["replicas"][0]["pid"], again["router"]["pid"]]
    until(lambda: not any(is_running(pid) for pid in pids))
    assert ask(f"{again['replicas'][0]['url']}/health")[0] == 0


HANGS = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"], start_new_session=True)
os.waitpid(child.pid, os.WUNTRACED)
print(f"dovetail serves {child.pid} at http://stopped", flush=True)
signal.pause()
"""


@pytest.mark.skipif(
    not list(Path("/proc/self/task").glob("*/children")),
    reason="the kernel doesn't tell a process's children",
)
def test_a_child_that_hangs_is_killed_with_its_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    server = ServerProcess("it", ["hangs"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    until(lambda: server.poll().url)
    child = int(until(lambda: re.search(r"serves (\d+)", capfd.readouterr().err))[1])
    try:
        assert is_running(child)
        server.kill()
        until(lambda: not is_running(child))
    finally:
        server.kill()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Return True for a process that is neither gone nor waits to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
