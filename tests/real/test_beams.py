"""Beam search with a real model, against transformers: the same answers, ended by EOS or by length,
and scores within 1e-4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail import LLM, BeamSearchParams
from tests.e2e.test_beam_search import check_equal

pytestmark = pytest.mark.full

QUESTIONS = ["What is the capital of France?", "Is water wet? Answer with one word."]
TEXTS = ["def fibonacci(n):\n"]


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (4, 1.0), (4, 0.0)])
def test_beams_of_smollm2_are_those_of_transformers(
    smollm2: Path, width: int, penalty: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    params = BeamSearchParams(beam_width=width, max_tokens=48, length_penalty=penalty)
    with LLM(smollm2, dtype="float32", max_model_len=256) as llm:
        tokenizer, eos = llm.engine.tokenizer, llm.engine.eos_token_ids
        template = llm.get_tokenizer().apply_chat_template
        chats = [
            template([{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True)
            for one in QUESTIONS
        ]
        prompts = [*chats, *TEXTS]
        outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        check_equal(output, model, ids, params, eos)
        for sequence in output.sequences:
            answer = sequence.tokens[:-1] if sequence.finish_reason == "stop" else sequence.tokens
            assert sequence.text == tokenizer.decode(answer, skip_special_tokens=True)
    assert {sequence.finish_reason for output in outputs for sequence in output.sequences} == {
        "stop",
        "length",
    }
