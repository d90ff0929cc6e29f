"""Models with recurrent layers that check drafts in recorded graphs: requests get the tokens that
they get without speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.gpu.device import make_drafts_pay, on_a_gpu, settings_for
from tests.gpu.test_sampling import PROMPTS, generated
from tests.models import hybrids
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401

pytestmark = on_a_gpu

DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 64}
CONFIGS = {
    "qwen3_next": lambda: hybrids.qwen3_next(vocab_size=997, hidden_size=128, **DELTA),
    "granite": lambda: hybrids.granite(vocab_size=997, hidden_size=256),
    "lfm2": lambda: hybrids.lfm2(vocab_size=997, hidden_size=128),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {"max_num_batched_tokens": 33},
    {"overlap": True},
]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_without_speculation(
    name: str,
    temperature: float,
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_drafts_pay(monkeypatch)
    drafting.install(site)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = settings_for(
        "triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12
    )
    with checkpoint(CONFIGS[name]()) as (directory, _):
        expected = generated(plain, directory, "float32", {"temperature": temperature})
        answers = {
            tuple(prompt): [tokens for tokens, _ in each]
            for prompt, each in zip(PROMPTS, expected, strict=True)
        }
        monkeypatch.setattr(drafting, "ANSWERS", answers)
        options = {
            "drafter": {"name": "dovetail-drafting:alternating"},
            "max_drafts": 4,
            "timeout_s": 1.0,
        }
        for way in WAYS:
            settings = {**plain, "cuda_graphs": True, "speculation": options, **way}
            for ours, theirs in zip(
                generated(settings, directory, "float32", {"temperature": temperature}),
                expected,
                strict=True,
            ):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], way
