"""The report's figures. Each takes runs by policy name (one for each seed) and returns a `Drawing`,
or None without data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dovetail_lab.fairness import service_difference, service_over_time, work_of
from dovetail_lab.metrics import per_request
from dovetail_lab.records import RunResult
from dovetail_lab.report.style import (
    MUTED,
    Drawing,
    dot_of,
    line_of,
    make,
    name_lines,
    plain_log_ticks,
    styled,
)

Floats = npt.NDArray[np.float64]
Runs = Mapping[str, Sequence[RunResult]]

BINS = 400  # per line over time
POINTS = 250  # per distribution
WINDOW_S = 60.0  # window for the service of clients, as in the VTC paper
CENTRES = 120  # number of such windows
CLIENTS = 12  # shown by name
SERVED = 6  # number of clients with a drawn service


def latencies(runs: Runs) -> Drawing | None:
    """Draw distributions of TTFT, TPOT and E2E."""
    with styled():
        figure, panels = make(1, 3, 2.9, sharey=True)
        drawn = [
            _ecdf(panel, runs, metric, title)
            for panel, (metric, title) in zip(panels, _LATENCIES.items(), strict=True)
        ]
        if not any(drawn):
            return None
        panels[0].set_ylabel("share of completed requests")
        panels[0].set_ylim(0, 1.02)
        panels[0].yaxis.set_major_formatter(FuncFormatter(_percent))
        name_lines(figure, list(runs))
    return Drawing(
        "latencies",
        "Latencies",
        "Cumulative share of requests by latency; further left is better. A dot marks p99.",
        figure,
    )


_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}


def _ecdf(panel: Axes, runs: Runs, metric: str, title: str) -> bool:
    panel.set_title(title)
    panel.set_xlabel("s")
    lowest = math.inf
    highest = 0.0
    for index, of_policy in enumerate(runs.values()):
        values = np.concatenate([per_request(run, metric) for run in of_policy])
        values = np.sort(values[values > 0])
        if not len(values):
            continue
        shares = np.linspace(0, 1, min(POINTS, len(values)))
        panel.plot(
            np.quantile(values, shares, method="inverted_cdf"),
            shares,
            drawstyle="steps-post",
            **line_of(index),
        )
        p99 = float(np.quantile(values, 0.99))
        panel.plot([p99], [0.99], **dot_of(index))
        lowest = min(lowest, float(np.quantile(values, 0.005)))
        highest = max(highest, float(values[-1]))
    if not highest:
        panel.text(0.5, 0.5, "nothing to show", ha="center", color=MUTED, transform=panel.transAxes)
        panel.set_xticks([])
        return False
    panel.set_xlim(lowest * 0.8, highest * 1.25)
    panel.set_xscale("log")
    decades = math.log10(highest * 1.25 / (lowest * 0.8))
    plain_log_ticks(
        panel.xaxis,
        (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0),
        6,
    )
    return True


def over_time(runs: Runs) -> Drawing | None:
    """Draw waiting requests, running requests and the KV pool, for each policy's first run."""
    firsts = {name: of_policy[0] for name, of_policy in runs.items()}
    if not any(len(run.timeline) for run in firsts.values()):
        return None
    end_s, unit, unit_s = _time_axis(firsts.values())
    with styled():
        figure, panels = make(3, 1, 4.4, sharex=True)
        for index, run in enumerate(firsts.values()):
            line = run.timeline
            pages = _pool(run)
            for panel, values in zip(
                panels, (line.waiting, line.running, 100 * line.kv_held / pages), strict=True
            ):
                times, means = held_means(line.time_s, values.astype(np.float64), end_s)
                panel.plot(times / unit_s, means, **line_of(index))
        for panel, title in zip(
            panels,
            ("waiting requests", "running requests", "KV pool held by running requests, %"),
            strict=True,
        ):
            panel.set_title(title, fontweight="normal")
            panel.set_ylim(bottom=0)
            panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        panels[2].set_ylim(0, 102)
        panels[2].set_yticks([0, 25, 50, 75, 100])
        panels[2].set_xlim(0, end_s / unit_s)
        panels[2].set_xlabel(f"time since the trace began, {unit}")
        name_lines(figure, list(runs))
    seed = next(iter(firsts.values())).seed
    return Drawing(
        "over-time",
        "Over time",
        f"Means over {end_s / BINS:.2g} s, of the runs with seed {seed}.",
        figure,
    )


