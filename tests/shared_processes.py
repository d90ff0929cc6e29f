"""Processes that do untrusted work, which engines of tests share: one that renders chat templates
takes 0.15 s of processor time to start, one that prepares images two seconds, and each serves any
checkpoint. Fixtures of `tests/conftest.py` use them: `shared_template_processes`, for all tests, and
`shared_image_processes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.front.worker_processes import WorkerProcess, WorkerProcesses


class KeptProcesses(WorkerProcesses):
    """Pool that outlives the engines which use it."""

    def close(self) -> None:
        """Leave the processes to the next engine."""

    def end(self) -> None:
        """End the processes."""
        super().close()


class SharedProcesses:
    """Stands for `WorkerProcesses`: returns the same pool for the same size and the same start."""

    def __init__(self) -> None:
        self._pools: dict[Any, KeptProcesses] = {}

    def __call__(self, most: int, start: Callable[[], WorkerProcess]) -> WorkerProcesses:
        how = (start.func, *start.args) if isinstance(start, partial) else start
        return self._pools.setdefault((most, how), KeptProcesses(most, start))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.end()
