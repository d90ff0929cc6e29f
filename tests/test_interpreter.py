"""Runs all tests of Triton kernels in Triton's interpreter, on a machine without a GPU.

A kernel is interpreted or compiled for good when its module, or triton, is first imported: it takes
another process. One does for all files, as it imports torch for seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels import INTERPRETED, ON_GPU
from tests.support import FULL

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    INTERPRETED or ON_GPU, reason="the tests of kernels run by themselves"
)


@pytest.mark.slow("runs kernels in the interpreter")
def test_the_kernels_hold_in_tritons_interpreter() -> None:
    files = sorted(
        str(path)
        for path in TESTS.glob("*/test_*.py")
        if "\nfrom tests.kernels import" in path.read_text(encoding="utf-8")
    )
    assert files
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            *files,
        ],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "DOVETAIL_TEST_PROFILE": "full" if FULL else "quick",
            "DOVETAIL_TEST_BUDGET": "off",
        },
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
