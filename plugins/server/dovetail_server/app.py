"""The HTTP app: for now completions of text, and whether the server is ready."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dovetail.errors import DovetailError, RequestError
from dovetail.request import RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail_server.engine import ServedEngine
from dovetail_server.settings import ServerSettings


class _Queue:
    def __init__(self) -> None:
        self.items: asyncio.Queue[RequestOutput | DovetailError] = asyncio.Queue()

    def on_output(self, output: RequestOutput) -> None:
        self.items.put_nowait(output)

    def on_error(self, error: DovetailError) -> None:
        self.items.put_nowait(error)


def create_app(engine: ServedEngine, settings: ServerSettings) -> Starlette:
    counter = itertools.count()

    async def completions(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        body = {key: value for key, value in body.items() if key not in ("model", "stream")}
        prompt, name, listener = body.pop("prompt"), f"cmpl-{id(counter)}-{next(counter)}", _Queue()
        try:
            await engine.submit(name, prompt, SamplingParams(**body), listener)
        except RequestError as error:
            return JSONResponse({"error": str(error)}, 400)

        async def events() -> AsyncIterator[bytes]:
            finished = False
            try:
                while not finished:
                    output = await listener.items.get()
                    if isinstance(output, DovetailError):
                        finished = True
                        yield b"data: " + json.dumps({"error": str(output)}).encode() + b"\n\n"
                        return
                    finished = output.finished
                    choices = [{"index": s.index, "text": s.text, "finish_reason": s.finish_reason} for s in output.outputs]
                    yield b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"
                yield b"data: [DONE]\n\n"
            finally:
                if not finished:
                    engine.abort(name)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def ready(request: Request) -> Response:
        good = not app.state.draining and app.state.failure is None
        return JSONResponse({"ready": good, "failure": app.state.failure, "held_blocks": engine.load.held_blocks}, 200 if good else 503)

    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/ready", ready)])
    return app
