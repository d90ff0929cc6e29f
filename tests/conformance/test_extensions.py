"""The suites of routes, commands and routers: right ones pass, and each mistake is
found by a check."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.testing import CommandSuite, RouteExample, RouteSuite
from dovetail.testing.checks import CheckFailed
from dovetail.testing.extensions import route
from dovetail.testing.extensions.base import ExtensionSuite
from dovetail_lab.testing import RouterSuite
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401

DECLARED = """
from dovetail.api import {spec}, hookimpl

@hookimpl
def {hook}():
    yield {spec}(name="mine", target="mine_code:{target}", summary="for a test")
"""


class Routes(RouteSuite):
    name = "mine"
    examples = (RouteExample(path="/mine?most=3", body={"text": "Once.", "options": {"most": 5}}),)


class Command(CommandSuite):
    name = "mine"
    examples = (("1",),)
    refused = (("none",),)


class Replicas(RouterSuite):
    name = "mine"


ROUTES = """
import asyncio
import json
from starlette.responses import JSONResponse
from starlette.routing import Route
from dovetail import SamplingParams
from dovetail.errors import RequestError

def make(context):
    async def summarize(request):
        body = await request.json()
        text = body.get("text") if isinstance(body, dict) else None
        if not isinstance(text, str):
            raise RequestError("text: expected a text")
        answer = await context.answer(text, SamplingParams(max_tokens=9))
        return JSONResponse({"text": answer.outputs[0].text})
    return [Route("/mine", summarize, methods=["POST"])]
"""
HEAD = """
import asyncio
import itertools
import threading
import time
from time import sleep
KEPT = []
ANSWERS = {}
NUMBERS = itertools.count()
TEXT = None
LOCK = asyncio.Semaphore(3)
WAITING = threading.Event()

def started():
    thread = threading.Thread(target=WAITING.wait)
    thread.start()
    return thread
"""
COMMAND = '''
import sys
from dovetail.errors import ConfigError, EngineDeadError

def main(number: str):
    """Print a number."""
    if number == "none":
        raise ConfigError("expected a number")
    print(number)
'''
ROUTER = """
from dovetail_lab.routers import Router

class Mine(Router):
    def choose(self, request, replicas):
        return len(request.prompt) % len(replicas)
"""
SORTS: dict[str, tuple[type[ExtensionSuite], str, str, str, str]] = {
    "route": (Routes, "RoutesSpec", "dovetail_routes", "make", ROUTES),
    "command": (Command, "CommandSpec", "dovetail_commands", "main", COMMAND),
    "router": (Replicas, "RouterSpec", "dovetail_routers", "Mine", ROUTER),
}
QUIET = "except Exception:\n            return JSONResponse({'text': None})"
ANSWER = "answer = await context.answer(text, SamplingParams(max_tokens=9))"
TEXT = 'text = body.get("text") if isinstance(body, dict) else None'
RETURN = 'return JSONResponse({"text": answer.outputs[0].text})'
ROUTE = 'Route("/mine", summarize, methods=["POST"])'
AS_500 = "except Exception as error:\n            return JSONResponse(str(error), 500)"
IN_A_GROUP = (
    "async with asyncio.TaskGroup() as group:\n            task = group.create_task(context.answer("
    "text, SamplingParams(max_tokens=9)))\n        answer = task.result()"
)
STREAM = """
        queue = asyncio.Queue()
        async def pump():
            async for output in context.generate(text, SamplingParams()):
                queue.put_nowait(output.outputs[0].text)
            queue.put_nowait(None)
        async def texts():
            KEPT.append({make})
            while (part := await queue.get()) is not None:
                yield part
        from starlette.responses import StreamingResponse
        return StreamingResponse(texts())
"""
PARTIAL = """
        parts = []
        try:
            async for output in context.generate(text, SamplingParams()):
                parts.append(output.outputs[0].text)
        except Exception:
            pass
        return JSONResponse({"text": "".join(parts)})
"""
LAST = """
        async for output in context.generate(text, SamplingParams()):
            pass
        return JSONResponse({"text": output.outputs[0].text})
