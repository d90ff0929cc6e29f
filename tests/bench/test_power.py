"""Reports of GPU power, with a stand-in for nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.power import PowerWatch

LINES = [
    "1980, 650.10, Not Active",
    "1785, 702.30, Active",
    "[N/A], 700.00, Active",
    "1800, 699.90, Active",
    "17",
]


def stand_in(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an `nvidia-smi` that runs `script` on the path."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_medians_and_the_share_at_the_limit_of_what_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "\n".join(f"echo '{line}'" for line in LINES), monkeypatch)
    with PowerWatch() as watch:
        assert watch.process is not None
        watch.process.wait()
    assert watch.summary() == {
        "sm_mhz": 1800.0,
        "power_w": 699.9,
        "power_limited_share": pytest.approx(2 / 3),
    }


def test_a_program_that_keeps_running_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "exec tail -f /dev/null", monkeypatch)
    with PowerWatch() as watch:
        pass
    assert watch.process is not None
    assert watch.process.returncode not in (None, 0)
    assert watch.summary() == {}


def test_without_the_program_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with PowerWatch() as watch:
        pass
    assert watch.summary() == {}
