"""CPU time that a front end spends on a streamed token: `python -m bench.serve_frontend`. The engine is faked.

Streams of chat over loopback, 512 of them: each step of the fake gives every stream one token. The client is a process of its own, which reads and
counts, so that its time isn't counted. What the fake itself takes for a token is measured, too, and told beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import time
from pathlib import Path

import uvicorn

import dovetail_models
from dovetail.errors import DovetailError
from dovetail.front.tokenizer import Tokenizer
from dovetail.request import RequestOutput
from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from dovetail_server.testing import FakeEngine, FakeRequest
from dovetail_server.wire import DirectProtocol

_WORDS = (" the", " quick", "er", " brown", " fox", ",", " over", "ing")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class _Nobody:
    """A listener that does nothing."""

    def on_output(self, output: RequestOutput) -> None:
        pass

    def on_error(self, error: DovetailError) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=5.0, help="time between two steps, if the front end keeps up")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=_uvloop) as runner:
        runner.run(_measure(args.streams, args.tokens, args.step_ms / 1000))


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _measure(streams: int, tokens: int, step_s: float) -> None:
    demo = Path(dovetail_models.__file__).parent / "demo"
    engine = FakeEngine(Tokenizer.load(demo), [_WORDS[index % len(_WORDS)] for index in range(tokens)], paced=True)
    settings = ServerSettings(max_queued_requests=None, log_requests=False)
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(create_app(engine, settings), http=DirectProtocol, log_level="warning", access_log=False, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    ours, theirs = multiprocessing.Pipe()
    client = multiprocessing.get_context("spawn").Process(target=_client, args=(port, streams, theirs))
    client.start()
    await engine.until_requests(streams)
    spent = await _steps(engine, tokens, step_s)
    while not ours.poll():
        await asyncio.sleep(0.05)
    events = ours.recv()
    client.join()
    server.should_exit = True
    await serving
    engine.chat.close()
    fake = _fake_alone(engine, streams, tokens)
    each = 1e6 / (streams * tokens)
    print(
        f"{streams} streams x {tokens} tokens, {events} events read: {spent * each:.2f} us of CPU a token, of which the fake takes {fake * each:.2f}"
    )


async def _steps(engine: FakeEngine, tokens: int, step_s: float) -> float:
    """Run the steps; return the CPU seconds that the process spent."""
    began, next_at = _cpu_s(), time.monotonic()
    for _ in range(tokens + 1):
        engine.step()
        next_at += step_s
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    return _cpu_s() - began


def _fake_alone(engine: FakeEngine, streams: int, tokens: int) -> float:
    one = engine.submitted[0]
    for index in range(streams):
        request = FakeRequest(str(index), one.prompt, one.prompt_token_ids, one.params, _Nobody(), {}, iter(engine.pieces))
        engine.requests[request.id] = request
    began = _cpu_s()
    for _ in range(tokens):
        engine.step()
    return _cpu_s() - began


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _client(port: int, streams: int, done: multiprocessing.connection.Connection) -> None:
    with asyncio.Runner(loop_factory=_uvloop) as runner:
        done.send(runner.run(_read_all(port, streams)))


async def _read_all(port: int, streams: int) -> int:
    """Number of events that all streams had, the last ones excepted."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "chat_template": _TEMPLATE}).encode()
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask)
        answer = await reader.read(-1)
        writer.close()
        assert b"data: [DONE]" in answer, answer[:500]
        return answer.count(b'"content":"') - 1

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


if __name__ == "__main__":
    main()
