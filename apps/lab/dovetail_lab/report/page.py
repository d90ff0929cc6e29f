"""`write_report`: write a report's page, figures (PNG) and tables (CSV). Output is
deterministic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail_lab.digits import evenly, per_cent
from dovetail_lab.metrics import RunMetrics, measure
from dovetail_lab.records import RunResult
from dovetail_lab.report import figures, tables
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.forest import forest
from dovetail_lab.report.html import write_page
from dovetail_lab.report.style import Drawing
from dovetail_lab.step_error import Repeated
from dovetail_lab.summary import TITLES
from dovetail_lab.verdict import Comparison, Line, change_rows

_COLUMNS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a report: runs by policy, one per seed."""

    title: str
    command: str
    runs: Mapping[str, Sequence[RunResult]]
    comparison: Comparison | None = None
    repeated: Repeated | None = None  # the comparison at other step times


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the report into the new folder `out` and return its files, the page first. Raises
    `ConfigError` if that fails, or without runs."""
    if not report.runs or not all(report.runs.values()):
        raise ConfigError("a report needs at least one run of each policy")
    drawings = _drawings(report)
    found = report.comparison
    measured = {name: [measure(run) for run in runs] for name, runs in report.runs.items()}
    return write_page(
        "page.html.j2",
        report.title,
        report.command,
        [Engine.of(name, runs) for name, runs in report.runs.items()],
        drawings,
        out,
        _tables(report),
        requests=_requests(report.runs),
        several=any(len(runs) > 1 for runs in report.runs.values()),
        comparison=found,
        columns=_COLUMNS,
        latencies=[(title, _latency_rows(metric, measured)) for metric, title in TITLES.items()],
        counts=_counts(report.runs, measured),
        repeated=report.repeated,
        changes=[]
        if found is None
        else [(versus, _change_rows(report, index)) for index, versus in enumerate(found.versus)],
        absent=_absent(drawings),
        per_cent=per_cent,
    )


def _change_rows(report: Report, index: int) -> Iterator[tuple[Line, list[str], str]]:
    """Yield each line of a comparison with its cells and its outcome in words."""
    assert report.comparison is not None
    for line, cells in change_rows(report.comparison.versus[index].lines):
        if report.repeated is None:
            yield line, cells, line.outcome
        else:
            survives = report.repeated.survives(index, line)
            yield (
                line,
                [*cells, *report.repeated.cells(index, line)],
                line.outcome + ("" if survives else ", depends on step times"),
            )


def _drawings(report: Report) -> list[Drawing]:
    runs = report.runs
    changes = None if report.comparison is None else forest(report.comparison, report.repeated)
    made = (
        changes,
        figures.latencies(runs),
        figures.over_time(runs),
        figures.clients(runs),
        figures.service(runs),
        figures.work(runs),
    )
    return [drawing for drawing in made if drawing is not None]


def _tables(report: Report) -> dict[str, str]:
    runs = report.runs
    made = {
        "requests.csv": tables.requests(runs),
        "clients.csv": tables.clients(runs),
        "summary.csv": tables.summary(runs),
        "timeline.csv": tables.timeline(runs),
    }
    return (
        made
        if report.comparison is None
        else {**made, "comparison.csv": tables.comparison(report.comparison, report.repeated)}
    )


def _requests(runs: Mapping[str, Sequence[RunResult]]) -> str:
    """Return the number of requests in words: once if all policies had the same."""
    says = {name: _requests_of(of_policy) for name, of_policy in runs.items()}
    if len(set(says.values())) == 1:
        return next(iter(says.values()))
    return "; ".join(f"{name}: {one}" for name, one in says.items())


def _requests_of(runs: Sequence[RunResult]) -> str:
    seeds = ", ".join(str(run.seed) for run in runs)
    if len(runs) == 1:
        return f"{len(runs[0]):,} request{'' if len(runs[0]) == 1 else 's'}, seed {seeds}"
    sizes = {len(run) for run in runs}
    each = f", {sizes.pop():,} a seed" if len(sizes) == 1 else ""
    return f"{sum(map(len, runs)):,} requests{each}, {len(runs)} seeds ({seeds})"


def _latency_rows(
    metric: str, measured: Mapping[str, Sequence[RunMetrics]]
) -> list[tuple[str, list[str]]]:
    """Return a latency's row for each policy: means over seeds of each run's value."""

    texts = iter(
        evenly(
            [
                _mean([one.latencies[metric].named(column) for one in of_policy])
                for of_policy in measured.values()
                for column in _COLUMNS
            ]
        )
    )
    return [(name, [next(texts) for _ in _COLUMNS]) for name in measured]


def _counts(
    runs: Mapping[str, Sequence[RunResult]], measured: Mapping[str, Sequence[RunMetrics]]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return the column titles, and a row per policy: counts are summed over seeds, rates and
    shares are averaged."""

    def total(figure: str) -> list[str]:
        return [
            f"{sum(getattr(one, figure) for one in of_policy):,}" for of_policy in measured.values()
        ]

    def mean(figure: str) -> list[float]:
        return [
            _mean([float(getattr(one, figure)) for one in of_policy])
            for of_policy in measured.values()
        ]

    def hits(of_policy: Sequence[RunMetrics]) -> float:
        prompts = sum(one.prompt_tokens for one in of_policy)
        return sum(one.cached_tokens for one in of_policy) / prompts if prompts else 0.0

    columns = {
        **{title: total(title) for title in ("completed", "rejected", "failed")},
        "requests/s": evenly(mean("request_rate")),
        "output tokens/s": evenly(mean("output_rate")),
        "device busy": [per_cent(share) for share in mean("device_share")],
        "prompts cached": [per_cent(hits(of_policy)) for of_policy in measured.values()],
        "preemptions": total("preemptions"),
        "tokens recomputed": total("recomputed_tokens"),
        "tokens from the cache": [
            f"{sum(int(run.timeline.cached_tokens.sum()) for run in of_policy):,}"
            for of_policy in runs.values()
        ],
    }
    if any(one.grammars for of_policy in measured.values() for one in of_policy):
        columns |= {
            "with a grammar": total("grammars"),
            "lost to masks": [per_cent(share) for share in mean("masks_share")],
        }
    if any(one.draft_tokens for of_policy in measured.values() for one in of_policy):
        columns |= {"drafts": total("draft_tokens"), "accepted": total("accepted_drafts")}
        columns |= {
            "acceptance length": evenly(mean("acceptance_length")),
            "tokens a step": evenly(mean("tokens_per_step")),
        }
    return list(columns), list(
        zip(measured, map(list, zip(*columns.values(), strict=True)), strict=True)
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN."""
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan


def _absent(drawings: Sequence[Drawing]) -> list[str]:
    """Return a sentence for each figure that is omitted because it would be empty."""
    names = {drawing.name for drawing in drawings}
    absent = {
        "latencies": "No request completed: there are no latencies.",
        "over-time": "No step ran.",
        "clients": "The trace has one client: fairness doesn't apply.",
        "work": "No preemption, no recomputation, and no prefix-cache hit.",
    }
    return [text for name, text in absent.items() if name not in names]


def as_json(found: Comparison, repeated: Repeated | None = None) -> dict[str, Any]:
    """Return the comparison as plain values for JSON, with None for missing ones."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def elsewhere(index: int, line: Line) -> dict[str, Any]:
        if repeated is None:
            return {}
        others = {
            f"{steps}_steps": {
                **{key: number(getattr(other.change, key)) for key in ("relative", "low", "high")},
                "outcome": other.outcome,
            }
            for steps, other in repeated.elsewhere(index, line)
        }
        return {**others, "survives": repeated.survives(index, line)}

    return {
        "policies": list(found.names),
        "seeds": list(found.seeds),
        "confidence": found.method.confidence,
        "method": found.method.says,
        "warnings": list(found.method.warnings),
        "caution": found.caution,
        "step_time_error": None
        if repeated is None
        else {
            "says": repeated.says,
            "errors": dict(repeated.errors.of),
            "verdicts": [repeated.verdict(index) for index in range(len(found.versus))],
            "warnings": list(repeated.warnings),
        },
        "versus": [
            {
                "policy": versus.other,
                "against": versus.base,
                "verdict": versus.verdict,
                "requests": versus.requests,
                "completed": {versus.base: versus.completed[0], versus.other: versus.completed[1]},
                "share_of_requests": {
                    metric: {"quicker": number(one.quicker), "slower": number(one.slower)}
                    for metric, one in versus.faster.items()
                },
                "changes": [
                    {
                        "metric": line.metric,
                        "statistic": line.statistic,
                        **{
                            name: number(getattr(line.change, name))
                            for name in ("a", "b", "relative", "low", "high")
                        },
                        "measurable": line.measurable,
                        "outcome": line.outcome,
                        "would_tell": line.would_tell(found.method, len(found.seeds)),
                        **elsewhere(index, line),
                    }
                    for line in versus.lines
                ],
            }
            for index, versus in enumerate(found.versus)
        ],
    }
