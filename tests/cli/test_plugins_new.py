"""`dovetail plugins new`: what it writes installs, is found, works and passes the suite of its
kind; it overwrites nothing."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import is_normalized_name
from typer.testing import CliRunner

from dovetail import LLMEngine, SamplingParams, __version__
from dovetail.api.component import API_VERSIONS, KINDS, CommandSpec, Kind
from dovetail.cli.app import app
from dovetail.cli.plugins_new import (
    EXTENSIONS,
    MAX_NAME,
    NEW,
    component_name,
    new,
    write_package,
)
from dovetail.config.engine import COMPONENT_KEYS, EngineConfig
from dovetail.errors import DISTRIBUTION, ConfigError
from dovetail.registry.doctor.examine import examine
from dovetail.registry.registry import Registry
from dovetail.testing import run
from tests.preloaded import Preloaded
from tests.registry.fakes import Site, modules_forgotten
from tests.support import FULL, examples

LONGEST = "a" * 19 + "_" + "b" * 20
PIP_INSTALL = [
    "pip",
    "install",
    "--quiet",
    "--no-deps",
    "--no-build-isolation",
    "--no-index",
    "--disable-pip-version-check",
]
ROOT = Path(__file__).parents[2]

names = st.from_regex(r"(dovetail-)?[a-z][a-z0-9]{0,9}([_-][a-z0-9]{1,9}){0,2}", fullmatch=True)


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """A package of each kind, called after it."""
    folder = tmp_path_factory.mktemp("projects")
    return {kind: write_package(kind, f"my_{kind}", folder) for kind in KINDS}


@pytest.fixture(scope="module")
def site_packages(projects: dict[Kind, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which all are installed: by pip in the full profile, otherwise laid out like pip
    does it."""
    folder = tmp_path_factory.mktemp("site")
    if FULL:
        python(folder, "-m", *PIP_INSTALL, "--target", str(folder), *map(str, projects.values()))
        return folder
    for project in projects.values():
        metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        Site(folder).install(
            project.name,
            metadata["version"],
            modules={},
            entry_points=metadata["entry-points"]["dovetail.plugins"],
        )
        for package in (project / "src").iterdir():
            shutil.copytree(package, folder / package.name)
    return folder


