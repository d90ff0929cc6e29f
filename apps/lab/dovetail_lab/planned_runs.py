"""Run many simulations: `PlannedRun` describes one, `run_all` runs a list in several processes with
results that don't depend on their number. `Workers` keeps the processes for further lists."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel
from tqdm import tqdm

from dovetail import EngineConfig
from dovetail.api.component import Kind
from dovetail.errors import ConfigError
from dovetail.serving import Registry
from dovetail_lab.records import RunResult
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import Routing, parse_router
from dovetail_lab.simulate import replay
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.traces import Trace
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.workloads.load import load_workload

Made = TypeVar("Made")
Ran = TypeVar("Ran", covariant=True)

SHOWN_EVERY_S = 0.5  # between updates of the progress bar

# kinds whose options are checked before any run
CHECKED: tuple[Kind, ...] = (
    "scheduler",
    "kv_cache",
    "executor",
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run. The seed in `options` is also the engine's."""

    config: EngineConfig
    workload: str  # an argument of `load_workload`
    options: WorkloadOptions
    name: str | None = None  # display name; None: the scheduler's
    routing: Routing | None = None  # None: one engine without a router

    def check(self) -> None:
        """Validate components and workload, so that errors surface before hours of simulation."""
        for kind in CHECKED:
            options = _options(self.config, kind)
            if isinstance(options, SimulatedOptions):
                StepTimeProfile.load(options.step_time).make()
        cached_workload(self.workload, self.options)

    def run(self, progress: Callable[[int, int], None] | None = None) -> RunResult:
        trace = cached_workload(self.workload, self.options)
        return replay_routed(
            self.config,
            trace,
            self.routing,
            name=self.name,
            seed=self.options.seed,
            progress=progress,
        )


def simulated_options(config: EngineConfig) -> SimulatedOptions:
    """Return the options of an engine's simulated executor. Raises `ConfigError` if they are
    invalid, or if it has another executor."""
    options = _options(config, "executor")
    if not isinstance(options, SimulatedOptions):
        raise ConfigError(f"expected the executor simulated, got {config.executor.label}")
    return options


def scheduler_options(config: EngineConfig) -> BaseModel:
    """Return the options of an engine's scheduler. Raises `ConfigError` if they are invalid."""
    options: BaseModel = _options(config, "scheduler")
    return options


def _options(config: EngineConfig, kind: Kind) -> Any:
    choice = getattr(config, kind)
    return (
        Registry.discover(config.plugins)
        .resolve(kind, choice.name, choice.options, choice.where)
        .validate_options()
    )


def replay_routed(
    config: EngineConfig,
    trace: Trace,
    routing: Routing | None,
    *,
    name: str | None,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> RunResult:
    """Replay a trace through one engine, or through the replicas of `routing`. Raises the errors of
    `replay` and `replay_replicas`."""
    if routing is None:
        return replay(config, trace, name=name, seed=seed, progress=progress)
    return replay_replicas(
        config,
        trace,
        routing.replicas,
        parse_router(routing.router),
        name=name,
        seed=seed,
        progress=progress,
    )


@lru_cache(maxsize=4)
def cached_workload(text: str, options: WorkloadOptions) -> Trace:
    """Load a workload once for all policies."""
    return load_workload(text, options)


def unchanged(run: Made) -> Made:
    """Return the result of a run unchanged: a `make` for `run_all`."""
    return run


class Runnable(Protocol[Ran]):
    """Something that `Workers` can run: `PlannedRun`, or another picklable description of a run."""

    def run(self, progress: Callable[[int, int], None] | None = None) -> Ran:
        """Run it; `progress` is called with the number of finished requests, and of all."""


def run_all(
    planned: Sequence[Runnable[Ran]],
    make: Callable[[Ran], Made],
    processes: int = 1,
    desc: str = "runs",
) -> Iterator[Made]:
    """Do as `Workers.run_all`, with processes for this call only."""
    with Workers(processes) as workers:
        yield from workers.run_all(planned, make, desc)


class Workers:
    """Up to `processes` processes that make runs: they start when they are needed, since their
    imports take seconds, and stay until the context ends."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None  # until it is needed
        self._finished: Any = None  # with a pool: number of finished requests of all processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run_all(
        self, planned: Sequence[Runnable[Ran]], make: Callable[[Ran], Made], desc: str = "runs"
    ) -> Iterator[Made]:
        """Yield `make(run)` for each planned run, in order. With several processes `make` must be
        picklable. Shows a progress bar on stderr if that is a terminal. Raises the errors of a run;
        runs that wait are cancelled at the context's end."""
        with tqdm(total=len(planned), desc=desc, unit="run", disable=None, leave=False) as bar:
            if self._processes == 1 or len(planned) <= 1:
                for one in planned:
                    yield make(one.run(progress=partial(_show, bar)))
                    bar.update()
                return
            pool = self._started()
            before = self._finished.value
            waiting = [pool.submit(_run_and_make, make, one) for one in planned]
            for future in waiting:
                while wait([future], timeout=SHOWN_EVERY_S).not_done:
                    bar.set_postfix_str(f"{self._finished.value - before:,} requests")
                bar.update()
                yield future.result()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._finished = context.Value("q", 0)
            self._pool = ProcessPoolExecutor(
                self._processes, context, initializer=_count_in, initargs=(self._finished,)
            )
        return self._pool


_finished: Any = None  # in a process of `Workers`: the shared count


def _count_in(finished: Any) -> None:
    global _finished
    _finished = finished


def _run_and_make(make: Callable[[Ran], Made], planned: Runnable[Ran]) -> Made:
    counted = 0

    def count(done: int, total: int) -> None:
        nonlocal counted
        with _finished.get_lock():
            _finished.value += done - counted
        counted = done

    return make(planned.run(progress=count))


def _show(bar: tqdm[Any], done: int, total: int) -> None:
    bar.set_postfix_str(f"{done:,}/{total:,} requests", refresh=done % 100 == 0)


def display_names(sources: Sequence[str]) -> list[str]:
    """Return each engine's display name: its file's name without suffix, or the whole path if two
    files share that; a repeated file gets a number."""
    stems = {source: Path(source).stem for source in sources}
    names = [
        stems[source] if list(stems.values()).count(stems[source]) == 1 else source
        for source in sources
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]
