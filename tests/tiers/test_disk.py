"""Engines with the tier `disk`: damaged files, restarts, and two engines in one folder."""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.clock import Clock, WallClock
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.prospect import Pace
from tests.small_model import small_demo

FLIPS = int(os.environ.get("DOVETAIL_TIER_FLIPS", "5"))
PROMPT = [*range(10, 45)]  # two frames and some
OTHER = [*range(60, 95)]


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", 16)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 30.0)
    monkeypatch.setattr("dovetail.engine.tiers.feature.FIND_S", 30.0)


def started(folder: Path | None, clock: Clock | None = None, **config: Any) -> LLMEngine:
    tiers = [] if folder is None else [{"name": "disk", "path": str(folder), "size": "64MiB"}]
    engine = LLMEngine.from_config(
        {
            "model": small_demo(),
            "dtype": "float32",
            "max_model_len": 96,
            "block_size": 8,
            "kv_host_memory": "1MiB",
            "kv_tiers": tiers,
            "executor": {"name": "local", "num_pages": 40},
            **config,
        },
        clock=clock or WallClock(),
    )
    feature(engine).wait_until_open()
    return engine


def feature(engine: LLMEngine) -> TierFeature:
    return next(one for one in engine.core.features if isinstance(one, TierFeature))


def answer(engine: LLMEngine, name: str, prompt: list[int] = PROMPT) -> tuple[list[int], int, int]:
    """Return the tokens of an answer, and how many were found and restored."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    engine.add_request(name, prompt, params)
    found: tuple[list[int], int, int] | None = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.metrics is not None
            restored = output.metrics.restored_tokens
            tokens = [*output.outputs[0].token_ids]
            found = tokens, output.num_cached_tokens, restored
    assert found is not None
    while engine.core.idle():
        pass
    engine.core.kv.check_integrity()
    return found


def forget(engine: LLMEngine, names: tuple[Any, ...]) -> None:
    """Let the device and the host pool forget, but not the tiers."""
    engine.core.kv.reset()
    pool = feature(engine).pool
    for name in names:
        pool.drop(name)


@pytest.fixture(scope="module")
def expected() -> Iterator[list[int]]:
    with LLMEngine.from_config(
        {"model": small_demo(), "dtype": "float32", "max_model_len": 96, "block_size": 8}
    ) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        engine.add_request("one", PROMPT, params)
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = [*output.outputs[0].token_ids]
        yield tokens


def frames_of(folder: Path) -> list[Path]:
    """Return the files of frames: those with more than a header."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 64)


def test_frames_survive_a_restart_and_serve_two_engines(
    tmp_path: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail")
    with started(tmp_path / "frames") as engine:
        assert answer(engine, "first") == (expected, 0, 0)
    line = (
        r"K and V beyond the device: 1\.0 MiB of host memory, in frames of 16 tokens; tier .*disk"
    )
    assert re.search(line, caplog.text)
    with started(tmp_path / "frames") as one, started(tmp_path / "frames") as two:
        assert answer(one, "again") == (expected, 32, 32)
        answer(one, "other", OTHER)
        assert answer(two, "again") == (expected, 32, 32)
        assert answer(two, "other", OTHER)[1:] == (32, 32)


def test_another_models_frames_are_not_found(tmp_path: Path) -> None:
    with started(tmp_path / "frames", load_format="dummy") as engine:
        answer(engine, "first")
    with started(tmp_path / "frames", load_format="dummy", seed=1) as engine:
        assert answer(engine, "again")[1:] == (0, 0)


def test_no_flipped_bit_of_a_file_reaches_an_answer(tmp_path: Path, expected: list[int]) -> None:
    chance = random.Random(7)
    folder = tmp_path / "frames"
    with started(folder) as engine:
        assert answer(engine, "first") == (expected, 0, 0)
        stats = feature(engine).stats
        for number in range(FLIPS):
            path = chance.choice(frames_of(folder))
            data = bytearray(path.read_bytes())
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            forget(engine, feature(engine).pool.names)
            tokens, cached, restored = answer(engine, f"again {number}")
            assert tokens == expected
            assert restored == cached < 32
            missed = sum(stats.missed.values()) + sum(stats.damaged_frames.values())
            assert missed > number, "each is counted"
    assert stats.restored_tokens < 32 * (FLIPS + 1)
