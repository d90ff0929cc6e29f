"""Steps with drafts in recorded graphs: requests get the tokens that they get without speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.gpu.device import make_drafts_pay, on_a_gpu, settings_for
from tests.gpu.test_sampling import PROMPTS, SMALL, generated
from tests.registry.fakes import Site

pytestmark = on_a_gpu

WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"max_num_batched_tokens": 33, "executor": {"name": "local", "device": "cuda", "num_blocks": 24}},
    {"attention": "torch", "cuda_graphs": False},
    {"overlap": True},
]


@pytest.mark.parametrize(("drafter", "temperature"), [("alternating", 0.8), ("model", 0.0), ("model", 0.8)])
def test_tokens_are_those_without_speculation(drafter: str, temperature: float, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is the model itself, so that most drafts are right."""
    make_drafts_pay(monkeypatch)
    drafting.install(site)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = settings_for("triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12)
    with checkpoint(SMALL) as (directory, _):
        expected = generated(plain, directory, "float32", {"temperature": temperature})
        answers = {tuple(prompt): [tokens for tokens, _ in each] for prompt, each in zip(PROMPTS, expected, strict=True)}
        monkeypatch.setattr(drafting, "ANSWERS", answers)
        options = {"name": "model", "model": str(directory)} if drafter == "model" else {"name": f"dovetail-drafting:{drafter}"}
        speculation = {"speculation": {"drafter": options, "max_drafts": 4, "timeout_s": 1.0}}
        for way in WAYS:
            settings = {**plain, "cuda_graphs": True, **speculation, **way}
            for ours, theirs in zip(generated(settings, directory, "float32", {"temperature": temperature}), expected, strict=True):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], way
