"""`RunResult`: the result of one simulated or real run of a trace. Metrics, comparisons and reports
read it. It doesn't depend on the machine that wrote it, so that the same inputs give the same
bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from dovetail.end_reason import FinishReason
from dovetail.errors import ConfigError, shown
from dovetail_lab.writing import write_whole

# of a run
SETTINGS = (
    "config",
    "scheduler",
    "executor",
    "overlap",
    "prefix_reuse",
    "block_size",
    "num_pages",
    "prefill_limit",
    "max_model_len",
)
FORMAT = 2  # of the file; files of another format are refused

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """One request of the trace. Times are seconds on the run's clock, which starts at 0 with the
    trace; None: it never happened."""

    id: str
    client: str | None
    arrival_s: float
    first_scheduled_s: float | None
    token_times_s: Times  # [output_tokens] time at which the client received each
    finished_s: float
    prompt_tokens: int
    true_tokens: int  # output tokens according to the trace
    max_tokens: int  # the limit that policies saw
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    predicted_tokens: int | None = None
    priority: int = 0
    deadline_s: float | None = None  # absolute, of the last token
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when it was first admitted
    restored_tokens: int = 0  # of these, tokens that came from host memory or a KV tier
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed again after preemptions
    grammar: bool = False  # constrained by a grammar
    replica: int = 0  # index of the replica it was sent to
    session: str | None = None  # id of its conversation or agent
    # closed loop: it arrived after others had ended, so its arrival depends on the engine
    waited: bool = False

    @property
    def output_tokens(self) -> int:
        """Number of tokens that the client received."""
        return len(self.token_times_s)

    @property
    def completed(self) -> bool:
        """True if it generated all its tokens; False if it was rejected, failed or aborted."""
        return self.finish_reason in ("stop", "length") and self.output_tokens > 0


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Steps of a run, one column per quantity: entry i belongs to the i-th finished step. Times in
    seconds.

    With several replicas it has the steps of all. Requests and pages after a step are then those
    of all replicas, and the two durations are divided by the number of replicas, so that their sums
    are averages over replicas.
    """

    time_s: Times  # when its results were delivered
    device_s: Times  # duration on the device
    waiting: NDArray[np.int64]  # requests, after it
    running: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64]  # computed in it, including recomputed ones
    decode_tokens: NDArray[np.int64]
    generated_tokens: NDArray[np.int64]  # delivered
    cached_tokens: NDArray[np.int64]  # found in the prefix cache since the previous step
    recomputed_tokens: NDArray[np.int64]
    preemptions: NDArray[np.int64]  # since the previous step
    kv_free: NDArray[np.int64]  # pages, after it
    kv_held: NDArray[np.int64]
    kv_cached: NDArray[np.int64]
    # delay of its end by grammars: masks that took longer than the model, planning that waited for
    # them
    masks_s: Times
    draft_rows: NDArray[np.int64]  # requests that checked drafts
    draft_tokens: NDArray[np.int64]  # drafts that they checked
    # those that were right; they count in decode_tokens, others don't
    accepted_drafts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.time_s)

    def storms(self, steps: int) -> int:
        """Return the number of runs of `steps` steps in which more tokens were recomputed after
        preemptions than computed for the first time."""
        starts = np.arange(0, len(self) - steps + 1, steps)
        again = self.recomputed_tokens
        anew = self.prefill_tokens + self.decode_tokens - again
        return sum(
            int(again[at : at + steps].sum()) > int(anew[at : at + steps].sum()) for at in starts
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[float, ...]]) -> Timeline:
        """Create a timeline from one tuple per step, in the order of the columns."""
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields(cls))
        dtypes: list[Any] = [
            np.float64 if column.name.endswith("_s") else np.int64 for column in fields(cls)
        ]
        return cls(
            *(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True))
        )

    @classmethod
    def of_totals(cls, rows: Sequence[tuple[float, ...]]) -> Timeline:
        """Create a timeline from rows whose counts and durations are totals since the start."""
        totals = cls.of_rows(rows)
        return replace(
            totals,
            **{
                column.name: np.diff(getattr(totals, column.name), prepend=0)
                for column in fields(cls)
                if column.name not in ("time_s", *_AFTER)
            },
        )

    @classmethod
    def of_replicas(cls, timelines: Sequence[Timeline], num_pages: int) -> Timeline:
        """Merge the steps of several replicas with `num_pages` pages each, in the order of their
        ends."""
        order = sorted(
            (time, replica, step)
            for replica, line in enumerate(timelines)
            for step, time in enumerate(line.time_s)
        )
        after = dict.fromkeys(_AFTER, 0) | {"kv_free": num_pages}
        states = [dict(after) for _ in timelines]
        rows = []
        for _, replica, step in order:
            row = {
                column.name: getattr(timelines[replica], column.name)[step]
                for column in fields(cls)
            }
            states[replica] = {name: row[name] for name in _AFTER}
            row |= {name: sum(state[name] for state in states) for name in _AFTER}
            row |= {name: row[name] / len(timelines) for name in ("device_s", "masks_s")}
            rows.append(tuple(row.values()))
        return cls.of_rows(rows)


