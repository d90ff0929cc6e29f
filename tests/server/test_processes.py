"""`dovetail serve` as processes: whichever is killed, clients get an error, the others react
correctly, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.toy import installed_in
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail_server import child, supervisor
from tests.preloaded import Preloaded
from tests.server.forked import MODULES, SHORTER, ForkedProcess
from tests.support import FULL

PATIENCE_S = 120.0  # on a loaded machine a front end needs several seconds to start
# until clients know that the engine is dead, on a machine that does nothing else
TOLD_S = 5.0 if FULL else PATIENCE_S
FREED_S = 1.0 if FULL else PATIENCE_S  # until a dead front end's requests have left the engine
ENDLESS = {"prompt": "ROMEO:", "max_tokens": 900, "ignore_eos": True}
TOY = {"step_s": 0.05}  # for longer than any test: 8000 tokens

# Limits of a server that `forked.py` starts, which are shorter outside of the full profile.
_SHORTER = {} if FULL else SHORTER
_OF_SUPERVISOR = {**vars(supervisor), **_SHORTER.get("dovetail_server.supervisor", {})}
HANGS_S: float = _OF_SUPERVISOR["FRONT_END_HANGS_S"]
STOPPED_S: float = _OF_SUPERVISOR["STOPPED_S"]
PAUSE_S: float = {**vars(child), **_SHORTER.get("dovetail_server.child", {})}["PAUSE_S"]


def until(what: Callable[[], Any], why: str, seconds: float = PATIENCE_S) -> Any:
    """Wait until `what()` is true, and return it. It is asked less and less often: an answer may
    take as long as the server does to give it."""
    deadline = time.monotonic() + seconds
    pause_s = 0.02
    while time.monotonic() < deadline:
        if result := what():
            return result
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.25)
    raise AssertionError(f"nothing came of waiting until {why}")


class Server:
    """`dovetail serve`, run as a user does."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        toy: dict[str, Any] | None = None,
        listens: bool = True,
        preloaded: Preloaded | None = None,
    ) -> None:
        """`toy`: options of the executor of that name, with which the engine's process starts in a
        fifth of the time, as it imports no torch. `listens`: wait until it does, or has ended.
        `preloaded`: fork its processes from this one, see `forked.py`."""
        self.directory = directory
        environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
        source = "demo"
        if toy is not None:
            environment |= {"PYTHONPATH": _toy(directory)}
            source = str(directory / "engine.yaml")
            Path(source).write_text(
                yaml.safe_dump(
                    {
                        "model": "demo",
                        "sampler": "toy",
                        "executor": {"name": "toy", "max_model_len": 8192, **toy},
                    }
                )
            )
        self.errors = (directory / "stderr").open("ab")
        arguments = ["serve", source, "--port", "0", *options]
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if preloaded is not None:
            self.process = ForkedProcess(preloaded, arguments, environment, self.errors)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dovetail", *arguments],
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env=environment,
            )
        self.line = self._first_line() if listens else ""
        self.port = int(self.line.rsplit(":", 1)[1]) if "http" in self.line else 0

    def _first_line(self) -> str:
        """Return what it prints once it listens, or nothing if it has ended: its children have its
        output, too, so what they leave must not be waited for."""
        output = self.process.stdout
        assert output is not None

        def is_there() -> bool:
            return bool(select.select([output], [], [], 0.0)[0]) or self.process.poll() is not None

        until(is_there, "it listens")
        return output.readline().decode() if select.select([output], [], [], 0.0)[0] else ""

    def children(self, module: str = "") -> list[int]:
        """Processes that it started, and that run that module."""
        found = []
        for pid in children_of(self.process.pid):
            with suppress(OSError):
                if module in words_of(pid):
                    found.append(pid)
        return found

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def complete(self, **body: Any) -> Stream:
        return Stream(self.port, body)

    def told(self) -> str:
        return (self.directory / "stderr").read_text()

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Kill it if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()

    def left(self, pids: list[int]) -> list[str]:
        """Return what was left: processes, and files in its temporary directory."""
        alive = [str(pid) for pid in pids if _runs(pid)]
        return [
            *alive,
            *(
                entry.name
                for entry in self.directory.iterdir()
                if entry.name not in ("stderr", "toy", "engine.yaml")
            ),
        ]


