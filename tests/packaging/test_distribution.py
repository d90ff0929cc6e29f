"""The distribution is called dovetail-llm wherever pip is used, and uploads contain the right
files."""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dovetail
from dovetail.cli.plugins_new import write_package
from dovetail.errors import DISTRIBUTION, MissingExtraError
from tests.packaging.building import (
    ROOT,
    build_wheel,
    copy_tracked,
    make_venv,
    pip_install,
    run,
    serve_index,
    tracked_files,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of the repository, for nobody who has unpacked an sdist
UNPUBLISHED = (
    ".ci/",
    ".gitignore",
    ".pre-commit-config.yaml",
)

# What a reader, pip or a tool would take for the other project: `pip install dovetail`,
# "dovetail[torch]", 'dovetail>=0.1'.
OTHER_PROJECT = re.compile(
    r"""pip install [^\n`]*?(?<![\w./-])dovetail(?![\w.-])|["']dovetail\s*(\[[a-z,]+\]|[<>=~!]=?\s*\d)"""
)


def test_the_project_is_called_what_messages_call_it() -> None:
    assert (PROJECT["name"], PROJECT["version"]) == (DISTRIBUTION, dovetail.__version__)
    assert list(PROJECT["scripts"]) == ["dovetail"]


def test_every_extra_brings_something_and_names_this_distribution_for_others() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra, texts in extras.items():
        assert texts, f"{extra} is empty"
        for requirement in map(Requirement, texts):
            assert requirement.name != "dovetail"
            assert requirement.name != DISTRIBUTION or requirement.extras <= extras.keys()


@pytest.mark.parametrize("extra", ["torch", "testing", "lab"])
def test_a_missing_extra_is_named_by_a_line_for_pip(extra: str) -> None:
    assert (
        str(MissingExtraError.naming(extra, "this needs x"))
        == f'this needs x; install with: pip install "dovetail-llm[{extra}]"'
    )
    assert extra in PROJECT["optional-dependencies"]


def test_nothing_tells_anyone_to_install_the_other_project() -> None:
    told = []
    for path in tracked_files():
        if (
            path.startswith(("core/", "plugins/", "apps/", "docs/", "examples/", "tools/"))
            or "/" not in path
        ):
            text = (ROOT / path).read_bytes().decode(errors="replace")
            told += [f"{path}: {match[0]}" for match in OTHER_PROJECT.finditer(text)]
    assert not told


@pytest.mark.parametrize(
    "line",
    [
        "pip install dovetail",
        'pip install -U "dovetail[torch]"',
        '["dovetail>=0.1,<0.2"]',
        "'dovetail[lab]'",
    ],
)
def test_a_line_that_would_install_the_other_project_is_seen(line: str) -> None:
    assert OTHER_PROJECT.search(line)
    assert not OTHER_PROJECT.search(line.replace("dovetail", DISTRIBUTION))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    return build_wheel(copy_tracked(folder / "source"), folder / "wheels")


@pytest.mark.full
def test_new_packages_install_in_a_clean_venv_from_an_index_that_holds_the_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    """The index has only Dovetail, and the venv has Dovetail's dependencies. One package needs the
    extra `torch`."""
    projects = [
        write_package("observer", "mine", tmp_path),
        write_package("sampler", "other", tmp_path),
    ]
    python = make_venv(tmp_path)
    with serve_index([wheel], tmp_path / "index") as (index, asked):
        pip_install(python, *(f"{project}[test]" for project in projects), index=index)
    assert f"/simple/{DISTRIBUTION}/" in asked
    assert "/simple/dovetail/" not in asked
    home = run(python, "-c", "import dovetail; print(dovetail.__file__)", cwd=tmp_path)
    assert Path(home).is_relative_to(tmp_path / "venv")
    command = python.parent / "dovetail"
    assert "errors: 0, warnings: 0" in run(command, "plugins", "doctor", cwd=tmp_path)
    assert "CONFORMANT observer" in run(
        command, "plugins", "test", "observer", "mine", cwd=tmp_path
    )
    assert "interface Observer" in run(
        command, "plugins", "contract", "--kind", "observer", cwd=tmp_path
    )
    assert run(
        command,
        "generate",
        projects[0] / "engine.yaml",
        "ROMEO:",
        "--max-tokens",
        "3",
        cwd=tmp_path,
    )


@pytest.mark.full
def test_the_sdist_holds_docs_examples_and_tests_and_dovetail_installs_from_it(
    wheel: Path, tmp_path: Path
) -> None:
    source = copy_tracked(tmp_path / "source")
    (source / "docs/__pycache__").mkdir()
    (source / "docs/__pycache__/left.pyc").touch()
    run(
        sys.executable,
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})",
        cwd=source,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {path for path in tracked_files() if not path.startswith(UNPUBLISHED)} - held == set()
    assert {path for path in held - set(tracked_files()) if ".egg-info/" not in path} == {
        "PKG-INFO",
        "setup.cfg",
    }
    (again := tmp_path / "again").mkdir()
    assert build_wheel(unpacked, again).stat().st_size == pytest.approx(
        wheel.stat().st_size, rel=0.01
    )
