"""LoRA adapters in a simulation: nothing is read, and only their time counts.

The engine's own slots decide which adapters a step loads, and which requests wait for one. The
simulated executor accounts for loads, and for steps with adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dovetail.api.clock import Clock
from dovetail.api.executor import AdapterCapacity, AdapterRows
from dovetail.request.lora import LoRARequest
from dovetail_lab.step_time import Seconds

if TYPE_CHECKING:
    from dovetail.serving import Finish


class AdapterCosts(BaseModel):
    """Times, in seconds, by which adapters prolong a simulated step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load_s: Seconds
    step_s: Seconds
    token_s: Seconds


@dataclass(slots=True)
class SimulatedAdapter:
    """An adapter that is on the host from `ready` on."""

    name: str
    clock: Clock
    ready: float

    @property
    def path(self) -> str:
        return self.name

    @property
    def digest(self) -> str:
        return self.name

    def closed(self) -> bool:
        return self.clock.now() < self.ready

    def failed(self) -> Finish | None:
        return None


class SimulatedAdapters:
    """The adapters of one engine, on its host and in its slots."""

    def __init__(self, clock: Clock, read_s: float, rows: int) -> None:
        """Reading an adapter takes `read_s`, once: the host keeps it. `rows`: of the executor."""
        self._clock = clock
        self._read_s = read_s
        self._ready: dict[str, float] = {}
        self._slots = np.zeros(rows, np.int64)  # of each row; 0: no adapter
        self.arrival = 0.0  # of the request that is being added
        self.loads = 0  # adapters loaded to slots
        self.seconds = 0.0  # by which adapters prolonged steps

    @staticmethod
    def capacity(slots: int, max_rank: int) -> AdapterCapacity | None:
        """Return `Capacity.adapters`, which change no module; None without slots."""
        return AdapterCapacity(slots, max_rank, {}) if slots else None

    def get(self, request: LoRARequest) -> SimulatedAdapter:
        """Return the adapter of a request that arrives at `arrival`."""
        name = request.lora_name
        ready = self._ready.setdefault(name, self.arrival + self._read_s)
        return SimulatedAdapter(name, self._clock, ready)

    def begin(self, row: int) -> None:
        """Take note of a request that takes a row, until `step_seconds` says its adapter."""
        self._slots[row] = 0

    def step_seconds(
        self,
        part: AdapterRows | None,
        costs: AdapterCosts,
        rows: NDArray[np.int32],
        new_tokens: NDArray[np.int32],
    ) -> float:
        """Return by how long adapters prolong a step of these `rows` [b] that compute `new_tokens`
        [b] tokens each, and count it. `part`: of the batch."""
        loads = 0
        if part is not None:
            loads = len(part.loads)
            for row, slot in part.slots.items():
                self._slots[row] = slot
        adapted = self._slots[rows] > 0
        seconds = costs.load_s * loads
        if adapted.any():
            seconds += costs.step_s + costs.token_s * int(new_tokens[adapted].sum())
        self.loads += loads
        self.seconds += seconds
        return seconds
