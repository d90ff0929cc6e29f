"""`Recorded`: a processor with a record per row in fixed buffers, which a CUDA graph reads in each
replay. `total`: sums that no batch changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import LogitsProcessor, LogitsProcessorCapabilities, ProcessedRow

Record = Mapping[str, torch.Tensor]


class Recorded(LogitsProcessor):
    capabilities = LogitsProcessorCapabilities(cuda_graph=GraphSupport.ALL)

    @abstractmethod
    def record(self, row: ProcessedRow | None) -> Record:
        """Return the fields of a row; with None of one that didn't ask, such that `apply` doesn't
        change its lines."""

    def prepare(self, max_rows: int) -> None:
        count = max_rows + 1  # the last row is padding
        self._off = self.record(None)
        self._table = {name: value.to(self.context.device).repeat(count, *[1] * value.dim()) for name, value in self._off.items()}

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self._write(row, self._off)
        for asking in added:
            self._write(asking.row, self.record(asking))

    def _write(self, row: int, record: Record) -> None:
        for name, value in record.items():
            self._table[name][row] = value

    def field(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return a field of rows [n]: [n, 1] for a number, [n, size] for a vector."""
        values = self._table[name][rows]
        return values if values.dim() > 1 else values[:, None]


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum values [n, size] by row: [n, 1]. Adds halves until one is left: the order, and so the
    rounding, depends on nothing but the size."""
    while (size := values.shape[1]) > 1:
        half = (size + 1) // 2
        upper = values[:, half:]
        values = values[:, :half].clone()
        values[:, : size - half] += upper
    return values
