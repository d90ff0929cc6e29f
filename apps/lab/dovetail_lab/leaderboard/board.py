"""The board: an engine and traces that never change under one `VERSION`, and the runs of schedulers
on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import xxhash

from dovetail import EngineConfig, __version__
from dovetail.errors import ConfigError
from dovetail.serving import Registry
from dovetail_lab.metrics import measure
from dovetail_lab.planned_runs import cached_workload
from dovetail_lab.records import RequestRecord, RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.traces import Trace, TraceRequest
from dovetail_lab.workload_options import WorkloadOptions

# of engine and traces: raised with any change to the files in the folder of that number
VERSION = 1
TRACES = ("chat", "code", "agents", "overload")
_FIELDS = (
    *(
        "id",
        "client",
        "arrival_time",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "predicted_tokens",
        "priority",
    ),
    *("ttft_deadline", "tbt_s", "deadline", "spans"),
)
# policies' information about lengths of answers
MAX_TOKENS = "1024"
PREDICTOR = "noisy(0.5)"


@dataclass(frozen=True, slots=True)
class Entry:
    """A scheduler on the board. `digest` changes with its module's source, the engine of the board
    and the version of Dovetail."""

    name: str
    plugin: str
    summary: str
    digest: str


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. Latencies are of completed requests, in seconds; NaN without any."""

    in_time: float  # the share of a client's requests that were in time, averaged over clients
    requests: int
    completed: int
    rejected: int
    ttft_mean: float
    ttft_p99: float
    itl_p99: float
    e2e_mean: float
    cached: float  # share of prompt tokens


@dataclass(frozen=True, slots=True)
class BoardRun:
    """One scheduler on one trace with one seed, or on its first `requests`."""

    scheduler: str
    trace: str
    seed: int
    requests: int | None = None

    def run(self, progress: Callable[[int, int], None] | None = None) -> Figures | str:
        """Return the figures, or the reason why the run failed: one policy's failure mustn't end
        other runs."""
        trace = trace_of(self.trace, self.seed, self.requests)
        try:
            result = replay(engine_of(self.scheduler), trace, seed=self.seed, progress=progress)
        except Exception as error:  # a policy's code may raise any
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return _figures(trace, result)


def folder() -> Path:
    """Return the folder with the board's files."""
    return Path(str(files("dovetail_lab"))) / "leaderboard" / f"v{VERSION}"


def engine_of(scheduler: str) -> EngineConfig:
    return EngineConfig.load_with(folder() / "engine.yaml", {"scheduler": scheduler})


def trace_of(name: str, seed: int, requests: int | None = None) -> Trace:
    """Return a trace of the board, or its first `requests`."""
    part = None if requests is None else f"0:{requests}"
    return cached_workload(
        str(folder() / f"{name}.yaml"),
        WorkloadOptions(slice=part, seed=seed, max_tokens=MAX_TOKENS, predictor=PREDICTOR),
    )


@cache
def fingerprint(name: str, seed: int, requests: int | None = None) -> str:
    """Return a hash of all requests of a trace, or of its first `requests`. Results for other
    requests aren't comparable, e.g. if random numbers are drawn differently."""
    trace = trace_of(name, seed, requests)
    rows = [tuple(getattr(request, field) for field in _FIELDS) for request in trace]
    return xxhash.xxh64_hexdigest(repr(rows).encode())


def entries(only: Sequence[str] = ()) -> list[Entry]:
    """Return the installed schedulers, by name; those of `only`, if given. Raises `ConfigError` for
    a name that isn't installed."""
    registry = Registry.discover()
    found = {}
    for component in registry.components("scheduler"):
        name = (
            component.qualified_name if registry.needs_full_name(component) else component.spec.name
        )
        digest = _digest(component.spec.target.partition(":")[0])
        found[name] = Entry(
            name, f"{component.plugin_id} {component.version}", component.spec.summary, digest
        )
    for name in only:
        if name not in found:
            raise ConfigError(
                f"--only: no scheduler {name!r} is installed; there are {', '.join(found)}"
            )
    return [entry for name, entry in found.items() if not only or name in only]


def _digest(module: str) -> str:
    try:
        origin = getattr(find_spec(module), "origin", None)
    except ImportError:  # reported by the run
        origin = None
    source = Path(origin).read_bytes() if origin and Path(origin).is_file() else b""
    return xxhash.xxh64_hexdigest(
        b"\0".join((source, (folder() / "engine.yaml").read_bytes(), __version__.encode()))
    )


def in_time(request: TraceRequest, record: RequestRecord) -> bool:
    """Return True if a reader never waited: every token came by its due time. The first is due at
    `ttft_deadline`, each other `tbt_s` after the one before was due, and the last by `deadline`,
    too. A request that didn't complete wasn't in time."""
    if not record.completed:
        return False
    assert request.ttft_deadline is not None  # every request of the board has the three
    assert request.tbt_s is not None
    assert request.deadline is not None
    due = np.minimum(
        request.ttft_deadline + request.tbt_s * np.arange(record.output_tokens), request.deadline
    )
    return bool((record.token_times_s <= due).all())


def score(trace: Iterable[TraceRequest], records: Iterable[RequestRecord]) -> float:
    """Return the share of requests in time, averaged over clients, so that one who sends much
    doesn't count for more."""
    of_client: dict[str | None, list[bool]] = {}
    for request, record in zip(trace, records, strict=True):
        of_client.setdefault(request.client, []).append(in_time(request, record))
    return float(np.mean([np.mean(own) for own in of_client.values()]))


def _figures(trace: Trace, result: RunResult) -> Figures:
    metrics = measure(result)
    latencies = metrics.latencies
    return Figures(
        in_time=score(trace, result.requests),
        requests=metrics.requests,
        completed=metrics.completed,
        rejected=metrics.rejected,
        ttft_mean=float(latencies["ttft"].mean),
        ttft_p99=float(latencies["ttft"].percentiles[99]),
        itl_p99=float(latencies["itl"].percentiles[99]),
        e2e_mean=float(latencies["e2e"].mean),
        cached=metrics.cached_tokens / metrics.prompt_tokens if metrics.prompt_tokens else 0.0,
    )


def specs() -> Mapping[str, str]:
    """Return the text of the board's files, by name."""
    return {
        name: (folder() / f"{name}.yaml").read_text(encoding="utf-8")
        for name in ("engine", *TRACES)
    }
