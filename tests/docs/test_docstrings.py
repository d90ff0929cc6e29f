"""Examples in docstrings fit this version: they compile, and a plugin with the same declarations is
accepted. API changes are documented."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from dovetail.api.component import API_VERSIONS, KINDS
from dovetail.registry.plugin import PluginOrigin
from dovetail.registry.resolved import ResolvedComponent
from tests.docs.pages import ROOT, blocks_of, pages

FENCED = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PACKAGES = "docs/plugins/packages.md"
VERDICT = re.compile(rf"CONFORMANT ({'|'.join(KINDS)}) api=(\d+\.\d+)")


class Text(NamedTuple):
    place: str
    text: str


@cache
def docstrings(containing: str) -> tuple[Text, ...]:
    """Every docstring of the core, of the plugin packages and of the examples, in files that
    contain this: to parse all takes seconds."""
    return tuple(_docstrings(containing))


def _docstrings(containing: str) -> Iterator[Text]:
    for folder in ("core/dovetail", "plugins", "apps", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)) if containing in source else ():
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ) and (text := ast.get_docstring(node, clean=False)):
                    yield Text(
                        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}",
                        inspect.cleandoc(text),
                    )


def examples() -> list[Text]:
    """The Python in them, and on the pages."""
    fenced = [
        Text(text.place, textwrap.dedent(found))
        for text in docstrings("```python\n")
        for _, found in FENCED.findall(text.text)
    ]
    return fenced + [
        Text(block.place, block.text)
        for page in pages()
        for block in blocks_of(page)
        if block.language == "python"
    ]


def test_the_examples_are_found() -> None:
    places = [text.place for text in examples()]
    assert sum(place.startswith("core/dovetail/registry/hookspecs.py") for place in places) == 6
    assert any(place.startswith("core/dovetail/front/llm.py") for place in places)


@pytest.mark.parametrize(
    "example",
    [text for text in examples() if not text.place.endswith(".md")],
    ids=lambda text: text.place,
)
def test_an_example_compiles(example: Text) -> None:
    compile(example.text, example.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    "example",
    [text for text in examples() if "def dovetail_components" in text.text],
    ids=lambda text: text.place,
)
def test_a_component_that_an_example_declares_is_accepted(example: Text) -> None:
    namespace: dict[str, object] = {}
    exec(compile(example.text, example.place, "exec"), namespace)
    declared = list(namespace["dovetail_components"]())  # type: ignore[operator]
    assert declared
    for spec in declared:
        assert (
            ResolvedComponent(spec, PluginOrigin("dovetail-fair", "fair", "1.0")).api_problem()
            is None
        )


def test_a_verdict_that_is_shown_names_the_present_version() -> None:
    shown = [
        *docstrings("CONFORMANT "),
        *(
            Text(page, (ROOT / page).read_text(encoding="utf-8"))
            for page in pages()
            if page != PACKAGES  # which were written for versions of their own
        ),
    ]
    found = [
        (text.place, kind, version)
        for text in shown
        for kind, version in VERDICT.findall(text.text)
    ]
    assert len(found) > 5
    assert [one for one in found if API_VERSIONS[one[1]] != one[2]] == []  # type: ignore[index]
