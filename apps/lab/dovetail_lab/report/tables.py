"""The report's numbers as CSV: full precision, seconds, empty cells for missing values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dovetail_lab.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT
from dovetail_lab.metrics import PERCENTILES, e2e_s, measure, per_request, queue_s, tpot_s, ttft_s
from dovetail_lab.records import RequestRecord, RunResult
from dovetail_lab.report.figures import BINS, held_means
from dovetail_lab.step_error import Repeated
from dovetail_lab.verdict import Comparison, Line, Versus
from dovetail_lab.writing import Cell, as_csv

Runs = Mapping[str, Sequence[RunResult]]


_REQUEST_COLUMNS: Mapping[str, Callable[[RequestRecord], Cell]] = {
    "request": lambda record: record.id,
    "client": lambda record: record.client,
    "arrival_s": lambda record: record.arrival_s,
    "prompt_tokens": lambda record: record.prompt_tokens,
    "output_tokens": lambda record: record.output_tokens,
    "finish_reason": lambda record: record.finish_reason,
    "queue_s": queue_s,
    "ttft_s": ttft_s,
    "tpot_s": tpot_s,
    "e2e_s": e2e_s,
    "cached_tokens": lambda record: record.cached_tokens,
    "preemptions": lambda record: record.preemptions,
    "recomputed_tokens": lambda record: record.recomputed_tokens,
    "grammar": lambda record: "yes" if record.grammar else "no",
}


def requests(runs: Runs) -> str:
    """Return CSV with a line per request, policy and seed."""
    return as_csv(
        ("policy", "seed", *_REQUEST_COLUMNS),
        (
            (name, run.seed, *(column(record) for column in _REQUEST_COLUMNS.values()))
            for name, of_policy in runs.items()
            for run in of_policy
            for record in run
        ),
    )


def clients(runs: Runs) -> str:
    """Return CSV with a line per client, policy and seed; `service` is input + 2 x output tokens of
    its completed requests."""
    header = (
        "policy",
        "seed",
        "client",
        "requests",
        "completed",
        "prompt_tokens",
        "output_tokens",
        "service",
        "ttft_mean_s",
        "e2e_mean_s",
    )
    return as_csv(
        header,
        (
            row
            for name, of_policy in runs.items()
            for run in of_policy
            for row in _clients(name, run)
        ),
    )


def _clients(name: str, run: RunResult) -> Iterable[tuple[Cell, ...]]:
    of_client: dict[str | None, list[RequestRecord]] = {}
    for record in run:
        of_client.setdefault(record.client, []).append(record)
    for client, own in sorted(of_client.items(), key=lambda item: item[0] or ""):
        done = [record for record in own if record.completed]
        prompt = sum(record.prompt_tokens for record in done)
        output = sum(record.output_tokens for record in done)
        means = (
            float(np.mean(per_request(done, metric))) if done else math.nan
            for metric in ("ttft", "e2e")
        )
        yield (
            name,
            run.seed,
            client,
            len(own),
            len(done),
            prompt,
            output,
            INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * output,
            *means,
        )


def summary(runs: Runs) -> str:
    """Return CSV with a line per metric, policy and seed."""
    return as_csv(
        ("policy", "seed", "metric", "statistic", "value"),
        (
            row
            for name, of_policy in runs.items()
            for run in of_policy
            for row in _figures(name, run)
        ),
    )


def _figures(name: str, run: RunResult) -> Iterable[tuple[Cell, ...]]:
    metrics = measure(run)
    for metric, of_metric in metrics.latencies.items():
        yield name, run.seed, f"{metric}_s", "mean", of_metric.mean
        for percentile in PERCENTILES:
            yield name, run.seed, f"{metric}_s", f"p{percentile}", of_metric.percentiles[percentile]
    counts = (
        "requests",
        "completed",
        "rejected",
        "failed",
        "preemptions",
        "recomputed_tokens",
        "cached_tokens",
        "grammars",
    )
    drafts = ("draft_tokens", "accepted_drafts", "acceptance_length", "tokens_per_step")
    for figure in (
        *counts,
        "duration_s",
        "request_rate",
        "output_rate",
        "total_rate",
        "device_share",
        "masks_s",
        "masks_share",
        *drafts,
    ):
        yield name, run.seed, figure, "", getattr(metrics, figure)


def timeline(runs: Runs) -> str:
    """Return the time series of every run as CSV: means over equal intervals."""
    return as_csv(
        ("policy", "seed", "time_s", "waiting", "running", "kv_held_pages"),
        (
            row
            for name, of_policy in runs.items()
            for run in of_policy
            for row in _stretches(name, run)
        ),
    )


def _stretches(name: str, run: RunResult) -> Iterable[tuple[Cell, ...]]:
    line = run.timeline
    if not len(line):
        return
    end = float(line.time_s[-1])
    bins = min(BINS, len(line))
    columns = [
        held_means(line.time_s, column.astype(np.float64), end, bins)
        for column in (line.waiting, line.running, line.kv_held)
    ]
    for row in zip(columns[0][0], *(means for _, means in columns), strict=True):
        yield name, run.seed, *map(float, row)


def comparison(found: Comparison, repeated: Repeated | None = None) -> str:
    """Return CSV with a line per change; the last three columns are from the comparison at other
    step times."""
    header = (
        "policy",
        "against",
        "metric",
        "statistic",
        "before",
        "after",
        "change",
        "low",
        "high",
        "measurable",
        "outcome",
    )
    more = () if repeated is None else ("change_shorter_steps", "change_longer_steps", "survives")
    rows = (
        (*_change(versus, line), *_elsewhere(repeated, index, line))
        for index, versus in enumerate(found.versus)
        for line in versus.lines
    )
    return as_csv((*header, *more), rows)


def _change(versus: Versus, line: Line) -> tuple[Cell, ...]:
    change = line.change
    figures = (change.a, change.b, change.relative, change.low, change.high)
    return (
        versus.other,
        versus.base,
        line.metric,
        line.statistic,
        *figures,
        "yes" if line.measurable else "no",
        line.outcome,
    )


def _elsewhere(repeated: Repeated | None, index: int, line: Line) -> tuple[Cell, ...]:
    if repeated is None:
        return ()
    changes = (other.change.relative for _, other in repeated.elsewhere(index, line))
    return *changes, "yes" if repeated.survives(index, line) else "no"
