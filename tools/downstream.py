"""Tries the packages of `docs/plugins/packages.toml` with releases of Dovetail, as their users
install them: from wheels, where no file of this repository can be imported.

    python -m tools.downstream                               # this tree's Dovetail
    python -m tools.downstream --dovetail dovetail_llm-1.0.0-py3-none-any.whl
    python -m tools.downstream --package dovetail-gdsf --device cuda

For each package it takes the last two releases that pip finds: on the package index, among the
wheels of `examples/plugins`, and in the folders of `--find-links`. The doctor looks at each, and
the conformance suite of its kind tries each component. Results are kept in
`docs/plugins/packages.json`, from which `tools.docs_hooks` makes the table of
`docs/plugins/packages.md`. The exit code is 1 if something failed.

It builds the wheels of this tree in a folder of its own, or in $WHEELS unless they are there.

What packages depend on is taken from the environment that runs this, and otherwise installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.testing.suites import suite_for

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs/plugins/packages.toml"
RESULTS = ROOT / "docs/plugins/packages.json"
RELEASES = 2  # of a package, the newest
TIME_LIMIT_S = 1800  # for one component's suite
ANY = "any"  # the device of a component that runs on none


@dataclass(frozen=True, kw_only=True)
class Package:
    """An entry of the list.

    Attributes:
        name: Name of the distribution.
        suite: By component, arguments of `dovetail plugins test`, under the key `arguments`.
    """

    name: str
    suite: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a component did, or its whole package where `component` is empty.

    Attributes:
        package: Name of the distribution.
        version: Its version.
        dovetail: Version of Dovetail.
        device: `cpu`, `cuda`, or `any` for a kind that computes on none.
        kind: Kind of the component.
        component: Name of the component.
        passed: Whether it conforms.
        says: The verdict's line, or what was wrong.
    """

    package: str
    version: str
    dovetail: str
    device: str
    kind: str
    component: str
    passed: bool
    says: str

    @property
    def key(self) -> tuple[str, ...]:
        """Return the values that identify a result: a later one with the same values replaces it."""
        return (self.package, self.version, self.component, self.dovetail, self.device)


class Environment:
    """A virtual environment with one release of Dovetail and one of a package."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv/bin/python"
        site = next((folder / "venv/lib").glob("python*")) / "site-packages"
        layer = folder / "layer"
        layer.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("dovetail", "__editable__")) and entry.suffix != ".pth":
                (layer / entry.name).symlink_to(entry)
        (site / "layer.pth").write_text(f"{layer}\n")
        self._folder = folder

    def install(self, *what: str) -> None:
        """Install wheels. Raises `subprocess.CalledProcessError` if pip fails."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        subprocess.run([*pip, *what], check=True)

    def dovetail(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Dovetail's command, in a folder of its own."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), "-P", "-m", "dovetail", *arguments],
            cwd=self._folder,
            env=environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )


def listed(path: Path = LIST) -> list[Package]:
    """Read the list. Raises `TypeError` for an entry with an unknown key."""
    return [Package(**entry) for entry in tomllib.loads(path.read_text("utf-8"))["package"]]


def releases(package: Package, links: Sequence[str]) -> list[str]:
    """Return what pip can install of a package: its newest releases, the newest first. Raises
    `ValueError` if there is none."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "--json", *links, package.name]
    found = subprocess.run(pip, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ValueError(f"{package.name}: no release was found\n{found.stderr}")
    versions = json.loads(found.stdout)["versions"][:RELEASES]
    return [f"{package.name}=={version}" for version in versions]


def results_of(package: Package, made: Environment, device: str) -> Iterator[Result]:
    """Ask the doctor, and run the suites of an installed package's components."""
    found = json.loads(made.dovetail("plugins", "list", "--json").stdout)["components"]
    own = [one for one in found if one["distribution"] == package.name]
    ours = next(one["version"] for one in found if one["distribution"] == "dovetail-llm")
    same: dict[str, Any] = {
        "package": package.name,
        "version": version_of(made, package.name),
        "dovetail": ours,
    }
    doctor = made.dovetail("plugins", "doctor", package.name)
    if doctor.returncode or not own:
        says = doctor.stdout.strip() or doctor.stderr.strip() or "it offers no component"
        yield Result(**same, device=ANY, kind="", component="", passed=False, says=says)
        return
    for one in own:
        kind, name = one["kind"], one["name"]
        runs_on_one = hasattr(suite_for(kind), "device")
        chosen = ["--suite", f"device={device}"] if runs_on_one else []
        arguments = package.suite.get(name, {}).get("arguments", [])
        tried = made.dovetail("plugins", "test", kind, name, *chosen, *arguments, "--json")
        verdict = json.loads(tried.stdout) if tried.stdout else {}
        yield Result(
            **same,
            device=device if runs_on_one else ANY,
            kind=kind,
            component=name,
            passed=tried.returncode == 0,
            says=verdict.get("line") or tried.stderr.strip(),
        )


def version_of(made: Environment, name: str) -> str:
    """Return the version of an installed distribution."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    command = [str(made.python), "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def kept(path: Path = RESULTS) -> list[Result]:
    """Return the results of earlier runs."""
    if not path.exists():
        return []
    return [Result(**one) for one in json.loads(path.read_text("utf-8"))]


def main(
    dovetail: Annotated[
        list[Path], typer.Option(help="A wheel of Dovetail. May be repeated.")
    ] = [],  # noqa: B006
    package: Annotated[
        list[str], typer.Option(help="A listed package; all by default. May be repeated.")
    ] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="Device to compute on: cpu or cuda.")] = "cpu",
    find_links: Annotated[
        list[Path], typer.Option(help="A folder of wheels besides. May be repeated.")
    ] = [],  # noqa: B006
    packages: Annotated[Path, typer.Option(help="The list of packages.")] = LIST,
    results: Annotated[Path, typer.Option(help="The file of results.")] = RESULTS,
) -> None:
    """Try listed packages with releases of Dovetail."""
    chosen = [one for one in listed(packages) if not package or one.name in package]
    if unlisted := set(package) - {one.name for one in chosen}:
        raise typer.BadParameter(f"{', '.join(sorted(unlisted))}: not listed in {packages}")
    known = {one.key: one for one in kept(results)}
    failed = False
    with tempfile.TemporaryDirectory() as own:
        built = os.environ.get("WHEELS") or own
        subprocess.run([ROOT / "tests/wheels.sh", built, sys.executable, "-m", "pip"], check=True)
        links = [f"--find-links={folder.resolve()}" for folder in (Path(built), *find_links)]
        for wheel in dovetail or Path(built).glob("dovetail_llm-*.whl"):
            for one in chosen:
                for release in releases(one, links):
                    for result in tried(one, release, wheel, device, links):
                        typer.echo(f"{result.package} {result.version}: {result.says}")
                        known[result.key] = result
                        failed |= not result.passed
    ordered = sorted(known.values(), key=lambda one: one.key)
    results.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n", "utf-8")
    raise typer.Exit(failed)


def tried(
    package: Package, release: str, wheel: Path, device: str, links: Sequence[str]
) -> list[Result]:
    """Install one release of a package beside a wheel of Dovetail, and try it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Environment(Path(folder))
        made.install(*links, f"{wheel.resolve()}[testing]", release)
        return list(results_of(package, made, device))


if __name__ == "__main__":
    typer.run(main)
