"""The KV pool of the server that the VTC paper measured, and an executor that knows its cost.

S-LoRA keeps K and V by the token, in slots of one pool. A prefill takes the lowest free slots. A
decode step of n requests asks for n neighbouring slots, to which its kernels can write; if there
are none, it takes the lowest free ones and copies K and V of every layer there, which takes
longer. Requests that were admitted one at a time, or differ in length, leave such a pool when they
end. (`slora/common/mem_manager.py` and `basemodel.py` of github.com/Ying1123/VTC-artifact.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dovetail.api.executor import Batch, ExecutorContext
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.simulated_options import SimulatedOptions


class TokenPool:
    """Which slots are free, and whose the others are."""

    def __init__(self, slots: int) -> None:
        self._free = np.ones(slots, np.bool_)
        self._slots: dict[int, list[NDArray[np.intp]]] = {}  # row -> its slots

    def release(self, row: int) -> None:
        """Free all slots of a row; of an unknown one there are none."""
        for slots in self._slots.pop(row, ()):
            self._free[slots] = True

    def prefill(self, row: int, tokens: int) -> None:
        """Take the lowest free slots, as many as there are."""
        self._take(row, np.flatnonzero(self._free)[:tokens])

    def decode(self, rows: Sequence[int]) -> bool:
        """Take a slot for each row. Return True if they are neighbours."""
        count = len(rows)
        before = np.concatenate([[0], np.cumsum(self._free)])
        starts = np.flatnonzero(before[count:] - before[:-count] == count)
        together = len(starts) > 0
        slots = (
            np.arange(starts[0], starts[0] + count)
            if together
            else np.flatnonzero(self._free)[:count]
        )
        for row, slot in zip(rows, slots, strict=False):
            self._take(row, np.array([slot]))
        return together

    def _take(self, row: int, slots: NDArray[np.intp]) -> None:
        self._free[slots] = False
        self._slots.setdefault(row, []).append(slots)


class SLoRAOptions(SimulatedOptions):
    """Options of the executor `s-lora`."""

    scattered_s: float = Field(
        0.0, ge=0, description="Additional time of a decode step whose slots aren't neighbours."
    )


class SLoRAExecutor(SimulatedExecutor):
    """The executor `simulated` with S-LoRA's pool; prompts and decodes don't share a step."""

    options: SLoRAOptions

    def __init__(self, options: SLoRAOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        if options.num_pages is None:
            raise ValueError("executor s-lora needs num_pages")
        self._pool = TokenPool(options.num_pages)
        self.decode_steps = self.scattered_steps = 0

    def submit(self, batch: Batch) -> int:
        for row in batch.removed.tolist():
            self._pool.release(row)
        if batch.num_tokens.max() > 1:
            for row, tokens in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
                self._pool.prefill(row, tokens)
        else:
            self.decode_steps += 1
            if not self._pool.decode(batch.rows.tolist()):
                self.scattered_steps += 1
                self.clock.wait_until(self.clock.now() + self.options.scattered_s)
        return super().submit(batch)
