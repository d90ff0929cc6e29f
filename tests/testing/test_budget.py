"""The budget of tests in `make test`: what counts, and what fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import Spent, descendants_cpu_s

ROOT = Path(__file__).parents[2]
BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
CONFTEST = "import sys\nsys.path.insert(0, {root!r})\nfrom tests.budget import *\n"
REGISTER = "def pytest_configure(config): config.pluginmanager.register(Budget(), 'budget')\n"


def test_cpu_time_of_a_living_child_and_of_its_own_children_counts() -> None:
    burn = BURN.format(seconds=0.2)
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); input()"
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


@pytest.mark.slow("burns CPU time in a pytest of its own")
def test_a_test_far_over_its_budget_fails_and_a_fixture_of_its_module_does_not_count(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)) + REGISTER)
    (tmp_path / "test_some.py").write_text(
        "import time, pytest\n"
        "def burn():\n"
        "    end = time.process_time() + 3\n"
        "    while time.process_time() < end: pass\n"
        "@pytest.fixture(scope='module')\n"
        "def costly(): burn()\n"
        "def test_shares(costly): pass\n"
        "def test_burns(): burn()\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "3.00 CPU s and 3." in done.stdout
    assert "; a test has " in done.stdout
    assert "tests over their budget" in done.stdout


@pytest.mark.slow("starts a pytest of its own")
def test_what_is_marked_slow_has_a_reason(tmp_path: Path) -> None:
    hooks = "from tests.conftest import pytest_collection_modifyitems\n"
    (tmp_path / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{hooks}")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_one(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "marked slow without a reason" in done.stdout + done.stderr
