"""Low-overhead client of an OpenAI-compatible server. `Client` keeps hundreds of streams open in
one process and timestamps arrivals.

`bench/serve.py` and `bench/soak.py` run it. A connection is an asyncio protocol with httptools'
parser: no task, future or object for each token.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import ssl
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
import orjson

from bench.toy import FIRST_LETTER, LETTERS, answer
from bench.workloads import Workload
from dovetail_lab.token_ids import prompt_ids
from dovetail_lab.traces import TraceRequest

REFUSED_PAUSE_S = 0.1  # before a closed loop tries again to connect
ERROR_BYTES = 2000  # of a refusal's body, at most, that are kept
MAX_SEED = 2**63

COMPLETED = "completed"
HUNG_UP = "hung up by the client"


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests to send, by index, and settings. Each process gets a copy, and sends every
    `processes`-th request."""

    url: str  # of the server: http://host:port
    model: str
    # lengths of prompts and answers; more requests than it has go through it again, with other
    # tokens
    work: Workload | None
    trace: tuple[TraceRequest, ...] = ()  # instead of `work`
    arrivals: tuple[float, ...] = ()  # seconds since the start; empty: a closed loop
    requests: int | None = None  # None: for `seconds`
    concurrency: int = 1  # streams at once, all processes together, of a closed loop
    seconds: float = 0.0
    processes: int = 1
    disconnects: float = 0.0  # share of requests whose client hangs up on the way
    checked: bool = False  # the server runs the executor `toy`: compare every text
    # /v1/chat/completions, with a message of about as many letters as the prompt has tokens
    chat: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0  # for one request
    seed: int = 0

    def job(self, index: int) -> Job:
        """Create a request, the same for an index in any process."""
        rng = np.random.default_rng((self.seed, index))
        if self.work is None:
            traced = self.trace[index]
            prompt = prompt_ids(traced, 10_000).tolist()
            output_tokens = traced.output_tokens
        else:
            work = self.work
            prompt_tokens, output_tokens = work.lens[index % len(work.lens)]
            shared = (
                np.random.default_rng(self.seed)
                .integers(1, work.max_id + 1, work.shared_prefix)
                .tolist()
            )
            prompt = (
                shared
                + rng.integers(1, work.max_id + 1, prompt_tokens - work.shared_prefix).tolist()
            )
        seed = int(rng.integers(MAX_SEED))
        hangs_up = rng.random() < self.disconnects
        body = {
            "model": self.model,
            **(
                {"messages": [{"role": "user", "content": letters(prompt)}]}
                if self.chat
                else {"prompt": prompt}
            ),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"seed": seed} if self.checked else {}),
            **self.params,
        }
        return Job(
            index=index,
            at=self.arrivals[index] if self.arrivals else None,
            output_tokens=output_tokens,
            body=orjson.dumps(body),
            hangs_up_after=int(rng.integers(output_tokens)) if hangs_up else None,
            text=answer(seed, output_tokens) if self.checked else None,
        )

    def jobs(self, process: int) -> Iterator[Job]:
        indices = count() if self.requests is None else range(self.requests)
        return map(self.job, islice(indices, process, None, self.processes))

    def streams(self, process: int) -> int:
        """Number of streams that a process keeps open in a closed loop."""
        return len(range(process, self.concurrency, self.processes))


def letters(ids: list[int]) -> str:
    """Return one letter per id."""
    return "".join(chr(FIRST_LETTER + token % LETTERS) for token in ids)


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    index: int
    at: float | None  # seconds since the start when it is due
    output_tokens: int
    body: bytes
    hangs_up_after: int | None  # events
    text: str | None  # that must come


