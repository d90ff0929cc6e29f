"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and their other names: answers, errors and limits,
over the frames of every request."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from dovetail import PoolingParams
from dovetail.api.executor import PoolingCapacity
from dovetail.testing.fake_executor import FakeExecutor
from dovetail_server.engine import Load
from dovetail_server.frames import Extra, PackedResult, StepFrame, decode_to_front_end, encode
from dovetail_server.settings import ServerSettings
from tests.front.pooled import (
    CLASSIFIER,
    EMBEDDER,
    GENERATOR,
    LEXICAL,
    SCORER,
    config,
    expected,
    install,
)
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.rounding import rounded
from tests.server.engines import Collector, served
from tests.server.serving import demo_tokenizer, serving_in_threads

TEXTS = ["O Romeo, Romeo!", "wherefore art thou Romeo?", "Deny thy father"]
LIMITS = {"limits": {"max_inputs": 4}}


@pytest.fixture(autouse=True)
def executor(site: Site) -> None:  # noqa: F811
    install(site)


@contextmanager
def client(
    capacity: PoolingCapacity | None, settings: ServerSettings | None = None, **more: Any
) -> Iterator[httpx.Client]:
    with (
        serving_in_threads(config(capacity, **LIMITS, **more), settings) as url,
        httpx.Client(base_url=url, timeout=60) as one,
    ):
        yield one


def answer(one: httpx.Client, path: str, **body: Any) -> Any:
    response = one.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(one: httpx.Client, path: str, **body: Any) -> tuple[int, str, str | None]:
    response = one.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["message"], error["param"]


def tokens(text: str) -> list[int]:
    return demo_tokenizer().encode(text)


def test_embeddings_by_openai_s_client() -> None:
    with (
        client(EMBEDDER) as one,
        openai.OpenAI(base_url=f"{one.base_url}/v1", api_key="none", max_retries=0) as theirs,
    ):
        for given, ids in [
            (TEXTS[0], [tokens(TEXTS[0])]),
            (TEXTS, [*map(tokens, TEXTS)]),
            ([5, 6], [[5, 6]]),
            ([[5, 6], [7]], [[5, 6], [7]]),
        ]:
            for form in (
                "float",
                "base64",
                openai.omit,
            ):  # left out, the client asks for base64, and decodes it
                made = theirs.embeddings.create(model="demo", input=given, encoding_format=form)  # type: ignore[arg-type]
                assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))
                assert [one.index for one in made.data] == list(range(len(ids)))
                for told, prompt in zip(made.data, ids, strict=True):
                    vector = (
                        np.frombuffer(base64.b64decode(told.embedding), np.float32)
                        if form == "base64"
                        else np.float32(told.embedding)
                    )
                    np.testing.assert_array_equal(vector, expected(prompt, "embed", EMBEDDER))
        [cut] = theirs.embeddings.create(model="demo", input="a", dimensions=2).data
        np.testing.assert_array_equal(
            np.float32(cut.embedding), expected(tokens("a"), "embed", EMBEDDER, dimensions=2)
        )


