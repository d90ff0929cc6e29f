"""Closing a rank on a (simulated) GPU: it never waits forever, and releases resources in an order
that avoids waiting."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail_executors import rank as rank_module
from dovetail_executors.rank import Rank, RankSettings
from tests.runtime.demo import context

SETTINGS = RankSettings(
    group="test",
    size=2,
    store="nowhere",
    num_pages=None,
    threads=None,
    symmetric=True,
    step_timeout_s=1.0,
)


class Part:
    """A worker or a group that notes what is asked of it."""

    def __init__(self, acts: list[str]) -> None:
        self._acts = acts

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self._acts.append(name)


class Stream:
    """A stream whose kernels end when `is_over` returns True."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.query = is_over


def closing(monkeypatch: pytest.MonkeyPatch, acts: list[str], is_over: Callable[[], bool]) -> Rank:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(is_over))
    rank: Any = Rank(0, torch.device("cuda", 0), SETTINGS, context())
    rank.group = rank.worker = Part(acts)
    return rank  # type: ignore[no-any-return]


def test_cuda_graphs_go_before_the_group_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for those in which it was recorded."""
    acts: list[str] = []
    closing(monkeypatch, acts, lambda: True).close()
    assert acts == ["stop", "close"]


def test_kernels_that_wait_for_another_rank_are_released_before_anything_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acts: list[str] = []
    closing(monkeypatch, acts, lambda: "abort" in acts).close()
    assert acts == ["abort", "stop", "close"]


def test_a_gpu_that_never_stops_computing_is_left_to_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr(rank_module, "IDLE_S", 0.05)
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    acts: list[str] = []
    with caplog.at_level(logging.ERROR, "dovetail"):
        closing(monkeypatch, acts, lambda: False).close()
    assert acts == ["abort"]
    assert "cuda:0 still computes 0.05 s after the ranks were ended" in caplog.text
    assert at_exit == [(os._exit, 1)]
