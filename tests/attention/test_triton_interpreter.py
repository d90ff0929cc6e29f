"""Runs the `triton` backend's conformance suite on a machine without a GPU.
`tests/test_interpreter.py` runs its own tests."""

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


@pytest.mark.full
def test_the_triton_backend_conforms_in_tritons_interpreter() -> None:
    """In a new process: a kernel is interpreted or compiled for good when it, or triton, is first
    imported."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            str(HERE / "triton_suite.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    verdict = next(line for line in run.stdout.splitlines() if "CONFORMANT attention" in line)
    assert verdict.startswith("CONFORMANT")
    assert verdict.endswith("1 not tried here (cuda_graph)")