def _toy(directory: Path) -> str:
    """The path on which Python finds the executor `toy`."""
    if not (directory / "toy").exists():
        installed_in(directory / "toy")
    return os.pathsep.join(
        [str(directory / "toy"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )


def shared_memory(pids: list[int]) -> set[str]:
    """The shared memory that has a name, or an id of System V, of these processes."""
    found = set()
    for pid in pids:
        found |= set(re.findall(r"/dev/shm/\S+|/SYSV\S+", Path(f"/proc/{pid}/maps").read_text()))
    return {name for name in found if Path(name).exists() or "SYSV" in name}


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, in the order of their numbers."""
    found: list[int] = []
    for entry in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, entry.read_text().split())
    return sorted(found)


def words_of(pid: int) -> str:
    """Return the command line of a process, or the name that `forked.py` has given it."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return Path(f"/proc/{pid}/cmdline").read_text() if name.startswith("python") else name


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Stream:
    """A streaming client, in a thread."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.events: list[str] = []
        self.begun, self.over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(port, body), daemon=True)
        self._thread.start()

    def _run(self, port: int, body: dict[str, Any]) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            connection.request(
                "POST", "/v1/completions", json.dumps({"stream": True, "model": "demo", **body})
            )
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
                    self.begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.events.append(f"connection: {error}")
        finally:
            self.begun.set()
            self.over.set()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="dt-"
    ) as name:  # short: the path of a socket is at most 107 characters
        yield Path(name)


@pytest.fixture(scope="module")
def server_to_fork() -> Iterator[Preloaded | None]:
    """Yield the process from which servers with the executor `toy` are forked; None in the full
    profile."""
    if FULL:
        yield None
        return
    with closing(Preloaded(MODULES)) as preloaded:
        yield preloaded


@pytest.fixture
def start(directory: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    servers = []

    def start(*options: str, toy: dict[str, Any] | None = None, **how: Any) -> Server:
        if toy is not None:
            how["preloaded"] = request.getfixturevalue("server_to_fork")
        servers.append(Server(directory, *options, toy=toy, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def started_once(server_to_fork: Preloaded | None) -> Iterator[Callable[[], Server]]:
    """Return the server of the fixture `server`, started if it isn't running."""
    with tempfile.TemporaryDirectory(prefix="dt-") as name:
        servers: list[Server] = []

        def start() -> Server:
            if not servers or servers[-1].process.poll() is not None:
                (directory := Path(name) / str(len(servers))).mkdir()
                options = ("--front-ends", "2")
                servers.append(Server(directory, *options, toy=TOY, preloaded=server_to_fork))
            return servers[-1]

        yield start
        for server in servers:
            server.close()


@pytest.fixture
def server(started_once: Callable[[], Server]) -> Server:
    """A server with two front ends, for tests after which it serves as before. Two of them end a
    front end: after a third it would give up."""
    one = started_once()
    until(lambda: len(one.children("front_end")) == 2 and one.get("/health")[0] == 200, "it serves")
    return one


def begin(server: Server, count: int, **fields: Any) -> list[Stream]:
    streams = [server.complete(**{**ENDLESS, **fields}) for _ in range(count)]
    for stream in streams:
        assert stream.begun.wait(PATIENCE_S)
    return streams


@pytest.mark.parametrize("once_more", range(20 if FULL else 1))
@pytest.mark.slow("starts a server's processes")
def test_when_the_engine_is_killed_all_clients_are_told_why_and_the_server_ends(
    start: Callable[..., Server], once_more: int
) -> None:
    server = start("--front-ends", "2", toy=None if FULL else TOY)
    pids = server.children()
    streams = begin(server, 8)
    [engine] = server.children("engine_process")
    shared = shared_memory(pids)
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + TOLD_S
    for stream in streams:
        assert stream.over.wait(deadline - time.monotonic())
        assert any("SIGKILL" in event for event in stream.events[-2:])
    assert server.end() == 1
    assert "killed by SIGKILL" in server.told()
    until(lambda: not server.left(pids), "nothing is left")
    assert not any(Path(name).exists() for name in shared)
    socket.create_server(("127.0.0.1", server.port)).close()  # the port is free


@pytest.mark.slow("starts a server's processes")
def test_one_of_several_engines_that_is_killed_is_restarted_while_others_go_on(
    start: Callable[..., Server], directory: Path
) -> None:
    names = ["--served-model-name", "one", "--served-model-name", "two"]
    server = start(str(directory / "engine.yaml"), *names, toy=TOY)
    streams = {
        name: server.complete(model=name, prompt="ROMEO:", max_tokens=8000)
        for name in ("one", "two")
    }
    for stream in streams.values():
        assert stream.begun.wait(PATIENCE_S)
    os.kill(server.children("engine_process")[0], signal.SIGKILL)
    [lost] = until(
        lambda: [name for name, stream in streams.items() if stream.over.is_set()], "one ends"
    )
    assert "SIGKILL" in streams.pop(lost).events[-1]
    until(lambda: server.get("/health")[1] == {"status": "ok"}, "it is restarted")
    again = server.complete(model=lost, prompt="ROMEO:", max_tokens=3)
    assert again.over.wait(PATIENCE_S)
    assert again.events[-1] == "[DONE]"
    assert not any(stream.over.is_set() for stream in streams.values())
    pids = server.children()
    for engine in server.children("engine_process"):
        os.kill(engine, signal.SIGKILL)
    assert server.end() == 1
    until(lambda: not server.left(pids), "nothing is left")


@pytest.mark.slow("starts a server's processes")
def test_a_step_that_hangs_ends_the_server_and_all_clients_are_notified(
    start: Callable[..., Server],
) -> None:
    server = start("--step-timeout", "1", toy={"step_s": 0.05, "hangs_at_step": 12})
    pids = server.children()
    streams = begin(server, 4)
    until(lambda: server.get("/health")[0] == 503, "it isn't healthy")
    for stream in streams:
        assert stream.over.wait(PATIENCE_S)
        assert "a step took longer than 1 s (--step-timeout)" in stream.events[-1]
    assert server.end() == 1
    until(lambda: not server.left(pids), "nothing is left")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--step-timeout", "1"),
            "it had sent no heartbeat for 1 s (--step-timeout)",
        ),  # as with code that never lets another thread run
        ((), f"it had been stopped (SIGSTOP) for {STOPPED_S:g} s"),
    ],
)
@pytest.mark.slow("starts a server's processes")
def test_an_engine_that_says_nothing_any_more_ends_the_server(
    start: Callable[..., Server], options: tuple[str, ...], said: str
) -> None:
    server = start(*options, toy=TOY)
    pids = server.children()
    [stream] = begin(server, 1, max_tokens=8000)
    os.kill(server.children("engine_process")[0], signal.SIGSTOP)
    until(lambda: server.get("/health")[0] == 503, "it isn't healthy")
    assert stream.over.wait(PATIENCE_S)
    assert said in stream.events[-1]
    assert server.end() == 1
    until(lambda: not server.left(pids), "nothing is left")


