"""A real model in a GGUF file writes what transformers' dequantized weights do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail import LLM, SamplingParams

pytestmark = pytest.mark.full

QUESTIONS = ["What is the capital of France?", "Name three colors.", "Why is the sky blue?"]
TOKENS = 48


def test_smollm2_in_gguf_writes_what_transformers_does(smollm2_gguf: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(smollm2_gguf, dtype="float32", max_model_len=256) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(chats, params, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        assert list(output.outputs[0].token_ids) == whole[0, ids.shape[1] :].tolist()
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[0].outputs[0].finish_reason == "stop"
