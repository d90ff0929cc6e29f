"""Work that an executor's start has left for later is done while the engine has no request."""

from __future__ import annotations

import pytest

from dovetail.errors import DovetailError
from tests.engine.policies import FCFS
from tests.engine.world import RecordingExecutor, Spec, World

PROMPT = (1, 2, 3)


class Leaving(RecordingExecutor):
    """Leaves three pieces of work for later."""

    left = 3

    def finish_start(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left > 0


def world() -> World:
    return World(FCFS, executor=Leaving)


def left(world: World) -> int:
    executor = world.core.executor
    assert isinstance(executor, Leaving)
    return executor.left


def test_an_idle_engine_does_it_piece_by_piece() -> None:
    idle = world()
    assert [idle.core.finish_start() for _ in range(4)] == [True, True, False, False]
    assert left(idle) == 0


def test_requests_come_first() -> None:
    busy = world()
    busy.add(Spec("r", PROMPT, max_tokens=3))
    while busy.core.has_unfinished():
        assert not busy.core.finish_start()
        busy.step()
    assert left(busy) == 3
    assert busy.core.finish_start()
    assert left(busy) == 2


def test_a_step_of_ended_requests_is_collected_first() -> None:
    idle = world()
    idle.add(Spec("r", PROMPT, max_tokens=30))
    while not idle.core.is_computing:
        idle.step()
    idle.abort("r")
    assert idle.core.is_computing
    assert idle.core.finish_start()
    assert left(idle) == 3
    while idle.core.is_computing:
        assert idle.core.finish_start()
    assert idle.core.finish_start()
    assert left(idle) == 2
    idle.check_end()


def test_an_executor_without_such_work_is_done() -> None:
    assert not World(FCFS).core.finish_start()


def test_an_executor_that_fails_at_it_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(executor: Leaving) -> bool:
        raise DovetailError("the device is gone")

    monkeypatch.setattr(Leaving, "finish_start", fails)
    idle = world()
    assert not idle.core.finish_start()
    assert str(idle.core.dead) == "the device is gone"
    assert not idle.core.finish_start()
