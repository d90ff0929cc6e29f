"""Replicas behind their router, on this machine: effects on clients when replicas are killed or
replaced, and the router's costs and savings.

    python -m bench.replicas kills --seconds 120
    python -m bench.replicas kills --seconds 120 --key secret --router
    python -m bench.replicas restart
    python -m bench.replicas router
    python -m bench.replicas prefixes

Each starts `dovetail cluster up` with the demo model. `kills` kills one replica every ten seconds
under load, `restart` does a rolling restart under load: clients, who try each request at most
twice, must get all answers, with the tokens that the same seeds give without any of this. With
`--router` every other kill is the router's, and clients try again for 30 seconds; with `--key` the
cluster requires that key. `router` compares the time to the first token with and without the router
between. `prefixes` compares the share of prompt tokens that is found in a cache with that of one
engine with the memory of all replicas.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.soak import free_port

UP_S = 240.0
REQUEST_S = 120.0
ROUTER_BACK_S = 30.0  # for which clients try again while the router is started
# of K and V that a replica of `prefixes` has; the one engine has as much as all
KV_BYTES = 24 * 2**20
WORDS = (
    *("king", "crown", "sword", "night", "love", "grief", "honest", "noble", "blood", "sun"),
    *("moon", "earth", "heaven", "mercy", "time", "death", "brother", "queen", "father", "ghost"),
)


class Failed(Exception):
    """A request got no complete answer."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request, with metadata."""

    text: str
    first_s: float  # until the first piece of text
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def ask(url: str, body: dict[str, Any], key: str | None = None) -> Answer:
    """Send a streamed completion. Raises `Failed`."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_S)
    begun = time.perf_counter()
    first = None
    texts = []
    usage = None
    try:
        whole = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, **body}
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        connection.request("POST", "/v1/completions", json.dumps(whole), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"status {answer.status}: {answer.read(200)!r}")
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                if usage is None or first is None:
                    raise Failed("an answer without its usage or text")
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                return Answer(
                    "".join(texts),
                    first,
                    usage["prompt_tokens"],
                    cached,
                    usage["completion_tokens"],
                )
            event = json.loads(line[6:])
            if "error" in event:
                raise Failed(str(event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                first = time.perf_counter() - begun if first is None else first
                texts.append(choice["text"])
        raise Failed("the stream ended early")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def request(number: int, tokens: int) -> dict[str, Any]:
    """Return request number `number`, with its own prompt and seed."""
    words = random.Random(number)
    prompt = f"{' '.join(words.choices(WORDS, k=12))}\nROMEO:"
    return {
        "prompt": prompt,
        "seed": number,
        "max_tokens": tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }


@dataclass
class Load:
    """Clients that send requests in a loop until stopped. `tries_s`: for how long they try one
    again; 0: once."""

    url: str
    expected: Sequence[Answer]
    tokens: int
    key: str | None = None
    tries_s: float = 0.0
    answered: int = 0
    retried: int = 0
    failures: list[str] = field(default_factory=list)
    different: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._send, args=(number,), daemon=True)
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _send(self, client: int) -> None:
        order = random.Random(client)
        while not self._stop.is_set():
            number = order.randrange(len(self.expected))
            try:
                answer, retried = self._with_retries(request(number, self.tokens))
            except Failed as error:
                with self._lock:
                    self.failures.append(str(error))
                continue
            with self._lock:
                self.answered += 1
                self.retried += retried
                self.different += answer.text != self.expected[number].text

    def _with_retries(self, body: dict[str, Any]) -> tuple[Answer, bool]:
        end = time.monotonic() + self.tries_s
        retried = False
        while True:
            try:
                return ask(self.url, body, self.key), retried
            except Failed:
                if retried and time.monotonic() >= end:
                    raise
            if retried:
                time.sleep(0.2)
            retried = True

    def told(self) -> dict[str, Any]:
        return {
            "answered": self.answered,
            "retried": self.retried,
            "failed": len(self.failures),
            "other tokens": self.different,
            "failures": self.failures[:3],
        }


class Cluster:
    """A running `dovetail cluster up`."""

    def __init__(
        self,
        directory: Path,
        replicas: int,
        engine: dict[str, Any] | None = None,
        policy: str = "cache_aware",
        key: str | None = None,
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "XDG_RUNTIME_DIR": str(directory),
        }  # replicas share the cores
        if key is not None:
            self._environment["DOVETAIL_API_KEYS"] = key
        file = directory / "cluster.yaml"
        settings = {
            "engine": engine or "demo",
            "name": "bench",
            "replicas": replicas,
            "router": {"port": port, "policy": policy},
        }
        file.write_text(json.dumps(settings))
        self._log = (directory / "cluster.log").open("wb")
        self.process = subprocess.Popen(
            self._command("up", str(file)),
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )
        self._wait()

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            self._command("status", "--json"),
            env=self._environment,
            capture_output=True,
            check=False,
        )
        found: dict[str, Any] = json.loads(done.stdout or b"{}")
        return found

    def serving(self) -> list[dict[str, Any]]:
        return [
            replica
            for replica in self.status().get("replicas", ())
            if replica["state"] == "serving"
        ]

    def restart(self) -> float:
        begun = time.monotonic()
        subprocess.run(
            self._command("restart"),
            env=self._environment,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=UP_S,
        )
        return time.monotonic() - begun

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline and self.process.poll() is None:
            found = self.status()
            if found and len(self.serving()) >= found["target"]:
                return
            time.sleep(0.5)
        self.process.kill()
        raise SystemExit(
            f"the cluster isn't up:\n{Path(self._log.name).read_text(errors='replace')[-3000:]}"
        )

    def _command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dovetail", "cluster", *words]


@contextmanager
def cluster(
    replicas: int,
    engine: dict[str, Any] | None = None,
    policy: str = "cache_aware",
    key: str | None = None,
) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as directory:
        up = Cluster(Path(directory), replicas, engine, policy, key)
        try:
            yield up
        finally:
            up.close()


def expected(up: Cluster, count: int, tokens: int, key: str | None = None) -> list[Answer]:
    """Return the answers by seed of one undisturbed replica; of the router with a `key`, which is
    none of the replicas'."""
    url = up.serving()[0]["url"] if key is None else up.url
    return [ask(url, request(number, tokens), key) for number in range(count)]


