"""Models that can't be split over ranks are rejected. The conformance suite checks that a split
decoder computes the same as a whole one."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from dovetail.errors import UnsupportedError
from tests.models.oracle import FakeGroup, arch_of


def test_heads_that_cannot_be_split_are_refused() -> None:
    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=6, hidden_size=48
    )
    with pytest.raises(UnsupportedError, match="num_attention_heads"):
        arch_of(config).layer_specs(config, FakeGroup(0, 4))
