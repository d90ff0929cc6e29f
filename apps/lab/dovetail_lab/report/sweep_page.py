"""Page of a sweep: a curve per combination of settings, over the arrival rate or a numeric
setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dovetail_lab.report.curves import Curves, Panel, Point, Table, draw
from dovetail_lab.report.style import Drawing
from dovetail_lab.slo import Objective
from dovetail_lab.summary import title_of
from dovetail_lab.sweep import ARRIVALS, RATE, GridResult

_SHOWN = ("ttft_p99", "tpot_p99", "itl_p99", "e2e_mean")
_NO_FIGURE = (
    "There is no figure: no axis has two or more numeric values. --rates shows how "
    "latencies grow with the rate of arrivals."
)


def sweep_page(
    name: str,
    trace: str,
    results: Sequence[GridResult],
    objectives: Sequence[Objective],
    seeds: int,
    table: Table,
    command: str,
    files: Mapping[str, str],
) -> Curves:
    """Create the page. `results`: one per point of the grid, means over `seeds`; `name`: the
    engine's."""
    axis = _axis(results)
    drawings = [] if axis is None else _drawings(name, results, axis, objectives, seeds)
    over = f", means over {seeds} seeds" if seeds > 1 else ""
    combinations = "1 combination" if len(results) == 1 else f"{len(results):,} combinations"
    return Curves(
        title=f"{name} on {trace}",
        command=command,
        introduction=f"{combinations} of {', '.join(results[0].point.values)}{over}. Latencies "
        f"count from arrival. Settings are those of the first.",
        answers=(),
        cautions=(),
        engines=[results[0].engine],
        drawings=drawings,
        table=table,
        absent="" if drawings else _NO_FIGURE,
        files=files,
    )


def _axis(results: Sequence[GridResult]) -> str | None:
    """Return the horizontal axis: the rate, otherwise the first key with two or more numeric
    values."""
    for key in sorted(results[0].point.values, key=lambda key: key != RATE):
        values = {result.point.values[key] for result in results}
        if len(values) > 1 and all(map(_number, values)):
            return key
    return None


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _drawings(
    name: str, results: Sequence[GridResult], axis: str, objectives: Sequence[Objective], seeds: int
) -> list[Drawing]:
    def curves(figure: str, objective: Objective | None = None) -> dict[str, list[Point]]:
        made: dict[str, list[Point]] = {}
        for result in results:
            x = result.figures[ARRIVALS] if axis == RATE else float(result.point.values[axis])
            missed = (
                objective is not None
                and result.figures[f"slo_{objective.name}"] > objective.limit_s
            )
            made.setdefault(_name(name, result, axis), []).append(
                Point(x, result.figures[figure], None if objective is None else not missed)
            )
        return {name: sorted(points, key=lambda point: point.x) for name, points in made.items()}

    x_label = "requests/s that arrive" if axis == RATE else axis
    over = f" Means over {seeds} seeds." if seeds > 1 else ""
    judged = [
        Panel(_title(one.name), curves(f"slo_{one.name}", one), one.limit_s) for one in objectives
    ]
    plain = [
        Panel(_title(shown), curves(shown))
        for shown in _SHOWN
        if shown not in {one.name for one in objectives}
    ]
    throughput = Panel("output tokens/s", curves("output_rate"))
    within = [
        Panel(
            f"{title_of(one.metric)} within {one.limit_s:g} s",
            curves(f"slo_{one.name}_within", one),
            one.q,
            share=True,
        )
        for one in objectives
        if one.q is not None
    ]
    kept = (
        " A panel with a dotted limit is of all requests sent, as the objective is; hollow: missed."
        if objectives
        else ""
    )
    made = (
        draw(
            "rates",
            "Latency and throughput",
            f"Of completed requests.{kept}{over}",
            x_label,
            [*judged, *plain, throughput],
        ),
        draw(
            "objectives",
            "Objectives",
            f"The share of all requests sent; dotted: the required share; hollow: missed.{over}",
            x_label,
            within,
        ),
    )
    return [drawing for drawing in made if drawing is not None]


def _name(name: str, result: GridResult, axis: str) -> str:
    """Return a curve's name: its settings without the axis, or the engine's name if there are
    none."""
    return (
        ", ".join(f"{key}={value}" for key, value in result.point.values.items() if key != axis)
        or name
    )


def _title(figure: str) -> str:
    metric, _, statistic = figure.partition("_")
    return f"{title_of(metric, statistic)}, s"
