"""The tour of one prompt leads through real code, in the order in which the prompt visits it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import FrameType
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from tests.docs.pages import DOCS, ROOT
from tests.small_model import small_demo

STOP = re.compile(
    r"^## (\d+)\. .+?\n\n`([^`]+\.py)`, `(\w+)` of `(\w+)`: .+?```py\n(.+?)```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Stop:
    path: Path
    function: str
    lines: str


def stops() -> list[Stop]:
    found = STOP.findall((DOCS / "tour.md").read_text(encoding="utf-8"))
    assert [int(number) for number, *_ in found] == list(range(1, 11))
    return [Stop(ROOT / path, method, lines) for _, path, method, _, lines in found]


@pytest.mark.parametrize("stop", stops(), ids=lambda stop: stop.function)
def test_the_lines_of_a_stop_are_those_of_its_file(stop: Stop) -> None:
    assert 3 <= len(stop.lines.splitlines()) <= 6
    code = stop.path.read_text(encoding="utf-8").splitlines(keepends=True)
    count = len(stop.lines.splitlines())
    windows = ("".join(code[at : at + count]) for at in range(len(code)))
    assert any(dedent(window) == stop.lines for window in windows)


def test_a_prompt_visits_the_stops_in_their_order() -> None:
    wanted = [(str(stop.path), stop.function) for stop in stops()]
    visited: dict[tuple[str, str], None] = {}

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            visited.setdefault((frame.f_code.co_filename, frame.f_code.co_name))

    with LLMEngine.from_config({"model": str(small_demo())}) as engine:
        sys.setprofile(called)
        try:
            engine.add_request("one", "To be", SamplingParams(temperature=0.0, max_tokens=1))
            engine.step()
        finally:
            sys.setprofile(None)
    assert [place for place in visited if place in wanted] == wanted
