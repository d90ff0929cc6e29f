"""Work that was left for later is done while the engine has no request: that of features, and that
of an executor's start, if whoever drives the engine allows it."""

from __future__ import annotations

import pytest

from dovetail.engine.feature import EngineFeature
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


def idle_once(world: World) -> bool:
    """Let the executor finish its start, too."""
    return world.core.idle(finish_start=True)


def left(world: World) -> int:
    executor = world.core.executor
    assert isinstance(executor, Leaving)
    return executor.left


def test_an_idle_engine_does_it_piece_by_piece() -> None:
    idle = world()
    assert [idle_once(idle) for _ in range(4)] == [True, True, False, False]
    assert left(idle) == 0


class Saving(EngineFeature):
    """A feature that has two pieces of work to do while idle."""

    left = 2

    def idle(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left > 0


@pytest.mark.parametrize("finish_start", [False, True])
def test_features_do_theirs_whether_or_not_the_start_is_finished(finish_start: bool) -> None:
    idle = world()
    saving = Saving()
    idle.core.features = [*idle.core.features, saving]
    assert idle.core.idle(finish_start=finish_start)
    assert saving.left == 1
    assert idle.core.idle(finish_start=finish_start) == finish_start
    assert saving.left == 0
    assert left(idle) == (1 if finish_start else 3)


def test_only_who_asks_for_it_has_the_start_finished() -> None:
    idle = world()
    assert not idle.core.idle()
    assert left(idle) == 3


def test_requests_come_first() -> None:
    busy = world()
    busy.add(Spec("r", PROMPT, max_tokens=3))
    while busy.core.has_unfinished():
        assert not idle_once(busy)
        busy.step()
    assert left(busy) == 3
    assert idle_once(busy)
    assert left(busy) == 2


@pytest.mark.parametrize("finish_start", [False, True])
def test_a_step_of_ended_requests_is_collected_first(finish_start: bool) -> None:
    idle = world()
    idle.add(Spec("r", PROMPT, max_tokens=30))
    while not idle.core.is_computing:
        idle.step()
    idle.abort("r")
    assert idle.core.is_computing
    while idle.core.is_computing:
        assert idle.core.idle(finish_start=finish_start)
    assert left(idle) == 3
    assert idle.core.idle(finish_start=finish_start) == finish_start
    assert left(idle) == (2 if finish_start else 3)
    idle.check_end()


def test_an_executor_without_such_work_is_done() -> None:
    assert not idle_once(World(FCFS))


def test_an_executor_that_fails_at_it_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(executor: Leaving) -> bool:
        raise DovetailError("the device is gone")

    monkeypatch.setattr(Leaving, "finish_start", fails)
    idle = world()
    assert not idle_once(idle)
    assert str(idle.core.dead) == "the device is gone"
    assert not idle_once(idle)