@dataclass(slots=True)
class Outcome:
    """A finished request. Times are seconds on the machine's monotonic clock, NaN if it didn't
    happen."""

    kind: str  # `COMPLETED`, `HUNG_UP`, or what went wrong
    sent: float
    first: float = np.nan  # event with a choice
    last: float = np.nan
    late: float = 0.0  # the client sent it so long after it was due
    prompt_tokens: int = 0  # by `usage`
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Record:
    """Streams of a process."""

    began: float
    outcomes: list[Outcome] = field(default_factory=list)
    # seconds between events of one answer, of those completed
    gaps: array[float] = field(default_factory=lambda: array("d"))
    # kind of failure -> the first one in words
    examples: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0  # of this process, while requests ran
    events: int = 0

    @property
    def failures(self) -> Counter[str]:
        return Counter(
            outcome.kind for outcome in self.outcomes if outcome.kind not in (COMPLETED, HUNG_UP)
        )


class _Delta(msgspec.Struct):
    content: str | None = ""


class _Choice(msgspec.Struct):
    text: str | None = ""
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class Connection(asyncio.Protocol):
    """Keep-alive connection for one request at a time."""

    def __init__(self, record: Record, headers: bytes, timeout_s: float) -> None:
        self._record = record
        self._headers = headers
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None  # of the request under way
        self.transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing() and self._done is None

    async def send(self, job: Job, late: float = 0.0) -> None:
        """Send a request and wait until it has ended; the record then has its outcome."""
        assert self.transport is not None
        self._job = job
        self._buffer = b""
        self._status = 0
        self._over = False
        self._texts: list[str] | None = [] if job.text is not None else None
        self._gaps: array[float] = array("d")
        self._events = 0
        self._done = self._loop.create_future()
        self._outcome = Outcome("", sent=time.perf_counter(), late=late)
        self.transport.write(
            b"%sContent-Length: %d\r\n\r\n%s" % (self._headers, len(job.body), job.body)
        )
        timeout = self._loop.call_later(self._timeout_s, self._end, "timed out")
        if job.hangs_up_after == 0:
            self._hang_up()
        try:
            await self._done
        finally:
            timeout.cancel()
            self._done = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end("not HTTP", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(
            "cut off",
            f"the connection ended after {self._events if self._done else 0} events: "
            f"{error or 'closed'}",
        )

    # What the parser calls.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if self._status != 200:
            self._buffer = (self._buffer + body)[:ERROR_BYTES]
            return
        *events, self._buffer = (
            (self._buffer + body if self._buffer else body).replace(b"\r\n", b"\n").split(b"\n\n")
        )
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:])

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._end(f"HTTP {self._status}", self._buffer.decode("utf-8", "replace"))
        elif not self._over:
            self._end("no [DONE]", f"the answer ended after {self._events} events")
        else:
            self._end(*self._verdict())
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()

    def _on_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._over = True
            return
        try:
            event = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self._end("not an event", f"{error}: {data[:200]!r}")
            return
        if event.error is not None:
            self._end("error event", orjson.dumps(event.error).decode())
            return
        outcome = self._outcome
        if event.choices:
            if self._events == 0:
                outcome.first = self._now
            else:
                self._gaps.append(self._now - outcome.last)
            outcome.last = self._now
            self._events += 1
            self._record.events += 1
            if self._texts is not None:
                choice = event.choices[0]
                self._texts.append(
                    (choice.text if choice.delta is None else choice.delta.content) or ""
                )
            if self._events == self._job.hangs_up_after:
                self._hang_up()
        if event.usage is not None:
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
            outcome.cached_tokens = (
                event.usage.prompt_tokens_details or _Details()
            ).cached_tokens or 0

    def _verdict(self) -> tuple[str, str]:
        """Return the kind of a finished answer, and an example if it is wrong."""
        if not self._outcome.output_tokens:
            return "no usage", f"{self._events} events and no usage.completion_tokens"
        return self._compared() or (COMPLETED, "")

    def _compared(self) -> tuple[str, str] | None:
        """Return the error in the text so far, if it is checked."""
        if self._texts is None or self._job.text is None:
            return None
        text = "".join(self._texts)
        whole = self._job.text
        right = (
            whole.startswith(text)
            if self._job.hangs_up_after is not None and not self._over
            else text == whole
        )
        if right and (not self._over or self._outcome.output_tokens == self._job.output_tokens):
            return None
        at = next(
            (i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b),
            min(len(text), len(whole)),
        )
        told = (
            f"request {self._job.index}: {len(text)} of {len(whole)} tokens, usage says "
            f"{self._outcome.output_tokens}"
        )
        return (
            "lost or doubled tokens",
            f"{told}; from {at} on {text[at : at + 20]!r} instead of {whole[at : at + 20]!r}",
        )

    def _hang_up(self) -> None:
        self._end(*(self._compared() or (HUNG_UP, "")))
        if self.transport is not None:
            # a reset, or an orderly end
            self.transport.abort() if self._job.index % 2 else self.transport.close()

    def _end(self, kind: str, example: str = "") -> None:
        if self._done is None or self._done.done():
            return
        self._outcome.kind = kind
        self._record.outcomes.append(self._outcome)
        if kind == COMPLETED:
            self._record.gaps.extend(self._gaps)
        elif kind != HUNG_UP:
            self._record.examples.setdefault(kind, example)
            if self.transport is not None and not kind.startswith("HTTP"):
                self.transport.abort()
        self._done.set_result(None)