# columns of a timeline with the state after a step
_AFTER = (
    "waiting",
    "running",
    "kv_free",
    "kv_held",
    "kv_cached",
)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Source of a run's step times. `error`: mean of |predicted - measured| / measured over the
    steps that evaluated the model; None: it was never compared with measurements, or the steps are
    real."""

    name: str  # "linear (a100.json)", or "measured" where a device computed
    error: float | None = None
    judged_on: str = ""  # description: which steps, how many
    coefficients: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """Result of one trace, one engine and one seed."""

    name: str  # display name of the engine
    trace: str
    trace_source: str
    seed: int
    # all of `SETTINGS`: the engine's config as plain values, and derived settings
    settings: Mapping[str, Any]
    step_times: StepTimes
    requests: tuple[RequestRecord, ...]  # in the order of the trace
    timeline: Timeline
    notes: tuple[str, ...] = ()
    seeded: bool = False  # another seed gives other traffic, see `Trace.seeded`
    window: tuple[float, float] | None = None  # measured part in seconds; None: all

    def __iter__(self) -> Iterator[RequestRecord]:
        """Yield the measured requests: those that arrive in the window."""
        begin, end = self.window or (-math.inf, math.inf)
        return (record for record in self.requests if begin <= record.arrival_s < end)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON. The same result gives the same bytes."""
        instants, runs = _as_runs([record.token_times_s for record in self.requests])
        document = {
            "dovetail_lab_run": FORMAT,
            **{
                name: getattr(self, name)
                for name in (
                    "name",
                    "trace",
                    "trace_source",
                    "seed",
                    "settings",
                    "notes",
                    "seeded",
                    "window",
                )
            },
            "step_times": {f.name: getattr(self.step_times, f.name) for f in fields(StepTimes)},
            "requests": {
                name: [getattr(record, name) for record in self.requests] for name in _columns()
            },
            "instants_s": instants,  # when tokens were delivered
            # per request: first instant, number of consecutive ones, next first instant, …
            "tokens": runs,
            "timeline": {f.name: getattr(self.timeline, f.name).tolist() for f in fields(Timeline)},
        }
        text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        write_whole(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> RunResult:
        """Read a result. Raises `ConfigError` if the file wasn't written by `save`."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeError, ValueError) as error:
            raise ConfigError(
                f"{path}: can't be read as a run of the lab: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from None
        if not isinstance(document, dict) or document.get("dovetail_lab_run") != FORMAT:
            raise ConfigError(
                f'{path}: not a run of the lab: expected "dovetail_lab_run": {FORMAT}, as written '
                f"by `dovetail lab run --out`"
            )
        try:
            return cls._from(document)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{path}: a run of the lab, but damaged: {type(error).__name__}: {error}"
            ) from None

    @classmethod
    def _from(cls, document: dict[str, Any]) -> RunResult:
        columns = {name: _checked(name, document["requests"][name]) for name in _columns()}
        times = _from_runs(np.array(document["instants_s"], np.float64), document["tokens"])
        rows = zip(*columns.values(), strict=True)
        settings = document["settings"]
        if missing := [name for name in SETTINGS if name not in settings]:
            raise ValueError(f"settings lack {', '.join(missing)}")
        records = [
            RequestRecord(**dict(zip(columns, row, strict=True)), token_times_s=own)
            for row, own in zip(rows, times, strict=True)
        ]
        timeline = [document["timeline"][f.name] for f in fields(Timeline)]
        return cls(
            **{
                name: document[name]
                for name in ("name", "trace", "trace_source", "seed", "settings")
            },
            step_times=StepTimes(**document["step_times"]),
            requests=tuple(records),
            timeline=Timeline.of_rows(list(zip(*timeline, strict=True))),
            notes=tuple(document["notes"]),
            seeded=document["seeded"],
            window=None if document["window"] is None else _window(*document["window"]),
        )


def _window(begin: float, end: float) -> tuple[float, float]:
    if not -math.inf < begin < end < math.inf:
        raise ValueError(f"window: expected two times in order, got {begin!r} and {end!r}")
    return begin, end


def _as_runs(times: Sequence[Times]) -> tuple[list[float], list[list[int]]]:
    """Return the sorted distinct times, and for each request its runs of consecutive ones: most
    requests get a token in every step."""
    instants = np.unique(np.concatenate([*times, np.empty(0)]))
    runs = []
    for own in times:
        at = np.searchsorted(instants, own)
        starts = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(at))
        runs.append(np.column_stack([at[starts], lengths]).ravel().tolist())
    return instants.tolist(), runs


@cache
def _columns() -> dict[str, TypeAdapter[list[Any]]]:
    """Return the type of each column of a file's requests."""
    return {
        name: TypeAdapter(list[kind])  # type: ignore[valid-type]
        for name, kind in get_type_hints(RequestRecord).items()
        if name != "token_times_s"
    }


def _checked(name: str, values: Any) -> list[Any]:
    """Check a column. Raises `ValueError` naming it and its first wrong entry."""
    try:
        return _columns()[name].validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(
            f"requests.{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}, got "
            f"{shown(first['input'])}"
        ) from None


def _from_runs(instants: Times, runs: Sequence[Sequence[int]]) -> list[Times]:
    if any(
        first < 0 or first + count > len(instants)
        for own in runs
        for first, count in zip(own[::2], own[1::2], strict=True)
    ):
        raise ValueError("tokens beyond the last instant")
    return [
        np.concatenate(
            [
                instants[first : first + count]
                for first, count in zip(own[::2], own[1::2], strict=True)
            ]
            or [instants[:0]]
        )
        for own in runs
    ]
