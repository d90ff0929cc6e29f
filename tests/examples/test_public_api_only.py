"""Third-party packages use only the public API: the packages in examples/plugins, and the templates
of `dovetail plugins new`. That they work without this repository, `tests/third_party.sh` shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.api.component import KINDS

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(
    path.parent
    for folder in ("examples/plugins", "core/dovetail/cli/templates")
    for path in (ROOT / folder).glob("*/engine.yaml")
)
PUBLIC = tuple(
    f"dovetail.{name}"
    for name in (
        "api",
        "nn",
        "runtime",
        "request",
        "sampling_params",
        "checks",
        "errors",
        "testing",
    )
)


def test_there_are_nine_examples_and_a_template_a_kind() -> None:
    assert len(PACKAGES) == 9 + len(KINDS)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_imports_only_what_is_public(package: Path) -> None:
    for path, node in nodes(package):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            ours = name.partition(".")[0] == "dovetail"
            own = name.partition(".")[0] in {folder.name for folder in (package / "src").iterdir()}
            runs_an_engine = name == "dovetail" and path.is_relative_to(package / "tests")
            assert (
                not name.startswith("dovetail")
                or own
                or runs_an_engine
                or (ours and name.startswith(PUBLIC))
            ), f"{path}: {name}"
            assert ".kernels" not in name, f"{path}: {name} is no layer"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_it_reads_no_private_name_of_anything_but_itself(package: Path) -> None:
    for path, node in nodes(package):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        ):
            assert ast.unparse(node.value) == "self", f"{path}:{node.lineno}: {ast.unparse(node)}"


def nodes(package: Path) -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node
