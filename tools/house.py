"""Draws the packages of Dovetail as `docs/assets/house.svg`: the core, plugins around it, apps on
top.

    python -m tools.house            # writes the drawing
    python -m tools.house --check    # exits with 1 if the existing one is out of date

An arrow means that a package imports another, at import time or in use. The arrows are listed here;
drawing fails if the code has an import that doesn't follow from them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grimp

from dovetail.api.component import KINDS

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs" / "assets" / "house.svg"
WIDTH = 720  # pixels
HEIGHT = 454


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the drawing: its modules, and where it is."""

    modules: tuple[str, ...]
    title: str
    caption: str
    x: int
    y: int
    width: int
    height: int = 48


BOXES: Mapping[str, Box] = {
    "apps": Box(
        ("dovetail_batch", "dovetail_cluster", "dovetail_lab", "dovetail_server"),
        "applications",
        "server, batch jobs, cluster, lab",
        190,
        14,
        220,
    ),
    "cli": Box(("dovetail.cli", "dovetail.__main__"), "cli", "the command", 424, 14, 106),
    "front": Box(
        ("dovetail.front", "dovetail.compat", "dovetail.serving"),
        "front",
        "LLM, LLMEngine: requests in, text out",
        204,
        138,
        312,
    ),
    "engine": Box(("dovetail.engine",), "engine", "the loop over steps", 204, 214, 148),
    "registry": Box(
        ("dovetail.registry", "dovetail.config"),
        "registry, config",
        "finds and selects plugins",
        368,
        214,
        148,
    ),
    "api": Box(
        (
            "dovetail.api",
            "dovetail.request",
            "dovetail.base",
            "dovetail.end_reason",
            "dovetail.errors",
            "dovetail.gguf",
        ),
        "api, request",
        "interfaces of components, data of requests",
        204,
        290,
        312,
    ),
    "nn": Box(("dovetail.nn",), "nn", "layers and kernels", 204, 392, 148),
    "testing": Box(("dovetail.testing",), "testing", "conformance suites", 368, 392, 148),
}
PLUGINS = "plugins"
DEVICE_KINDS = ("executor", "model", "attention", "sampler", "logits_processor")
HOST_KINDS = (
    "scheduler",
    "kv_cache",
    "kv_tier",
    "grammar",
    "drafter",
    "observer",
    "tokenizer",
    "parser",
)

ARROWS: Mapping[tuple[str, str], str] = {  # (importing, imported) -> path
    ("apps", "front"): "M392 62V136",
    ("cli", "front"): "M477 62V136",
    ("front", "engine"): "M278 186V212",
    ("front", "registry"): "M442 186V212",
    ("engine", "api"): "M278 262V288",
    ("registry", "api"): "M442 262V288",
    ("nn", "api"): "M278 392V340",
    ("testing", "api"): "M442 392V340",
    (PLUGINS, "api"): "M556 314H518",
    (PLUGINS, "nn"): "M164 416H202",
}
UNDRAWN = (  # imports of few modules
    ("testing", "front"),  # suites drive the loop
    ("testing", "nn"),
    ("cli", "testing"),  # `plugins test`
    ("apps", "testing"),  # the lab's executor extends a fake
)


def imports() -> dict[str, set[str]]:
    """Return box -> boxes that it imports. Loading through entry points isn't an import."""
    packages = [path.name for path in sorted(ROOT.glob("*/*/dovetail_*")) if path.is_dir()]
    graph = grimp.build_graph("dovetail", *packages, exclude_type_checking_imports=True)
    boxes = {module: box for module in graph.modules if (box := box_of(module)) is not None}
    found: dict[str, set[str]] = {box: set() for box in (*BOXES, PLUGINS)}
    for module, box in boxes.items():
        for imported in graph.find_modules_directly_imported_by(module):
            other = boxes.get(imported, box)
            if other != box:
                found[box].add(other)
    return found


def box_of(module: str) -> str | None:
    """Return the box of a module. The packages of plugins are one box."""
    for name, box in BOXES.items():
        if any(module == one or module.startswith(f"{one}.") for one in box.modules):
            return name
    return PLUGINS if module.startswith("dovetail_") else None


