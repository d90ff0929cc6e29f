"""Uniform routing for random models, whose own routers would choose few experts: the choice of each
token's experts is a hash of its logits and its row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from bench.shapes import Shape


class Routing:
    """Takes the place of `dovetail.nn.moe.choose`, and remembers what each layer chose last."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._calls = 0
        self._last: list[torch.Tensor] = []  # one a layer, for the most tokens that came

    def choose(
        self, logits: torch.Tensor, k: int, *, normalize: bool, shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `dovetail.nn.moe.choose`, by a kernel that takes about as long."""
        from bench.routing_kernel import choose_by_hash

        layer = self._calls % self._shape.layers
        self._calls += 1
        if layer == len(self._last):
            self._last.append(
                torch.full((MOST_TOKENS, k), -1, dtype=torch.int32, device=logits.device)
            )
        return choose_by_hash(logits, k, self._last[layer], shared)

    def details(self, rows: int) -> dict[str, float]:
        """The mean number of distinct experts in a layer of the last step, and how many are
        expected of `rows` tokens."""
        if not self._last:
            return {}
        found = [len(last[:rows].unique()) for last in self._last]
        return {
            "distinct_experts": sum(found) / len(found),
            "expected_experts": self._shape.distinct_experts(rows),
        }


MOST_TOKENS = 1 << 16  # of a step


@contextmanager
def uniform_routing(shape: Shape) -> Iterator[Routing]:
    """Within the context, models of our own that have experts route uniformly."""
    routing = Routing(shape)
    if not shape.experts:
        yield routing
        return
    with patch("dovetail.nn.moe.choose", routing.choose):
        yield routing