def held_means(
    times: Floats, values: Floats, end: float, bins: int = BINS
) -> tuple[Floats, Floats]:
    """Return the means over `bins` equal parts of [0, end] of a step function, initially 0 and
    `values[i]` from `times[i]` on; and the bins' centers."""
    edges = np.linspace(0, end, bins + 1)
    knots = np.concatenate([[0.0], times, [max(end, times[-1] if len(times) else 0.0)]])
    area = np.concatenate([[0.0], np.cumsum(np.concatenate([[0.0], values]) * np.diff(knots))])
    return (edges[:-1] + edges[1:]) / 2, np.diff(np.interp(edges, knots, area)) / np.diff(edges)


def work(runs: Runs) -> Drawing | None:
    """Draw cumulative preemptions, recomputed tokens and cache hits, omitting those that didn't
    occur."""
    firsts = {name: of_policy[0] for name, of_policy in runs.items()}
    chosen = [
        column
        for column in _WORK
        if any(getattr(run.timeline, column).any() for run in firsts.values())
    ]
    if not chosen:
        return None
    end_s, unit, unit_s = _time_axis(firsts.values())
    with styled():
        figure, panels = make(1, len(chosen), 2.5)
        for panel, column in zip(panels, chosen, strict=True):
            for index, run in enumerate(firsts.values()):
                at = _thinned(len(run.timeline))
                panel.plot(
                    run.timeline.time_s[at] / unit_s,
                    np.cumsum(getattr(run.timeline, column))[at],
                    drawstyle="steps-post",
                    **line_of(index),
                )
            panel.set_title(_WORK[column], fontweight="normal")
            panel.set_xlabel(f"time, {unit}")
            panel.set_xlim(0, end_s / unit_s)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(4))
            panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.yaxis.set_major_formatter(FuncFormatter(_thousands))
        name_lines(figure, list(runs))
    return Drawing(
        "work",
        "Preemption and prefix cache",
        f"Cumulative, for the runs with seed {next(iter(firsts.values())).seed}. Cached tokens "
        f"include those that "
        "preempted requests find again when they resume.",
        figure,
    )


_WORK = {
    "preemptions": "preemptions",
    "recomputed_tokens": "tokens recomputed after them",
    "cached_tokens": "tokens found in the cache",
}


def clients(runs: Runs) -> Drawing | None:
    """Draw each client's TTFT, and the inequality of service; None for a trace with one client."""
    firsts = {name: of_policy[0] for name, of_policy in runs.items()}
    shares = _client_shares(next(iter(firsts.values())))
    if len(shares) < 2:
        return None
    shown = list(shares)[:CLIENTS]
    end_s, unit, unit_s = _time_axis(firsts.values())
    window_s = _window(end_s)
    centres = np.linspace(window_s / 2, end_s - window_s / 2, CENTRES)
    with styled():
        figure, (left, right) = make(1, 2, 1.3 + 0.19 * len(shown), width_ratios=(3, 4))
        for index, run in enumerate(firsts.values()):
            waits = _mean_ttft(run, shown)
            left.plot(waits, np.arange(len(shown)) + _nudge(index, len(firsts)), **dot_of(index))
            right.plot(
                centres / unit_s,
                service_difference(service_over_time(work_of(run), centres, window_s)),
                **line_of(index),
            )
        left.set_yticks(
            range(len(shown)), [f"{_client(name)}, {100 * shares[name]:.0f} %" for name in shown]
        )
        left.invert_yaxis()
        left.grid(visible=False, axis="y")
        left.set_title("mean TTFT by client", fontweight="normal")
        left.set_xlabel("s")
        left.set_xlim(left=0)
        right.set_title("service lag of clients, tokens/s", fontweight="normal")
        right.set_xlabel(f"time, {unit}")
        right.set_ylim(bottom=0)
        name_lines(figure, list(runs))
    caption = "Beside each client its share of the work (input + 2 x output tokens)."
    if len(shares) > len(shown):
        caption += f" The {len(shown)} with most work of {len(shares)}."
    caption += f" Right: over windows of {window_s:.3g} s, of the runs with seed {next(iter(firsts.values())).seed}; lower is fairer."
    return Drawing("clients", "Clients", caption, figure)


