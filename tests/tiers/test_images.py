"""Prompts with images in an engine with tiers: answers are those of an engine without, and another
image of equal tokens isn't restored."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from PIL import Image

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.prospect import Pace
from tests.media.checkpoints import checkpoint, picture, written

pytestmark = [
    pytest.mark.usefixtures("shared_image_processes"),
    pytest.mark.slow("makes engines of a model with a tower"),
]
SIZE = (33, 50)
FRAME = 8  # tokens
Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def restores_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tiers.keys.FRAME_TOKENS", FRAME)
    monkeypatch.setattr(Pace, "loading_s", lambda *_: 0.0)
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 30.0)


def started(**config: Any) -> LLM:
    small = {
        "dtype": "float32",
        "generation_config": "none",
        "max_model_len": 400,
        "block_size": 8,
        "executor": {"name": "local", "num_pages": 60},
    }
    return LLM(str(checkpoint("llava")), **{**small, **config})


def prompt(text: str, *images: Image.Image) -> dict[str, Any]:
    """Return a prompt that begins with the images."""
    return {
        "prompt": written("llava") * len(images) + text,
        "multi_modal_data": {"image": [*images]},
    }


def answers(llm: LLM, prompts: list[dict[str, Any]], n: int = 1) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, n=n)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    core = llm.engine.core
    while in_its_thread(llm, core.idle):  # saves and stores end
        pass
    in_its_thread(llm, core.kv.check_integrity)
    return outputs


def in_its_thread(llm: LLM, function: Callable[[], Result]) -> Result:
    """Return what a function does to the engine, whose thread saves and stores, too, when it is
    idle."""
    return llm.engine.run_in_thread().call(function)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [[*one.token_ids] for one in output.outputs]


def forget(llm: LLM, *, host: bool = False) -> None:
    """Let the device forget all K and V, and the host pool, too, so that only the disk has any."""
    in_its_thread(llm, llm.engine.core.kv.reset)
    if host:
        in_its_thread(llm, feature_of(llm).pool.clear)


def feature_of(llm: LLM) -> TierFeature:
    return next(one for one in llm.engine.core.features if isinstance(one, TierFeature))


def restored(output: RequestOutput) -> int:
    assert output.metrics is not None
    return output.metrics.restored_tokens


@pytest.mark.parametrize("host", [False, True], ids=["host pool", "disk"])
def test_only_the_same_image_is_restored(host: bool, tmp_path: Path) -> None:
    one = prompt(" tell me more", picture(*SIZE, seed=1))
    other = prompt(" tell me more", picture(*SIZE, seed=2))
    with started() as llm:
        expected = [tokens(output) for output in answers(llm, [one, other])]
    tier = {"name": "disk", "path": str(tmp_path / "frames"), "size": "64MiB"}
    with started(kv_host_memory="4MiB", kv_tiers=[tier]) as llm:
        feature_of(llm).wait_until_open()
        [first] = answers(llm, [one])
        forget(llm, host=host)
        [second] = answers(llm, [other])
        assert second.prompt_token_ids == first.prompt_token_ids
        assert restored(second) < FRAME, "its image begins in the first frame"
        forget(llm, host=host)
        [third] = answers(llm, [one])
        assert restored(third) > len(third.prompt_token_ids or ()) // 2
        assert [tokens(first), tokens(second)] == expected
        assert tokens(third) == expected[0]


def test_random_prompts_with_images_are_answered_as_without_tiers(tmp_path: Path) -> None:
    chance = random.Random(2)
    pictures = [picture(*SIZE, seed=seed) for seed in range(3)]
    prompts = [
        prompt(
            "".join(chance.choices("abc ", k=chance.randint(1, 30))) + "?",
            *chance.choices(pictures, k=chance.choice([0, 1, 1, 2])),
        )
        for _ in range(8)
    ]
    with started(max_num_batched_tokens=400) as llm:
        expected = [tokens(answers(llm, [each])[0])[0] for each in prompts]
    tier = {"name": "disk", "path": str(tmp_path / "frames"), "size": "64MiB"}
    with started(kv_host_memory="256KiB", kv_tiers=[tier], max_num_batched_tokens=64) as llm:
        feature_of(llm).wait_until_open()
        for turn in range(4):
            chosen = chance.sample(range(8), 6)
            n = chance.choice([1, 3])
            outputs = answers(llm, [prompts[index] for index in chosen], n)
            for index, output in zip(chosen, outputs, strict=True):
                assert tokens(output) == [expected[index]] * n
            if turn % 2:
                forget(llm, host=chance.random() < 0.5)
        stats = feature_of(llm).stats
        assert stats.restored_tokens > 0
        assert not stats.damaged_frames
