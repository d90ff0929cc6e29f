"""Embeddings, classes and scores through `LLM`, `LLMEngine` and `AsyncLLMEngine`, with an executor
that knows what it should have been given."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import (
    LLM,
    AsyncLLMEngine,
    LLMEngine,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
)
from dovetail.api.executor import PoolingCapacity
from dovetail.config.limits import MAX_CUT_CHARS
from dovetail.errors import EngineDeadError, ModelLoadError, RequestError, UnsupportedError
from dovetail.front.pooling import YES_OR_NO, PoolingFacts, PoolingIntake, ScorePlan, paired
from dovetail.front.prompts import PromptSource
from dovetail.front.tokenizer import TokenizedText
from tests.front.pooled import CLASSIFIER, EMBEDDER, GENERATOR, SCORER, config, expected, install
from tests.registry.fakes import Site
from tests.rounding import assert_rounded

TEXTS = ["O Romeo, Romeo!", "wherefore art thou Romeo?", "Deny thy father and refuse thy name"]


@pytest.fixture(autouse=True)
def executor(site: Site) -> None:
    install(site)


def unchecked(facts: PoolingFacts, encoded: Any, tokenizer: Any = None) -> PoolingIntake:
    """The intake of a model whose prompts may have any number of characters."""
    return PoolingIntake(
        facts,
        encoded,
        lambda: tokenizer or pytest.fail("no tokenizer is needed"),
        lambda chars, cut: None,
    )


def llm(capacity: PoolingCapacity | None, **more: Any) -> LLM:
    return LLM(**config(capacity, **more))


@pytest.mark.parametrize("capacity", [EMBEDDER, GENERATOR])
def test_embeddings_come_in_the_order_of_the_prompts_and_are_those_of_their_tokens(
    capacity: PoolingCapacity,
) -> None:
    with llm(capacity) as one:
        outputs = one.embed([*TEXTS, [5, 6, 7]], use_tqdm=False)
        assert [output.prompt for output in outputs] == [*TEXTS, None]
        assert [list(output.prompt_token_ids) for output in outputs] == [
            *map(one.engine.tokenizer.encode, TEXTS),
            [5, 6, 7],
        ]
        for output in outputs:
            assert output.outputs is not None
            assert output.finish_reason == "stop"
            np.testing.assert_array_equal(
                np.float32(output.outputs.embedding),
                expected(output.prompt_token_ids, "embed", capacity),
            )


def test_parameters_of_each_prompt_are_its_own() -> None:
    with llm(EMBEDDER) as one:
        params = [
            PoolingParams(dimensions=2),
            PoolingParams(task="token_embed"),
            PoolingParams(use_activation=False),
        ]
        outputs = one.encode(TEXTS, params, use_tqdm=False)
        ids = [output.prompt_token_ids for output in outputs]
        datas = [output.outputs.data for output in outputs if output.outputs is not None]
        np.testing.assert_array_equal(datas[0], expected(ids[0], "embed", EMBEDDER, dimensions=2))
        np.testing.assert_array_equal(datas[1], expected(ids[1], "token_embed", EMBEDDER))
        np.testing.assert_array_equal(datas[2], expected(ids[2], "embed", EMBEDDER, activate=False))
        assert datas[1].shape == (len(ids[1]), 6)


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_a_prompt_whose_states_are_summed_keeps_its_row_when_others_come_first(
    max_num_seqs: int,
) -> None:
    """What is pooled of its first chunks is kept in its row. More requests run than `max_num_seqs`,
    and each new one is more urgent."""
    prompts = {
        str(place): [place + 5] * length for place, length in enumerate((60, 50, 40, 30, 20, 3))
    }
    outputs: dict[str, Any] = {}
    with LLMEngine.from_config(
        config(EMBEDDER, scheduler="priority", max_num_seqs=max_num_seqs, max_num_batched_tokens=8)
    ) as engine:
        urgency = len(prompts)
        for name, prompt in prompts.items():
            urgency -= 1
            engine.add_request(
                name,
                prompt,
                PoolingParams(task="token_embed" if urgency % 2 else "embed"),
                priority=urgency,
            )
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    for name, prompt in prompts.items():
        task = "embed" if int(name) % 2 else "token_embed"
        np.testing.assert_array_equal(
            np.float32(outputs[name].outputs.data),
            expected(prompt, task, EMBEDDER),
            f"{name}: {outputs[name].stop_reason}",
        )


def test_classes_and_scores_of_a_classifier() -> None:
    with llm(CLASSIFIER) as one:
        [output] = one.classify("a rose", use_tqdm=False)
        assert output.outputs is not None
        np.testing.assert_array_equal(
            np.float32(output.outputs.probs),
            expected(output.prompt_token_ids, "classify", CLASSIFIER),
        )
        with pytest.raises(RequestError, match=r"3 labels, and a score needs a model of one"):
            one.score("a", "b")


def test_pairs_are_scored_in_the_form_of_the_tokenizer_or_of_a_template() -> None:
    with llm(SCORER) as one:
        encode = one.engine.tokenizer.encode
        outputs = one.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
        assert [list(output.prompt_token_ids) for output in outputs] == [
            encode(TEXTS[0]) + encode(text) for text in TEXTS[1:]
        ]
        outputs += one.score(TEXTS, TEXTS[::-1], template="Q {query} D {document}!", use_tqdm=False)
        asked = [
            encode(f"Q {query} D {document}!")
            for query, document in zip(TEXTS, TEXTS[::-1], strict=True)
        ]
        assert [list(output.prompt_token_ids) for output in outputs[2:]] == asked
        for output in outputs:
            ids = output.prompt_token_ids
            second = len(encode(TEXTS[0])) if output in outputs[:2] else None
            assert output.outputs is not None
            assert output.outputs.score == float(
                expected(ids, "classify", SCORER, second=second)[0]
            )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y)),
        ("dot", lambda x, y: x @ y),
        ("euclidean", lambda x, y: -(((x - y) ** 2).sum() ** 0.5)),
        ("manhattan", lambda x, y: -abs(x - y).sum()),
    ],
)
def test_scores_are_the_stored_similarity_of_embeddings(
    name: str, expected: Callable[..., float], tmp_path: Path
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"similarity_fn_name": name})
    )
    facts = PoolingFacts.of(EMBEDDER, tmp_path, None, 64, 64)
    plan = ScorePlan(PromptSource([], lambda part: []), PoolingParams(), [(0, 1)], facts.similarity)
    first, second = np.array([1, 2, 3], np.float32), np.array([-1, 0.5, 4], np.float32)
    assert plan.score([first, second]) == pytest.approx(expected(first, second))


def test_scores_of_an_embedding_model_are_cosines_and_each_text_is_embedded_once() -> None:
    with llm(EMBEDDER) as one:
        before = one.engine.stats().finished
        outputs = one.score([TEXTS[0]] * 3, TEXTS, use_tqdm=False)
        assert one.engine.stats().finished - before == 4
        vectors = [
            np.float64(output.outputs.embedding)
            for output in one.embed(TEXTS, use_tqdm=False)
            if output.outputs
        ]
        cosines = [vectors[0] @ vector for vector in vectors]
        assert_rounded(
            [output.outputs.score for output in outputs if output.outputs], cosines, len(vectors[0])
        )


def test_stored_prompts_are_put_before_texts() -> None:
    stored = dataclasses.replace(
        PoolingFacts(EMBEDDER, 100, "max_model_len"),
        prompts={"query": "Q: ", "passage": "P: "},
        default_prompt="passage",
    )
    pooling = unchecked(stored, lambda texts: [TokenizedText(text, [1]) for text in texts])
    assert pooling.prompted("a", "query") == "Q: a"
    assert pooling.prompted("a", None) == "P: a"
    plan = pooling.plan_scores([("a", "b"), ("a", "a")], PoolingParams())
    assert [prompt.text for prompt in plan.prompts.all()] == ["Q: a", "P: b", "P: a"]  # type: ignore[union-attr]
    assert plan.places == [(0, 1), (0, 2)]
    with pytest.raises(RequestError, match="no prompt named 'doc'; it has 'query', 'passage'"):
        pooling.prompted("a", "doc")


@pytest.mark.parametrize(
    "content",
    [{"prompts": {"q": 1}}, {"prompts": ["q"]}, {"prompts": {"q": ""}, "default_prompt_name": "d"}],
)
def test_a_checkpoint_s_wrong_prompts_are_named(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(
        ModelLoadError, match=r"config_sentence_transformers\.json: (prompts|default_prompt_name)"
    ):
        PoolingFacts.of(EMBEDDER, tmp_path, None, 10, 10)


def test_a_generator_with_score_tokens_gets_pairs_in_the_form_of_qwen3_reranker(
    tmp_path: Path,
) -> None:
    yes_or_no = dataclasses.replace(GENERATOR, tasks=("classify", "embed"), labels=("score",))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert PoolingFacts.of(yes_or_no, tmp_path, None, 10, 10).template == YES_OR_NO
    assert (
        PoolingFacts.of(yes_or_no, tmp_path, "{query}{document}", 10, 10).template
        == "{query}{document}"
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    other = PoolingFacts.of(yes_or_no, tmp_path, None, 10, 10)
    with pytest.raises(RequestError, match="only that of Qwen3-Reranker is known: give one"):
        unchecked(other, lambda texts: []).plan_scores([("a", "b")], PoolingParams())


class Around:
    """A tokenizer that puts 1 before a text and 2, 3 after it, and whose tokens are characters."""

    around = ([1], [2, 3])

    def __init__(self, *, left: bool = False) -> None:
        self.truncates_left = left

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        inner = list(map(ord, text))
        return [1, *inner, 2, 3] if special_tokens else inner


def around(most: int, *, left: bool = False, template: str | None = None) -> PoolingIntake:
    tokenizer: Any = Around(left=left)
    facts = PoolingFacts(SCORER, most, "max_model_len", template=template)
    return unchecked(
        facts,
        lambda texts: [TokenizedText(text, tokenizer.encode(text)) for text in texts],
        tokenizer,
    )


def test_truncation_keeps_the_special_tokens_around_a_text() -> None:
    ids = [1, 10, 11, 12, 13, 14, 2, 3]
    assert around(9).cut(ids, PoolingParams(truncate_prompt_tokens=5)) == [1, 10, 11, 2, 3]
    assert around(9, left=True).cut(ids, PoolingParams(truncate_prompt_tokens=5)) == [
        1,
        13,
        14,
        2,
        3,
    ]
    assert around(6).cut(ids, PoolingParams(truncate_prompt_tokens=-1)) == [1, 10, 11, 12, 2, 3]
    assert around(6).cut([10, 11, 12, 13], PoolingParams(truncate_prompt_tokens=2)) == [10, 11]
    assert around(6).cut(ids, PoolingParams()) == ids
    with pytest.raises(
        RequestError, match="must be more than 3, the special tokens around a text, got 3"
    ):
        around(9).cut(ids, PoolingParams(truncate_prompt_tokens=3))


def test_truncation_of_a_template_cuts_the_document_and_nothing_else() -> None:
    cut = around(12, template="<{query}|{document}>").plan_scores(
        [("ab", "cdefghij"), ("a", "b")], PoolingParams(truncate_prompt_tokens=-1)
    )
    made: Any = cut.prompts.all()
    assert [[*map(chr, prompt.token_ids[1:-2])] for prompt in made] == [
        list("<ab|cdef>"),
        list("<a|b>"),
    ]
    full = around(12, template="<{query}|{document}>").plan_scores(
        [("abcdefghij", "k")], PoolingParams(truncate_prompt_tokens=-1)
    )
    with pytest.raises(RequestError, match="leave no room for the document"):
        full.prompts.all()


def test_a_text_that_is_truncated_may_be_longer_than_what_fits() -> None:
    long = "To be or not to be. " * 200
    for capacity, calls in [
        (
            EMBEDDER,
            [
                lambda one, **cut: one.embed(long, **cut),
                lambda one, **cut: one.score("a", long, **cut),
            ],
        ),
        (
            CLASSIFIER,
            [
                lambda one, **cut: one.classify(["a", long], **cut),
                lambda one, **cut: one.reward(long, **cut),
            ],
        ),
        (
            SCORER,
            [
                lambda one, **cut: one.score(long, long, **cut),
                lambda one, **cut: one.score("a", long, template="{query}:{document}", **cut),
            ],
        ),
    ]:
        with llm(capacity, max_model_len=64) as one:
            for call in calls:
                for most in (40, -1):
                    outputs = call(one, truncate_prompt_tokens=most, use_tqdm=False)
                    assert outputs[-1].outputs is not None
                with pytest.raises(RequestError, match=r"limits\.max_prompt_chars"):
                    call(one, use_tqdm=False)
            with pytest.raises(RequestError, match=rf"at most {MAX_CUT_CHARS} are tokenized"):
                one.encode("a" * (MAX_CUT_CHARS + 1), truncate_prompt_tokens=4, use_tqdm=False)


def test_texts_of_pairs_are_measured_before_they_are_joined() -> None:
    def check(chars: int, cut: bool) -> None:
        measured.append((chars, cut))

    measured: list[tuple[int, bool]] = []
    text = "x" * 10**6
    pairs = [(text, f"{number}") for number in range(1000)]
    for capacity, template in ((SCORER, None), (SCORER, "{query}:{document}"), (EMBEDDER, None)):
        facts = PoolingFacts(
            capacity, 10, "max_model_len", prompts={"query": "12"} if capacity is EMBEDDER else {}
        )
        pooling = PoolingIntake(
            facts, lambda texts: pytest.fail("joined"), lambda: pytest.fail("tokenized"), check
        )
        plan = pooling.plan_scores(pairs, PoolingParams(truncate_prompt_tokens=4), template)
        lengths = [len(query) + len(document) + bool(template) for query, document in pairs]
        if capacity is EMBEDDER:
            lengths = [len(text) + 2, *(len(document) for _, document in pairs)]
        assert list(plan.prompts.chars) == lengths
        assert measured == [(length, True) for length in lengths]
        measured.clear()


@given(st.lists(st.integers(0, 100)), st.integers(0, 300))
def test_slices_of_prompts_are_all_of_them_and_none_costs_more_than_it_may_but_a_single_one(
    chars: list[int], most: int
) -> None:
    source = PromptSource(chars, lambda part: list(range(len(chars)))[part])  # type: ignore[arg-type]
    slices = list(source.slices(most))
    assert [place for part, _ in slices for place in source.make(part)] == source.all()
    assert sum(cost for _, cost in slices) == source.cost
    for part, cost in slices:
        assert cost <= most or part.stop - part.start == 1


def test_a_pair_is_cut_by_the_tokenizer() -> None:
    with llm(SCORER) as one:
        [output] = one.score(TEXTS[0], TEXTS[1], truncate_prompt_tokens=6, use_tqdm=False)
        assert len(output.prompt_token_ids) == 6


def test_prompts_that_fit_the_model_are_pooled_and_longer_ones_refused() -> None:
    with llm(EMBEDDER) as one:
        [output] = one.embed([7] * 128, use_tqdm=False)
        assert output.outputs is not None
        assert len(output.prompt_token_ids) == 128
        with pytest.raises(
            RequestError,
            match=r"has 129 tokens, and at most 128 fit \(max_model_len\); "
            r"truncate_prompt_tokens=-1 cuts it",
        ):
            one.embed([7] * 129)
        [cut] = one.embed([7] * 129, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 128
    with (
        llm(SCORER) as one,
        pytest.raises(RequestError, match=r"at most 64 fit \(max_num_batched_tokens\)"),
    ):
        one.classify([7] * 65)


def test_an_unknown_name_of_a_parameter_is_answered_with_the_nearest() -> None:
    assert PoolingParams.of({"dimensions": 8}) == PoolingParams(dimensions=8)
    with pytest.raises(
        RequestError, match=r"^dimension: unknown pooling parameter.*did you mean dimensions\?"
    ):
        PoolingParams.of({"dimension": 8})


def test_calls_that_a_model_can_t_serve_name_those_that_it_can() -> None:
    with llm(EMBEDDER) as one:
        with pytest.raises(
            RequestError, match=r"this model can't generate: embed\(\) makes embeddings"
        ):
            one.generate("a")
        with pytest.raises(RequestError, match=r"can't do classify; embed\(\)"):
            one.classify("a")
    with llm(CLASSIFIER) as one, pytest.raises(RequestError, match=r"can't do embed; classify\(\)"):
        one.embed("a")
    with llm(None) as one:
        assert one.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        with pytest.raises(RequestError, match="executor fake can't pool"):
            one.embed("a")
    with pytest.raises(UnsupportedError, match=r"pooling\.method: executor fake can't pool"):
        llm(None, pooling={"method": "mean"})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda one: one.embed("a", pooling_params=SamplingParams()),
            "pooling_params must be PoolingParams",
        ),
        (lambda one: one.generate("a", PoolingParams()), "sampling_params must be SamplingParams"),
        (
            lambda one: one.embed(["a", "b"], pooling_params=[PoolingParams()]),
            "got 1 for 2 prompts",
        ),
        (
            lambda one: one.embed("a", pooling_params=PoolingParams(task="token_embed")),
            "task: the call says 'embed'",
        ),
        (
            lambda one: one.embed("a", pooling_params=PoolingParams(dimensions=7)),
            "dimensions must be at most 6",
        ),
        (lambda one: one.embed("a", prompt_name="query"), "no prompt named 'query'; it has none"),
        (lambda one: one.embed([5], prompt_name="query"), "these are token ids"),
        (lambda one: one.embed("a", truncate_prompt_tokens=0), "truncate_prompt_tokens must be"),
        (
            lambda one: one.embed("a", dimensions=3),
            r"it is a field of PoolingParams: pooling_params=PoolingParams\(dimensions=…\)",
        ),
        (lambda one: one.embed("a", n=3), "embed\\(\\): n: unknown argument"),
        (lambda one: one.embed(""), "the prompt is empty"),
        (lambda one: one.embed([2000]), "out of the vocabulary"),
        (lambda one: one.score("a", "b", template="{query}"), "template"),
        (lambda one: one.score("a", "b", chat_template="x"), "it takes a `template` instead"),
        (lambda one: one.score("a", []), "data_2 must be a text"),
        (lambda one: one.score(["a", "b"], ["c"]), "got 2 and 1"),
        (lambda one: one.score("a", 3), "data_2 must be a text"),
        (lambda one: PoolingParams(task="rerank"), "task must be one of"),
    ],
)
def test_wrong_calls_are_refused_by_name(call: Any, said: str) -> None:
    with llm(EMBEDDER) as one:
        with pytest.raises(RequestError, match=said):
            call(one)
        assert not one.engine.core.has_unfinished()


def test_pairs_are_one_to_each_or_each_to_its_own() -> None:
    assert paired("a", ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert paired(["a", "b"], ("c", "d")) == [("a", "c"), ("b", "d")]


def test_requests_that_generate_and_that_pool_share_the_steps_of_an_engine() -> None:
    with LLMEngine.from_config(config(GENERATOR)) as engine:
        engine.add_request("text", "To be", SamplingParams(max_tokens=5))
        engine.add_list([(f"vector {n}", [n + 1, 2, 3], PoolingParams(), {}) for n in range(3)])
        engine.add_request("gone", [1, 2], PoolingParams())
        engine.abort_request("gone")
        outputs: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            steps += 1
            outputs |= {output.request_id: output for output in engine.step()}
        assert steps <= 8
        assert outputs.keys() == {"text", "vector 0", "vector 1", "vector 2"}
        assert isinstance(outputs["text"], RequestOutput)
        assert len(outputs["text"].outputs[0].token_ids) == 5
        for n in range(3):
            output = outputs[f"vector {n}"]
            assert isinstance(output, PoolingRequestOutput)
            assert output.finished
            assert output.outputs is not None
            np.testing.assert_array_equal(
                output.outputs.data, expected([n + 1, 2, 3], "embed", GENERATOR)
            )
            assert output.metrics is not None
            assert output.metrics.first_token_time is not None
        assert engine.core.kv.counts.held == 0


def test_only_requests_that_need_every_state_go_without_the_prefix_cache() -> None:
    for capacity, cached in ((GENERATOR, 8), (dataclasses.replace(GENERATOR, method="mean"), 0)):
        with llm(capacity) as one:
            prompt = list(range(1, 12))
            first, second = (one.embed(prompt, use_tqdm=False)[0] for _ in range(2))
            assert first.num_cached_tokens == 0
            assert second.num_cached_tokens == cached
            assert first.outputs == second.outputs
            [tokens] = one.encode(prompt, PoolingParams(task="token_embed"), use_tqdm=False)
            assert tokens.num_cached_tokens == 0


def test_the_engine_s_death_is_an_error_of_every_call() -> None:
    with llm(EMBEDDER) as one:
        one.engine.core.executor.submit = lambda batch: pytest.fail("broken")  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError):
            one.embed(TEXTS, use_tqdm=False)


def test_encode_of_the_engine_for_asyncio() -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_config(config(EMBEDDER)) as engine:
            [ours] = [output async for output in engine.encode("a", TEXTS[0], PoolingParams())]
            [theirs] = [output async for output in engine.encode(TEXTS[0], PoolingParams(), "a")]
            [default] = [output async for output in engine.encode(request_id="b", prompt=[1, 2])]
            assert ours.outputs is not None
            assert theirs.outputs is not None
            assert default.outputs is not None
            np.testing.assert_array_equal(ours.outputs.data, theirs.outputs.data)
            with pytest.raises(RequestError, match=r"encode\(\) takes PoolingParams"):
                engine.encode("a", "b", SamplingParams())  # type: ignore[call-overload]
            with pytest.raises(RequestError, match=r"generate\(\) takes SamplingParams"):
                engine.generate("a", "b", PoolingParams())  # type: ignore[call-overload]
            with pytest.raises(RequestError, match="can't generate"):
                await anext(engine.generate("a", "b"))

    asyncio.run(main())
