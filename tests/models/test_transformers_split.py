"""Models through transformers on several ranks: split where all of the config's own plan is covered
by layers of ours, otherwise refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.errors import UnsupportedError
from dovetail_models import transformers as served
from dovetail_models import transformers_check
from dovetail_models.transformers import traced_model
from dovetail_models.transformers_layers import find_layers, reasons_against_split
from tests.models.test_transformers_layers import tokens_of
from tests.models.tiny_configs import random_model, tiny

TWO = {"name": "tensor", "size": 2, "device": "cpu", "num_pages": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    random_model(tiny("qwen3")).save_pretrained(directory)
    return directory


@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.parametrize("model_type", [pytest.param("qwen3", marks=pytest.mark.full), "qwen2_moe"])
@pytest.mark.usefixtures("ranks_in_threads")
def test_two_ranks_write_the_tokens_of_one(tmp_path: Path, model_type: str) -> None:
    random_model(tiny(model_type)).save_pretrained(tmp_path)
    alone = tokens_of(tmp_path, "transformers")
    assert tokens_of(tmp_path, "transformers", executor=TWO) == alone


@pytest.mark.slow("starts ranks: processes that import torch")
def test_a_split_that_computes_something_else_on_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    # the other rank is a process of its own
    monkeypatch.setattr(
        served, "check", lambda *args: transformers_check.check(*args) or "rank 0 says no"
    )
    with pytest.raises(UnsupportedError, match="rank 0 says no"):
        tokens_of(checkpoint, "transformers", executor=TWO)


@pytest.mark.slow("starts ranks: processes that import torch")
def test_quantized_weights_are_refused_on_several_ranks(checkpoint: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="quantized model through transformers runs on one GPU"
    ):
        tokens_of(checkpoint, "transformers", executor=TWO, quantization="fp8")


def reasons(model_type: str) -> list[str]:
    config = tiny(model_type)
    traced = traced_model(config)
    layers = find_layers(traced.base, traced.calls, 200, torch.device("cpu"), traced.keeps)
    return reasons_against_split(traced.base, traced.calls, layers, config.base_model_tp_plan)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("qwen2", []),
        ("gpt2", ["no base_model_tp_plan"]),
        ("mixtral", []),
        ("olmo2", ["layers.0.self_attn isn't attention of ours"]),
    ],
)
def test_what_cannot_be_split_is_named(model_type: str, named: list[str]) -> None:
    found = reasons(model_type)
    assert bool(found) == bool(named)
    for name in named:
        assert name in "; ".join(found)
