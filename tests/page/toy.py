"""A server for the page's tests: the page, its figures, and a model that says words at a steady
pace."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dovetail.config.limits import Limits
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake_facts import IntakeFacts
from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail_server.engine import DecidedStep, Decisions, EngineInfo, Load, ServedEngine
from dovetail_server.live_page import page_routes
from dovetail_server.metrics import ServerMetrics
from dovetail_server.models import Model, Models

INFO = EngineInfo(
    model="a-model",
    intake=IntakeFacts(Limits(), 512, 64, GenerationDefaults(), "local", "torch"),
    block_size=16,
    num_pages=100,
    parts={
        "scheduler": "dovetail-llm:fcfs",
        "kv_cache": "dovetail-llm:prefix",
        "executor": "dovetail-llm:local",
        "sampler": "dovetail-llm:torch",
    },
    details={"device": "cpu", "dtype": "float32", "attention": "dovetail-llm:torch"},
    cache_groups=("full", "window 128"),
)
WORDS = ["It", " was", " the", " nightingale,", " and", " not", " the", " lark."]


class ToyServer:
    """Endless words: an answer ends after `max_tokens`. With `key`, answers are for those who have
    it. `others`: names of further models."""

    def __init__(self, *, chat: bool, key: str | None = None, others: Sequence[str] = ()) -> None:
        self.others = others
        self.engine = SimpleNamespace(
            info=INFO, load=Load(0, 0, 0, 90, 10), tokenizer=SimpleNamespace(has_chats=chat)
        )
        self.engine.decisions = self.decisions
        self.metrics = ServerMetrics(cast(ServedEngine, self.engine))
        self.key = key
        self.steps: list[DecidedStep] = []
        self.asked: list[dict[str, Any]] = []
        self.running = 0
        self.url = ""

    def model(self, name: str) -> Model:
        engine = cast(ServedEngine, self.engine)
        nothing = cast(Any, None)
        return Model((name,), engine, nothing, nothing, nothing, self.metrics)

    def app(self) -> Starlette:
        answers = [
            Route(path, self.answer, methods=["POST"])
            for path in ("/v1/completions", "/v1/chat/completions")
        ]
        return Starlette(
            routes=[
                *page_routes(Models([self.model(name) for name in (INFO.model, *self.others)])),
                Route("/version", self.version),
                *answers,
            ]
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse(
            {
                "version": "1",
                "max_model_len": 512,
                "parts": dict(INFO.parts),
                "details": dict(INFO.details),
            }
        )

    async def answer(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        self.asked.append(await request.json() | {"path": request.url.path})
        return StreamingResponse(self.words(self.asked[-1]), media_type="text/event-stream")

    async def words(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        meter = self.metrics.meter()
        self.under_way(+1)
        reason = "abort"
        try:
            for number, word in zip(
                range(body["max_tokens"]), itertools.cycle(WORDS), strict=False
            ):
                await asyncio.sleep(0.01)
                meter.saw(
                    RequestOutput(
                        "r",
                        None,
                        [1] * 40,
                        [CompletionOutput(0, word, [number])],
                        False,
                        num_cached_tokens=16,
                    )
                )
                yield event(
                    {
                        "choices": [
                            {"delta": {"content": word}} if "messages" in body else {"text": word}
                        ]
                    }
                )
            reason = "length"
            yield event({"choices": [{"delta": {}, "text": "", "finish_reason": reason}]})
            yield event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            yield b"data: [DONE]\n\n"
        finally:
            self.under_way(-1)
            meter.ended("length" if reason == "length" else "abort")

    def decisions(self) -> Decisions:
        """Return decisions that a scheduler might have made: a new step each time, if anything
        runs."""
        load = self.engine.load
        if load.running:
            step = len(self.steps)
            self.steps.append(
                DecidedStep(
                    step,
                    load.running,
                    40 * (step % 3 == 0),
                    load.running,
                    load.waiting,
                    0,
                    0,
                    load.running,
                    load.waiting,
                )
            )
        return Decisions(INFO.parts["scheduler"], tuple(self.steps[-12:]))

    def under_way(self, change: int) -> None:
        self.running += change
        held = min(90, 7 * self.running)
        drafts = 40, 100, (30, 20, 10)
        self.engine.load = Load(
            min(8, self.running),
            max(0, self.running - 8),
            held,
            90 - held,
            10,
            (held - held // 7, held // 7),
            *drafts,
        )


def event(value: object) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


@contextmanager
def serving(toy: ToyServer) -> Iterator[ToyServer]:
    """Serve on a free port until the end of the block."""
    server = uvicorn.Server(
        uvicorn.Config(toy.app(), port=0, log_level="error", timeout_graceful_shutdown=1)
    )
    started = threading.Event()
    startup = server.startup

    async def then_tell(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        started.set()

    server.startup = then_tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    assert started.wait(30)
    toy.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    yield toy
    server.should_exit = True
    thread.join(30)
