"""A server that answers `/v1/completions` like the executor `toy`, as a test specifies: complete,
truncated, duplicated, rejected, or in one event."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.toy import answer

Body = dict[str, Any]


class FakeServer:
    """`behave` is one of the words below; each request gets it. `bodies` are those that came."""

    def __init__(self, behave: str = "well") -> None:
        self.behave = behave
        self.bodies: list[Body] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. False ends the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = (
            int(head.split("content-length: ")[1].split("\r\n")[0])
            if "content-length" in head
            else 0
        )
        body: Body = json.loads(await reader.readexactly(length)) if length else {}
        if head.startswith("get /v1/models"):
            answered = b'{"data": [{"id": "toy"}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answered), answered)
            )
            return True
        self.bodies.append(body)
        if self.behave == "refuse":
            writer.write(
                b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 20\r\n\r\n{"error": "too '
                b'many"}'[:-1]
            )
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: "
            b"text/event-stream\r\n\r\n"
        )
        for event in self._events(body):
            if self.behave == "split":  # an event in pieces that are chunks of their own
                for piece in (event[:9], event[9:-1], event[-1:]):
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0)
            else:
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        if self.behave == "cut":
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def _events(self, body: Body) -> Iterator[bytes]:
        text = answer(body.get("seed", 0), body["max_tokens"])
        if self.behave == "lose":
            text = text[:2] + text[3:]
        size = 3 if self.behave == "bundle" else 1
        for start in range(0, len(text) // (2 if self.behave == "cut" else 1), size):
            piece = text[start : start + size]
            yield _event(
                {
                    "choices": [
                        {
                            "index": 0,
                            **(
                                {"delta": {"content": piece}}
                                if "messages" in body
                                else {"text": piece}
                            ),
                        }
                    ]
                }
            )
        if self.behave == "error":
            yield _event({"error": {"message": "the engine died", "code": 500}})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(text),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        if self.behave != "cut":
            yield b": a comment\n\n"
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"

    async def _start(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._stop = asyncio.Event()
        ready.set()
        await self._stop.wait()
        server.close()

    @contextmanager
    def running(self) -> Iterator[str]:
        ready = threading.Event()
        thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._start(ready)), daemon=True
        )
        thread.start()
        assert ready.wait(60)
        try:
            yield self.url
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(60)
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


def _event(value: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(value).encode()