def test_wrong_requests_are_refused_with_the_parameter() -> None:
    with client(EMBEDDER) as one:
        for body, said, param in [
            ({"input": "a", "dimensions": 7}, "dimensions must be at most 6", "dimensions"),
            ({"input": "a", "dimensions": 0}, "dimensions must be", "dimensions"),
            ({"input": []}, "input: it must be a text", "input"),
            ({"input": [5, "a"]}, "input: it must be", "input"),
            ({"input": ""}, "the prompt is empty", "input"),
            ({"input": [2000]}, "out of the vocabulary", "input"),
            ({"input": [[7] * 129]}, "at most 128 fit (max_model_len)", "input"),
            ({"input": ["a"] * 5}, "at most 4 (limits.max_inputs), got 5", "input"),
            ({"input": "a", "prompt_name": "query"}, "no prompt named 'query'", "prompt_name"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
            ({"input": "a", "temperature": 1}, "temperature: unknown parameter", "temperature"),
            ({"input": "a", "model": "other"}, "isn't served", "model"),
            ({}, "input: it is required", "input"),
        ]:
            status, message, named = refusal(one, "/v1/embeddings", **body)
            assert status == (404 if param == "model" else 400)
            assert said in message
            assert named == param
        for path, body in (("/classify", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
            status, message, _ = refusal(one, path, **body)
            assert status == 400
            assert "/v1/embeddings makes embeddings" in message
            assert "(" not in message
        assert (
            len(answer(one, "/v1/embeddings", input=[[7] * 129], truncate_prompt_tokens=-1)["data"])
            == 1
        )
    with client(None) as one:
        assert "executor fake can't pool" in refusal(one, "/v1/embeddings", input="a")[1]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_pairs(path: str) -> None:
    with client(SCORER) as one:
        for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
            made = answer(one, path, **dict(zip(names, (TEXTS[0], TEXTS[1:]), strict=True)))
            asked = [tokens(TEXTS[0]) + tokens(text) for text in TEXTS[1:]]
            assert [item["score"] for item in made["data"]] == [
                float(expected(ids, "classify", SCORER)[0]) for ids in asked
            ]
            assert made["usage"]["prompt_tokens"] == sum(map(len, asked))
        for body, said in [
            ({}, "give text_1 and text_2"),
            ({"text_1": "a"}, "give text_1 and text_2"),
            ({"text_1": "a", "text_2": "b", "queries": "c"}, "give text_1 and text_2"),
            (
                {"queries": ["a", "b"], "documents": ["c"]},
                "queries must be one text, or as many as documents",
            ),
            ({"text_1": "a", "text_2": ["b"] * 5}, "limits.max_inputs"),
            ({"text_1": "a", "text_2": "b", "template": "{query}"}, "template must have"),
        ]:
            status, message, _ = refusal(one, path, **body)
            assert status == 400
            assert said in message


def test_what_is_tokenized_for_one_request_is_bounded_before_it_is_joined() -> None:
    limits = {"limits": {"max_request_chars": 1000}}
    long = "ab " * 2000
    with (
        serving_in_threads(config(SCORER, **limits)) as url,
        httpx.Client(base_url=url, timeout=60) as one,
    ):
        for path, body in [
            ("/rerank", {"query": "a" * 200, "documents": ["b"] * 5}),
            (
                "/score",
                {"text_1": "a", "text_2": ["b"] * 5, "template": "c" * 200 + "{query}{document}"},
            ),
            ("/v1/score", {"queries": "a" * 600, "documents": "b" * 600}),
        ]:
            status, message, _ = refusal(one, path, **body)
            assert status == 400
            assert "at most 1000 (limits.max_request_chars)" in message
        assert len(answer(one, "/rerank", query="a" * 50, documents=["b"] * 5)["results"]) == 5
        for path, body in [
            ("/rerank", {"query": long, "documents": ["b"]}),
            ("/score", {"text_1": "a", "text_2": long}),
        ]:
            assert "limits.max_prompt_chars" in refusal(one, path, **body)[1]


@pytest.mark.slow("reads long texts")
def test_a_text_that_is_truncated_may_be_longer_than_what_fits() -> None:
    long = "To be or not to be. " * 200
    for capacity, asked in [
        (
            EMBEDDER,
            [
                ("/v1/embeddings", {"input": long}),
                ("/pooling", {"input": [long], "task": "token_embed"}),
            ],
        ),
        (CLASSIFIER, [("/classify", {"input": long})]),
        (
            SCORER,
            [
                ("/rerank", {"query": long, "documents": ["b"]}),
                ("/score", {"text_1": "a", "text_2": long}),
            ],
        ),
    ]:
        with client(capacity) as one:
            for path, body in asked:
                assert "limits.max_prompt_chars" in refusal(one, path, **body)[1]
                assert (
                    answer(one, path, **body, truncate_prompt_tokens=20)["usage"]["total_tokens"]
                    == 20
                )


def test_an_answer_that_would_be_too_large_is_refused_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"limits": {"max_answer_bytes": 6 * 16 * 40}}  # 40 embeddings as text, 120 as base64
    with (
        serving_in_threads(config(EMBEDDER, **limits)) as url,
        httpx.Client(base_url=url, timeout=60) as one,
    ):
        assert answer(one, "/v1/embeddings", input=["a"] * 40)
        assert answer(one, "/v1/embeddings", input=["a"] * 120, encoding_format="base64")
        assert answer(one, "/v1/embeddings", input=["a"] * 80, dimensions=3)
        assert answer(one, "/pooling", input=[[7] * 20] * 2, task="token_embed")
        assert answer(
            one, "/pooling", input=[[7] * 60] * 4, task="token_embed", truncate_prompt_tokens=10
        )
        monkeypatch.setattr(FakeExecutor, "submit", lambda self, batch: pytest.fail("computed"))
        for path, body in [
            ("/v1/embeddings", {"input": ["a"] * 41}),
            ("/v1/embeddings", {"input": ["a"] * 121, "encoding_format": "base64"}),
            ("/pooling", {"input": [[7] * 20, [7] * 21], "task": "token_embed"}),
        ]:
            status, message, param = refusal(one, path, **body)
            assert (status, param) == (400, "input")
            assert "limits.max_answer_bytes" in message


def test_a_large_answer_is_sent_in_parts_and_is_whole() -> None:
    with serving_in_threads(config(EMBEDDER)) as url, httpx.Client(base_url=url, timeout=60) as one:
        prompts = [[number % 1000 + 1] * 100 for number in range(20)]
        response = one.post("/pooling", json={"input": prompts, "task": "token_embed"})
        assert response.headers.get("transfer-encoding") == "chunked"
        for item, prompt in zip(response.json()["data"], prompts, strict=True):
            np.testing.assert_array_equal(
                np.float32(item["data"]), expected(prompt, "token_embed", EMBEDDER)
            )
        assert "content-length" in one.post("/v1/embeddings", json={"input": "a"}).headers


def test_documents_are_ranked_in_the_forms_of_jina_and_cohere() -> None:
    documents = [*TEXTS, {"text": "a rose"}]
    texts = [*TEXTS, "a rose"]
    with client(SCORER) as one:
        scores = [
            float(expected(tokens("love") + tokens(text), "classify", SCORER)[0]) for text in texts
        ]
        best = sorted(range(4), key=lambda place: -scores[place])
        for path, told in (("/v1/rerank", True), ("/rerank", True), ("/v2/rerank", False)):
            made = answer(one, path, query="love", documents=documents, model="demo")
            assert [(item["index"], item["relevance_score"]) for item in made["results"]] == [
                (place, scores[place]) for place in best
            ]
            assert [item.get("document") for item in made["results"]] == [
                {"text": texts[place]} if told else None for place in best
            ]
            assert made["usage"]["total_tokens"] == sum(
                len(tokens("love") + tokens(text)) for text in texts
            )
            made = answer(
                one, path, query="love", documents=documents, top_n=2, return_documents=not told
            )
            assert [item["index"] for item in made["results"]] == best[:2]
            assert all(("document" in item) is not told for item in made["results"])
        assert answer(one, "/v2/rerank", query="a", documents=["b"])["meta"]["api_version"] == {
            "version": "2"
        }
        for body, param in [
            ({"query": "a", "documents": []}, "documents"),
            ({"query": "a", "documents": ["b"] * 5}, "documents"),
            ({"query": "a", "documents": [{"title": "b"}]}, "documents[0].title"),
            ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
            ({"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
            ({"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
            ({"documents": ["b"]}, "query"),
        ]:
            status, _, named = refusal(one, "/v1/rerank", **body)
            assert (status, named) == (400, param)


def test_scores_of_an_embedding_model_are_cosines() -> None:
    with client(GENERATOR) as one:
        vectors = [
            np.float64(item["embedding"])
            for item in answer(one, "/v1/embeddings", input=TEXTS)["data"]
        ]
        made = answer(one, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
        assert made["results"][0]["index"] == 0
        for item in made["results"]:
            assert item["relevance_score"] == rounded(
                vectors[0] @ vectors[item["index"]], len(vectors[0])
            )


def test_classes_and_whatever_else_a_model_pools() -> None:
    with client(CLASSIFIER) as one:
        [made] = answer(one, "/classify", input="a rose")["data"]
        assert answer(one, "/v1/classify", input="a rose")["data"] == [made]
        probs = expected(tokens("a rose"), "classify", CLASSIFIER)
        np.testing.assert_array_equal(np.float32(made["probs"]), probs)
        assert made["label"] == CLASSIFIER.labels[int(probs.argmax())]
        [made] = answer(
            one, "/pooling", input="a rose", task="token_classify", use_activation=False
        )["data"]
        np.testing.assert_array_equal(
            np.float32(made["data"]),
            expected(tokens("a rose"), "token_classify", CLASSIFIER, activate=False),
        )


@pytest.mark.parametrize("name", ["maxsim", "meanmaxsim"])
def test_documents_are_ranked_by_the_vectors_of_their_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail_server.routes.pooling._SHORT", 0)  # in a thread
    with client(EMBEDDER, pooling={"similarity": name}) as one:
        matrices = [expected(tokens(text), "token_embed", EMBEDDER) for text in TEXTS]
        share = len(matrices[0]) if name == "meanmaxsim" else 1
        scores = [float((matrices[0] @ matrix.T).max(1).sum()) / share for matrix in matrices]
        made = answer(one, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
        assert [item["index"] for item in made["results"]] == sorted(
            range(3), key=lambda place: -scores[place]
        )
        for item in made["results"]:
            assert item["relevance_score"] == rounded(scores[item["index"]], 6 * len(matrices[0]))
        data = answer(one, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
        assert [item["score"] for item in data] == [
            rounded(score, 6 * len(matrices[0])) for score in scores
        ]


def test_vectors_to_compare_are_bounded_before_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"limits": {"max_answer_bytes": 6 * 4 * 4}}  # of four tokens
    changes = {"pooling": {"similarity": "maxsim"}, **limits}
    with (
        serving_in_threads(config(EMBEDDER, **changes)) as url,
        httpx.Client(base_url=url, timeout=60) as one,
    ):
        assert answer(one, "/v1/score", text_1="a", text_2="b")
        monkeypatch.setattr(FakeExecutor, "submit", lambda self, batch: pytest.fail("computed"))
        for path, body in (
            ("/v1/score", {"text_1": "a", "text_2": TEXTS}),
            ("/v1/rerank", {"query": "a", "documents": TEXTS}),
        ):
            status, message, _ = refusal(one, path, **body)
            assert status == 400
            assert "limits.max_answer_bytes" in message


def test_lexical_weights_are_those_of_each_token_id() -> None:
    with client(LEXICAL) as one:
        prompt = [9, 4, 9, 7]
        [made] = answer(one, "/pooling", input=prompt, task="embed_sparse")["data"]
        weights = expected(prompt, "token_classify", LEXICAL)[:, 0]
        assert made["data"] == [
            {"index": 4, "value": rounded(weights[1], 1)},
            {"index": 7, "value": rounded(weights[3], 1)},
            {"index": 9, "value": rounded(max(weights[0], weights[2]), 1)},
        ]
        body = {"input": prompt, "task": "embed_sparse", "encoding_format": "base64"}
        assert refusal(one, "/pooling", **body)[2] == "encoding_format"
        vectors = expected(prompt, "token_embed", LEXICAL)
        assert vectors.shape == (4, 5)
        [made] = answer(one, "/pooling", input=prompt, task="token_embed")["data"]
        np.testing.assert_array_equal(np.float32(made["data"]), vectors)
    with client(EMBEDDER) as one:
        message = refusal(one, "/pooling", input=[5], task="embed_sparse")[1]
        assert message.startswith("this model can't do embed_sparse; /v1/embeddings makes")


def test_an_answer_of_lexical_weights_is_bounded() -> None:
    limits = {"limits": {"max_answer_bytes": 4 * 16 * 4}}  # of four tokens
    with (
        serving_in_threads(config(LEXICAL, **limits)) as url,
        httpx.Client(base_url=url, timeout=60) as one,
    ):
        longest = {"index": 262143, "value": float(np.float32(1.2345678e-30))}
        assert len(str(longest)) < 4 * 16
        assert answer(one, "/pooling", input=[7] * 4, task="embed_sparse")
        message = refusal(one, "/pooling", input=[7] * 5, task="embed_sparse")[1]
        assert "limits.max_answer_bytes" in message


def test_keys_and_metrics_hold_for_these_routes() -> None:
    with client(GENERATOR, ServerSettings(api_keys=("secret",))) as one:
        assert one.post("/v1/embeddings", json={"input": "a"}).status_code == 401
        one.headers["authorization"] = "Bearer secret"
        answer(one, "/v1/embeddings", input=TEXTS, client="alice", user="somebody")
        told = one.get("/metrics").text
        count = sum(len(tokens(text)) for text in TEXTS)
        assert 'finished_reason="stop",front_end="0",model_name="demo"} 3.0' in told
        assert any(
            line.startswith("vllm:prompt_tokens_total{") and line.endswith(f" {count}.0")
            for line in told.splitlines()
        )
        assert 'client="alice"' in told


@pytest.mark.parametrize(
    "data",
    [
        np.arange(3, dtype=np.float32),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((1, 2), np.float32),
    ],
)
def test_what_was_pooled_crosses_processes_as_it_is(data: Any) -> None:
    frame = decode_to_front_end(
        encode(
            StepFrame(
                1, 0.0, b"", b"", load=Load(), extra=Extra(pooled=(PackedResult.of(7, data),))
            )
        )
    )
    assert isinstance(frame, StepFrame)
    assert frame.extra is not None
    [result] = frame.extra.pooled
    assert result.number == 7
    np.testing.assert_array_equal(result.array(), data)
    assert result.array().shape == data.shape


@pytest.mark.parametrize("link", ["thread", "zmq"])
def test_a_request_that_pools_can_be_aborted_and_one_that_fails_says_why(
    link: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with served(link, tmp_path, **config(GENERATOR)) as one:
            gone, kept = Collector(), Collector()
            await one.engine.submit("gone", [1, 2, 3], PoolingParams(), gone)
            await one.engine.submit(
                "kept", [1, 2, 3], PoolingParams(task="token_embed"), kept, priority=1
            )
            one.engine.abort("gone")
            async with asyncio.timeout(30):
                await kept.over.wait()
            [output] = kept.outputs
            output_data: Any = output.outputs
            np.testing.assert_array_equal(
                output_data.data, expected([1, 2, 3], "token_embed", GENERATOR)
            )
            assert output.metrics is not None
            assert output.metrics.first_scheduled_time is not None
            assert not gone.outputs
            await one.until_all_is_free()
            monkeypatch.setattr(FakeExecutor, "submit", lambda self, batch: 1 / 0)
            failed = Collector()
            await one.engine.submit("failed", [1, 2, 3], PoolingParams(), failed)
            async with asyncio.timeout(30):
                await failed.over.wait()
            assert "division" in str(failed.error)

    asyncio.run(main())
