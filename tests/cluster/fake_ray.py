"""The few calls of Ray that `dovetail_cluster.ray_jobs` makes, in threads of this process:
`FakeRay` replaces the module `ray`.

Its parameters are Ray's, which `test_ray_batch` checks if Ray is installed. It can lose workers,
and lose or double blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import pytest

Batch = Mapping[str, Any]


class RayError(Exception):
    """The base of Ray's errors."""


class FakeRay(ModuleType):
    """The module `ray`, and the cluster behind it."""

    def __init__(self, nodes: Sequence[Mapping[str, float]] = ({"CPU": 2},)) -> None:
        """`nodes` are the resources of the cluster's machines."""
        super().__init__("ray")
        self.machines = nodes
        # numbers of answered groups, after which the worker of the next is lost
        self.dies_after: set[int] = set()
        self.loses: set[int] = set()  # numbers of answered groups that never come
        self.doubles: set[int] = set()
        # number of answered groups after which all ends with an error of Ray's
        self.fails_after: int | None = None
        self.answered = 0  # groups, in all data sets
        self.workers_started = 0
        self.connected = False
        self.data, self.exceptions = ModuleType("ray.data"), ModuleType("ray.exceptions")
        self.exceptions.RayError = RayError  # type: ignore[attr-defined]
        self.data.from_items = self.from_items  # type: ignore[attr-defined]
        self.data.DataContext = DataContext  # type: ignore[attr-defined]
        self.data.ActorPoolStrategy = ActorPoolStrategy  # type: ignore[attr-defined]

    def installed(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        """Make it what `import ray` finds."""
        for module in (self, self.data, self.exceptions):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return self

    def init(self, address: str, *, log_to_driver: bool, logging_level: str) -> None:
        assert not self.connected, "a program has one connection"
        if address == "nowhere":
            raise ConnectionError("could not connect\n  a stack")
        self.connected = True

    def shutdown(self) -> None:
        self.connected = False

    def is_initialized(self) -> bool:
        return self.connected

    def nodes(self) -> list[Mapping[str, Any]]:
        return [{"Alive": True, "Resources": machine} for machine in self.machines]

    def cluster_resources(self) -> Mapping[str, float]:
        return {
            kind: sum(machine.get(kind, 0) for machine in self.machines) for kind in ("CPU", "GPU")
        }

    def get_runtime_context(self) -> FakeRay:
        return self

    def get_node_id(self) -> str:
        return "here"

    def from_items(self, items: list[Any]) -> FakeDataset:
        return FakeDataset(
            self, lambda: ({key: [value] for key, value in item.items()} for item in items)
        )


class DataContext:
    """Settings of Ray Data."""

    _current: DataContext | None = None

    @classmethod
    def get_current(cls) -> DataContext:
        cls._current = cls._current or cls()
        return cls._current


class ActorPoolStrategy:
    """A pool of actors of a fixed size."""

    def __init__(
        self,
        *,
        size: int,
        max_tasks_in_flight_per_actor: int,
        max_concurrent_calls_per_actor: int,
        enable_true_multi_threading: bool,
    ) -> None:
        assert enable_true_multi_threading
        assert max_tasks_in_flight_per_actor >= max_concurrent_calls_per_actor
        self.size, self.calls = size, max_concurrent_calls_per_actor


class FakeDataset:
    """Batches of one row that functions and actors pass on."""

    def __init__(self, ray: FakeRay, batches: Callable[[], Iterator[Batch]]) -> None:
        self._ray, self._batches = ray, batches

    def map_batches(
        self,
        fn: Any,
        *,
        batch_size: int,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Sequence[Any] = (),
        num_cpus: float,
        num_gpus: float | None = None,
        compute: ActorPoolStrategy | None = None,
        label_selector: Mapping[str, str] | None = None,
    ) -> FakeDataset:
        assert batch_size == 1
        if compute is not None:
            return FakeDataset(
                self._ray, lambda: self._computed(lambda: fn(*fn_constructor_args), compute)
            )
        assert label_selector == {"ray.io/node-id": "here"}, "the input is where the driver is"
        return FakeDataset(
            self._ray,
            lambda: (
                given for batch in self._batches() for given in fn(batch, **(fn_kwargs or {}))
            ),
        )

    def iter_batches(self, *, batch_size: None, prefetch_batches: int) -> Iterator[Batch]:
        return self._batches()

    def _computed(self, start: Callable[[], Any], pool: ActorPoolStrategy) -> Generator[Batch]:
        """Yield what a pool of actors answers. A lost actor is started again, and its groups are
        computed again."""
        ray = self._ray
        assert ray.connected

        def started() -> Any:
            ray.workers_started += 1
            return start()

        actors = [started() for _ in range(pool.size)]
        groups, under_way = iter(self._batches()), dict[Future[Batch], tuple[int, Batch]]()
        with ThreadPoolExecutor(pool.size * pool.calls) as threads:

            def submit(place: int, group: Batch) -> None:
                under_way[threads.submit(actors[place], group)] = place, group

            turn = 0
            while True:
                while (
                    len(under_way) < pool.size * pool.calls
                    and (group := next(groups, None)) is not None
                ):
                    submit(turn % pool.size, group)
                    turn += 1
                if not under_way:
                    return
                done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    if future not in under_way:  # its worker was lost a moment ago
                        continue
                    place, group = under_way[future]
                    if ray.answered in ray.dies_after:
                        ray.dies_after.discard(ray.answered)
                        actors[place] = started()
                        lost = [one for one, (where, _) in under_way.items() if where == place]
                        for again in [under_way.pop(one)[1] for one in lost]:
                            submit(place, again)
                        continue
                    del under_way[future]
                    yield from self._delivered(future.result())

    def _delivered(self, answer: Batch) -> Iterator[Batch]:
        ray, number = self._ray, self._ray.answered
        if number == ray.fails_after:
            ray.fails_after = None
            raise RayError("a worker is gone\n  a stack")
        ray.answered += 1
        if number not in ray.loses:
            yield answer
        if number in ray.doubles:
            yield answer
