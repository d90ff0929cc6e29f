"""The four architectures compute what transformers computes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.configs import MAX_LEN, configs
from tests.models.oracle import build, checkpoint_tensors, fill, reference, run, run_reference
from tests.support import examples


def a_pair(config: Any, seed: int) -> tuple[Any, Any]:
    """transformers' model and ours, with the same weights."""
    theirs, ours = reference(config, seed), build(config)
    fill(ours, checkpoint_tensors(theirs))
    return theirs, ours


def some_tokens(config: Any, length: int, seed: int) -> torch.Tensor:
    return torch.randint(
        config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(
        ours, theirs, atol=1e-4 * max(1.0, theirs.abs().max().item()), rtol=1e-4
    )


@given(config=configs(), length=st.integers(1, MAX_LEN), seed=st.integers(0, 99))
@examples(quick=32, full=1000)
def test_hidden_states_and_logits_equal_transformers(config: Any, length: int, seed: int) -> None:
    theirs, ours = a_pair(config, seed)
    tokens = some_tokens(config, length, seed)
    for mine, expected in zip(run(ours, tokens), run_reference(theirs, tokens), strict=True):
        assert_close(mine, expected)
