"""Runs the `triton` backend's conformance suite, and its own tests, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU they run by themselves")
HERE = Path(__file__).parent


def interpreted(statements: str) -> str:
    """Return pytest's output for a file, in a new process: a kernel is interpreted or compiled for good when it, or triton, is first imported."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:schemathesis", str(HERE / statements)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    return run.stdout


def test_the_triton_backend_holds_in_tritons_interpreter() -> None:
    assert " passed" in interpreted("test_triton_backend.py")


@pytest.mark.slow
def test_the_triton_backend_conforms_in_tritons_interpreter() -> None:
    verdict = next(line for line in interpreted("triton_suite.py").splitlines() if "CONFORMANT attention" in line)
    assert verdict.startswith("CONFORMANT")
    assert verdict.endswith("1 not tried here (cuda_graph)")
