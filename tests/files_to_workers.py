"""Distribution of tests to the workers of `pytest -n`: `FilesToWorkers`. Only pytest-xdist's
controller imports this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# files that share what takes seconds: each worker would have its own
TOGETHER = {
    "the preloaded process": (
        "tests/bench/test_all_reduce.py",
        "tests/cli/test_plugins_new.py",
        "tests/cli/test_streams.py",
        "tests/docs/test_code_blocks.py",
        "tests/docs/test_write_a_scheduler.py",
        "tests/executors/test_served_ranks.py",
        "tests/runtime/test_rank_shares.py",
        "tests/testing/test_preloaded.py",
    ),
    "the import of Anthropic's client": (
        "tests/server/test_agents.py",
        "tests/server/test_messages.py",
        "tests/server/test_service.py",
        "tests/server/test_structured.py",
    ),
}
_SHARED = {file: what for what, files in TOGETHER.items() for file in files}


class Collection(list[str]):
    """The ids of all tests, of which `index` needs no search."""

    def __init__(self, ids: Iterable[str]) -> None:
        super().__init__(ids)
        self._index = {test: index for index, test in enumerate(self)}

    def index(self, test: str, *between: SupportsIndex) -> int:
        return super().index(test, *between) if between else self._index[test]


class FilesToWorkers(LoadFileScheduling):
    """The tests of a file run in one process, which makes its fixtures once, as do those of files
    that are `TOGETHER`. If a test ends its worker, it fails, and the rest of its file goes to another one:
    `LoadFileScheduling` would assign the same test again and again, and then wait forever."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _SHARED.get(file, file)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Collection(collection)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that was running, if a worker with tests left has gone, and deal out the
        others again."""
        running = next(
            (
                (unit, test)
                for unit in self.assigned_work[node].values()
                for test, done in unit.items()
                if not done
            ),
            None,
        )
        if running is None:
            super().remove_node(node)
            return None
        unit, test = running
        unit[test] = True
        super().remove_node(node)
        return test

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more to do, or send it home: it begins its last test only once it knows
        which of the two comes next. Files that are done are forgotten: all tests that a worker has
        are counted after each."""
        work = self.assigned_work.get(node, {})
        for scope in [scope for scope, unit in work.items() if all(unit.values())]:
            del work[scope]
        while (
            node in self.registered_collections
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            super()._reschedule(node)
