"""Engines whose disk is full, read-only, slow or hangs, or whose tier returns nonsense: requests
finish with the tokens of an engine without tiers, within the stated wait."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.clock import VirtualClock
from dovetail.api.kv_tier import Frame, FrameKey, Why
from dovetail.engine.tiers import feature as tier_feature
from dovetail.engine.tiers import prospect
from dovetail_kv_tiers.disk import DiskTier
from tests.tiers.test_disk import (
    OTHER,
    PROMPT,
    answer,
    expected,
    feature,
    forget,
    frames_of,
    restores_always,
    started,
)

__all__ = ["expected", "restores_always"]  # fixtures

NEW = [*range(100, 140)]


@contextmanager
def refused(folder: Path, flags: int, error: int) -> Iterator[None]:
    """Let the opening of files in `folder` fail with `error` if it has one of these flags."""
    plain = os.open

    def opened(path: Any, wanted: int, *arguments: Any, **options: Any) -> int:
        if wanted & flags and str(path).startswith(str(folder)):
            raise OSError(error, os.strerror(error), str(path))
        return plain(path, wanted, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opened)
        yield


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let the kernel refuse to write more than `size` bytes to any file of this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow("makes an engine")
def test_a_full_disk_costs_no_token_and_is_used_again_once_there_is_room(
    tmp_path: Path, expected: list[int]
) -> None:
    folder = tmp_path / "frames"
    with started(folder) as engine:
        stats = feature(engine).stats
        for full in (files_end_at(4096), refused(folder, os.O_CREAT, errno.ENOSPC)):
            with full:
                assert answer(engine, f"first {full}") == (expected, 0, 0)
            assert not frames_of(folder)
            forget(engine, feature(engine).pool.names)
        assert stats.dropped_frames["refused"] == 4
        assert not stats.off
        answer(engine, "second")
        forget(engine, feature(engine).pool.names)
        assert answer(engine, "third") == (expected, 32, 32)


@pytest.mark.slow("makes two engines")
def test_a_folder_that_became_read_only_is_still_loaded_from(
    tmp_path: Path, expected: list[int]
) -> None:
    folder = tmp_path / "frames"
    with started(folder) as engine:
        answer(engine, "first")
    before = frames_of(folder)
    with started(folder) as engine, refused(folder, os.O_CREAT | os.O_WRONLY, errno.EROFS):
        for number in range(4):  # more failures than switch a tier off
            answer(engine, f"other {number}", [number, *OTHER])
        assert feature(engine).stats.off == {"dovetail:disk": 1}
        assert answer(engine, "again") == (expected, 32, 32)
        assert frames_of(folder) == before


def hangs(method: str, released: threading.Event) -> Callable[..., Why | None]:
    plain = getattr(DiskTier, method)

    def hanging(self: DiskTier, argument: Any) -> Why | None:
        released.wait()
        return plain(self, argument)  # type: ignore[no-any-return]

    return hanging


@pytest.mark.slow("makes two engines")
@pytest.mark.parametrize("method", ["find_frame", "load_frame", "store_frame"])
def test_a_disk_that_hangs_delays_a_request_for_the_stated_time_at_most(
    method: str, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that passes only while the engine waits: computing takes no time on it."""
    monkeypatch.undo()
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", 16)
    monkeypatch.setattr(tier_feature, "CLOSE_S", 0.05)
    folder = tmp_path / "frames"
    with started(folder) as engine:
        answer(engine, "first")
    released = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskTier, method, hangs(method, released))
        with started(folder, clock=VirtualClock()) as engine:
            for number in range(5):  # the tier is switched off meanwhile
                params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
                engine.add_request(f"again {number}", PROMPT, params)
                while engine.has_unfinished_requests():
                    outputs = engine.step()
                [output] = outputs
                assert [*output.outputs[0].token_ids] == expected
                assert output.metrics is not None
                assert output.metrics.first_token_time is not None
                waited = output.metrics.first_token_time - output.metrics.arrival_time
                bound = tier_feature.FIND_S + 2 * prospect.UNKNOWN_S + 2 * tier_feature.LOOK_S
                assert waited <= bound
                forget(engine, feature(engine).pool.names)
            released.set()


