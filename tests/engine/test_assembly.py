"""What putting an engine together leaves behind in the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dovetail import LLMEngine
from dovetail.api.executor import Capacity
from dovetail_executors.local import LocalExecutor


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.parametrize("freezes", [True, False])
def test_the_books_are_frozen_if_the_executor_freezes_what_stands(freezes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = LocalExecutor.start

    def starts(executor: LocalExecutor) -> Capacity:
        capacity = start(executor)
        if freezes:
            gc.freeze()
        return capacity

    monkeypatch.setattr(LocalExecutor, "start", starts)
    with LLMEngine.from_config({"model": "demo", "max_num_seqs": 2, "max_model_len": 128}) as engine:
        looked_through = {id(thing) for thing in gc.get_objects()}
        assert (id(engine.core.kv) in looked_through) != freezes
        assert bool(gc.get_freeze_count()) == freezes
