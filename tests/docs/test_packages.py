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
from tools import downstream

from tests.docs.pages import ROOT

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


@pytest.mark.slow("builds wheels and installs them")
def test_the_last_two_releases_are_tried_and_a_broken_package_fails(tmp_path: Path) -> None:
    for version in ("1.0", "1.1", "1.2"):
        wheel(tmp_path, version)
    listing = tmp_path / "packages.toml"
    listing.write_text('[[package]]\nname = "dovetail-mine"\n')
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "tools.downstream", "--packages", str(listing)]
    done = subprocess.run(
        [*command, "--results", str(out), "--find-links", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"EXAMPLES": ""},  # none of them is listed
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    results = json.loads(out.read_text())
    assert [(one["version"], one["passed"]) for one in results] == [("1.1", False), ("1.2", False)]
    assert all("contract-broken" in one["says"] for one in results)
