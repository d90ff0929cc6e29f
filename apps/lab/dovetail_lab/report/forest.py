"""Figure of a comparison: each change with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dovetail_lab.report.style import INK, MUTED, PAPER, Drawing, color_of, make, styled
from dovetail_lab.step_error import Repeated
from dovetail_lab.verdict import Comparison, Line

_LEAST = 0.05  # an axis extends at least this far to either side
_STEPS = (1, 2, 2.5, 5, 10)  # of ticks, times a power of ten
# per cent, where changes are large
_TICKS = (
    -99,
    -95,
    -90,
    -80,
    -67,
    -50,
    -33,
    0,
    50,
    100,
    200,
    400,
    900,
    1_900,
    4_900,
    9_900,
)
_LARGE = 0.7  # |log(1 + change)| from which the axis is logarithmic: half, or double


def forest(comparison: Comparison, repeated: Repeated | None = None) -> Drawing:
    """Draw the changes with their intervals, and as ticks those at other step times. Positions are
    logarithms of ratios, so that half is as far to the left as double to the right."""

    def elsewhere(index: int, line: Line) -> list[Line]:
        return [] if repeated is None else [other for _, other in repeated.elsewhere(index, line)]

    lines = [line for line in comparison.versus[0].lines if not math.isnan(line.change.relative)]
    columns = min(len(comparison.versus), 3)
    rows = math.ceil(len(comparison.versus) / columns)
    with styled():
        figure, panels = make(rows, columns, (1.0 + 0.2 * max(len(lines), 2)) * rows, sharey=True)
        for index, (panel, versus) in enumerate(
            zip(panels, comparison.versus, strict=False), start=1
        ):
            for row, line in enumerate(lines):
                own = versus.line(line.metric, line.statistic)
                _whisker(panel, row, own, color_of(index))
                for other in elsewhere(index - 1, line):
                    if math.isfinite(other.change.relative):
                        panel.plot(
                            [math.log1p(other.change.relative)],
                            [row],
                            "|",
                            markersize=9,
                            markeredgewidth=1.2,
                            color=INK,
                        )
            panel.axvline(0, color=INK, linewidth=0.8)
            panel.set_title(versus.other)
            panel.set_xlabel(f"change against {versus.base}, %")
            panel.grid(visible=False, axis="y")
            ends = [
                end
                for line in versus.lines
                for end in (line.change.low, line.change.relative, line.change.high)
            ]
            _axis(
                panel,
                [
                    *ends,
                    *(
                        other.change.relative
                        for line in lines
                        for other in elsewhere(index - 1, line)
                    ),
                ],
            )
        for panel in panels[len(comparison.versus) :]:
            panel.set_visible(False)
        panels[0].set_yticks(range(len(lines)), [line.label for line in lines])
        panels[0].set_ylim(len(lines) - 0.4, -0.6)
    level = 100 * comparison.method.confidence
    ticks = "" if repeated is None else " Ticks: the change with shorter and with longer steps."
    return Drawing(
        "changes",
        "Changes",
        f"With {level:g} % intervals, drawn as lines; hollow: no measurable difference, runs too "
        f"short to tell, or no interval. For latencies, "
        f"left is better.{ticks} The axis is logarithmic: half is as far from the center as "
        f"double.",
        figure,
    )


def _whisker(panel: Axes, row: int, line: Line, color: str) -> None:
    change = line.change
    sure = line.measurable
    if math.isnan(change.relative):
        return
    shade = color if sure else MUTED
    if not math.isnan(change.low):
        panel.plot(
            [math.log1p(change.low), math.log1p(change.high)],
            [row, row],
            color=shade,
            linewidth=1.6,
            solid_capstyle="butt",
        )
    panel.plot(
        [math.log1p(change.relative)],
        [row],
        "o",
        markersize=4.5,
        markeredgecolor=shade,
        markerfacecolor=shade if sure else PAPER,
    )


def _axis(panel: Axes, shown: Sequence[float]) -> None:
    """Set the limits and about five ticks, in per cent."""
    changes = [change for change in shown if math.isfinite(change)]
    low, high = (math.log1p(end(changes, default=0.0)) for end in (min, max))
    low = min(low, -_LEAST)
    high = max(high, _LEAST)
    margin = 0.06 * (high - low)
    panel.set_xlim(low - margin, high + margin)
    if max(-low, high) > _LARGE:
        ticks: list[float] = [
            tick for tick in _TICKS if low - margin <= math.log1p(tick / 100) <= high + margin
        ]
        ticks = [
            tick
            for place, tick in enumerate(ticks)
            if len(ticks) <= 6 or (place - ticks.index(0)) % 2 == 0
        ]
    else:
        ends = 100 * math.expm1(low - margin), 100 * math.expm1(high + margin)
        ticks = [
            tick
            for tick in MaxNLocator(6, steps=_STEPS).tick_values(*ends)
            if ends[0] <= tick <= ends[1]
        ]
    panel.set_xticks(
        [math.log1p(tick / 100) for tick in ticks],
        [f"{tick:+g}" if tick else "0" for tick in ticks],
    )
