"""Counts what one prompt visits: files, functions, and changes from one file to another.

    python -m tools.walk              # front, engine and runtime; and all of Dovetail
    python -m tools.walk --functions  # each function of the three, in the order of first visits
    python -m tools.walk --http       # the same prompt as a completion over HTTP
    python -m tools.walk --http --files

The prompt is warm (others ran before), on a CPU, greedy, of two tokens: through `LLMEngine`, or
over HTTP through a front end and the engine's host, each in a thread of its own. Heartbeats and
the supervisor, which serve no request, don't run.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from dovetail import LLMEngine, SamplingParams
from dovetail.front.assembly import assemble
from dovetail_server.front_end import EngineEnd, FrontEnd, log_to_stderr
from dovetail_server.one_process import HostThread
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import bind

ROOT = Path(__file__).parents[1]
CORE = [
    str(ROOT / "core" / "dovetail" / "front"),
    str(ROOT / "core" / "dovetail" / "engine"),
    str(ROOT / "plugins" / "executors" / "dovetail_executors" / "runtime"),
]
PROMPTS = 4  # of which the last is counted
Call = tuple[str, str]  # file and function


class Calls:
    """The calls of Python functions in all threads that begin after it, in their order."""

    def __init__(self) -> None:
        self.found: list[Call] = []
        self._counts = False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls within the block."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._counts and event == "call":
            self.found.append((frame.f_code.co_filename, frame.f_code.co_qualname))


def calls_of_prompt() -> list[Call]:
    """Return the calls of one prompt of a program."""
    calls = Calls()

    def answer(number: int) -> None:
        engine.add_request(f"{number}", "To be", SamplingParams(temperature=0.0, max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()

    with LLMEngine.from_config({"model": "demo"}) as engine:
        for number in range(PROMPTS - 1):
            answer(number)
        with calls.counted():
            answer(PROMPTS)
    return calls.found


def calls_of_completion() -> list[Call]:
    """Return the calls of one completion over HTTP, in a front end and in the engine's host."""
    calls = Calls()
    log_to_stderr()
    sockets, url = bind(ServerSettings(port=0))
    host = HostThread(assemble({"model": "demo"}, {}), lambda reason: print(reason))
    ready = threading.Event()
    front_ends: list[FrontEnd] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        front_ends.append(
            FrontEnd([EngineEnd(host.line)], "", ServerSettings(), sockets[0], ready.set)
        )
        await front_ends[0].run()

    serving = threading.Thread(target=asyncio.run, args=(serve(),))
    serving.start()
    ready.wait()
    for _ in range(PROMPTS - 1):
        _complete(url)
    with calls.counted():
        _complete(url)
    loops[0].call_soon_threadsafe(front_ends[0].drain, 1.0)
    serving.join()
    host.close()
    return calls.found


def _complete(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"prompt": "To be", "temperature": 0.0, "max_tokens": 2}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    answer.read()
    connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"the completion was answered with {answer.status}")


def told(name: str, visited: list[Call]) -> str:
    """Return a line of figures."""
    changes = sum(one[0] != other[0] for one, other in pairwise(visited))
    files = {file for file, _ in visited}
    return f"{name}: {len(files)} files, {len(set(visited))} functions, {changes} changes of file"


def one_layer(visited: list[Call]) -> list[Call]:
    """Return the calls from one block of the model to the next, in the last step."""
    begins = [index for index, (_, name) in enumerate(visited) if name == "Block.add_to"]
    return visited[begins[-2] : begins[-1] + 1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--files", action="store_true")
    arguments = parser.parse_args()
    calls = calls_of_completion() if arguments.http else calls_of_prompt()
    products = tuple(str(ROOT / folder) for folder in ("core", "plugins", "apps"))
    visited = [call for call in calls if call[0].startswith(products)]
    own = [call for call in visited if call[0].startswith(tuple(CORE))]
    print(told("front, engine and runtime", own))
    print(told("all of Dovetail", visited))
    print(told("one layer of the model", one_layer(visited)))
    if arguments.functions:
        for file, function in dict.fromkeys(own):
            print(Path(file).relative_to(ROOT), function)
    if arguments.files:
        for file in sorted({file for file, _ in visited}):
            print(Path(file).relative_to(ROOT))
