"""Engines that are compared don't share a process."""

from __future__ import annotations

import os
import sys

import pytest
from bench.apart import apart


def test_a_function_runs_in_another_process_and_what_it_returns_comes_back() -> None:
    assert apart(os.getpid) not in (os.getpid(), os.getppid())
    assert apart(sorted, [3, 1, 2]) == [1, 2, 3]


def test_a_process_without_a_result_ends_the_program_with_its_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="_exit ended with status 3, and no result"):
        apart(os._exit, 3)
    with pytest.raises(SystemExit, match="exit ended with status 1, and no result"):
        apart(sys.exit, "4 tokens were generated, not 5")
    with pytest.raises(SystemExit, match="int ended with status 1, and no result"):
        apart(int, "five")
    told = capfd.readouterr().err
    assert "4 tokens were generated, not 5" in told
    assert "invalid literal for int() with base 10: 'five'" in told