def kills(arguments: argparse.Namespace) -> dict[str, Any]:
    with cluster(arguments.replicas, key=arguments.key) as up:
        answers = expected(up, arguments.prompts, arguments.tokens, arguments.key)
        load = Load(
            up.url,
            answers,
            arguments.tokens,
            arguments.key,
            ROUTER_BACK_S if arguments.router else 0.0,
        )
        killed = {"replicas": 0, "routers": 0}
        waited = 0
        with load.running(arguments.clients):
            end = time.monotonic() + arguments.seconds
            while time.monotonic() < end:
                time.sleep(arguments.every)
                if arguments.router and killed["routers"] < killed["replicas"]:
                    os.kill(up.status()["router"]["pid"], signal.SIGKILL)
                    killed["routers"] += 1
                    continue
                serving = up.serving()
                if (
                    len(serving) < 2
                    # on few cores a replica takes longer to start: the last one isn't taken from
                    # the clients
                ):
                    waited += 1
                    continue
                os.kill(random.choice(serving)["pid"], signal.SIGKILL)
                killed["replicas"] += 1
        return {"killed": killed, "not killed, because only one served": waited, **load.told()}


def restart(arguments: argparse.Namespace) -> dict[str, Any]:
    with cluster(arguments.replicas) as up:
        load = Load(up.url, expected(up, arguments.prompts, arguments.tokens), arguments.tokens)
        before = {replica["pid"] for replica in up.serving()}
        with load.running(arguments.clients):
            seconds = up.restart()
        after = {replica["pid"] for replica in up.serving()}
        return {"seconds": round(seconds, 1), "replaced": len(before - after), **load.told()}


def router(arguments: argparse.Namespace) -> dict[str, Any]:
    with cluster(1) as up:
        urls = {"direct": up.serving()[0]["url"], "router": up.url}
        times: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(arguments.requests):
            for name, url in urls.items():
                times[name].append(ask(url, request(number, 2)).first_s)
        medians = {name: statistics.median(found[5:]) * 1e3 for name, found in times.items()}
        return {f"{name}, p50 ms": round(ms, 2) for name, ms in medians.items()} | {
            "added ms": round(medians["router"] - medians["direct"], 2)
        }


def prefixes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return groups of requests with shared prompt prefixes, in random order."""
    groups = [
        " ".join(random.Random(group).choices(WORDS, k=arguments.words))
        for group in range(arguments.groups)
    ]
    bodies = [
        {"prompt": f"{groups[group]}\n{turn}:", "seed": 1, "max_tokens": 4}
        for group in range(arguments.groups)
        for turn in range(arguments.turns)
    ]
    random.Random(1).shuffle(bodies)
    found: dict[str, Any] = {}
    for name, replicas, policy in (
        ("one engine", 1, "round_robin"),
        ("cache_aware", arguments.replicas, "cache_aware"),
        ("round_robin", arguments.replicas, "round_robin"),
    ):
        engine = {"model": "demo", "kv_cache_memory": KV_BYTES * arguments.replicas // replicas}
        with cluster(replicas, engine, policy) as up:
            answers = in_parallel(up.url, bodies, arguments.clients)
        found[name] = round(
            sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers), 3
        )
    return {
        **found,
        "cache_aware of one engine": round(found["cache_aware"] / found["one engine"], 3),
    }


def in_parallel(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    """Send requests in order, several at once; each client sends its next one after an answer."""
    answers: list[Answer] = []
    rest, lock = iter(bodies), threading.Lock()

    def send() -> None:
        while True:
            with lock:
                body = next(rest, None)
            if body is None:
                return
            answers.append(ask(url, body))

    threads = [threading.Thread(target=send) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(answers) < len(bodies):
        raise SystemExit(f"{len(bodies) - len(answers)} requests failed")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kills", "restart", "router", "prefixes"])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="of kills")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills")
    parser.add_argument(
        "--router", action="store_true", help="kills: every other kill is the router's"
    )
    parser.add_argument("--key", help="kills: an API key that the cluster requires")
    parser.add_argument(
        "--prompts",
        type=int,
        default=12,
        help="number of different requests, for kills and restart",
    )
    parser.add_argument(
        "--tokens", type=int, default=8, help="tokens per answer, for kills and restart"
    )
    parser.add_argument(
        "--requests", type=int, default=100, help="number of requests, for router, each way"
    )
    parser.add_argument("--groups", type=int, default=24, help="of prefixes")
    parser.add_argument("--turns", type=int, default=6, help="requests per group, for prefixes")
    parser.add_argument("--words", type=int, default=150, help="of a prefix")
    arguments = parser.parse_args()
    print(json.dumps({"what": arguments.what, **globals()[arguments.what](arguments)}, indent=2))


if __name__ == "__main__":
    main()
