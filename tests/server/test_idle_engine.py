"""A server's engine finishes its executor's start while it has no request. One in a user's program
doesn't, since recording a CUDA graph would break the program's own calls of
`torch.cuda.synchronize`. Features, such as K and V beyond the GPU, do their work in both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, LLMEngine
from dovetail.api.executor import Executor
from dovetail.engine.core import EngineCore
from dovetail.engine.feature import EngineFeature
from dovetail.front.assembly import assemble
from dovetail_server.one_process import HostThread
from tests.server.engines import DEMO, PATIENCE_S

ENOUGH = 3  # pieces of work


class Working(EngineFeature):
    """A feature that has some pieces of work to do while idle."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._pieces = 0

    def idle(self) -> bool:
        self._pieces += 1
        if self._pieces == ENOUGH:
            self.done.set()
        return self._pieces < ENOUGH


def watch(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when this executor finishes its start. Servers of other tests may
    idle in this process, too."""
    finished = threading.Event()

    def finish_start() -> bool:
        finished.set()
        return False

    monkeypatch.setattr(executor, "finish_start", finish_start)
    return finished


@contextmanager
def llm() -> Iterator[LLMEngine]:
    with LLM(**DEMO) as llm:
        yield llm.engine


@contextmanager
def async_engine() -> Iterator[LLMEngine]:
    engine = AsyncLLMEngine.from_config(DEMO)
    yield engine.engine
    engine.close()


@pytest.mark.parametrize("program", [llm, async_engine])
def test_an_engine_in_a_program_leaves_the_start_unfinished(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = Working()
    with program() as engine:
        finished = watch(engine.core.executor, monkeypatch)
        add(engine, feature)
        assert feature.done.wait(PATIENCE_S)
    assert not finished.is_set()


def add(engine: LLMEngine, feature: EngineFeature) -> None:
    def append(core: EngineCore = engine.core) -> None:
        core.features = [*core.features, feature]

    engine.run_in_thread().call(append)


def test_the_engine_of_a_server_finishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    feature = Working()
    assembly = assemble(DEMO, {})
    assembly.core.features = [*assembly.core.features, feature]
    finished = watch(assembly.core.executor, monkeypatch)
    host = HostThread(assembly, lambda reason: None)
    try:
        assert feature.done.wait(PATIENCE_S)
        assert finished.wait(PATIENCE_S)
    finally:
        host.close()
