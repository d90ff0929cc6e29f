"""`write_report`: the page, its figures as PNG, its numbers as CSV. The same runs and the same command give the same bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dovetail.errors import ConfigError
from dovetail_lab.compare import Comparison
from dovetail_lab.metrics import RunMetrics, measure
from dovetail_lab.records import RunResult
from dovetail_lab.report import figures, tables
from dovetail_lab.report.figures import Drawing
from dovetail_lab.report.style import lay_out, png, svg
from dovetail_lab.statistics import Change
from dovetail_lab.summary import TITLES, conditions, seconds, source_of_times
from dovetail_lab.writing import make_folder, write_whole

PAGE = "report.html"
_COLUMNS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a report: runs by policy, one for each seed."""

    title: str
    command: str
    runs: Mapping[str, Sequence[RunResult]]
    comparison: Comparison | None = None


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the report into the new folder `out` and return its files, the page first. Raises `ConfigError` if that fails, or without runs."""
    if not report.runs or not all(report.runs.values()):
        raise ConfigError("a report needs at least one run of each policy")
    drawings = _drawings(report)
    files: dict[str, str | bytes] = {
        PAGE: _page(report, drawings),
        **_tables(report),
        **{f"{drawing.name}.png": png(drawing.figure) for drawing in drawings},
    }
    make_folder(out)
    for name, content in files.items():
        write_whole(out / name, content)
    return [out / name for name in files]


def _drawings(report: Report) -> list[Drawing]:
    runs = report.runs
    changes = None if report.comparison is None else figures.forest(report.comparison)
    made = (changes, figures.latencies(runs), figures.over_time(runs), figures.clients(runs), figures.service(runs), figures.work(runs))
    drawings = [drawing for drawing in made if drawing is not None]
    for drawing in drawings:
        lay_out(drawing.figure)
    return drawings


def _tables(report: Report) -> dict[str, str]:
    runs = report.runs
    made = {
        "requests.csv": tables.requests(runs),
        "clients.csv": tables.clients(runs),
        "summary.csv": tables.summary(runs),
        "timeline.csv": tables.timeline(runs),
    }
    return made if report.comparison is None else {**made, "comparison.csv": tables.comparison(report.comparison)}


def _page(report: Report, drawings: Sequence[Drawing]) -> str:
    environment = Environment(
        loader=PackageLoader("dovetail_lab.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    first = {name: runs[0] for name, runs in report.runs.items()}
    return environment.get_template("page.html.j2").render(
        report=report,
        seeds=[run.seed for run in next(iter(report.runs.values()))],
        policies=[_policy(name, runs) for name, runs in report.runs.items()],
        latencies=TITLES,
        columns=_COLUMNS,
        drawings=[(drawing, Markup(svg(drawing.figure, drawing.name))) for drawing in drawings],
        settings={name: json.dumps(run.settings, indent=2, sort_keys=True, ensure_ascii=False) for name, run in first.items()},
        grammars=any(record.grammar for of_policy in report.runs.values() for run in of_policy for record in run),
        notes=_notes(report.runs),
        absent=_absent(report, drawings),
        per_cent=_per_cent,
        share=_share,
        interval=_interval,
        seconds=seconds,
    )


def _notes(runs: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Return each note once, with the names of the runs that have it, unless all do."""
    names: dict[str, list[str]] = {}
    for name, of_policy in runs.items():
        for note in dict.fromkeys(note for run in of_policy for note in run.notes):
            names.setdefault(note, []).append(name)
    return [note if len(own) == len(runs) else f"{', '.join(own)}: {note}" for note, own in names.items()]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy's row in each table: means over its seeds of each run's figure."""

    name: str
    scheduler: str
    conditions: str
    times: str
    measured: Sequence[RunMetrics]

    def latency(self, metric: str, column: str) -> float:
        summaries = [one.latencies[metric] for one in self.measured]
        return _mean([one.mean if column == "mean" else one.percentiles[int(column[1:])] for one in summaries])

    def figure(self, name: str) -> float:
        return _mean([float(getattr(one, name)) for one in self.measured])

    @property
    def hits(self) -> float:
        """The share of prompt tokens found in the cache."""
        prompts = sum(one.prompt_tokens for one in self.measured)
        return sum(one.cached_tokens for one in self.measured) / prompts if prompts else 0.0


def _policy(name: str, runs: Sequence[RunResult]) -> Policy:
    return Policy(name, runs[0].settings["scheduler"], conditions(runs[0]), source_of_times(runs[0].step_times), [measure(run) for run in runs])


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN."""
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan


def _absent(report: Report, drawings: Sequence[Drawing]) -> list[str]:
    """Return a sentence for each figure that would have been empty."""
    names = {drawing.name for drawing in drawings}
    absent = {
        "latencies": "No request completed: there are no latencies.",
        "over-time": "No step ran.",
        "clients": "The trace has one client: nothing to tell of fairness.",
        "work": "Nothing was preempted, nothing recomputed, and nothing found in the prefix cache.",
    }
    return [text for name, text in absent.items() if name not in names]


def _per_cent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:+.1f} %"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def _interval(change: Change) -> str:
    return "–" if math.isnan(change.low) else f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def as_json(found: Comparison) -> dict[str, Any]:
    """Return plain values for other programs, with None for missing ones."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "policies": list(found.names),
        "seeds": list(found.seeds),
        "confidence": found.method.confidence,
        "method": found.method.says,
        "warnings": list(found.method.warnings),
        "caution": found.caution,
        "versus": [
            {
                "policy": versus.other,
                "against": versus.base,
                "verdict": versus.verdict,
                "requests": versus.requests,
                "completed": {versus.base: versus.completed[0], versus.other: versus.completed[1]},
                "share_of_requests": {
                    metric: {"quicker": number(one.quicker), "slower": number(one.slower)} for metric, one in versus.faster.items()
                },
                "changes": [
                    {
                        "metric": line.metric,
                        "statistic": line.statistic,
                        **{name: number(getattr(line.change, name)) for name in ("a", "b", "relative", "low", "high")},
                        "measurable": line.change.measurable,
                    }
                    for line in versus.lines
                ],
            }
            for versus in found.versus
        ],
    }
