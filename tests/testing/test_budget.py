"""The budget of tests in `make test`: what counts, and what fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import CPU_S, FAILS_AT, Spent, descendants_cpu_s, least_s, slowness

ROOT = Path(__file__).parents[2]
FACTOR = 0.15  # of the budget, so that little has to be burnt
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
CONFTEST = "import sys\nsys.path.insert(0, {root!r})\nfrom tests.budget import *\n"
REGISTER = (
    "def pytest_configure(config): config.pluginmanager.register(Budget({factor}), 'budget')\n"
)


def test_cpu_time_of_a_living_child_and_of_its_own_children_counts() -> None:
    burn = BURN.format(seconds=0.2)
    inner = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); "
        f"print(flush=True); input()"
    )
    before = Spent.now()
    with subprocess.Popen(
        [sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert descendants_cpu_s(os.getpid()) >= 0.15
        assert (Spent.now() - before).cpu_s >= 0.15
        child.communicate(b"\n")
    assert (Spent.now() - before).cpu_s >= 0.15, "after its end, too"


def test_the_best_of_three_tries_is_held_against_a_bound_of_cpu_time() -> None:
    tries = iter([9.0, 0.1, 0.01])
    assert least_s(lambda: next(tries), 0.5) == 0.1
    assert list(tries) == [0.01], "the first within the bound is the last"
    tries = iter([3e6, 1e6, 2e6, 0.0])
    assert 1e6 >= least_s(lambda: next(tries), 0.5) > 1e4, "in seconds of the reference machine"
    assert list(tries) == [0.0]


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder, without plugins that are installed."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow("burns CPU time in a pytest of its own")
def test_a_test_far_over_its_budget_fails_and_a_fixture_of_its_module_does_not_count(
    tmp_path: Path,
) -> None:
    conftest = CONFTEST.format(root=str(ROOT)) + REGISTER.format(factor=FACTOR)
    (tmp_path / "conftest.py").write_text(conftest)
    burnt_s = 4 * FAILS_AT * FACTOR * CPU_S * slowness()
    (tmp_path / "test_some.py").write_text(
        "import time, pytest\n"
        "def burn():\n"
        f"    end = time.process_time() + {burnt_s}\n"
        "    while time.process_time() < end: pass\n"
        "@pytest.fixture(scope='module')\n"
        "def costly(): burn()\n"
        "def test_shares(costly): pass\n"
        "def test_burns(): burn()\n"
    )
    # without pytest's summary: where `CI` is set, it repeats the whole message
    done = run_pytest(tmp_path, "-rN")
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    [(cpu_s, wall_s)] = re.findall(r"took (.*) CPU s and (.*) s; a test has ", done.stdout)
    # the system counts in hundredths, each kind of time for itself
    assert 0.95 * burnt_s <= float(cpu_s) < 1.5 * burnt_s, "without that of the fixture"
    assert float(wall_s) >= burnt_s / 2
    assert "tests over their budget" in done.stdout


@pytest.mark.slow("starts a pytest of its own")
def test_what_is_marked_slow_has_a_reason(tmp_path: Path) -> None:
    hooks = "from tests.conftest import pytest_collection_modifyitems\n"
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{hooks}")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_one(): pass\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "marked slow without a reason" in done.stdout + done.stderr
