"""Every program of `bench/` has a help text, and those that need a GPU report it if there is
none."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import bench
import pytest
import torch
from bench import limits
from bench.engines import settings_of
from bench.limits import sustained_seconds

PROGRAMS = sorted(
    path.stem for path in Path(bench.__path__[0]).glob("*.py") if "\ndef main(" in path.read_text()
)
NEED_A_GPU = [
    "adapters",
    "attention",
    "beside",
    "embeddings",
    "kv_fp8",
    "latency",
    "products",
    "profile_decode",
    "throughput",
]
needs_triton = {"attention", "kv_fp8", "products"}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Its exit status, or what it says instead."""
    if name in needs_triton:
        pytest.importorskip("triton")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        import_module(f"bench.{name}").main()
    return ended.value.code


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, monkeypatch, "--help") == 0
    doc = import_module(f"bench.{name}").__doc__
    assert doc is not None
    assert doc.splitlines()[0] in capsys.readouterr().out
    assert f"bench/{name}.py" in doc or f"bench.{name}" in doc, "and says how it is called"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_a_program_that_measures_one_fails_with_a_message(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(name, monkeypatch) == f"this measures a GPU, and torch {torch.__version__} sees none"


def test_a_setting_without_a_value_is_reported_as_such() -> None:
    with pytest.raises(SystemExit, match="--set overlap: expected KEY=VALUE"):
        settings_of(["overlap"])


def test_a_rate_that_is_kept_up_is_measured_over_as_many_runs_as_fill_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for the device's clock: the first hundred runs take 0.25 s, those after them
    0.5."""
    runs = [0]

    def run() -> None:
        runs[0] += 1

    def timed(run: object, repeat: int = 20, warm_ups: int = 3) -> float:
        before = runs[0]
        for _ in range(repeat + warm_ups):
            run()  # type: ignore[operator]
        return sum(0.25 if at < 100 else 0.5 for at in range(before, runs[0])) / (repeat + warm_ups)

    monkeypatch.setattr(limits, "seconds", timed)
    assert sustained_seconds(run, for_s=100.0) == pytest.approx((77 * 0.25 + 323 * 0.5) / 400)
    assert runs == [23 + 400]
