"""Files for those who find the repository: workflows that trust nobody, templates, and how to cite
and to report."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.api.component import KINDS
from tests.docs.pages import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WRITTEN = sorted((ROOT / "core/dovetail/cli/templates").rglob("workflows/*.yml"))  # by plugins new
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_a_workflow_grants_nothing_by_default_and_each_job_what_it_needs(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        writes = {name for name, access in job["permissions"].items() if access == "write"}
        assert writes <= {"id-token", "attestations"}
        assert job["timeout-minutes"] <= 60


@pytest.mark.parametrize("path", [*WORKFLOWS, *WRITTEN], ids=lambda path: str(path.name))
def test_actions_are_pinned_by_commit_with_their_version_beside(path: Path) -> None:
    used = re.findall(r"uses: ([^.].*)", path.read_text(encoding="utf-8"))
    assert used
    for one in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one), one


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.name))
def test_the_commands_of_a_workflow_are_shell_without_values_of_others(path: Path) -> None:
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                assert "${{" not in step["run"], "a value could hold commands"
                subprocess.run(["bash", "-n", "-c", step["run"]], check=True)


def test_the_tests_run_on_every_python_that_the_package_names() -> None:
    jobs = read(ROOT / ".github/workflows/test.yml")["jobs"]
    named = [
        name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)
    ]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    assert any("make test" in step.get("run", "") for step in jobs["test"]["steps"])


def test_only_the_publishing_job_has_an_identity() -> None:
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert "contents" not in jobs["publish"]["permissions"], "it runs no code of the repository"
    assert jobs["publish"]["environment"] == "release"


def test_an_issue_can_name_every_kind_of_plugin() -> None:
    form = read(ROOT / ".github/ISSUE_TEMPLATE/plugin.yml")
    options = form["body"][0]["attributes"]["options"]
    assert options[: len(KINDS)] == list(KINDS)
    assert set(options[len(KINDS) :]) >= {"routes", "command", "weight format", "router"}


def test_the_citation_has_the_version_and_license_of_the_package() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_files_at_the_top_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\((?!https:)([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
        assert (ROOT / link).is_file(), link
