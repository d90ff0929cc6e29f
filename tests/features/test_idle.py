"""A plain prompt calls nothing of the features that it doesn't ask for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dovetail.engine
import dovetail_executors.runtime
from dovetail import LLMEngine, SamplingParams
from tests.small_model import small_demo

ENGINE = Path(dovetail.engine.__file__).parent
RUNTIME = Path(dovetail_executors.runtime.__file__).parent
OF_FEATURES = {
    *(ENGINE / "tiers").glob("*.py"),
    *(
        ENGINE / f"{name}.py"
        for name in (
            "adapters",
            "constraint",
            "drafter_thread",
            "feature",
            "masks",
            "pooling",
            "prompt_logprobs",
            "siblings",
            "speculation",
        )
    ),
    *(
        RUNTIME / f"{name}.py"
        for name in (
            "adapters",
            "draft_head",
            "draft_model",
            "features",
            "graphs",
            "logits",
            "mask_buffer",
            "pooler",
            "prompt_logprobs",
            "recording",
            "sampler_rows",
            "state_plan",
        )
    ),
}


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_config({"model": str(small_demo())}) as engine:
        yield engine


def visited(engine: LLMEngine, params: SamplingParams) -> set[Path]:
    """Return the files of the functions that a prompt calls until its end."""
    files: set[str] = set()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(called)
    try:
        engine.add_request("one", "To be", params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        sys.setprofile(None)
    return {Path(file) for file in files}


def test_a_plain_prompt_visits_no_feature(engine: LLMEngine) -> None:
    assert all(file.exists() for file in OF_FEATURES)
    assert not visited(engine, SamplingParams(temperature=0.0, max_tokens=3)) & OF_FEATURES


def test_a_prompt_visits_the_feature_that_it_asks_for_on_both_sides(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0)
    files = visited(engine, params) & OF_FEATURES
    assert {ENGINE / "prompt_logprobs.py", RUNTIME / "prompt_logprobs.py"} <= files
    assert not files & {ENGINE / "pooling.py", RUNTIME / "pooler.py"}