@pytest.mark.slow("starts a server's processes")
def test_a_front_end_that_is_stopped_is_replaced_and_takes_no_waiting_request_with_it(
    server: Server,
) -> None:
    stopped = server.children("front_end")[0]
    os.kill(stopped, signal.SIGSTOP)
    waiting = [server.complete(prompt="ROMEO:", max_tokens=3) for _ in range(12)]
    for stream in waiting:
        assert stream.over.wait(PATIENCE_S)
        assert stream.events[-1] == "[DONE]"
    until(
        lambda: len(server.children("front_end")) == 2 and stopped not in server.children(),
        "there is another",
    )
    assert f"had been stopped (SIGSTOP) for {STOPPED_S:g} s; restarting it" in server.told()


HANGS_AT_A_SIGNAL = """
import signal, sys, time
if any("front_end" in word for word in sys.orig_argv):
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
"""


@pytest.mark.slow("hangs for seconds")
def test_a_front_end_whose_event_loop_hangs_is_replaced(
    start: Callable[..., Server], directory: Path
) -> None:
    (directory / "toy").mkdir()
    installed_in(directory / "toy")
    (directory / "toy" / "sitecustomize.py").write_text(HANGS_AT_A_SIGNAL)
    server = start(toy={"step_s": 0.01})
    [hung] = server.children("front_end")
    # its loop answers, so the signal can't interrupt it while it reports that it is ready: that
    # holds the channel, and there would be no heartbeats
    assert until(lambda: _status(server), "it serves") == 200
    os.kill(hung, signal.SIGUSR1)
    until(
        lambda: server.children("front_end") and hung not in server.children(), "there is another"
    )
    assert f"its event loop had been blocked for {HANGS_S:g} s; restarting it" in server.told()
    assert until(lambda: _status(server), "it serves") == 200


