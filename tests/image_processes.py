"""Processes that prepare images, which engines share: each takes two seconds of processor time to
start, and serves any checkpoint. The fixture is `shared_image_processes` of `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.front.worker_processes import WorkerProcess, WorkerProcesses


class KeptProcesses(WorkerProcesses):
    """Pool that outlives the engines which use it."""

    def close(self) -> None:
        """Leave the processes to the next engine."""

    def end(self) -> None:
        """End the processes."""
        super().close()


class SharedImageProcesses:
    """Stands for `WorkerProcesses`: returns the same pool for the same size."""

    def __init__(self) -> None:
        self._pools: dict[int, KeptProcesses] = {}

    def __call__(self, most: int, start: Callable[[], WorkerProcess]) -> WorkerProcesses:
        return self._pools.setdefault(most, KeptProcesses(most, start))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.end()
