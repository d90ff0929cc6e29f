"""Draws the packages of Dovetail and their imports as `docs/assets/house.svg`.

    python -m tools.house            # writes the drawing
    python -m tools.house --check    # exits with 1 if the existing one is out of date

An arrow means that a package imports another, at import time or in use; transitive arrows are omitted. Boxes that no other box imports are at the
top.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import wrap

import grimp

DRAWING = Path(__file__).parents[1] / "docs" / "assets" / "house.svg"

ROOMS: Mapping[str, tuple[str, ...]] = {  # box of the drawing -> its modules
    "serving": ("dovetail.serving",),
    "cli": ("dovetail.cli", "dovetail.__main__"),
    "front": ("dovetail.front", "dovetail.compat"),
    "config": ("dovetail.config",),
    "registry": ("dovetail.registry",),
    "engine": ("dovetail.engine",),
    "nn": ("dovetail.nn",),
    "testing": ("dovetail.testing",),
    "api": ("dovetail.api",),
    "request": ("dovetail.request",),
    "base": ("dovetail.base", "dovetail.end_reason", "dovetail.errors"),
}
PLUGINS = (
    "schedulers",
    "kv_cache",
    "attention",
    "models",
    "samplers",
    "grammars",
    "executors",
    "observers",
    "lab",
)
SAYS: Mapping[str, str] = {
    "serving": "for programs on top",
    "cli": "the command dovetail",
    "front": "requests in, text out",
    "config": "engine.yaml",
    "registry": "finds plugins",
    "engine": "the loop: plan, submit, collect",
    "nn": "layers and kernels",
    "testing": "conformance suites, fakes",
    "api": "component interfaces",
    "request": "requests and their results",
    "base": "checks, errors, bounded files",
    "plugins": ", ".join(PLUGINS),
}
WIDTH, BOX, HEIGHT, GAP, RISE = (
    720,
    172,
    68,
    16,
    40,
)  # pixels: the drawing, a box, and the space between boxes and between rows


def imports() -> dict[str, set[str]]:
    """Return box -> boxes that it imports. The plugin packages are one box; loading through entry points isn't an import."""
    packages = [f"dovetail_{name}" for name in PLUGINS]
    graph = grimp.build_graph("dovetail", *packages, exclude_type_checking_imports=True)
    rooms = {module: room for module in graph.modules if (room := room_of(module)) is not None}
    found: dict[str, set[str]] = {room: set() for room in (*ROOMS, "plugins")}
    for module, room in rooms.items():
        for imported in graph.find_modules_directly_imported_by(module):
            other = rooms.get(imported)
            if other is not None and other != room:
                found[room].add(other)
    return found


def room_of(module: str) -> str | None:
    if module.startswith("dovetail_"):
        return "plugins"
    for room, modules in ROOMS.items():
        if any(module == one or module.startswith(f"{one}.") for one in modules):
            return room
    return None


