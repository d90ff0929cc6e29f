"""The executor `toy`: a request's seed determines its answer, regardless of other requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.toy import answer, installed_in

from dovetail import LLM, SamplingParams
from dovetail.errors import EngineDeadError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    installed_in(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {"executor": {"name": "toy", "num_pages": 64}}
    assert str(tmp_path) in sys.path


def asked(seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


def test_an_answer_depends_only_on_its_seed(toy: dict[str, object]) -> None:
    """There are fewer rows, blocks and tokens a step than requests need at once: prompts come in
    chunks, and some requests are preempted."""
    wanted = [(seed, 20 + seed % 7 * 30) for seed in range(20)]
    with LLM("demo", **toy, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(
            [[1 + seed] * 100 for seed, _ in wanted],
            [asked(*one) for one in wanted],
            use_tqdm=False,
        )
        assert llm.engine.stats().preemptions > 0
    assert [output.outputs[0].text for output in outputs] == [answer(*one) for one in wanted]


def test_answers_of_other_seeds_are_other_answers() -> None:
    assert len({answer(seed, 8) for seed in range(1000)}) == 1000
    assert answer(3, 50)[:20] == answer(3, 20)
    assert len(set(answer(2**64 - 1, 2000))) == 94


def test_a_device_can_be_lost_when_a_test_wants_it(toy: dict[str, object]) -> None:
    with (
        LLM("demo", executor={"name": "toy", "fails_at_step": 5}) as llm,
        pytest.raises(EngineDeadError, match="lost at step 5"),
    ):
        llm.generate("ROMEO:", asked(1, 50), use_tqdm=False)
