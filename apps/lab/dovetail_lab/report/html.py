"""Render a report's page from its template and write it with its figures and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from dovetail_lab.digits import MISSING
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.style import Drawing, lay_out, png, svg
from dovetail_lab.writing import make_folder, write_whole

PAGE = "report.html"


def write_page(
    template: str,
    title: str,
    command: str,
    engines: Sequence[Engine],
    drawings: Sequence[Drawing],
    out: Path,
    tables: Mapping[str, str],
    **more: Any,
) -> list[Path]:
    """Write a page, its figures as PNG and its `tables` (by file name) into the new folder `out`,
    and return the files, the page first.

    Each figure is laid out once, for all formats. Raises `ConfigError` if a file can't be
    written.
    """
    for drawing in drawings:
        lay_out(drawing.figure)
    environment = Environment(
        loader=PackageLoader("dovetail_lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "unbroken": _unbroken}
    settings = {engine.name: engine.settings for engine in engines}
    page = environment.get_template(template).render(
        title=title,
        command=command,
        engines=engines,
        drawings=[(drawing, Markup(svg(drawing.figure, drawing.name))) for drawing in drawings],
        settings={
            name: json.dumps(one, indent=2, sort_keys=True, ensure_ascii=False)
            for name, one in settings.items()
        },
        differing=differences(settings),
        notes=_notes(engines),
        **more,
    )
    files: dict[str, str | bytes] = {
        PAGE: page,
        **tables,
        **{f"{drawing.name}.png": png(drawing.figure) for drawing in drawings},
    }
    make_folder(out)
    for name, content in files.items():
        write_whole(out / name, content)
    return [out / name for name in files]


def _breakable(text: str) -> Markup:
    """Allow line breaks after underscores in a column's title, so that wide tables fit the page."""
    return Markup(escape(text).replace("_", Markup("_<wbr>")))


def _unbroken(text: str) -> str:
    """Keep a number and its per cent sign on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _notes(engines: Sequence[Engine]) -> list[str]:
    """Return each note once, prefixed with the names of the engines that have it, unless all do."""
    names: dict[str, list[str]] = {}
    for engine in engines:
        for note in engine.notes:
            names.setdefault(note, []).append(engine.name)
    return [
        note if len(own) == len(engines) else f"{', '.join(own)}: {note}"
        for note, own in names.items()
    ]


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each dotted key with different values between engines, with the value of each
    engine."""
    flat = [dict(_flat("", one)) for one in settings.values()]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key, MISSING) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    items = (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if items is None:
        yield path, value if isinstance(value, str) else json.dumps(value)
    else:
        for key, one in items:
            yield from _flat(f"{path}.{key}" if path else str(key), one)