def service(runs: Runs) -> Drawing | None:
    """Draw the service over time of the clients with most work; None for a trace with one
    client."""
    firsts = {name: of_policy[0] for name, of_policy in runs.items()}
    shares = _client_shares(next(iter(firsts.values())))
    if len(shares) < 2:
        return None
    shown = list(shares)[:SERVED]
    end_s, unit, unit_s = _time_axis(firsts.values())
    window_s = _window(end_s)
    seed = next(iter(firsts.values())).seed
    centres = np.linspace(window_s / 2, end_s - window_s / 2, CENTRES)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    with styled():
        figure, panels = make(rows, columns, 0.6 + 1.6 * rows, sharex=True, sharey=True)
        for index, run in enumerate(firsts.values()):
            over_time = service_over_time(work_of(run), centres, window_s)
            for panel, client in zip(panels, shown, strict=False):
                if client in over_time.clients:
                    panel.plot(
                        centres / unit_s,
                        over_time.served[over_time.clients.index(client)],
                        **line_of(index),
                    )
        for panel, client in zip(panels, shown, strict=False):
            panel.set_title(_client(client), fontweight="normal")
            panel.set_xlim(0, end_s / unit_s)
        for panel in panels[len(shown) :]:
            panel.set_visible(False)
        panels[0].set_ylim(bottom=0)
        figure.supxlabel(f"time since the trace began, {unit}", fontsize="medium")
        figure.supylabel("service, tokens/s", fontsize="medium")
        name_lines(figure, list(runs))
    return Drawing(
        "service",
        "Service of clients",
        f"Input + 2 x output tokens a second, each request's spread from its first token to its "
        f"last; means over {window_s:.3g} s, of the runs with "
        f"seed {seed}{'' if len(shown) == len(shares) else f'; the {len(shown)} clients with most work of {len(shares)}'}.",
        figure,
    )


def _window(end_s: float) -> float:
    """Return the window of the VTC paper, or a tenth of the run if it is too short for that."""
    return min(WINDOW_S, end_s / 10)


def _client_shares(run: RunResult) -> dict[str | None, float]:
    """Return each client's share of the service demanded by all requests, largest first."""
    asked: dict[str | None, float] = {}
    for record in run:
        asked[record.client] = (
            asked.get(record.client, 0.0) + record.prompt_tokens + 2 * record.true_tokens
        )
    total = sum(asked.values())
    return {
        client: service / total
        for client, service in sorted(asked.items(), key=lambda item: (-item[1], item[0] or ""))
    }


def _mean_ttft(run: RunResult, shown: Sequence[str | None]) -> list[float]:
    values = per_request(run, "ttft")
    means = []
    for client in shown:
        own = values[[record.client == client for record in run]]
        own = own[~np.isnan(own)]
        means.append(float(own.mean()) if len(own) else math.nan)
    return means


def _client(name: str | None) -> str:
    text = "(none)" if name is None else name
    return text if len(text) <= 16 else f"{text[:6]}…{text[-9:]}"


def _nudge(index: int, count: int) -> float:
    """Return an offset that keeps dots of equal value from hiding each other."""
    return 0.0 if count == 1 else (index / (count - 1) - 0.5) * 0.4


def _time_axis(runs: Iterable[RunResult]) -> tuple[float, str, float]:
    """Return the end in seconds, and the axis's unit as a name and in seconds."""
    ends = [float(run.timeline.time_s[-1]) for run in runs if len(run.timeline)]
    end = max(ends, default=1.0) or 1.0
    return (
        (end, "s", 1.0)
        if end < 600
        else (end, "min", 60.0)
        if end < 4 * 3600
        else (end, "h", 3600.0)
    )


def _pool(run: RunResult) -> int:
    line = run.timeline
    return max(1, int(line.kv_free[0] + line.kv_held[0] + line.kv_cached[0])) if len(line) else 1


def _thinned(count: int) -> npt.NDArray[np.intp]:
    """Return about `BINS` indices of a column, including the last."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, BINS)).astype(np.intp))


def _percent(value: float, _: object) -> str:
    return f"{100 * value:.0f} %"


def _thousands(value: float, _: object) -> str:
    return (
        f"{value / 1e6:g} M"
        if abs(value) >= 1e6
        else f"{value / 1e3:g} k"
        if abs(value) >= 1e4
        else f"{value:g}"
    )
