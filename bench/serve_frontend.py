"""CPU time of a front end per streamed token: `python -m bench.serve_frontend`. The engine is fake:
its frames are created here.

Streams of chat over loopback, 512 of them: each step gives every stream one token, in one frame
that the front end decodes, detokenizes and streams as always. The client is a process of its own,
which reads and counts, so that its time isn't counted. On loopback the kernel's time to receive is
the sender's: system time is told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import resource
import socket
import time
from array import array
from pathlib import Path

import uvicorn

import dovetail_models
from dovetail.config.limits import Limits
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake_facts import IntakeFacts
from dovetail_server.app import create_app
from dovetail_server.engine import EngineInfo, Load
from dovetail_server.frames import (
    Add,
    Finished,
    First,
    Hello,
    StepFrame,
    ToEngine,
    Welcome,
    decode_to_front_end,
    encode,
    pack_numbers,
)
from dovetail_server.links import Take
from dovetail_server.remote import RemoteEngine
from dovetail_server.settings import ServerSettings
from dovetail_server.wire import DirectProtocol

_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# ids of letters, in the demo model's vocabulary
_FIRST_TOKEN = 34
_TOKENS = 26


class FakeLine:
    """Connection to a fake engine. Every request gets a token per `step`."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # of the requests that have come
        self._take: Take = lambda message: None
        self._steps = 0

    def open(self, take: Take) -> None:
        self._take = take

    def send(self, message: ToEngine) -> None:
        match message:
            case Hello():
                self._take(_welcome())
            case Add():
                self.numbers.append(message.number)

    def close(self) -> None: ...

    def step(self, *, last: bool = False) -> None:
        numbers = self.numbers
        now = time.perf_counter()
        tokens = array("i", [_FIRST_TOKEN + self._steps % _TOKENS] * len(numbers)).tobytes()
        first = tuple(First(number, 0, now, now) for number in numbers) if not self._steps else ()
        finished = tuple(Finished(number, "length", None, 0) for number in numbers) if last else ()
        frame = encode(
            StepFrame(
                self._steps, now, pack_numbers(numbers), tokens, Load(len(numbers)), first, finished
            )
        )
        self._steps += 1
        self._take(decode_to_front_end(frame))


def _welcome() -> Welcome:
    intake = IntakeFacts(
        Limits(), 4096, 1024, GenerationDefaults(), "none", "none", has_logprobs=False
    )
    info = EngineInfo("demo", intake, block_size=16, num_pages=65_536)
    return Welcome(
        info, str(Path(dovetail_models.__file__).parent / "demo"), seed=0, wall_clock=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--step-ms",
        type=float,
        default=5.0,
        help="time between two steps, if the front end keeps up",
    )
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=_uvloop) as runner:
        runner.run(_measure(args.streams, args.tokens, args.step_ms / 1000))


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _measure(streams: int, tokens: int, step_s: float) -> None:
    line = FakeLine()
    engine = await RemoteEngine.connect(line, "bench")
    settings = ServerSettings(max_queued_requests=None, log_requests=False)
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(engine, settings),
            http=DirectProtocol,
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(
        target=_client, args=(port, streams, theirs)
    )
    client.start()
    while len(line.numbers) < streams:
        await asyncio.sleep(0.01)
    gc.freeze()  # as front ends do
    user, system = await _steps(line, tokens, step_s)
    while not ours.poll():
        await asyncio.sleep(0.05)
    events = ours.recv()
    client.join()
    server.should_exit = True
    await serving
    engine.close()
    each = 1e6 / (streams * tokens)
    print(
        f"{streams} streams x {tokens} tokens, a step each {1e3 * step_s:g} ms, {events} events "
        f"read: "
        f"{(user + system) * each:.2f} us of CPU a token, {user * each:.2f} user and "
        f"{system * each:.2f} system"
    )


async def _steps(line: FakeLine, tokens: int, step_s: float) -> tuple[float, float]:
    """Run the steps; return the process's CPU seconds, user plus system."""
    began = resource.getrusage(resource.RUSAGE_SELF)
    next_at = time.monotonic()
    for step in range(tokens):
        line.step(last=step == tokens - 1)
        next_at += step_s
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    ended = resource.getrusage(resource.RUSAGE_SELF)
    return ended.ru_utime - began.ru_utime, ended.ru_stime - began.ru_stime


def _client(port: int, streams: int, done: multiprocessing.connection.Connection) -> None:
    with asyncio.Runner(loop_factory=_uvloop) as runner:
        done.send(runner.run(_read_all(port, streams)))


async def _read_all(port: int, streams: int) -> int:
    """Number of events with text that all streams had."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "chat_template": _TEMPLATE}
    ).encode()
    ask = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
        b"%d\r\n\r\n%b" % (len(body), body)
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask)
        answer = await reader.read(-1)
        writer.close()
        assert b"data: [DONE]" in answer, answer[:500]
        return answer.count(b'"content":"') - answer.count(b'"content":""')

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


if __name__ == "__main__":
    main()
