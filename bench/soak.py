"""Soak test of a server: a thousand streams for minutes, some with disconnects. Checks for lost or
duplicated tokens, growing memory and leaked blocks.

    python -m bench.soak --streams 1000 --seconds 200
    python -m bench.soak --streams 1000 --seconds 200 --disconnects 0.3 --json out.json

It starts `dovetail serve` with the demo model's tokenizer on the executor `toy` (`bench/toy.py`),
whose every token is known beforehand, and compares every text that arrives. Afterwards all blocks
must be free and the server must end as it is told to. Memory is the resident size of each of its
processes; it is flat if it grows by no more than 5 % and 8 MiB after the first minute, or the first
third of a shorter run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import yaml

from bench import serve
from bench.streams import Plan
from bench.toy import installed_in

READY_S = 120.0
STOP_S = 60.0
IDLE_S = 10.0  # until all requests are gone, once no client wants any
GROWTH = 1.05
GROWTH_BYTES = 8 * 2**20
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def free_port() -> int:
    """Return a free TCP port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """`dovetail serve` in separate processes. Its log goes to a file."""

    def __init__(
        self,
        directory: Path,
        source: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`directory`: for the log. `source`: a model or a config file."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / "server.log"
        command = [
            sys.executable,
            "-m",
            "dovetail",
            "serve",
            source,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *arguments,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait until it is ready. Raises `SystemExit` with the end of the log if it ends before, or
        takes too long."""
        deadline = time.monotonic() + READY_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), urlopen(f"{self.url}/ready", timeout=5):
                return
            time.sleep(0.1)
        raise SystemExit(
            f"the server isn't ready, status "
            f"{self.process.poll()}:\n{self.log.read_text(errors='replace')[-3000:]}"
        )

    def gauges(self) -> dict[str, float] | None:
        """Return `GAUGES` from /metrics, or None without /metrics."""
        try:
            with urlopen(f"{self.url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except HTTPError:
            return None
        found = (
            (name, re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))
            for name in GAUGES
        )
        return {name: float(line[1]) for name, line in found if line}

    def idle(self) -> dict[str, float] | None:
        """Return the gauges once all are zero, or after a timeout."""
        deadline = time.monotonic() + IDLE_S
        while (gauges := self.gauges()) and any(gauges.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return gauges

    def stop(self) -> int | None:
        """Terminate it, and return its exit status, or None if it had to be killed with all its
        processes."""
        family = list(processes_of(self.process.pid))
        self.process.send_signal(signal.SIGTERM)
        try:
            status: int | None = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            status = None
            self.process.kill()
            self.process.wait()
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                status = None
        return status


def processes_of(pid: int) -> Iterator[int]:
    """Yield the ids of a process's descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if thread.name != str(pid):
                children += (thread / "children").read_text().split()
    except OSError:  # it has ended
        return
    for child in map(int, children):
        yield child
        yield from processes_of(child)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, 0 if it has ended."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def name_of(pid: int) -> str:
    """Return the module that a process runs, and its id."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return (
            f"{next((word for word in words[1:] if word.startswith('dovetail')), words[0])} {pid}"
        )
    return str(pid)


class MemoryWatch(threading.Thread):
    """Samples the memory of a server's processes."""

    def __init__(self, pid: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self._pid, self._every_s, self._over = pid, every_s, threading.Event()
        self.samples: list[tuple[float, dict[int, int]]] = []  # seconds, process id -> bytes

    def run(self) -> None:
        begun = time.monotonic()
        while True:
            sizes = {pid: resident_bytes(pid) for pid in (self._pid, *processes_of(self._pid))}
            self.samples.append((time.monotonic() - begun, sizes))
            if self._over.wait(self._every_s):
                return

    def end(self) -> None:
        self._over.set()
        self.join()

    def growing(self) -> list[int]:
        """Return the processes with growing memory."""
        seconds = self.samples[-1][0]
        settled = next(sizes for at, sizes in self.samples if at >= min(60.0, seconds / 3))
        last = self.samples[-1][1]
        return [
            pid
            for pid, size in settled.items()
            if last.get(pid, 0) > max(GROWTH * size, size + GROWTH_BYTES)
        ]


@contextmanager
def serving(
    source: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Yield a ready server, and terminate it afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(Path(directory), source, arguments, environment)
        try:
            server.wait_until_ready()
            yield server
        finally:
            if server.process.poll() is None:
                server.stop()


@contextmanager
def serving_toy(
    config: Mapping[str, Any], arguments: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """Yield a server with the demo model's tokenizer and the executor `toy`. `config`: keys of
    `engine.yaml`."""
    with tempfile.TemporaryDirectory() as directory:
        settings = Path(directory) / "engine.yaml"
        settings.write_text(yaml.safe_dump({"model": "demo", **config}))
        with serving(str(settings), arguments, installed_in(Path(directory) / "toy")) as server:
            yield server


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Run it, and return the results. `wrong` is empty on success."""
    executor = {"name": "toy", "step_s": 1e-3 * args.step_ms, "num_pages": args.streams * 16}
    with serving_toy(
        {"executor": executor, "max_num_seqs": args.streams}, shlex.split(args.serve)
    ) as server:
        plan = Plan(
            url=server.url,
            model=serve.model_of(server.url, None),
            work=serve.drawn_workload(
                args.prompt, args.output, 10_000, seed=args.seed, max_id=1000
            ),
            concurrency=args.streams,
            seconds=args.seconds,
            processes=args.processes,
            disconnects=args.disconnects,
            checked=True,
            chat=args.chat,
            seed=args.seed,
        )
        names = {
            pid: name_of(pid) for pid in (server.process.pid, *processes_of(server.process.pid))
        }
        spent = {pid: cpu_seconds(pid) for pid in names}
        watch = MemoryWatch(server.process.pid, min(60.0, args.seconds / 6))
        watch.start()
        records = serve.run(plan)
        watch.end()
        row = {"load": f"{args.streams} streams", "url": server.url, **serve.metrics(records)}
        events = max(1, sum(record.events for record in records))
        row["cpu_us_per_event"] = {
            names[pid]: 1e6 * (cpu_seconds(pid) - before) / events for pid, before in spent.items()
        }
        row["memory_mib"] = [
            {
                "s": round(at),
                **{names.get(pid, str(pid)): round(size / 2**20, 1) for pid, size in sizes.items()},
            }
            for at, sizes in watch.samples
        ]
        row["growing"] = [names.get(pid, str(pid)) for pid in watch.growing()]
        row["left"] = server.idle()
        row["status"] = server.stop()
        row["log_end"] = server.log.read_text(errors="replace")[-2000:]
    row["wrong"] = list(_wrong(row))
    return row


def _wrong(row: dict[str, Any]) -> Iterator[str]:
    if row["failures"]:
        yield "requests failed"
    if not row["completed"]:
        yield "no request was completed"
    if row["growing"]:
        yield f"the memory of {', '.join(row['growing'])} grows"
    if row["left"] is None:
        yield "the server has no /metrics: leaks can't be detected"
    elif any(row["left"].values()):
        yield f"left behind: {row['left']}"
    if row["status"] != 0:
        yield (
            "the server didn't end when it was asked to"
            if row["status"] is None
            else f"the server ended with status {row['status']}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000, help="at once")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument(
        "--disconnects",
        type=float,
        default=0.0,
        help="share of requests whose client disconnects early",
    )
    parser.add_argument("--prompt", type=int, default=32, help="tokens, on average")
    parser.add_argument("--output", type=int, default=128, help="tokens, on average")
    parser.add_argument("--chat", action="store_true", help="over /v1/chat/completions")
    parser.add_argument("--step-ms", type=float, default=100.0, help="milliseconds of a step")
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    parser.add_argument(
        "--serve",
        default="",
        metavar="OPTIONS",
        help="further options of `dovetail serve`, in one word",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse()
    row = soak(args)
    serve.show({**row, "missing_tokens": None})
    for sample in row["memory_mib"]:
        print(
            f"  after {sample['s']:4} s, MiB: "
            + "; ".join(f"{name}: {size}" for name, size in sample.items() if name != "s")
        )
    print(
        "  CPU, us an event: "
        + "; ".join(f"{name}: {spent:.1f}" for name, spent in row["cpu_us_per_event"].items())
    )
    print(f"  left behind: {row['left']}; the server's exit status: {row['status']}")
    if args.json:
        Path(args.json).write_text(json.dumps(row, indent=2))
    if row["wrong"]:
        raise SystemExit(f"{'; '.join(row['wrong'])}\n{row['log_end']}")
    print("nothing lost, nothing doubled, nothing left behind")


if __name__ == "__main__":
    main()