WRONG = ("lies", "mixes", "exchanges", "fails", "raises", "swaps headers")


def wrong_load(kind: str, chance: random.Random) -> Callable[..., Why | None]:
    """Return a `load_frame` that goes wrong."""
    plain = DiskTier.load_frame
    earlier: list[bytes] = []

    def load(self: DiskTier, frame: Frame) -> Why | None:
        if kind == "raises" or (kind == "fails" and chance.random() < 0.5):
            raise OSError(errno.EIO, "a test")
        if kind == "lies":
            return None
        why = plain(self, frame)
        if kind in ("exchanges", "swaps headers") and earlier:
            end = len(frame.data) if kind == "exchanges" else 64
            frame.data[:end], mine = earlier[0][:end], bytes(frame.data)
            earlier[0] = mine
        elif kind == "mixes" and earlier:
            frame.data[64:] = earlier[0][64:]
        else:
            earlier.append(bytes(frame.data))
        return why

    return load


@pytest.mark.slow("makes an engine")
@pytest.mark.parametrize("kind", WRONG)
def test_a_disk_that_returns_other_bytes_costs_no_token(
    kind: str, tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path / "frames") as engine:
        others = answer(engine, "others")[0]
        answer(engine, "other", OTHER)
        assert others == expected
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "load_frame", wrong_load(kind, random.Random(3)))
            for number in range(5):
                forget(engine, feature(engine).pool.names)
                assert answer(engine, f"again {number}")[0] == expected
                answer(engine, f"other {number}", OTHER)
        stats = feature(engine).stats
        missed = sum(stats.missed.values()) + sum(stats.damaged_frames.values())
        assert missed > 0


def found_late(self: DiskTier, key: FrameKey) -> Why | None:
    """Say that a frame is there though another engine may have removed it."""
    return None


@pytest.mark.slow("makes two engines")
def test_two_engines_that_evict_each_others_frames_at_once_answer_right(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(5)
    prompts = [PROMPT, *([number, *NEW] for number in range(12))]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
    tokens: dict[int, list[int]] = {}
    with started(tmp_path / "one") as engine:
        for number, prompt in enumerate(prompts):
            tokens[number] = answer(engine, str(number), prompt)[0]
        size = 6 * max(path.stat().st_size for path in frames_of(tmp_path / "one"))
    monkeypatch.setattr(DiskTier, "find_frame", found_late)
    tier = {"name": "disk", "path": str(tmp_path / "both"), "size": size}
    with started(None, kv_tiers=[tier]) as one, started(None, kv_tiers=[tier]) as two:
        for turn in range(40):
            engine = chance.choice([one, two])
            number = chance.randrange(4) if turn % 2 else chance.randrange(len(prompts))
            engine.add_request(f"{turn} {number}", prompts[number], params)
            for _ in range(chance.randint(1, 6)):
                check_some(one, tokens)
                check_some(two, tokens)
            if chance.random() < 0.3:
                forget(engine, feature(engine).pool.names)
        while one.has_unfinished_requests() or two.has_unfinished_requests():
            check_some(one, tokens)
            check_some(two, tokens)
        total = [feature(engine).stats for engine in (one, two)]
    assert sum(stats.restored_tokens for stats in total) > 0
    assert not any(stats.damaged_frames or stats.off for stats in total)
    assert sum(path.stat().st_size for path in frames_of(tmp_path / "both")) <= size


def check_some(engine: LLMEngine, tokens: dict[int, list[int]]) -> None:
    """Run a step, and check the answers that end with it."""
    if engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id.partition(" ")[2])
            assert not output.finished or [*output.outputs[0].token_ids] == tokens[number]