def unexplained(
    edges: Mapping[str, Iterable[str]], arrows: Iterable[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return the edges that don't follow from `arrows`. Raises `ValueError` for circular arrows."""
    direct: dict[str, list[str]] = {}
    for importing, imported in arrows:
        direct.setdefault(importing, []).append(imported)
    below: dict[str, set[str]] = {}

    def all_below(box: str, above: tuple[str, ...]) -> set[str]:
        if box in above:
            raise ValueError(f"circular imports: {' -> '.join((*above, box))}")
        if box not in below:
            others = direct.get(box, [])
            below[box] = set(others).union(*(all_below(one, (*above, box)) for one in others))
        return below[box]

    return {
        (box, other)
        for box, others in edges.items()
        for other in others
        if other not in all_below(box, ())
    }


def drawing() -> str:
    """Return the SVG, with colors for light and dark pages.

    Raises `ValueError` if an import of the code doesn't follow from the arrows, or a kind of
    component is missing.
    """
    if missing := unexplained(imports(), (*ARROWS, *UNDRAWN)):
        raise ValueError(f"the drawing has no arrows for these imports: {sorted(missing)}")
    if missing_kinds := set(KINDS) ^ {*DEVICE_KINDS, *HOST_KINDS}:
        raise ValueError(f"the drawing must have each kind once: {sorted(missing_kinds)}")
    arrows = [f'<path class="way" d="{path}"/>' for path in ARROWS.values()]
    boxes = [line for box in BOXES.values() for line in _box(box)]
    return "\n".join(
        [
            _head(),
            '<rect class="frame" x="190" y="102" width="340" height="250" rx="6"/>',
            '<text class="say left" x="204" y="124">the core: package dovetail</text>',
            '<text class="say" x="360" y="384">for authors of plugins</text>',
            *arrows,
            # brackets of the columns; the first also points at api
            '<path class="line" d="M156 153H164V416M156 297H164"/>',
            '<path class="way" d="M164 314H202"/>',
            '<path class="line" d="M564 117H556V333H564"/>',
            *boxes,
            *_column("on the device", DEVICE_KINDS, 14, 138),
            *_column("on the host", HOST_KINDS, 566, 102),
            "</svg>",
            "",
        ]
    )


def _head() -> str:
    return f"""<svg class="loop-drawing" xmlns="http://www.w3.org/2000/svg" \
viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="house-title">
<title id="house-title">Packages of Dovetail and their imports: a core, kinds of plugins on both \
sides, applications on top</title>
<style>
.loop-drawing {{ --ink: #1f2328; --quiet: #59636e; --core: #eceff1; --part: #1565c0; \
--paper: #ffffff; background: var(--paper); \
font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; font-size: 14px; }}
@media (prefers-color-scheme: dark) {{ .loop-drawing {{ --ink: #e6edf3; --quiet: #9da7b3; \
--core: #2b3440; --part: #64b5f6; --paper: #0d1117; }} }}
.loop-drawing text {{ fill: var(--ink); text-anchor: middle; }}
.loop-drawing .title {{ font-weight: 600; }}
.loop-drawing .say {{ fill: var(--quiet); font-size: 11px; }}
.loop-drawing .left {{ text-anchor: start; }}
.loop-drawing .key {{ fill: var(--part); font-size: 12px; \
font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }}
.loop-drawing .core {{ fill: var(--core); stroke: var(--quiet); }}
.loop-drawing .frame {{ fill: none; stroke: var(--quiet); stroke-width: 1.5; }}
.loop-drawing .part {{ fill: var(--paper); stroke: var(--part); stroke-width: 1.5; \
stroke-dasharray: 5 3; }}
.loop-drawing .line, .loop-drawing .way {{ fill: none; stroke: var(--quiet); stroke-width: 1.2; }}
.loop-drawing .way {{ marker-end: url(#house-tip); }}
.loop-drawing marker path {{ fill: var(--quiet); }}
</style>
<defs><marker id="house-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" \
markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>"""


def _box(box: Box) -> Iterable[str]:
    middle = box.x + box.width / 2
    yield _rect("core", box.x, box.y, box.width, box.height)
    yield f'<text class="title" x="{middle:g}" y="{box.y + 20}">{box.title}</text>'
    yield f'<text class="say" x="{middle:g}" y="{box.y + 37}">{box.caption}</text>'


def _column(where: str, kinds: Sequence[str], x: int, top: int) -> Iterable[str]:
    """Draw the kinds of plugins below each other, and a heading."""
    yield f'<text class="say" x="{x + 70}" y="{top - 10}">plugins, {where}</text>'
    for number, kind in enumerate(kinds):
        y = top + 36 * number
        yield _rect("part", x, y, 140, 30)
        yield f'<text class="key" x="{x + 70}" y="{y + 19}">{kind}</text>'


def _rect(style: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def main(arguments: list[str]) -> int:
    """Write or check the drawing. Returns the exit code."""
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