@pytest.mark.slow("is busy for seconds")
def test_a_front_end_that_is_busy_is_not_replaced(
    start: Callable[..., Server], directory: Path
) -> None:
    (directory / "toy").mkdir()
    installed_in(directory / "toy")
    (directory / "toy" / "sitecustomize.py").write_text(
        HANGS_AT_A_SIGNAL.replace("3600", f"{0.4 * HANGS_S}")
    )
    server = start(toy={"step_s": 0.01})
    [busy] = server.children("front_end")
    os.kill(busy, signal.SIGUSR1)
    assert until(lambda: _status(server), "it serves") == 200
    assert server.children("front_end") == [busy]


@pytest.mark.slow("pauses between restarts")
def test_front_ends_that_die_again_and_again_do_not_end_the_server(
    start: Callable[..., Server],
) -> None:
    server = start(toy={"step_s": 0.01})
    for _ in range(5):
        [pid] = until(lambda: server.children("front_end"), "there is one")
        assert until(lambda: _status(server), "it serves") == 200
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pid not in server.children(), "it is gone")
    assert until(lambda: _status(server), "it serves") == 200
    assert f"restarting it in {4 * PAUSE_S:g} s" in server.told()


CANNOT_START = """
import os, sys
if any("front_end" in word for word in sys.orig_argv):
    flag = os.path.join(os.environ["TMPDIR"], "toy", "began")
    if os.path.exists(flag):
        os.abort()
    open(flag, "w").close()
"""


@pytest.mark.slow("pauses between restarts")
def test_front_ends_that_cannot_start_again_end_the_server(
    start: Callable[..., Server], directory: Path
) -> None:
    (directory / "toy").mkdir()
    installed_in(directory / "toy")
    (directory / "toy" / "sitecustomize.py").write_text(CANNOT_START)
    server = start(toy={"step_s": 0.01})
    os.kill(server.children("front_end")[0], signal.SIGKILL)
    assert server.end() != 0
    assert "front ends can't start; the last was killed by SIGABRT" in server.told()


@pytest.mark.slow("starts a server's processes")
def test_while_the_supervisor_hangs_the_server_is_not_healthy(server: Server) -> None:
    server.process.send_signal(signal.SIGSTOP)
    status, told = until(
        lambda: (answer := server.get("/health"))[0] != 200 and answer, "it isn't healthy"
    )
    assert (status, told["error"]["code"]) == (503, "supervisor_hangs")
    # the other front end may answer
    until(lambda: server.get("/ready")[0] == 503, "it isn't ready")
    server.process.send_signal(signal.SIGCONT)
    until(lambda: server.get("/health")[0] == 200, "it is healthy again")


