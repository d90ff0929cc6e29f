"""Summary of a run on the terminal: one table, and notes on its accuracy."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from dovetail_lab.digits import evenly
from dovetail_lab.metrics import PERCENTILES, RunMetrics, Slo, measure
from dovetail_lab.records import RunResult, StepTimes

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL (pooled)", "e2e": "E2E", "queue": "queue"}


def title_of(metric: str, statistic: str = "") -> str:
    """Return a metric's name as the title of a figure: "p99 ITL"."""
    return f"{statistic} {TITLES[metric].removesuffix(' (pooled)')}".strip()


def print_summary(result: RunResult, slo: Slo | None = None) -> None:
    """Print a run's summary. `slo`: objectives of a request for goodput; None: no goodput."""
    metrics = measure(result, slo)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{result.name}: scheduler {result.settings['scheduler']}, {result.trace}, seed "
        f"{result.seed}"
    )
    console.print(_latencies(metrics))
    for line in (
        *_counts(metrics),
        conditions(result),
        source_of_times(result.step_times),
        *(f"note: {note}" for note in result.notes),
    ):
        console.print(line)


def _latencies(metrics: RunMetrics) -> Table:
    table = Table(
        "seconds",
        "mean",
        *(f"p{percentile}" for percentile in PERCENTILES),
        box=None,
        pad_edge=False,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in TITLES.items():
        summary = metrics.latencies[name]
        table.add_row(title, *evenly([summary.mean, *summary.percentiles.values()]))
    return table


def _counts(metrics: RunMetrics) -> tuple[str, ...]:
    share = metrics.cached_tokens / max(1, metrics.prompt_tokens)
    restored = metrics.restored_tokens / max(1, metrics.prompt_tokens)
    there = f", {restored:.1%} after they were restored" if metrics.restored_tokens else ""
    lines: tuple[str, ...] = (
        f"{metrics.completed} of {metrics.requests} requests completed in {metrics.duration_s:.1f} s"
        f" ({metrics.rejected} rejected, {metrics.failed} failed); device busy "
        f"{metrics.device_share:.0%}",
        f"{metrics.request_rate:.3g} requests/s, {metrics.output_rate:.5g} output tokens/s, "
        f"{metrics.total_rate:.5g} tokens/s in all",
        f"{share:.1%} of prompt tokens found in the prefix cache{there}; {metrics.preemptions} "
        f"preemptions, {metrics.recomputed_tokens} tokens recomputed",
    )
    if metrics.all_sessions:
        times = metrics.sessions
        lasted = (
            f"; they lasted {seconds(times.mean)} s on average, p90 "
            f"{seconds(times.percentiles[90])} s"
            if times.count
            else ""
        )
        lines = (*lines, f"{times.count} of {metrics.all_sessions} sessions completed{lasted}")
    if metrics.grammars:
        delayed = (
            f"their masks delayed steps by {seconds(metrics.masks_s)} s, "
            f"{metrics.masks_share:.1%} of the time"
        )
        lines = (
            *lines,
            f"{metrics.grammars} of {metrics.requests} requests had a grammar; {delayed}",
        )
    if metrics.draft_tokens:
        accepted = (
            f"{metrics.accepted_drafts / metrics.draft_tokens:.1%} of "
            f"{metrics.draft_tokens} drafts accepted"
        )
        lengths = (
            f"acceptance length {metrics.acceptance_length:.3g}, "
            f"{metrics.tokens_per_step:.3g} tokens a request and decode step"
        )
        lines = (*lines, f"{accepted}: {lengths}")
    if metrics.goodput is None:
        return lines
    return (
        *lines,
        f"goodput {metrics.goodput:.3g} requests/s: {metrics.attainment:.1%} of all requests met "
        f"the objectives",
    )


def conditions(result: RunResult) -> str:
    settings = result.settings
    overlap, reuse = ("on" if settings[name] else "off" for name in ("overlap", "prefix_reuse"))
    limit = settings["prefill_limit"]
    limited = "no prefill limit" if limit is None else f"prefill limit {limit:g}"
    routed = (
        f"{settings['replicas']} replicas, routed by {settings['router']}, each with "
        if "replicas" in settings
        else ""
    )
    groups = (
        f" of {len(settings['cache_groups'])} cache groups ({', '.join(settings['cache_groups'])})"
        if "cache_groups" in settings
        else ""
    )
    return (
        f"{routed}overlap {overlap}, {limited}, prefix reuse {reuse}, "
        f"{settings['num_pages']} pages, blocks of {settings['block_size']} tokens{groups}"
    )


def source_of_times(step_times: StepTimes) -> str:
    """Return a note on how accurate the run's step times are."""
    if step_times.name == "measured":
        return "times are real"
    if step_times.error is None:
        return f"simulated with step times {step_times.name}, never validated against measurements"
    return (
        f"simulated with step times {step_times.name}: off by {step_times.error:.1%} on average "
        f"({step_times.judged_on})"
    )


def seconds(value: float) -> str:
    """Format with three significant digits, or a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.3g}" if value < 100 else f"{value:.0f}"
