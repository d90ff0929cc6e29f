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
from dovetail_executors.local import LocalExecutor
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


class Finished:
    """The executors that have finished their start: other tests' servers may idle in this process,
    too."""

    def __init__(self) -> None:
        self._executors: list[Executor] = []
        self._changed = threading.Condition()

    def add(self, executor: Executor) -> bool:
        with self._changed:
            self._executors.append(executor)
            self._changed.notify_all()
        return False

    def __contains__(self, executor: Executor) -> bool:
        with self._changed:
            return executor in self._executors

    def wait(self, executor: Executor) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: executor in self._executors, PATIENCE_S)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Finished:
    found = Finished()
    monkeypatch.setattr(LocalExecutor, "finish_start", lambda executor: found.add(executor))
    return found


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
    program: Any, finished: Finished
) -> None:
    feature = Working()
    with program() as engine:
        executor = engine.core.executor
        add(engine, feature)
        assert feature.done.wait(PATIENCE_S)
    assert executor not in finished


def add(engine: LLMEngine, feature: EngineFeature) -> None:
    def append(core: EngineCore = engine.core) -> None:
        core.features = [*core.features, feature]

    engine.run_in_thread().call(append)


def test_the_engine_of_a_server_finishes_it(finished: Finished) -> None:
    feature = Working()
    assembly = assemble(DEMO, {})
    assembly.core.features = [*assembly.core.features, feature]
    host = HostThread(assembly, lambda reason: None)
    try:
        assert feature.done.wait(PATIENCE_S)
        assert finished.wait(assembly.core.executor)
    finally:
        host.close()