"""
AROUND = """
    from starlette.middleware import Middleware
    from starlette.requests import Request
    class Around:
        def __init__(self, app):
            self.app = app
        async def __call__(self, scope, receive, send):
            if {}:
                return
            await self.app(scope, receive, send)
    return [Middleware(Around), Route"""
READS = "scope['type'] == 'http' and (await Request(scope, receive).body()) == 1"
HIDES = (
    "scope['type'] == 'http':\n                try:\n                    await self.app(scope, "
    "receive, send)\n                except Exception:\n                    await JSONResponse(1)"
    "(scope, receive, send)\n                return\n            if False"
)
GROUP = """
import typer
main = typer.Typer(help="Numbers.")

@main.command()
def described(number: int):
    "Print a number."

@main.command()
def undescribed(number: int):
    pass

def other"""
MISTAKES = [  # sort, right, wrong, the check that finds it
    ("route", "def make(context):", "def make(context):\n    context.models", "made_without"),
    ("route", '"/mine"', '"/yours"', "examples_are_answered"),
    (
        "route",
        ANSWER,
        f"{ANSWER}\n        stream = context.generate(text, SamplingParams())\n"
        "        await anext(stream); KEPT.append(stream)",
        "ends_what_it_has_begun",
    ),
    (
        "route",
        "body = await request.json()",
        f"try:\n            body = await request.json()\n        {QUIET}",
        "not_json_is_refused",
    ),
    (
        "route",
        'body.get("text") if isinstance(body, dict) else None',
        'body["text"]',
        "another_shape",
    ),
    (
        "route",
        ANSWER,
        f"KEPT.append(1)\n        {ANSWER}\n        KEPT.pop(); KEPT and 1 / 0",
        "same_time",
    ),
    (
        "route",
        ANSWER,
        f"try:\n            {ANSWER}\n        {QUIET}",
        "error_of_the_engine",
    ),
    ("route", ANSWER, IN_A_GROUP, "error_of_the_engine"),
    ("route", ANSWER, f"try:\n            {ANSWER}\n        {AS_500}", "error_of_the_engine"),
    (
        "route",
        ANSWER,
        f"await LOCK.acquire()\n        {ANSWER}\n        LOCK.release()",
        "as_before",
    ),
    (
        "route",
        ANSWER,
        "global TEXT\n        TEXT = text\n        await asyncio.sleep(0)\n        "
        + ANSWER.replace("(text", "(TEXT"),
        "do_not_mix",
    ),
    (
        "route",
        RETURN,
        "global TEXT\n        TEXT = answer.outputs[0].text\n        await asyncio.sleep(0)\n"
        '        return JSONResponse({"text": TEXT})',
        "do_not_mix",
    ),
    (
        "route",
        ANSWER,
        f"{ANSWER}\n        known = ANSWERS.setdefault(text[:5], answer)\n        answer = known",
        "do_not_mix",
    ),
    (
        "route",
        ANSWER,
        "most = ANSWERS['most'] = body.get('options', {}).get('most', 9)\n"
        "        await asyncio.sleep(0)\n        "
        + ANSWER.replace("max_tokens=9", "max_tokens=ANSWERS['most']"),
        "do_not_mix",
    ),
    ("route", ANSWER, f"{ANSWER}\n        time.sleep(0.01)", "do_not_block"),
    ("route", ANSWER, f"{ANSWER}\n        sleep(0.01)", "do_not_block"),
    ("route", ANSWER, PARTIAL, "within_an_answer"),
    (
        "route",
        ANSWER,
        f"{ANSWER}\n        KEPT.append(1)\n        if len(KEPT) > 200: raise ValueError",
        "stay_as_they_are",
    ),
    ("route", RETURN, STREAM.format(make="asyncio.create_task(pump())"), "client_has_gone"),
    ("route", RETURN, LAST, "has_all_words"),
    (
        "route",
        "if not isinstance(text, str)",
        "text = text.strip()\n        if not text",
        "odd_values",
    ),
    ("route", RETURN, f"len(body.get('options', {{}}).keys())\n        {RETURN}", "odd_values"),
    ("route", RETURN, f"int(request.query_params['most'])\n        {RETURN}", "odd_values"),
    (
        "route",
        RETURN,
        f"json.dumps(body, ensure_ascii=False).encode()\n        {RETURN}",
        "odd_values",
    ),
    ("route", ROUTE, f"Route('/{{name}}', summarize, methods=['POST']), {ROUTE}", "be_reached"),
    ("route", "return [Route", AROUND.format("scope['path'] == 1"), "passes_on"),
    ("route", "return [Route", AROUND.format("scope['type'] == 'lifespan'"), "passes_on"),
    ("route", "return [Route", AROUND.format(READS), "passes_on"),
    ("route", "return [Route", AROUND.format(HIDES), "passes_on"),
    ("command", "def main", "async def main", "is_run"),
    ("command", "print(number)", "print(number); KEPT.append(started())", "leaves_nothing"),
    ("command", "print(number)", "print(open(number))", "wrong_argument"),
    ("command", "print(number)", "print(int(number))", "wrong_argument"),
    ("command", "def main", GROUP, "help_text"),
    ("command", '"""Print a number."""', "", "help_text"),
    ("command", "print(number)", "1 / 0", "examples_succeed"),
    ("command", "raise ConfigError(", "return print(", "mistakes_are_refused"),
    ("command", 'raise ConfigError("expected a number")', "sys.exit(2)", "mistakes_are_refused"),
    ("command", "raise ConfigError", "raise EngineDeadError", "mistakes_are_refused"),
    ("router", "% len(replicas)", "% 7", "one_of_the_replicas"),
    ("router", "len(request.prompt) %", "next(NUMBERS) %", "same_in_every_run"),
    ("router", "return", "replicas[0].sent += 1\n        return", "only_reads"),
]


def checks_of(suite: type[ExtensionSuite]) -> dict[str, Callable[[Any], None]]:
    """The checks but that of the doctor, which starts a process."""
    return {
        name: getattr(suite, name)
        for name in dir(suite)
        if name.startswith("test_") and "doctor" not in name
    }


def install(site: Site, sort: str, code: str) -> type[ExtensionSuite]:  # noqa: F811
    suite, spec, hook, target, _ = SORTS[sort]
    declared = DECLARED.format(spec=spec, hook=hook, target=target)
    head = HEAD
    site.install("dovetail-mine", modules={"mine": declared, "mine_code": head + code})
    return suite


@pytest.mark.parametrize("sort", SORTS)
def test_a_right_one_passes(sort: str, site: Site) -> None:  # noqa: F811
    suite = install(site, sort, SORTS[sort][-1])
    for check in checks_of(suite).values():
        check(suite())


@pytest.mark.parametrize(("sort", "right", "wrong", "found_by"), MISTAKES)
def test_a_mistake_is_found(
    sort: str,
    right: str,
    wrong: str,
    found_by: str,
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route, "TIME_LIMIT_S", 0.5)  # what hangs here hangs for good
    code = SORTS[sort][-1]
    assert code.count(right) == 1
    suite = install(site, sort, code.replace(right, wrong))
    (check,) = [check for name, check in checks_of(suite).items() if found_by in name]
    try:
        with pytest.raises(CheckFailed):
            check(suite())
    finally:
        if "mine_code" in sys.modules:
            sys.modules["mine_code"].WAITING.set()


def test_examples_that_are_all_refused_are_no_examples(site: Site) -> None:  # noqa: F811
    class Refused(Routes):
        examples = (RouteExample(path="/mine", body={}, status=400),)

    install(site, "route", ROUTES)
    with pytest.raises(CheckFailed, match="below 400"):
        Refused().test_examples_are_answered()


SLOTTED = """
import asyncio
from contextlib import aclosing
from starlette.endpoints import HTTPEndpoint
from starlette.responses import StreamingResponse
from starlette.routing import Mount, Route
from dovetail import SamplingParams
from dovetail.errors import RequestError

class Handler:
    __slots__ = ("context",)

    def __init__(self, context):
        self.context = context

    async def __call__(self, request):
        body = await request.json()
        if not isinstance(body, dict) or not isinstance(body.get("text"), str):
            raise RequestError("text: expected a text")
        return StreamingResponse(self.texts(body["text"]))

    async def texts(self, text):
        async with aclosing(self.context.generate(text, SamplingParams())) as outputs:
            async for output in outputs:
                yield output.outputs[0].text

def make(context):
    yield Route("/mine", Handler(context).__call__, methods=["POST"])
    yield Mount("/more", routes=[])
"""
GROUPED = '''
import typer
main = typer.Typer(invoke_without_command=True)
below = typer.Typer(help="More numbers.")
main.add_typer(below, name="more")

@main.callback()
def first(ctx: typer.Context):
    """Print numbers."""

@main.command("1")
def one():
    """Print one."""
    print(1)

@below.command()
def two(number: int = 2):
    """Print two."""
    print(number)
'''


@pytest.mark.parametrize(("sort", "code"), [("route", SLOTTED), ("command", GROUPED)])
def test_a_right_one_in_an_odd_style_passes(sort: str, code: str, site: Site) -> None:  # noqa: F811
    suite = install(site, sort, code)
    for check in checks_of(suite).values():
        check(suite())
