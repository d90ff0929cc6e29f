"""The order of a forward's collectives on several ranks, which the memory that GPUs share relies on
(`dovetail_executors.runtime.rank_shares`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from dovetail.api.model import LoadsItself, ModelContext, ModelInputs
from dovetail.nn.weights import dummy_weights
from tests.models import oracle
from tests.models.tiny_configs import tiny

OWN = ("qwen3", "mistral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text")
THROUGH_TRANSFORMERS = ("llama", "mixtral", "qwen2_moe", "hy_v3")


class Watched:
    """The first of two ranks, alone: its sums stay its own, and all calls are recorded."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls: list[str] = []

    @property
    def shares(self) -> Watched:
        return self

    def place(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.calls.append("place")
        return torch.zeros(rows, size, dtype=dtype)

    def add(self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor | None:
        self.calls.append("add")
        return None if norm is None else torch.nn.functional.rms_norm(x, x.shape[1:], *norm)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("meet")
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls.append("meet")
        return torch.cat((x, x), dim)


def calls_of_a_forward(arch: Any, config: Any) -> list[str]:
    group = Watched()
    model = arch.build(config, oracle.context(parallel=group))
    if isinstance(model, LoadsItself):
        model.load_checkpoint(None, 0)
    else:
        dummy_weights(model, 0)
    group.calls.clear()
    with torch.inference_mode():
        model(ModelInputs(token_ids=torch.arange(3, 12), positions=torch.arange(9)))
    return group.calls


@pytest.mark.parametrize(
    ("component", "model_type"),
    [
        *((name, name) for name in OWN),
        *(("transformers", name) for name in THROUGH_TRANSFORMERS),
    ],
)
def test_ranks_meet_before_a_forwards_first_share_and_add_each_before_they_meet_again(
    component: str, model_type: str
) -> None:
    arch = oracle.BY_TYPE[component].make(ModelContext())
    calls = calls_of_a_forward(arch, tiny(model_type))
    assert calls[0] == "meet"
    assert "place" in calls
    assert all(after == "add" for call, after in pairwise(calls) if call == "place")
