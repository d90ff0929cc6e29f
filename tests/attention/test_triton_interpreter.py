"""Runs the statements about the `triton` backend on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_triton_backend.py runs by itself")
def test_the_triton_backend_holds_in_tritons_interpreter() -> None:
    """In a process of its own: a kernel is interpreted or compiled for good when its module, or triton, is first imported."""
    statements = Path(__file__).with_name("test_triton_backend.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(statements)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=statements.parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert " passed" in run.stdout
