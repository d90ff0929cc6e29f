"""`write_curves`: the page of a sweep or of a search for capacity, with its curves as SVG and PNG beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dovetail_lab.report.drawing import Drawing
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.html import write_page


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. The first `names` columns name what the row is about."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1


@dataclass(frozen=True, slots=True)
class Curves:
    """The content of a page. `engines` have a name for each curve, or one for the whole sweep."""

    title: str
    command: str
    introduction: str  # what was run, in a sentence
    answers: Sequence[str]  # in words, without full stops
    cautions: Sequence[str]
    engines: Sequence[Engine]
    drawings: Sequence[Drawing]
    table: Table
    absent: str = ""  # why there is no figure
    files: Mapping[str, str] = field(default_factory=dict)  # CSV by file name


def write_curves(curves: Curves, out: Path) -> list[Path]:
    """Write the page, its figures and its CSV into the new folder `out`, and return the files, the page first. Raises `ConfigError`."""
    return write_page("curves.html.j2", curves.title, curves.command, curves.engines, curves.drawings, out, curves.files, curves=curves)
