"""Calibration measures adapters: it writes files that engines accept, and subtracts times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.api.executor import AdapterCapacity
from dovetail.front.lora_files import AdapterFiles, read_adapter
from dovetail.request.lora import LoRARequest
from dovetail_lab.adapter_timing import adapter_times, written_adapters

CAPACITY = AdapterCapacity(
    slots=2, max_rank=4, modules={"model.layers.0.self_attn.q_proj": (8, 6), "lm_head": (8, 3)}
)


class FakeRig:
    """Steps take 1 s, 0.25 s more with adapters and 0.125 s more for each of their rows; loads
    0.5 s."""

    def __init__(self, capacity: AdapterCapacity | None, rows: int = 8) -> None:
        self.engine: Any = SimpleNamespace(
            capacity=SimpleNamespace(adapters=capacity), config=SimpleNamespace(max_num_seqs=rows)
        )
        self.adapter: LoRARequest | None = None
        self.sightings: list[Any] = []
        self._rows = 0
        self._loaded: set[str] = set()

    def time_of(self, prompt: list[int], adapter: LoRARequest) -> float:
        is_new = adapter.lora_name not in self._loaded
        self._loaded.add(adapter.lora_name)
        return 1.0 + 0.5 * is_new

    def grow(self, rows: int, context: int) -> None:
        self._rows = rows

    def decode(self, steps: int) -> None:
        seconds = 1.0 if self.adapter is None else 1.25 + 0.125 * self._rows
        self.sightings += [SimpleNamespace(ended=seconds * step) for step in range(steps)]

    def clear(self) -> None:
        self._rows = 0


def test_written_adapters_are_accepted_and_removed() -> None:
    pytest.importorskip("safetensors", reason="adapters are files of this library")
    with written_adapters(CAPACITY, 2) as adapters:
        folders = [Path(adapter.lora_path) for adapter in adapters]
        digests = {
            read_adapter(AdapterFiles.find(str(folder)), CAPACITY).digest for folder in folders
        }
    assert len(digests) == 2
    assert not any(folder.exists() for folder in folders)


def test_loads_steps_and_rows_are_told_apart() -> None:
    pytest.importorskip("safetensors", reason="adapters are files of this library")
    rig: Any = FakeRig(CAPACITY)
    assert adapter_times(rig, quick=True) == pytest.approx((0.5, 0.25, 0.125))
    assert rig.adapter is None
    assert rig.sightings == []


def test_an_engine_without_slots_is_not_measured() -> None:
    rig: Any = FakeRig(None)
    assert adapter_times(rig) is None
