"""Tests of the `torch` backend's attention to selected tokens: the numbers that it gathers, and the
size of its temporary tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from dovetail.api.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    Indexer,
    LayerSpec,
)
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError
from dovetail.testing.memory import bind_layers
from dovetail_attention.sdpa import TorchAttention
from dovetail_attention.selected import MOST_NUMBERS

SPEC = LayerSpec(0, 2, 1, 24, 0.2, v_in_k=True, v_head_size=16, indexer=Indexer(2048, 4, 8))
BLOCK = 16
OF_TOKEN = 24 + 16  # this backend gathers V, a part of K, again


class Sizes(TorchFunctionMode):
    """Counts the floating-point numbers that are gathered, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0
        self.largest = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            if function is torch.Tensor.index_select:
                self.gathered += result.numel()
            self.largest = max(self.largest, result.numel())
        return result


def planned(history: int, queries: int) -> AttentionLayer:
    """A layer with random K and index keys of `history` tokens, and a step planned that computes
    the next ones."""
    length = history + queries
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", BLOCK))
    layer = backend.make_layer(SPEC)
    blocks = -(-length // BLOCK)
    bind_layers(backend, [layer], blocks)
    backend.prepare(max_rows=1, max_tokens=length, max_len=length)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int()
    for first, end in ((0, history), (history, length)):
        position = torch.arange(first, end)
        slots = table[position // BLOCK].long() * BLOCK + position % BLOCK
        backend.plan(
            AttentionBatch(
                1,
                end - first,
                torch.tensor([0, end - first], dtype=torch.int32),
                torch.tensor([end], dtype=torch.int32),
                (table[None, None],),
                (slots[None],),
                np.array([end - first], np.int32),
                np.array([end], np.int32),
            )
        )
        layer.write(torch.randn(end - first, 1, 24), None)
        layer.write_index(torch.randn(end - first, 8))
    return layer


def attend(layer: AttentionLayer, queries: int) -> Sizes:
    with Sizes() as sizes:
        layer.select(torch.randn(queries, 4, 8), torch.randn(queries, 4))
        layer.attend(torch.randn(queries, 2, 24))
    return sizes


@pytest.mark.parametrize("length", [32_768, 131_072])
def test_a_decode_reads_all_index_keys_and_k_of_the_selected_tokens(length: int) -> None:
    sizes = attend(planned(length - 1, 1), 1)
    assert sizes.gathered == length * 8 + 2048 * OF_TOKEN


def test_a_row_with_fewer_tokens_than_are_selected_reads_no_index_keys() -> None:
    assert attend(planned(2047, 1), 1).gathered == 2048 * OF_TOKEN


@pytest.mark.slow("attends to many tokens")
def test_the_memory_of_a_prefill_does_not_grow_with_its_queries() -> None:
    assert attend(planned(6_000, 200), 200).largest <= MOST_NUMBERS


def test_a_layer_without_an_indexer_selects_nothing() -> None:
    backend = TorchAttention(NoOptions(), AttentionContext("cpu", "float32", BLOCK))
    layer = backend.make_layer(LayerSpec(3, 2, 1, 24, 0.2))
    with pytest.raises(DovetailError, match="layer 3 has no index keys"):
        layer.select(torch.zeros(1, 4, 8), torch.zeros(1, 4))
