"""What an installation without the extra `server`, or with a part of it, can and cannot do: each is told at once, before a process is started."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import DISTRIBUTION
from dovetail_server.command import EXTRA, MODULES
from dovetail_server.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
MISSING = """import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
from dovetail.cli.main import main
main()
"""


def run(modules: list[str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run `dovetail` where these can't be imported."""
    return subprocess.run([sys.executable, "-c", MISSING.format(modules=modules), *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", MODULES)
def test_a_package_that_is_missing_is_named_with_its_remedy_before_anything_starts(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: 0)
    monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    done = CliRunner().invoke(app, ["serve", "demo", "--port", "0"])
    assert done.exit_code == 2
    assert done.stderr == f'error: dovetail serve needs {MODULES[module]}; install with: pip install "{DISTRIBUTION}[{EXTRA}]"\n'


def test_without_the_extra_the_server_says_so_in_one_sentence() -> None:
    done = run(list(MODULES), "serve", "demo", "--port", "0")
    assert done.returncode == 2
    needed = ", ".join(MODULES.values())
    assert done.stderr == f'error: dovetail serve needs {needed}; install with: pip install "{DISTRIBUTION}[{EXTRA}]"\n'


@pytest.mark.parametrize("args", [("chat", "--help"), ("serve", "--help"), ("plugins", "list")], ids=" ".join)
def test_what_needs_no_server_works_without_its_packages(args: tuple[str, ...]) -> None:
    done = run(list(MODULES), *args)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_packages_are_those_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][EXTRA]
    needed = {requirement.name for requirement in map(Requirement, extra) if requirement.marker is None or requirement.marker.evaluate()}
    assert needed == {DISTRIBUTION, *MODULES.values()}
