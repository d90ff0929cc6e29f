"""Steps with drafts in recorded graphs: requests get the tokens that they get without
speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dovetail import LLMEngine, SamplingParams
from tests.e2e import drafting
from tests.e2e.reference import checkpoint
from tests.gpu.device import SHAPES, make_drafts_pay, on_a_gpu, settings_for
from tests.gpu.test_sampling import PROMPTS, SMALL, generated, steps
from tests.models.heads import (
    chained,
    eagle3_fields,
    eagle3_tensors,
    write_chained_eagle3,
    write_eagle3,
)
from tests.registry.fakes import Site

pytestmark = on_a_gpu

LAYER = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 192,
}  # of a head
WAYS: list[dict[str, Any]] = [
    {},
    {"cuda_graphs": False},
    {
        "max_num_batched_tokens": 33,
        "executor": {"name": "local", "device": "cuda", "num_pages": 24},
    },
    {"attention": "torch", "cuda_graphs": False},
    {"overlap": True},
]


@pytest.mark.parametrize(
    ("drafter", "temperature"), [("alternating", 0.8), ("model", 0.0), ("model", 0.8)]
)
def test_tokens_are_those_without_speculation(
    drafter: str, temperature: float, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model is the model itself, so that most drafts are right."""
    make_drafts_pay(monkeypatch)
    drafting.install(site)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = settings_for(
        "triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12
    )
    with checkpoint(SMALL) as (directory, _):
        expected = generated(plain, directory, "float32", {"temperature": temperature})
        answers = {
            tuple(prompt): [tokens for tokens, _ in each]
            for prompt, each in zip(PROMPTS, expected, strict=True)
        }
        monkeypatch.setattr(drafting, "ANSWERS", answers)
        options = (
            {"name": "model", "model": str(directory)}
            if drafter == "model"
            else {"name": f"dovetail-drafting:{drafter}"}
        )
        speculation = {"speculation": {"drafter": options, "max_drafts": 4, "timeout_s": 1.0}}
        for way in WAYS:
            settings = {**plain, "cuda_graphs": True, **speculation, **way}
            for ours, theirs in zip(
                generated(settings, directory, "float32", {"temperature": temperature}),
                expected,
                strict=True,
            ):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], way


def test_a_head_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are random, so that most drafts are wrong."""
    make_drafts_pay(monkeypatch)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = settings_for(
        "triton", overlap=False, cuda_graphs=False, max_model_len=256, max_num_seqs=12
    )
    fields = eagle3_fields(SMALL, eagle_aux_hidden_state_layer_ids=[0, 1, 2], layer=LAYER)
    head = write_eagle3(tmp_path / "head", fields, eagle3_tensors(fields))
    with checkpoint(SMALL) as (directory, _):
        expected = generated(plain, directory, "float32", {})
        speculation = {
            "speculation": {"drafter": {"name": "eagle3", "model": str(head)}, "max_drafts": 4}
        }
        for way in WAYS:
            settings = {**plain, "cuda_graphs": True, **speculation, **way}
            for ours, theirs in zip(
                generated(settings, directory, "float32", {}), expected, strict=True
            ):
                assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs], way


@pytest.mark.parametrize("graphs", [True, False])
def test_a_head_that_must_be_right_is_right(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_pay(monkeypatch)
    with chained(
        config := Qwen3Config(
            **{**SHAPES[0].fields, "vocab_size": 256}, num_hidden_layers=3, head_dim=64
        )
    ) as directory:
        head = write_chained_eagle3(tmp_path / "head", config, 2, **LAYER)
        settings = settings_for(
            "triton", overlap=False, cuda_graphs=graphs, max_model_len=256, max_num_seqs=12
        )
        speculation = {"drafter": {"name": "eagle3", "model": str(head)}, "max_drafts": 1}
        with LLMEngine.from_config(
            settings,
            model=str(directory),
            dtype="float32",
            generation_config="none",
            speculation=speculation,
        ) as engine:
            for index in range(5):
                params = SamplingParams(
                    temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False
                )
                engine.add_request(str(index), [index + 1] * (1 + 9 * index), params)
            for _ in steps(engine):
                pass
            stats = engine.stats()
    assert stats.draft_tokens == sum(stats.accepted_drafts) > 50
