"""The suites of routes, commands and routers: right ones pass, and each mistake is
found by a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.testing import CommandSuite, RouteExample, RouteSuite
from dovetail.testing.checks import CheckFailed
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
    examples = (RouteExample(path="/mine", body={"text": "Once."}),)


class Command(CommandSuite):
    name = "mine"
    examples = (("1",),)


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
COMMAND = '''
def main(number: int):
    """Print a number."""
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
    ("command", '"""Print a number."""', "", "help_text"),
    ("command", "print(number)", "1 / 0", "examples_succeed"),
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
    head = "import itertools\nKEPT = []\nNUMBERS = itertools.count()\n"
    site.install("dovetail-mine", modules={"mine": declared, "mine_code": head + code})
    return suite


@pytest.mark.parametrize("sort", SORTS)
def test_a_right_one_passes(sort: str, site: Site) -> None:  # noqa: F811
    suite = install(site, sort, SORTS[sort][-1])
    for check in checks_of(suite).values():
        check(suite())


@pytest.mark.parametrize(("sort", "right", "wrong", "found_by"), MISTAKES)
def test_a_mistake_is_found(sort: str, right: str, wrong: str, found_by: str, site: Site) -> None:  # noqa: F811
    code = SORTS[sort][-1]
    assert code.count(right) == 1
    suite = install(site, sort, code.replace(right, wrong))
    (check,) = [check for name, check in checks_of(suite).items() if found_by in name]
    with pytest.raises(CheckFailed):
        check(suite())