@pytest.mark.full
def test_a_server_that_is_suspended_as_a_whole_resumes(start: Callable[..., Server]) -> None:
    server = start("--front-ends", "2", "--step-timeout", "2", toy={"step_s": 0.05})
    pids = server.children()
    streams = begin(server, 4, max_tokens=100)
    for pid in [server.process.pid, *pids]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(12)  # longer than anybody may be silent
    for pid in [server.process.pid, *pids]:
        os.kill(pid, signal.SIGCONT)
    for stream in streams:
        assert stream.over.wait(PATIENCE_S)
        assert stream.events[-1] == "[DONE]"
    assert server.get("/health")[0] == 200
    assert set(server.children()) == set(pids)


class Scraper:
    """A connection that stays open, to one of the front ends."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def scrape(self) -> str:
        self._connection.request("GET", "/metrics")
        return self._connection.getresponse().read().decode()

    @property
    def place(self) -> str:
        return str(re.findall(r'front_end="(\d+)"', self.scrape())[0])

    @property
    def running(self) -> int:
        [value] = re.findall(r"^vllm:num_requests_running\S* (\S+)$", self.scrape(), re.MULTILINE)
        return int(float(value))


@pytest.mark.slow("starts a server's processes")
def test_the_requests_of_a_dead_front_end_are_freed_and_the_others_go_on(server: Server) -> None:
    streams = begin(server, 12, max_tokens=8000)
    scrapers: dict[str, Scraper] = {}
    while (
        len(scrapers) < 2
    ):  # new connections may wait in a dead front end's queue until there is another
        one = Scraper(server.port)
        scrapers[one.place] = one
    [doomed] = server.children("front_end")[:1]
    os.kill(doomed, signal.SIGKILL)
    killed = time.monotonic()
    alive: list[Scraper] = []
    for scraper in scrapers.values():
        with suppress(OSError, http.client.HTTPException):
            scraper.scrape()
            alive.append(scraper)
    [survivor] = alive
    # of some it shows only later that they are over
    seen = [len(stream.events) for stream in streams]
    until(
        lambda: all(
            stream.over.is_set() or len(stream.events) > before
            for stream, before in zip(streams, seen, strict=True)
        ),
        "the others go on",
    )
    until(
        lambda: survivor.running == sum(not stream.over.is_set() for stream in streams),
        "all is free",
        killed + FREED_S - time.monotonic(),
    )
    until(lambda: len(server.children("front_end")) == 2, "there is another")


@pytest.mark.slow("starts a server's processes")
def test_a_signal_while_it_starts_ends_it(start: Callable[..., Server]) -> None:
    server = start(listens=False)  # it imports torch for seconds
    pids = until(lambda: server.children("engine_process"), "the engine's process has started")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 128 + signal.SIGTERM
    until(lambda: not server.left([*pids, *server.children()]), "nothing is left")


@pytest.mark.slow("starts a server's processes")
def test_what_is_ready_has_rendered_a_conversation_and_is_not_harmed_by_a_second_server_at_its_port(
    start: Callable[..., Server],
) -> None:
    server = start(toy=TOY)
    [front_end] = server.children("front_end")
    started = children_of(front_end)
    assert any("chat_worker" in words_of(pid) for pid in started)
    other = start("--port", str(server.port), toy=TOY)
    assert other.end() == 2
    assert f"127.0.0.1:{server.port}: Address already in use" in other.told()
    assert server.get("/health")[0] == 200


@pytest.mark.full
def test_two_servers_that_start_at_the_same_port_at_once_do_not_share_it(
    start: Callable[..., Server],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    servers = [start("--port", str(port), listens=False) for _ in range(2)]
    ended = until(
        lambda: [server for server in servers if server.process.poll() is not None],
        "one has given up",
    )
    assert len(ended) == 1
    assert "Address already in use" in ended[0].told()
    assert "Traceback" not in ended[0].told()
    [other] = set(servers) - set(ended)
    other.port = port
    assert until(lambda: _status(other), "the other serves") == 200


def _status(server: Server) -> int | None:
    try:
        return server.get("/health")[0]
    except OSError:
        return None


@pytest.mark.slow("starts a server's processes")
def test_when_the_supervisor_is_killed_all_end(start: Callable[..., Server]) -> None:
    server = start(toy=TOY)
    streams = begin(server, 2, max_tokens=8000)
    pids = server.children()
    assert len(pids) == 2
    server.process.kill()
    for stream in streams:
        assert stream.over.wait(PATIENCE_S)
    until(lambda: not server.left(pids), "nothing is left")


@pytest.mark.slow("starts a server's processes")
def test_a_second_signal_does_not_wait_for_requests(start: Callable[..., Server]) -> None:
    server = start(toy=TOY)
    begin(server, 2, max_tokens=8000)
    pids = server.children()
    server.process.send_signal(signal.SIGINT)
    until(lambda: server.get("/ready")[0] == 503, "it is not ready any more")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == 130
    assert server.left(pids) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "max_num_seqs=none"], "max_num_seqs"),  # by the supervisor
        pytest.param(
            ["--set", "kv_cache_memory=1"], "kv_cache_memory", marks=pytest.mark.full
        ),  # by the engine's process
        # also in this process: `test_options_that_keep_it_from_starting_are_named`
        pytest.param(["--port", "70000"], "--port", marks=pytest.mark.full),
        pytest.param(["--host", "256.256.256.256"], "--host", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow("starts a server's processes")
def test_what_keeps_it_from_starting_is_reported_in_a_sentence(
    start: Callable[..., Server], options: list[str], said: str
) -> None:
    server = start(*options, toy=None if FULL else TOY)
    assert server.end() == 2
    assert said in server.told()
    assert "Traceback" not in server.told()
    assert server.left([]) == []


@pytest.mark.parametrize(("option", "value"), [("--port", "70000"), ("--host", "256.256.256.256")])
def test_options_that_keep_it_from_starting_are_named(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", option, value])
    assert done.exit_code == 2
    assert value.partition("=")[0] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("is_in_process", [False, True])
@pytest.mark.slow("starts a server's processes")
def test_each_request_is_a_line_of_json_on_stderr(
    server: Server, start: Callable[..., Server], is_in_process: bool
) -> None:
    server = start("--in-process", toy=TOY) if is_in_process else server
    server.get("/v1/models")
    until(lambda: "/v1/models" in server.told(), "the request was logged")
    lines = [json.loads(line) for line in server.told().splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines if line["path"] == "/v1/models"] == [200]


@pytest.mark.slow("starts a server's processes")
def test_when_the_only_front_end_is_killed_another_serves_and_a_drain_lets_requests_end(
    start: Callable[..., Server],
) -> None:
    server = start(toy=TOY)
    streams = begin(server, 4, max_tokens=8000)
    [front_end], [engine] = server.children("front_end"), server.children("engine_process")
    os.kill(front_end, signal.SIGKILL)
    for stream in streams:
        assert stream.over.wait(PATIENCE_S)
    until(
        lambda: [pid for pid in server.children("front_end") if pid != front_end],
        "there is another",
    )
    done = server.complete(prompt="ROMEO:", max_tokens=3)
    assert done.over.wait(PATIENCE_S)
    assert done.events[-1] == "[DONE]"
    until(lambda: Scraper(server.port).running == 0, "its requests are freed")
    assert server.children("engine_process") == [engine]
    pids = server.children()
    [stream] = begin(server, 1, max_tokens=50)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.get("/ready")[0] == 503, "it is not ready any more")
    assert stream.over.wait(PATIENCE_S)
    assert stream.events[-1] == "[DONE]"
    assert server.end() == 0
    until(lambda: not server.left(pids), "nothing is left")


def test_the_help_tells_defaults() -> None:
    told = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "[default: 8000]" in " ".join(told.split())
