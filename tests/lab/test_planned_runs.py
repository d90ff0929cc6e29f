"""Processes of planned runs: they are kept from one list of runs to the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dovetail_lab.planned_runs import Workers, unchanged


@dataclass(frozen=True)
class Process:
    """A run whose result is the id of the process that made it."""

    fails: bool = False

    def run(self, progress: Callable[[int, int], None] | None = None) -> int:
        if self.fails:
            raise ValueError("no run")
        return os.getpid()


@pytest.mark.slow("starts a process")
def test_processes_are_kept_for_the_next_runs_and_end_with_the_context() -> None:
    with Workers(2) as workers:
        first = {*workers.run_all([Process(), Process()], unchanged)}
        assert os.getpid() not in first
        assert {*workers.run_all([Process(), Process()], unchanged)} & first
        assert [*workers.run_all([Process()], unchanged)] == [os.getpid()]
        with pytest.raises(ValueError, match="no run"):
            list(workers.run_all([Process(fails=True), Process()], unchanged))
    with pytest.raises(RuntimeError, match="after shutdown"):
        list(workers.run_all([Process(), Process()], unchanged))


def test_one_process_is_this_one() -> None:
    with Workers(1) as workers:
        assert {*workers.run_all([Process(), Process()], unchanged)} == {os.getpid()}
