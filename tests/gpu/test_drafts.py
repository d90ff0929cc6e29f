"""Steps with drafts in recorded graphs: requests get the tokens that they get without speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.reference import checkpoint
from tests.gpu.device import make_drafts_pay, on_a_gpu, settings_for
from tests.gpu.test_sampling import SMALL, generated

pytestmark = on_a_gpu

WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"max_num_batched_tokens": 33, "executor": {"name": "local", "device": "cuda", "num_blocks": 24}},
    {"attention": "torch", "cuda_graphs": False},
    {"overlap": True},
]


@pytest.mark.parametrize(("drafter", "temperature"), [("ngram", 0.0), ("model", 0.0), ("model", 0.8)])
def test_tokens_are_those_without_speculation(drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is the model itself, so that most drafts are right. Drawn answers of random weights repeat too little for `ngram`."""
    make_drafts_pay(monkeypatch)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = settings_for("triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12)
    with checkpoint(SMALL) as (directory, _):
        options = {"model": str(directory)} if drafter == "model" else {"min_match": 1}
        drafting = {**plain, "cuda_graphs": True, "speculation": {"drafter": {"name": drafter, **options}, "max_drafts": 4, "timeout_s": 1.0}}
        expected = generated(plain, directory, "float32", {"temperature": temperature})
        for way in WAYS:
            for ours, theirs in zip(generated({**drafting, **way}, directory, "float32", {"temperature": temperature}), expected, strict=True):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], way