class Client:
    """Client of one process's part of a plan."""

    def __init__(self, plan: Plan, process: int) -> None:
        self.plan = plan
        self.process = process
        self.record = Record(began=0.0)
        self._address = urlsplit(plan.url)
        self._host = self._address.hostname or "127.0.0.1"
        key = f"Authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
        path = f"{self._address.path.rstrip('/')}/v1/{'chat/completions' if plan.chat else 'completions'}"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\nContent-Type: "
            f"application/json\r\nAccept: text/event-stream\r\n{key}"
        )
        self._headers = head.encode()
        self._idle: list[Connection] = []

    async def run(self, wait: Any) -> Record:
        """Run this process's part of the plan. `wait()` blocks until all processes are ready to
        start."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        streams = self.plan.streams(self.process)
        jobs: Iterator[Job] = self.plan.jobs(self.process)
        if self.plan.requests is not None:
            jobs = iter(deque(jobs))  # made before the clock starts
        if not self.plan.arrivals:
            self._idle = [
                one for one in [await self._connect() for _ in range(streams)] if one is not None
            ]
            self.record.outcomes.clear()
        gc.collect()
        gc.freeze()
        wait()
        self.record.began, cpu = time.perf_counter(), time.process_time()
        if self.plan.arrivals:
            await self._open_loop(jobs)
        else:
            await asyncio.gather(*(self._closed_loop(jobs) for _ in range(streams)))
        self.record.cpu_s = time.process_time() - cpu
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        return self.record

    async def _closed_loop(self, jobs: Iterator[Job]) -> None:
        until = np.inf if self.plan.requests is not None else self.record.began + self.plan.seconds
        for job in jobs:
            await self._one(job)
            if time.perf_counter() >= until:
                return

    async def _open_loop(self, jobs: Iterator[Job]) -> None:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                due = self.record.began + (job.at or 0.0)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._one(job, due))

    async def _one(self, job: Job, due: float | None = None) -> None:
        connection = self._idle_connection() or await self._connect()
        if connection is None:
            await asyncio.sleep(REFUSED_PAUSE_S)
            return
        await connection.send(job, 0.0 if due is None else time.perf_counter() - due)
        if connection.usable:
            self._idle.append(connection)

    def _idle_connection(self) -> Connection | None:
        """Return an open connection, or None."""
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        return None

    async def _connect(self) -> Connection | None:
        """Return a new connection, or None after recording the failure."""
        secure = self._address.scheme == "https"
        port = self._address.port or (443 if secure else 80)
        begun = time.perf_counter()
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self.record, self._headers, self.plan.timeout_s),
                self._host,
                port,
                ssl=ssl.create_default_context() if secure else None,
            )
        except OSError as error:
            self.record.outcomes.append(Outcome("not connected", sent=begun))
            self.record.examples.setdefault("not connected", str(error))
            return None
        return connection
