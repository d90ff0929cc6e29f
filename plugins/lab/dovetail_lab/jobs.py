"""Many runs: a `Job` says all that one run needs, `run_jobs` does them on as many processes as asked, with the results of a single one, in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from dovetail import EngineConfig
from dovetail.api.component import Kind
from dovetail.registry.registry import Registry
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.simulated import SimulatedOptions
from dovetail_lab.step_time import StepTimeProfile
from dovetail_lab.traces import Trace
from dovetail_lab.workloads.load import WorkloadOptions, load_workload

Made = TypeVar("Made")

SHOWN_EVERY_S = 0.5  # how many requests are finished, while runs go on

CHECKED: tuple[Kind, ...] = ("scheduler", "kv_cache", "executor")  # their options, before any run


@dataclass(frozen=True, slots=True)
class Job:
    """One run. The options' seed is that of the engine too."""

    config: EngineConfig
    workload: str  # as `load_workload` takes it
    options: WorkloadOptions
    name: str | None = None  # in tables; None: the scheduler's

    def check(self) -> None:
        """Raises what would be wrong with its parts or its workload, before hours of simulation."""
        registry = Registry.discover(self.config.plugins)
        for kind in CHECKED:
            choice = getattr(self.config, kind)
            options = registry.resolve(kind, choice.name, choice.options, choice.where).validate_options()
            if isinstance(options, SimulatedOptions):
                StepTimeProfile.load(options.step_time).make()
        cached_workload(self.workload, self.options)

    def run(self, progress: Callable[[int, int], None] | None = None) -> RunResult:
        trace = cached_workload(self.workload, self.options)
        return replay(self.config, trace, name=self.name, seed=self.options.seed, progress=progress)


@lru_cache(maxsize=4)
def cached_workload(text: str, options: WorkloadOptions) -> Trace:
    """The same for every policy, and read once."""
    return load_workload(text, options)


def keep(run: RunResult) -> RunResult:
    """To `run_jobs`, when all of a run is wanted."""
    return run


def run_jobs(jobs: Sequence[Job], make: Callable[[RunResult], Made], processes: int = 1, desc: str = "runs") -> Iterator[Made]:
    """`make` of each run, in the order of `jobs`. With several processes `make` is sent to them, so it must be importable; results don't depend on
    how many there are. A bar on stderr, if that is a terminal. Raises what a run raises."""
    with tqdm(total=len(jobs), desc=desc, unit="run", disable=None, leave=False) as bar:
        if processes == 1 or len(jobs) == 1:
            for job in jobs:
                yield make(job.run(progress=partial(_show, bar)))
                bar.update()
            return
        context = multiprocessing.get_context("spawn")
        finished = context.Value("q", 0)  # requests, of all processes
        with ProcessPoolExecutor(min(processes, len(jobs)), context, initializer=_count_in, initargs=(finished,)) as pool:
            waiting = [pool.submit(_run_and_make, make, job) for job in jobs]
            try:
                for future in waiting:
                    while wait([future], timeout=SHOWN_EVERY_S).not_done:
                        bar.set_postfix_str(f"{finished.value:,} requests")
                    bar.update()
                    yield future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


_finished: Any = None  # in a process of `run_jobs`: the count that all of them share


def _count_in(finished: Any) -> None:
    global _finished
    _finished = finished


def _run_and_make(make: Callable[[RunResult], Made], job: Job) -> Made:
    counted = 0

    def count(done: int, total: int) -> None:
        nonlocal counted
        with _finished.get_lock():
            _finished.value += done - counted
        counted = done

    return make(job.run(progress=count))


def _show(bar: tqdm[Any], done: int, total: int) -> None:
    bar.set_postfix_str(f"{done:,}/{total:,} requests", refresh=done % 100 == 0)


def names_of(sources: Sequence[str]) -> list[str]:
    """What each engine is called in tables: its file's name without suffix, the whole path where two files have the same; the same file again is
    numbered."""
    stems = {source: Path(source).stem for source in sources}
    names = [stems[source] if list(stems.values()).count(stems[source]) == 1 else source for source in sources]
    return [name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})" for index, name in enumerate(names)]
