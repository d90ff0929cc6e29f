"""`Drawing`: a figure of a report, with what is written beside it."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure. `caption` says what it shows, and how to read it."""

    name: str  # of its files
    title: str
    caption: str
    figure: Figure
