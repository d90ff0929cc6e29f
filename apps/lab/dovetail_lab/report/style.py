"""`Drawing`, the style of a report's figures, and their export as PNG and SVG. SVGs take their
colors from the page: light, dark or print."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito 2008, "Color universal design", without yellow, which is too light on paper;
# distinguishable with all common kinds of color vision.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# so that coinciding lines show through each other
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.3, 2.2)),
    (0, (6, 2, 1.3, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLES = len(SERIES) * len(DASHES)  # number of distinct line styles
INK = "#1c2126"
MUTED = "#6b727b"
GRID = "#dde1e6"
PAPER = "#fefefe"
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    **{color: f"var(--series-{i})" for i, color in enumerate(SERIES)},
}

WIDTH_IN = 7.4
_PNG_DPI = 160
_KEY_CHARACTERS = 95  # per line
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # bundled with matplotlib: the same everywhere
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "dovetail",
    "path.simplify": True,
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with its title and a caption that explains how to read it."""

    name: str  # base name of its files
    title: str
    caption: str
    figure: Figure


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style; figures must be created and saved within this context."""
    with mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS}):
        yield


def color_of(index: int) -> str:
    return SERIES[index % len(SERIES)]


def line_of(index: int) -> dict[str, Any]:
    """Return the line style of the index-th policy, the same in every figure; `STYLES` policies
    have distinct ones. The first is a broad pale band below the others, which have gaps: where
    curves coincide, each shows through the gaps of those above it."""
    # without the shift, six colors and four dashes would repeat after twelve
    dash = (index + index // (2 * len(SERIES))) % len(DASHES)
    broad: dict[str, Any] = (
        {} if index else {"linewidth": 3.6, "alpha": 0.45, "solid_capstyle": "butt"}
    )
    return {
        "color": color_of(index),
        "linestyle": DASHES[dash],
        "linewidth": 1.5,
        "zorder": 2 + index / 100,
        **broad,
    }


def dot_of(index: int) -> dict[str, Any]:
    """Return the style of the index-th policy's dots. The first's are larger, so that they are
    visible below others."""
    return {
        "color": color_of(index),
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": "none",
        "markersize": 4.0 if index else 6.5,
    }


def make(rows: int, columns: int, height_in: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Create a figure and its panels, row by row."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(panels.ravel())


def key_in(names: Sequence[str]) -> float:
    """Return the height of the legend of `name_lines` in inches, for figures that may have many
    names."""
    return 0.17 * -(-len(names) // _key_columns(names)) if len(names) > 1 else 0.0


def _key_columns(names: Sequence[str]) -> int:
    return max(1, _KEY_CHARACTERS // (max(map(len, names)) + 5))


def name_lines(figure: Figure, names: Sequence[str], *, dots: bool = False) -> None:
    """Add a legend above a figure's panels, with each name in the color of its line; none for a
    single policy. `dots`: show dots, too."""
    if len(names) > 1:
        lines = [
            Line2D([], [], **{**(dot_of(index) if dots else {}), **line_of(index)})
            for index in range(len(names))
        ]
        columns = _key_columns(names)
        figure.legend(
            lines,
            names,
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            labelcolor="linecolor",
            handlelength=2.6,
            columnspacing=1.4,
        )


def plain_log_ticks(axis: Axis, subs: Sequence[float], most: int) -> None:
    """Label a log axis with plain numbers: `subs` of each decade, about `most` labels."""
    axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def lay_out(figure: Figure) -> None:
    """Lay out a figure once for all file formats."""
    with styled():
        figure.draw_without_rendering()
        # "none" would leave an engine, for which each file is drawn once more
        figure.set_layout_engine(None)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with styled():
        figure.savefig(
            buffer, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None}
        )
    return buffer.getvalue()


def svg(figure: Figure, prefix: str) -> str:
    """Return an SVG to embed in a page: colors as CSS variables, all ids prefixed with `prefix`,
    and text as text."""
    buffer = io.StringIO()
    with styled():
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
