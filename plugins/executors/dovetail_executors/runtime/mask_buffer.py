"""`MaskBuffer`: transfers a step's token masks from the grammars, which fill host memory, to the
device, where sampling reads them.

They take megabytes for a large batch. So they are written directly to pinned memory, and copied
while the model runs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Masks

SLOTS = 2  # one step may be copied while the next is filled


class MaskBuffer:
    """Buffer of `most` masks. `words` keeps its address, for graphs to read."""

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        self._width = -(-vocab_size // 32)
        self._most = most
        self._device = device
        # [most, ceil(vocab / 32)]
        self.words = torch.zeros((most, self._width), dtype=torch.int32, device=device)
        # in host memory, of the same size; allocated on first use
        self._slots: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None
        self._next = 0

    def to_fill(self, count: int) -> NDArray[np.uint32]:
        """Return uninitialized memory [count, ceil(vocab / 32)] for the masks of the next `send`.
        It is reused after `SLOTS` sends."""
        on_gpu = self._device.type == "cuda"
        if not self._slots:
            self._slots = [
                torch.zeros(self.words.shape, dtype=torch.int32, pin_memory=on_gpu)
                for _ in range(SLOTS)
            ]
            if on_gpu:
                self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._next = (self._next + 1) % SLOTS
        if on_gpu:
            self._copied[self._next].synchronize()
        return self._slots[self._next][:count].numpy().view(np.uint32)

    def send(self, masks: Masks) -> None:
        """Enqueue the copy of `masks` to the first rows of `words`. Later work on the stream reads
        them; earlier work has read the old ones. The copy overlaps with the model, which was
        enqueued before and doesn't read them."""
        count = len(masks.words)
        if not count:
            return
        slot = self._slots[self._next] if self._slots else None
        if slot is None or masks.words.ctypes.data != slot.data_ptr():  # in other memory
            self.to_fill(count)[:] = masks.words
            slot = self._slots[self._next]
        if self._stream is None:
            self.words[:count].copy_(slot[:count])
            return
        with torch.cuda.stream(self._stream):
            self.words[:count].copy_(slot[:count], non_blocking=True)
            self._copied[self._next].record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._copied[self._next])


def masks_of_lines(masks: Masks, num_lines: int) -> NDArray[np.int64]:
    """Return, for each line of a batch, its row in the words of `masks`, or -1."""
    found = np.full(num_lines, -1, np.int64)
    found[masks.lines] = np.arange(len(masks.lines))
    return found