def reduced(edges: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Remove transitive arrows. Raises `ValueError` for circular imports."""
    below: dict[str, set[str]] = {}

    def all_below(room: str, above: tuple[str, ...]) -> set[str]:
        if room in above:
            raise ValueError(f"a circle: {' -> '.join((*above, room))}")
        if room not in below:
            below[room] = set(edges[room]).union(
                *(all_below(other, (*above, room)) for other in edges[room])
            )
        return below[room]

    for room in edges:
        all_below(room, ())
    return {
        room: {other for other in others if not any(other in below[between] for between in others)}
        for room, others in edges.items()
    }


def floors(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return rows of boxes from the top: each box as low as possible, above all that it imports."""
    depth: dict[str, int] = {}

    def depth_of(room: str) -> int:
        if room not in depth:
            depth[room] = 1 + max((depth_of(other) for other in edges[room]), default=-1)
        return depth[room]

    order = [*ROOMS, "plugins"]
    levels = sorted({depth_of(room) for room in order}, reverse=True)
    return [[room for room in order if depth[room] == level] for level in levels]


def drawing() -> str:
    """Return the SVG, with colors for light and dark pages."""
    edges = reduced(imports())
    places: dict[str, tuple[float, float]] = {}
    for floor, rooms in enumerate(floors(edges)):
        left = (WIDTH - len(rooms) * BOX - (len(rooms) - 1) * 2 * GAP) / 2
        for index, room in enumerate(rooms):
            places[room] = left + index * (BOX + 2 * GAP), 14 + floor * (HEIGHT + RISE)
    height = max(y for _, y in places.values()) + HEIGHT + 14
    lines = [
        line for room, others in edges.items() for line in _arrows(places, room, sorted(others))
    ]
    boxes = [line for room, (x, y) in places.items() for line in _box(room, x, y)]
    return "\n".join([_head(height), *lines, *boxes, "</svg>", ""])


def _head(height: float) -> str:
    return f"""<svg class="loop-drawing" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="house-title">
<title id="house-title">Packages of Dovetail and their imports</title>
<style>
.loop-drawing {{ --ink: #1f2328; --quiet: #59636e; --core: #eceff1; --part: #1565c0; --paper: #ffffff; background: var(--paper); \
font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; font-size: 14px; }}
@media (prefers-color-scheme: dark) {{ .loop-drawing {{ --ink: #e6edf3; --quiet: #9da7b3; --core: #2b3440; --part: #64b5f6; --paper: #0d1117; }} }}
.loop-drawing text {{ fill: var(--ink); text-anchor: middle; }}
.loop-drawing .title {{ font-weight: 600; }}
.loop-drawing .say {{ fill: var(--quiet); font-size: 11px; }}
.loop-drawing .core {{ fill: var(--core); stroke: var(--quiet); }}
.loop-drawing .part {{ fill: var(--paper); stroke: var(--part); stroke-width: 1.5; stroke-dasharray: 5 3; }}
.loop-drawing .way {{ fill: none; stroke: var(--quiet); stroke-width: 1.2; marker-end: url(#house-tip); }}
.loop-drawing marker path {{ fill: var(--quiet); }}
</style>
<defs><marker id="house-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">\
<path d="M0 0 8 4 0 8z"/></marker></defs>"""


def _arrows(
    places: Mapping[str, tuple[float, float]], room: str, others: list[str]
) -> Iterable[str]:
    """Draw arrows from the lower edge of a box to the upper edges of what it imports, with their ends spread along the edges."""
    x, y = places[room]
    for other in others:
        to_x, to_y = places[other]
        shift = max(-BOX / 3, min(BOX / 3, (to_x - x) / 4))
        begin, end = (x + BOX / 2 + shift, y + HEIGHT), (to_x + BOX / 2 - shift, to_y)
        bend = (end[1] - begin[1]) / 2
        curve = f"C{begin[0]:g} {begin[1] + bend:g} {end[0]:g} {end[1] - bend:g} {end[0]:g} {end[1] - 1:g}"
        yield f'<path class="way" d="M{begin[0]:g} {begin[1]:g} {curve}"/>'


def _box(room: str, x: float, y: float) -> Iterable[str]:
    yield f'<rect class="{"part" if room == "plugins" else "core"}" x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
    yield f'<text class="title" x="{x + BOX / 2:g}" y="{y + 20:g}">{"plugin packages" if room == "plugins" else room}</text>'
    for number, line in enumerate(wrap(SAYS[room], 28)):
        yield f'<text class="say" x="{x + BOX / 2:g}" y="{y + 36 + 13 * number:g}">{line}</text>'


def main(arguments: list[str]) -> int:
    svg = drawing()
    if arguments == ["--check"]:
        if DRAWING.is_file() and DRAWING.read_text(encoding="utf-8") == svg:
            return 0
        print(f"{DRAWING} is out of date: run `python -m tools.house`", file=sys.stderr)
        return 1
    DRAWING.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
