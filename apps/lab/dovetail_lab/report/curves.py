"""Page and figures of `sweep` and `capacity`: latencies, and shares of requests within an
objective, by arrival rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dovetail_lab.report.engine import Engine
from dovetail_lab.report.html import write_page
from dovetail_lab.report.style import (
    INK,
    PAPER,
    STYLES,
    Drawing,
    dot_of,
    key_in,
    line_of,
    make,
    name_lines,
    plain_log_ticks,
    styled,
)

_COLUMNS = 2
_WIDE = 8.0  # ratio of largest to smallest value from which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a curve. `met`: whether the panel's objective was met; None: no objective."""

    x: float
    y: float  # infinite: beyond any axis
    met: bool | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric over the rate, with a curve per engine, by name. All panels of a figure have the
    same engines, in the same order."""

    title: str
    curves: Mapping[str, Sequence[Point]]
    limit: float | None = None  # of an objective, drawn as a line
    share: bool = False  # from 0 to 1, on a percent axis


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. The first `names` columns are row labels."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


@dataclass(frozen=True, slots=True)
class Curves:
    """Content of a page. `engines`: one per curve, or one for the whole sweep."""

    title: str
    command: str
    introduction: str  # description of the runs, one sentence
    answers: Sequence[str]  # sentences without full stops
    cautions: Sequence[str]
    engines: Sequence[Engine]
    drawings: Sequence[Drawing]
    table: Table
    absent: str = ""  # reason if there is no figure
    files: Mapping[str, str] = field(default_factory=dict)  # CSV by file name


def write_curves(curves: Curves, out: Path) -> list[Path]:
    """Write the page, its figures and its CSV into the new folder `out`, and return the files, the
    page first. Raises `ConfigError`."""
    return write_page(
        "curves.html.j2",
        curves.title,
        curves.command,
        curves.engines,
        curves.drawings,
        out,
        curves.files,
        curves=curves,
    )


def draw(
    name: str,
    title: str,
    caption: str,
    x_label: str,
    panels: Sequence[Panel],
    answers: Mapping[str, float] | None = None,
) -> Drawing | None:
    """Draw the panels; None if no curve has a point. `answers`: each engine's sustainable rate,
    marked in every panel."""
    shown = list(panels[0].curves)[:STYLES] if panels else []
    panels = [
        panel
        for panel in panels
        if any(not math.isnan(point.y) for own in shown for point in panel.curves[own])
    ]
    if not panels:
        return None
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with styled():
        figure, axes = make(rows, columns, 0.4 + 2.1 * rows + key_in(shown))
        for place, panel in zip(axes, panels, strict=False):
            _draw(place, panel, shown, answers or {})
        for place in axes[len(panels) :]:
            place.set_visible(False)
        figure.supxlabel(x_label, fontsize="medium")
        name_lines(figure, shown, dots=True)
    left_out = len(panels[0].curves) - len(shown)
    more = [caption]
    if any(math.isinf(point.y) for panel in panels for own in shown for point in panel.curves[own]):
        more.append("An arrow at the top: infinite, because too many requests were never served.")
    if left_out:
        more.append(f"The first {len(shown)} of {len(shown) + left_out}.")
    return Drawing(name, title, " ".join(more), figure)


def _draw(axes: Axes, panel: Panel, shown: Sequence[str], answers: Mapping[str, float]) -> None:
    axes.set_title(panel.title, fontweight="normal")
    for index, name in enumerate(shown):
        points = [point for point in panel.curves[name] if not math.isnan(point.y)]
        finite = [point for point in points if math.isfinite(point.y)]
        axes.plot([point.x for point in finite], [point.y for point in finite], **line_of(index))
        dot = dot_of(index)
        for point in finite:
            axes.plot(
                [point.x],
                [point.y],
                **dot,
                markerfacecolor=PAPER if point.met is False else dot["color"],
                zorder=3,
            )
        for point in points:
            if math.isinf(point.y):
                axes.plot(
                    [point.x],
                    [0.97],
                    **{**dot, "marker": r"$\uparrow$"},
                    transform=axes.get_xaxis_transform(),
                    zorder=3,
                )
        if name in answers:
            axes.axvline(
                answers[name],
                color=dot["color"],
                linewidth=0.9,
                linestyle=line_of(index)["linestyle"],
                zorder=1,
            )
    if panel.limit is not None:
        axes.axhline(panel.limit, color=INK, linewidth=0.9, linestyle=(0, (2, 1.5)), zorder=1.5)
    every = [point for name in shown for point in panel.curves[name]]
    _y_axis(axes, panel, [point.y for point in every if math.isfinite(point.y)])
    if _spread([point.x for point in every]) >= _WIDE:
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis, (1.0, 2.0, 5.0), 8)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))


def _y_axis(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    if panel.share:
        axes.set_ylim(-0.02, 1.04)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        return
    drawn = [*values, *([] if panel.limit is None else [panel.limit])]
    if _spread(drawn) >= _WIDE:
        axes.set_yscale("log")
        axes.set_ylim(min(drawn) / 1.5, max(drawn) * 1.6)
        plain_log_ticks(axes.yaxis, (1.0, 2.0, 5.0), 8)
    else:
        axes.set_ylim(0, (max(drawn, default=0.0) or 1.0) * 1.15)


def _spread(values: Sequence[float]) -> float:
    """Return the largest over the smallest; 1 unless all are above 0."""
    return max(values) / min(values) if values and min(values) > 0 else 1.0
