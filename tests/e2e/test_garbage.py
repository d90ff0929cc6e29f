"""An engine's effects on the garbage collector of its process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dovetail import LLMEngine, SamplingParams
from dovetail.api.executor import Capacity
from dovetail.front.detokenizer import BytePieces, PieceTexts
from dovetail_executors.local import LocalExecutor


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.slow("looks through all objects, several times")
def test_books_and_tokenizer_are_frozen_if_the_executor_freezes_what_stands(
    freezes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = LocalExecutor.start

    def starts(executor: LocalExecutor) -> Capacity:
        capacity = start(executor)
        if freezes:
            gc.freeze()
        return capacity

    monkeypatch.setattr(LocalExecutor, "start", starts)
    with LLMEngine.from_config(
        {"model": "demo", "max_num_seqs": 2, "max_model_len": 128}
    ) as engine:
        looked_through = {id(thing) for thing in gc.get_objects()}
        assert (id(engine.core.kv) in looked_through) != freezes
        assert bool(gc.get_freeze_count()) == freezes
        engine.add_request("a", "To be", SamplingParams(max_tokens=3))
        while engine.has_unfinished_requests():
            engine.step()
        looked_through = gc.get_objects()
        assert any(thing is engine.tokenizer for thing in looked_through) != freezes
        assert any(isinstance(thing, BytePieces) for thing in looked_through) != freezes


def test_what_the_process_froze_before_says_nothing_of_an_engine() -> None:
    gc.freeze()
    with LLMEngine.from_config(
        {"model": "demo", "max_num_seqs": 2, "max_model_len": 128}
    ) as engine:
        assert any(thing is engine.core.kv for thing in gc.get_objects())


@pytest.mark.slow("looks through all objects, several times")
def test_whoever_freezes_sees_the_count_grow_though_frozen_things_have_died() -> None:
    things = [[n] for n in range(100_000)]
    gc.freeze()
    before = gc.get_freeze_count()
    assert before >= len(things)
    del things
    gc.freeze()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        ("delta", None),
        ("cumulative", ["no such word"]),
        pytest.param("final", ["no such word"], marks=pytest.mark.full),
        pytest.param("delta", ["no such word"], marks=pytest.mark.full),
        pytest.param("cumulative", None, marks=pytest.mark.full),
        pytest.param("final", None, marks=pytest.mark.full),
    ],
)
def test_a_token_more_is_nothing_more_to_look_through(kind: str, stop: list[str] | None) -> None:
    def looked_at() -> int:
        gc.collect()
        # the vocabulary's, as far as it was seen
        things = [
            thing for thing in gc.get_objects() if type(thing) not in (BytePieces, PieceTexts)
        ]
        return len(gc.get_referents(*things))

    def growth() -> int:
        gc.collect()
        gc.freeze()  # what was there before isn't looked through: that takes seconds
        with LLMEngine.from_config(
            {"model": "demo", "max_num_seqs": 4, "max_model_len": 512}
        ) as engine:
            engine.add_request(
                "a",
                "To be",
                SamplingParams(n=4, max_tokens=400, ignore_eos=True, output_kind=kind, stop=stop),
            )

            def after(tokens: int) -> int:
                while engine.stats().decode_tokens < tokens:
                    engine.step()
                return looked_at()

            early, late = after(40), after(190)
        return late - early

    few = 150 / 3  # blocks of 16 tokens are noted in some places
    assert growth() < few or growth() < few, (
        "what a library imports or starts meanwhile, it does once"
    )
