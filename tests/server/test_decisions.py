"""Scheduler decisions as sent to the page: counts, on request, and only while a page requests
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from dovetail.request.sampling_params import SamplingParams
from dovetail_server import decision_watch, remote
from dovetail_server.engine import DecidedStep
from dovetail_server.frames import Ask
from tests.server.engines import Collector, Link, Served, served

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)


async def run(engine: Served, name: str, prompt: str = "a secret") -> None:
    listener = Collector()
    await engine.engine.submit(name, prompt, PARAMS, listener, client="somebody")
    await listener.over.wait()
    assert listener.error is None


def steps_of(engine: Served) -> tuple[DecidedStep, ...]:
    told = engine.engine.decisions()
    return told.steps if told is not None else ()


@pytest.mark.parametrize("link", ["thread", "zmq"])
async def test_decisions_of_the_last_steps_are_only_numbers(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ASK_S", 0)
    async with served(link, tmp_path) as engine:
        await engine.until(lambda: engine.engine.decisions() is not None)
        await run(engine, "mine")
        await engine.until(lambda: len(steps_of(engine)) == decision_watch.NOTED_STEPS)
        told = engine.engine.decisions()
    assert told is not None
    assert [step.index for step in told.steps] == list(range(decision_watch.NOTED_STEPS))
    prefill, *decodes = [
        (step.granted, step.prefill_tokens, step.decode_tokens, step.refused, step.preempted)
        for step in told.steps
    ]
    assert prefill == (1, told.steps[0].prefill_tokens, 0, 0, 0)
    assert prefill[1] > 0
    assert set(decodes) == {(1, 0, 1, 0, 0)}
    assert words(json.loads(orjson.dumps(told))) == ["dovetail:fcfs"]


def words(value: Any) -> list[str]:
    """All texts in a JSON value, but for names of fields."""
    if isinstance(value, dict | list):
        return [
            word
            for one in (value.values() if isinstance(value, dict) else value)
            for word in words(one)
        ]
    return [value] if isinstance(value, str) else []


@pytest.mark.slow("answers many requests")
async def test_a_question_has_a_few_steps_noted_and_no_more(tmp_path: Path) -> None:
    async with served("thread", tmp_path) as engine:
        await run(engine, "one")
        assert not engine.core.observers.listens
        await engine.until(lambda: engine.engine.decisions() is not None)
        assert engine.core.observers.wants_decisions
        await run(engine, "two")
        await engine.until_all_is_free()
        assert not engine.core.observers.listens
        assert not engine.core.observers.wants_decisions


async def test_however_often_a_page_asks_the_engine_is_asked_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served("thread", tmp_path) as engine:
        sent: list[Any] = []
        line = engine.engine._line
        monkeypatch.setattr(line, "send", sent.append)
        now = [1000.0]
        monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
        for _ in range(20):
            engine.engine.decisions()
            now[0] += 0.1
        assert [type(message) for message in sent] == [Ask] * 4