@pytest.fixture
def installed(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, added to `sys.path`."""
    monkeypatch.delenv("DOVETAIL_PLUGINS", raising=False)
    monkeypatch.setattr(sys, "path", [str(site_packages), *sys.path])
    with modules_forgotten(site_packages):
        yield site_packages


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def project(projects: dict[Kind, Path], kind: Kind) -> Path:
    return projects[kind]


def python(cwd: Path, *args: str, **environ: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{args}:\n{done.stdout}\n{done.stderr}"


def test_they_install_are_listed_and_load(installed: Path, kind: Kind) -> None:
    component = Registry.discover().resolve(kind, f"my_{kind}")
    distribution = f"dovetail-my-{kind.replace('_', '-')}"
    assert (component.qualified_name, component.version) == (f"{distribution}:my_{kind}", "0.1.0")
    # the first version: what it uses came with it, and any later minor version runs it
    assert component.spec.api == f"{API_VERSIONS[kind].partition('.')[0]}.0"
    assert component.load().__name__.startswith("My")
    assert (installed / f"dovetail_my_{kind}" / "py.typed").exists()


@pytest.mark.slow("runs suites of components in processes")
def test_the_doctor_finds_nothing_wrong(
    site_packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed in site_packages.glob("dovetail_my_executor*"):
        shutil.copytree(installed, tmp_path / installed.name)
    monkeypatch.delenv("DOVETAIL_PLUGINS", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert examine("dovetail-my-executor").findings == ()


NEEDS_TIME = ("scheduler", "kv_cache", "sampler", "attention", "model", "logits_processor")
SUITES = [
    pytest.param(kind, marks=pytest.mark.full if kind in NEEDS_TIME else ()) for kind in KINDS
]


# the suite's process is a fork of this one
RUN_SUITE = """
import sys
from dovetail.testing import run, runner
from tests.conformance import fewer
from tests.forking import forking

runner.COMMAND = fewer.COMMAND
with forking(runner):
    verdict = run(*sys.argv[1:])
sys.exit(str(verdict) if verdict.findings else 0)
"""


@pytest.mark.parametrize("kind", SUITES)
@pytest.mark.slow("runs suites of components in processes")
def test_it_passes_the_suite_of_its_kind(
    installed: Path, kind: Kind, request: pytest.FixtureRequest
) -> None:
    if FULL:
        verdict = run(kind, f"my_{kind}")
        assert not verdict.findings, str(verdict)
        return
    preloaded: Preloaded = request.getfixturevalue("preloaded")
    ended = preloaded.run(
        ["-c", RUN_SUITE, kind, f"my_{kind}"],
        environ=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout_s=600,
    )
    assert ended.exit_code == 0, f"{ended.output}\n{ended.errors}"


def test_its_config_names_it_and_an_engine_runs_with_it(
    installed: Path, project: Path, kind: Kind
) -> None:
    config = EngineConfig.load(project / "engine.yaml")
    if kind in ("model", "parser"):
        return  # chosen by the model's config.json, or by the server
    [choice] = config.choices(next(key for key, of in COMPONENT_KEYS.items() if of == kind))
    assert choice.name == f"my_{kind}"
    with LLMEngine.from_config(project / "engine.yaml", max_model_len=64) as engine:
        engine.add_request("r", "ROMEO:", SamplingParams(max_tokens=3, ignore_eos=True))
        while engine.has_unfinished_requests():
            outputs = engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 3


@pytest.mark.slow("runs ruff over many packages")
def test_they_are_formatted_and_linted_whatever_their_names(tmp_path: Path) -> None:
    for kind in NEW:
        for name in ("x", LONGEST):
            (tmp_path / kind).mkdir(exist_ok=True)
            write_package(kind, name, tmp_path / kind)
    python(tmp_path, "-m", "ruff", "check", ".")
    python(tmp_path, "-m", "ruff", "format", "--check", ".")


@pytest.mark.full  # `make types` checks the templates where they lie
def test_its_types_are_strict(tmp_path: Path) -> None:
    project = write_package("scheduler", "my_own", tmp_path)
    python(project, "-m", "mypy", "src", MYPYPATH=str(ROOT / "core"))


def test_its_ci_installs_it_and_runs_its_suite(project: Path, kind: Kind) -> None:
    commands = "\n".join(
        step["run"] for step in steps_of(project, "conformance", "suite") if "run" in step
    ).splitlines()
    assert f"dovetail plugins doctor {project.name}" in commands
    assert (
        f'dovetail plugins test {kind} my_{kind} --json --badge "badge/$DOVETAIL.json" > '
        f"verdict.json" in commands
    )
    assert commands[-1] == "python -m pytest"
    tests = ast.parse((project / "tests/test_conformance.py").read_text())
    (suite,) = [node for node in tests.body if isinstance(node, ast.ClassDef)]
    assert ast.unparse(suite.bases[0]).lower().removesuffix("suite") == kind.replace("_", "")
    assert f'component = "my_{kind}"' in (project / "tests/test_conformance.py").read_text()


def workflow(project: Path, name: str) -> dict[str, Any]:
    read: dict[Any, Any] = yaml.safe_load((project / f".github/workflows/{name}.yml").read_text())
    return {"on": read.pop(True), **read}  # YAML 1.1 reads `on` as true


def steps_of(project: Path, name: str, job: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = workflow(project, name)["jobs"][job]["steps"]
    return steps


def test_its_ci_calls_the_reusable_workflow_with_each_dovetail(projects: dict[Kind, Path]) -> None:
    project = projects["scheduler"]
    called, text = (
        workflow(project, "conformance"),
        (project / ".github/workflows/conformance.yml").read_text(),
    )
    inputs = called["on"]["workflow_call"]["inputs"]
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(inputs)
    caller = workflow(project, "ci")["jobs"]["conformance"]
    assert (project / caller["uses"]).is_file()
    assert set(caller["with"]) <= set(inputs)
    assert {name for name, given in inputs.items() if given.get("required")} <= set(caller["with"])
    legs = caller["strategy"]["matrix"]["include"]
    assert [leg["dovetail"] for leg in legs] == ["oldest", "newest", "main"]
    named = set(re.findall(r"matrix\.(\w+)", str(caller["with"])))
    assert all(set(leg) == named for leg in legs)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert all(SpecifierSet(metadata["requires-python"]).contains(leg["python"]) for leg in legs)


@pytest.mark.parametrize(
    ("dovetail", "installs"),
    [
        ("oldest", ["install .[test] -c oldest.txt"]),
        ("newest", ["install .[test]"]),
        (
            "main",
            [
                "install .[test]",
                f"install --upgrade {DISTRIBUTION}[testing] @ git+https://example.org/it",
            ],
        ),
    ],
)
def test_its_ci_installs_the_dovetail_that_it_names(
    projects: dict[Kind, Path], tmp_path: Path, dovetail: str, installs: list[str]
) -> None:
    project = projects["model"]  # it depends on Dovetail with an extra
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    pip.chmod(0o755)
    (script,) = [
        step["run"]
        for step in steps_of(project, "conformance", "suite")
        if step.get("name") == "Install"
    ]
    (tmp_path / "pyproject.toml").write_text((project / "pyproject.toml").read_text())
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DOVETAIL": dovetail,
        "SOURCE": "https://example.org/it",
    }
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environ, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == installs
    if dovetail == "oldest":
        pinned = Requirement((tmp_path / "oldest.txt").read_text().strip())
        assert (pinned.name, pinned.specifier.contains(__version__)) == (DISTRIBUTION, True)


@pytest.mark.parametrize("name", ["ci", "conformance"])
def test_the_commands_of_its_ci_are_shell(projects: dict[Kind, Path], name: str) -> None:
    scripts = [
        step["run"]
        for job in workflow(projects["scheduler"], name)["jobs"].values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_it_depends_on_the_dovetail_that_wrote_it(project: Path) -> None:
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for text in (*metadata["dependencies"], metadata["optional-dependencies"]["test"][0]):
        requirement = Requirement(text)
        assert requirement.name == DISTRIBUTION
        assert requirement.specifier.contains(__version__)
        assert requirement.specifier.contains("9.0.0"), "later releases run it, too"


def test_no_word_of_the_template_is_left(project: Path) -> None:
    for path in project.rglob("*"):
        assert "acme" not in path.name.lower()
        assert not path.is_file() or "acme" not in path.read_text().lower(), path


@pytest.fixture(params=EXTENSIONS)
def extension(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def extended(extension: str, tmp_path: Path) -> Path:
    """The project of an extension, laid out for `PYTHONPATH` in its folder `src`."""
    project = write_package(extension, f"my_{extension}", tmp_path)
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    points = metadata["entry-points"]["dovetail.plugins"]
    Site(project / "src").install(
        project.name, metadata["version"], modules={}, entry_points=points
    )
    return project


@pytest.mark.slow("runs the tests of a package in a process")
def test_the_package_of_an_extension_passes_its_suite(extended: Path, preloaded: Preloaded) -> None:
    path = os.pathsep.join([str(extended / "src"), *sys.path])
    ended = preloaded.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=extended,
        environ=os.environ | {"PYTHONPATH": path},
    )
    assert ended.exit_code == 0, f"{ended.output}\n{ended.errors}"


def test_no_word_of_the_template_is_left_in_an_extension(tmp_path: Path, extension: str) -> None:
    project = write_package(extension, f"my_{extension}", tmp_path)
    for path in project.rglob("*"):
        assert "acme" not in path.name.lower()
        assert not path.is_file() or "acme" not in path.read_text().lower(), path
    assert f"my_{extension}" in (project / "README.md").read_text()


def test_the_ci_of_an_extension_runs_the_doctor_and_its_tests(extended: Path) -> None:
    steps = steps_of(extended, "conformance", "suite")
    commands = [step["run"] for step in steps if "run" in step]
    assert f"dovetail plugins doctor {extended.name}" in commands
    assert commands[-1] == "python -m pytest"
    assert "badges" not in workflow(extended, "ci")["jobs"]


@given(names, st.sampled_from(NEW))
@examples(quick=15, full=300)
def test_any_name_gives_names_that_are_valid_and_collide_with_no_import(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str
) -> None:
    project = write_package(kind, name, tmp_path_factory.mktemp("new"))
    component = component_name(name)
    assert is_normalized_name(project.name)
    CommandSpec(component, "a:B")  # every declaration takes the same names
    for path in project.rglob("*.py"):
        tree = ast.parse(path.read_text())
        defined = [
            node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        imported = [
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        ]
        assert len({*defined, *imported}) == len(defined) + len(imported), path


@pytest.mark.parametrize(
    "name",
    [
        "",
        "My",
        "3d",
        "a b",
        "a--b",
        "_a",
        "a.b",
        "../a",
        "a/b",
        "é",
        "dovetail-",
        "a" * (MAX_NAME + 1),
        "a\n",
    ],
)
def test_a_name_that_will_not_do_is_refused_with_what_would(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected lower case letters and digits"):
        write_package("scheduler", name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fcfs", "schedulers", "kv-cache", "lab", "llm"])
def test_a_name_that_dovetail_has_itself_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comes with Dovetail"):
        write_package("scheduler", name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        write_package("scheduler", "mine", tmp_path / "file")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean scheduler"):
        write_package("schedulers", "x", tmp_path)


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "dovetail-x").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        write_package("scheduler", "x", tmp_path)
    assert not list((tmp_path / "dovetail-x").iterdir())


def test_the_command_says_what_is_next(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(new)
    done = CliRunner().invoke(app, ["kv_cache", "my_cache", "--dir", str(tmp_path)])
    assert done.exit_code == 0
    assert (tmp_path / "dovetail-my-cache" / "pyproject.toml").exists()
    for line in (
        "dovetail plugins test kv_cache my_cache",
        "dovetail plugins doctor dovetail-my-cache",
    ):
        assert f"  {line}\n" in done.stdout


@pytest.mark.parametrize(
    ("kind", "tests"),
    [("drafter", "dovetail plugins test drafter mine"), ("route", "python -m pytest")],
)
def test_the_command_says_what_to_run_next(kind: str, tests: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plugins", "new", kind, "mine", "--dir", str(tmp_path)])
    project = tmp_path / "dovetail-mine"
    assert [line.strip() for line in done.stdout.splitlines()[1:5]] == [
        f"cd {project}",
        'pip install -e ".[test]"',
        tests,
        "dovetail plugins doctor dovetail-mine",
    ]
