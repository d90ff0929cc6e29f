"""Listed packages of third parties: the list can be read, each was tried, and one that doesn't keep
the contract is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer
from tools import downstream

from tests.support import FULL

OBSERVER = """
from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components():
    yield ComponentSpec(
        kind="observer", name="mine", api="1.0", target="dovetail_mine:Mine", summary="An observer."
    )


class Mine:
    pass
"""


def test_every_listed_package_was_tried_and_conforms() -> None:
    results = downstream.kept()
    assert {one.package for one in results} == {one.name for one in downstream.listed()}
    assert [one for one in results if not one.passed] == []


def test_a_misspelt_key_of_the_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "packages.toml"
    path.write_text('[[package]]\nname = "dovetail-mine"\nsuites = {}\n')
    with pytest.raises(TypeError, match="suites"):
        downstream.listed(path)


def wheel(folder: Path, version: str) -> None:
    """Write a package's wheel: three files of metadata, and a module."""
    info = f"dovetail_mine-{version}.dist-info"
    files = {
        "dovetail_mine.py": OBSERVER,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: dovetail-mine\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[dovetail.plugins]\nmine = dovetail_mine\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"dovetail_mine-{version}-py3-none-any.whl", "w") as archive:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)


class Unpacked(downstream.Environment):
    """This environment, with a wheel unpacked on the path of its processes, in place of one that
    pip fills."""

    def __init__(self, folder: Path) -> None:
        self.python = Path(sys.executable)
        self._folder = folder

    def install(self, *what: str) -> None:
        release = what[-1].replace("-", "_").replace("==", "-")
        [links] = [Path(one.partition("=")[2]) for one in what if one.endswith("/releases")]
        with zipfile.ZipFile(links / f"{release}-py3-none-any.whl") as archive:
            archive.extractall(self._folder / release)
        os.environ["PYTHONPATH"] = str(self._folder / release)

    def dovetail(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-P", "-m", "dovetail", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three releases of a package, in an environment that needs no wheel of
    Dovetail, outside of the full profile."""
    folder = tmp_path / "releases"
    folder.mkdir()
    for version in ("1.0", "1.1", "1.2"):
        wheel(folder, version)
    monkeypatch.setenv("EXAMPLES", "")  # none of them is listed
    if not FULL:
        monkeypatch.setattr(downstream, "Environment", Unpacked)
        monkeypatch.setenv("PYTHONPATH", "")
        monkeypatch.setenv("WHEELS", str(tmp_path))
        for name in (".built", "dovetail_llm-1-py3-none-any.whl"):
            (tmp_path / name).touch()
    return folder


@pytest.mark.slow("starts processes that import everything")
def test_the_last_two_releases_are_tried_and_a_broken_package_fails(
    releases: Path, tmp_path: Path
) -> None:
    listing = tmp_path / "packages.toml"
    listing.write_text('[[package]]\nname = "dovetail-mine"\n')
    out = tmp_path / "results.json"
    with pytest.raises(typer.Exit) as end:
        downstream.main(packages=listing, results=out, find_links=[releases])
    assert end.value.exit_code == 1
    results = json.loads(out.read_text())
    assert [(one["version"], one["passed"]) for one in results] == [("1.1", False), ("1.2", False)]
    assert all("contract-broken" in one["says"] for one in results)
