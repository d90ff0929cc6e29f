"""Sampled tokens and log-probabilities that a step leaves on the device, copied to the host together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import HostLogprobs
from dovetail.api.sampler import TopLogprobs
from dovetail.nn.transfer import HostCopy


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens of `size` lines. The next replay overwrites the tensors."""

    tokens: torch.Tensor  # [3, size] int64: see `decode_rows.append`
    packed: torch.Tensor | None = None  # int32: `tokens`, followed by log-probabilities
    columns: int = 0  # of log-probabilities: the sampled token and the most likely

    @classmethod
    def pack(cls, tokens: torch.Tensor, top: TopLogprobs) -> Sampled:
        """Pack the results. Can be recorded in a graph."""
        parts = tokens, top.ranks, top.token_ids, top.logprobs
        packed = torch.cat([part.view(torch.int32).view(-1) for part in parts])
        return cls(
            packed[: 2 * tokens.numel()].view(torch.int64).view_as(tokens),
            packed,
            top.token_ids.shape[1],
        )

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


class SampledCopy:
    """`Sampled` being copied to the host. Values may be read once the device has passed the point of its creation."""

    __slots__ = ("_columns", "_copy", "_order", "_size")

    def __init__(
        self,
        sampled: Sampled,
        order: NDArray[np.int64] | None = None,
        *,
        with_logprobs: bool = False,
    ) -> None:
        """`order` [n]: indices of the step's lines for the first n of `sampled`; None: same order."""
        self._order, self._size = order, sampled.size
        self._columns = sampled.columns if with_logprobs else 0
        self._copy = HostCopy(
            sampled.packed if with_logprobs and sampled.packed is not None else sampled.tokens
        )

    def tokens(self, n: int) -> NDArray[np.int64]:
        """Return [3, n], as `Sampled.tokens`."""
        words = self._copy.value.reshape(-1).view(np.int32)[: 6 * self._size]
        return self._sorted(words.view(np.int64).reshape(3, -1)[:, :n].T).T

    def logprobs(self, n: int, k: int) -> HostLogprobs:
        """Return log-probabilities of each line's token and of the k most likely, or as many as there are."""
        words, size, columns = self._copy.value, self._size, self._columns
        ends = np.cumsum([6 * size, 2 * size, 2 * size * columns]).tolist()
        _, ranks, token_ids, values = np.split(words, ends)
        return HostLogprobs(
            self._sorted(token_ids.view(np.int64).reshape(size, columns)[:n, : 1 + k]),
            self._sorted(values.view(np.float32).reshape(size, columns)[:n, : 1 + k]),
            self._sorted(ranks.view(np.int64)[:n]),
        )

    def _sorted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the first n lines, [n, …], in the step's order."""
        return values if self._order is None else values[np.argsort(self._order)]
