"""The page "Write a scheduler" is a whole package: built here from the page's own blocks, installed
with pip, and used."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.conformance import fewer
from tests.docs.pages import ROOT, blocks_of, commands_of
from tests.docs.running import check_output
from tests.preloaded import Preloaded
from tests.support import FULL

PAGE = "docs/write-a-scheduler.md"
INSTALL = [
    "pip",
    "install",
    "--quiet",
    "--no-deps",
    "--no-build-isolation",
    "--no-index",
    "--disable-pip-version-check",
    "--target",
]
DOVETAIL = ["-c", "from dovetail.cli.main import main; main()"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of the page, as a reader would have written them."""
    folder = tmp_path / "dovetail-shortest-prompt"
    for block in blocks_of(PAGE):
        if block.is_file:
            path = folder / str(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder


@pytest.mark.slow("starts processes that import everything")
def test_the_package_of_the_page_installs_passes_its_tests_and_runs_in_an_engine(
    project: Path, preloaded: Preloaded
) -> None:
    site = project.parent / "site"
    for block in blocks_of(PAGE):
        if block.language == "console":
            for command in commands_of(block):
                args = python_args(shlex.split(command.line), site)
                printed = run(preloaded, project, site, args)
                if command.output:
                    check_output(block, command.output, printed)
        elif block.language == "python" and not block.is_file:
            run(preloaded, project, site, ["-c", block.text])


def test_its_files_are_those_of_the_tree_that_the_page_draws(project: Path) -> None:
    tree = next(block.text for block in blocks_of(PAGE) if block.language == "text")
    drawn = {
        line.split("── ")[1].split()[0]
        for line in tree.splitlines()
        if "── " in line and not line.endswith("/")
    }
    assert drawn == {path.name for path in project.rglob("*") if path.is_file()}


def python_args(words: list[str], site: Path) -> list[str]:
    """A command of the page as arguments of this Python. pip installs into a folder of its own,
    from no index."""
    if words == ["pip", "install", "-e", "."]:
        return ["-m", *INSTALL, str(site), "."]
    if words[0] == "python":
        return words[1:]
    assert words[0] == "dovetail", f"{PAGE}: how is {words} to be run?"
    return [*DOVETAIL, *words[1:]]


def run(preloaded: Preloaded, project: Path, site: Path, args: list[str]) -> str:
    """Return this Python code's output, run in the project's folder with the installed packages on
    its path."""
    path = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = os.environ | {"PYTHONPATH": path, "DOVETAIL_PLUGINS": ""}
    if not FULL:
        environ["PYTEST_ADDOPTS"] = f"-p {fewer.__name__}"
    done = preloaded.run(args, cwd=project, environ=environ, timeout_s=300)
    assert done.exit_code == 0, f"{args}:\n{done.output}\n{done.errors}"
    return done.output
