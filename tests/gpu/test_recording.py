"""Graphs that are recorded while an engine serves, in its thread, beside other engines."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from dovetail import LLM, SamplingParams
from dovetail_executors.runtime.recording import Pool, record
from tests.e2e.reference import checkpoint
from tests.gpu.device import SHAPES, on_a_gpu, settings_for

pytestmark = on_a_gpu

CONFIG = Qwen3Config(
    **{**SHAPES[0].fields, "vocab_size": 997},
    num_hidden_layers=2,
    head_dim=SHAPES[0].head_size,
    max_position_embeddings=512,
)


def test_an_engine_records_late_in_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    with (
        checkpoint(CONFIG) as (directory, _),
        caplog.at_level(logging.WARNING),
        LLM(**settings_for("triton", model=str(directory), dtype="bfloat16")) as llm,
    ):
        for tokens in (3, 200, 40, 300):
            llm.generate([{"prompt_token_ids": [5] * tokens}], params, use_tqdm=False)
    assert not [record.message for record in caplog.records if "recorded" in record.message]


def test_engines_record_late_in_their_threads_beside_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    answers: dict[str, Any] = {"first": [], "second": []}
    with checkpoint(CONFIG) as (directory, _), caplog.at_level(logging.WARNING):
        settings = settings_for("triton", model=str(directory), dtype="bfloat16")
        with LLM(**settings) as first, LLM(**settings) as second:
            for tokens in (3, 40, 100, 200, 300):
                for name, llm in (("first", first), ("second", second)):
                    work = [{"prompt_token_ids": [5] * tokens}, {"prompt_token_ids": [7] * 9}]
                    outputs = llm.generate(work, params, use_tqdm=False)
                    answers[name].append([list(each.outputs[0].token_ids) for each in outputs])
    assert answers["first"] == answers["second"]
    assert not [record.message for record in caplog.records if "recorded" in record.message]


def test_a_recording_that_fails_leaves_others_possible() -> None:
    pool = Pool()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    ones = torch.ones(8, device="cuda")

    def waits() -> None:
        if torch.cuda.is_current_stream_capturing():
            ones.sum().item()

    with pytest.raises(RuntimeError):
        record(waits, pool, stream)
    recording = record(lambda: ones * 2, pool, stream)
    assert recording.replay().tolist() == [2.0] * 8
