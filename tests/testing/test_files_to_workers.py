"""`pytest -n` ends, and fails, when a test ends its worker; and long files go first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG

FILES = {
    "conftest": "from tests.conftest import pytest_xdist_make_scheduler",
    "test_dies": "import os\ndef test_before(): pass\ndef test_dies(): os._exit(3)\ndef "
    "test_after(): pass",
    "test_dies_too": "import os\ndef test_dies(): os._exit(3)",
    "test_good": "def test_one(): pass\ndef test_two(): pass",
}


@pytest.mark.full
def test_a_test_that_ends_its_worker_fails_and_all_others_run(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        "2",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 4 passed" in done.stdout


def test_files_that_are_named_are_there() -> None:
    pytest.importorskip("xdist")
    from tests.files_to_workers import TOGETHER

    tests = Path(__file__).parents[1]
    named = [tests / name for name in LONG]
    named += [tests.parent / name for files in TOGETHER.values() for name in files]
    assert not [path for path in named if not path.is_file()]
