"""Vectors of tokens, lexical weights and MaxSim are those that PyLate, sentence-transformers and
FlagEmbedding compute of the same checkpoints: read here from transformers' states."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dovetail import LLM, PoolingParams
from dovetail.errors import ConfigError, ModelLoadError, RequestError, UnsupportedError
from tests.models.late_checkpoints import (
    CLS,
    DOCUMENT,
    MASK,
    QUERY,
    SEP,
    UNK,
    bge_m3,
    ids_of,
    multi_vector,
    pylate,
    stanford,
)
from tests.models.pooling_checkpoints import save, states

TEXT = "W1 w40 , w3 w40 . w17"
WORDS = ids_of(TEXT.lower())
LONG = " ".join(f"w{index}" for index in range(30))
TOLERANCE = 1e-5


def llm(directory: Path, **more: Any) -> LLM:
    return LLM(str(directory), executor={"name": "local", "device": "cpu"}, dtype="float32", **more)


def vectors(
    one: LLM, prompt: Any, name: str | None = None, **options: Any
) -> tuple[list[int], Any, Any]:
    """The prompt's tokens, their vectors, and which tokens these are of."""
    [output] = one.encode(
        prompt, pooling_task="token_embed", prompt_name=name, use_tqdm=False, **options
    )
    assert output.outputs is not None, output.stop_reason
    return list(output.prompt_token_ids), output.outputs.data, output.outputs.token_ids


@torch.no_grad()
def computed(model: Any, layer: torch.nn.Linear, ids: list[int]) -> Any:
    return F.normalize(layer(states(model, ids)), dim=-1).numpy()


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def maxsim(query: Any, document: Any) -> float:
    return float((query @ document.T).max(1).sum())


@pytest.mark.slow("makes an engine and many requests")
def test_pylate_s_queries_and_documents_are_compared_by_maxsim(tmp_path: Path) -> None:
    model, layer = pylate(tmp_path)
    query = [CLS, QUERY, *ids_of("w5 w6"), SEP, *[MASK] * 5]  # ten tokens
    document = [CLS, DOCUMENT, *WORDS, SEP]
    of_document = computed(model, layer, document)
    counts = [token not in ids_of(", .") for token in document]
    with llm(tmp_path) as one:
        ids, found, kept = vectors(one, "w5 w6", "query")
        assert (ids, kept) == (query, None)
        near(found, computed(model, layer, query))
        ids, found, kept = vectors(one, TEXT, "document")
        assert ids == document
        assert kept.tolist() == [token for token in document if token not in ids_of(", .")]
        near(found, of_document[counts])
        ids, found, kept = vectors(one, TEXT)
        assert ids == document  # a text is a document unless it is called a query
        ids, _, _ = vectors(one, LONG, "query")
        assert ids == [CLS, QUERY, *ids_of(LONG)[:7], SEP]
        ids, _, _ = vectors(one, LONG, "document")
        assert ids == [CLS, DOCUMENT, *ids_of(LONG)[:9], SEP]
        # token ids are taken as they are
        ids, found, kept = vectors(one, document)
        assert (ids, kept) == (document, None)
        near(found, of_document)
        outputs = one.score("w5 w6", [TEXT, LONG, "w9"], use_tqdm=False)
        expected = [
            maxsim(computed(model, layer, query), of_document[counts]),
            *(
                maxsim(computed(model, layer, query), vectors(one, text, "document")[1])
                for text in (LONG, "w9")
            ),
        ]
        near([output.outputs.score for output in outputs if output.outputs], expected)
        with pytest.raises(RequestError, match="can't do embed; encode"):
            one.embed("w5")


@torch.no_grad()
def hidden(model: Any, layer: torch.nn.Linear, ids: list[int], seen: int) -> Any:
    """As `computed`, where tokens see only the first ones."""
    mask = torch.tensor([[1] * seen + [0] * (len(ids) - seen)])
    body = model.base_model(input_ids=torch.tensor([ids]), attention_mask=mask)
    return F.normalize(layer(body.last_hidden_state[0]), dim=-1).numpy()


@pytest.mark.parametrize("kind", ["BertModel", "ModernBertModel"])
def test_tokens_that_fill_a_query_are_not_seen(kind: str, tmp_path: Path) -> None:
    """Beside documents in the same step, whose tokens all are seen."""
    model, layer = pylate(tmp_path, kind, attend_to_expansion_tokens=False)
    own = [CLS, QUERY, *ids_of("w5 w6"), SEP]
    query = [*own, *[MASK] * 5]
    with llm(tmp_path) as one:
        ids, found, _ = vectors(one, "w5 w6", "query")
        assert ids == query
        expected = hidden(model, layer, query, len(own))
        near(found, expected)
        assert abs(found - computed(model, layer, query)).max() > 100 * TOLERANCE
        full = [CLS, QUERY, *ids_of(LONG)[:7], SEP]  # nothing fills it
        near(vectors(one, LONG, "query")[1], computed(model, layer, full))
        outputs = one.score("w5 w6", [TEXT, LONG], use_tqdm=False)
        scores = [maxsim(expected, vectors(one, text, "document")[1]) for text in (TEXT, LONG)]
        near([output.outputs.score for output in outputs if output.outputs], scores)
        # truncation takes the last ones first
        cut = vectors(one, "w5 w6", "query", truncate_prompt_tokens=7)[0]
        assert len(cut) == 7


@pytest.mark.parametrize("attended", [False, True])
def test_the_layout_of_colbert_s_own_program(attended: bool, tmp_path: Path) -> None:
    model, layer = stanford(tmp_path, attend_to_mask_tokens=attended)
    own = [CLS, *ids_of("w70 w5 w6"), SEP]
    query = [*own, *[MASK] * 5]
    document = [CLS, *ids_of("w71"), *WORDS, SEP]
    counts = [token not in ids_of(", .") for token in document]
    with llm(tmp_path) as one:
        ids, found, _ = vectors(one, "w5 w6", "query")
        assert ids == query
        near(found, hidden(model, layer, query, len(query) if attended else len(own)))
        ids, found, _ = vectors(one, TEXT)
        assert ids == document
        near(found, computed(model, layer, document)[counts])
        [output] = one.score("w5 w6", TEXT, use_tqdm=False)
        assert output.outputs is not None
        near(output.outputs.score, maxsim(vectors(one, "w5 w6", "query")[1], found))
        assert len(vectors(one, LONG)[0]) == 12


def test_modules_of_pylate_go_before_colbert_s_own_layer(tmp_path: Path) -> None:
    model, layer = pylate(tmp_path, do_query_expansion=False)
    _, other = stanford(tmp_path)
    assert not torch.equal(layer.weight, other.weight)
    with llm(tmp_path) as one:
        ids, found, _ = vectors(one, "w5", "query")
        assert ids == [CLS, QUERY, *ids_of("w5"), SEP]
        near(found, computed(model, layer, ids))


def test_a_query_that_nothing_fills_has_its_own_tokens(tmp_path: Path) -> None:
    model, layer = pylate(tmp_path, do_query_expansion=False, attend_to_expansion_tokens=False)
    query = [CLS, QUERY, *ids_of("w5 w6"), SEP]
    with llm(tmp_path) as one:
        ids, found, _ = vectors(one, "w5 w6", "query")
        assert ids == query
        near(found, computed(model, layer, query))


def test_a_prefix_that_is_no_token_is_text(tmp_path: Path) -> None:
    pylate(tmp_path, query_prefix="w7 w8 ", document_prefix="", skiplist_words=None)
    with llm(tmp_path) as one:
        assert vectors(one, "w5", "query")[0][:5] == [CLS, *ids_of("w7 w8 w5"), SEP]
        ids, _, kept = vectors(one, TEXT, "document")
        assert ids == [CLS, *WORDS, SEP]
        # PyLate leaves punctuation out unless the files say otherwise
        assert kept.tolist() == [token for token in ids if token not in ids_of(", .")]


@pytest.mark.parametrize(
    ("expansion", "short", "long"),
    [
        (None, 4, 8),
        ({"strategy": "fixed", "attend": True, "length": 7}, 7, 7),
        ({"strategy": "min", "attend": True, "length": 7, "token": "w3"}, 7, 33),
    ],
)
def test_the_layout_of_sentence_transformers(
    expansion: Any, short: int, long: int, tmp_path: Path
) -> None:
    model, layer = multi_vector(
        tmp_path, expansion, skiplist_words=["w40"], skiplist_tasks=["query", "document"]
    )
    own = [CLS, *ids_of("w1 w5"), SEP]
    fill = ids_of("w3") if expansion and expansion.get("token") else [MASK]
    query = own + fill * (short - len(own))

    def tanh(ids: list[int]) -> Any:
        with torch.no_grad():
            return F.normalize(torch.tanh(layer(states(model, ids))), dim=-1).numpy()

    with llm(tmp_path) as one:
        ids, found, _ = vectors(one, "w5", "query")
        assert ids == query
        near(found, tanh(query))
        assert len(vectors(one, LONG, "query")[0]) == long
        ids, _, kept = vectors(one, "w40 w5", "document")
        assert ids == [CLS, *ids_of("w2 w40 w5"), SEP]
        assert kept.tolist() == [CLS, *ids_of("w2 w5"), SEP]
        [output] = one.score("w5", TEXT, use_tqdm=False)
        assert output.outputs is not None
        mean = maxsim(tanh(query), vectors(one, TEXT, "document")[1]) / len(query)
        near(output.outputs.score, mean)


@torch.no_grad()
def lexical(model: Any, sparse: torch.nn.Linear, ids: list[int]) -> dict[int, float]:
    weights: dict[int, float] = {}
    each = torch.relu(sparse(states(model, ids)))[:, 0].tolist()
    for token, weight in zip(ids, each, strict=True):
        if token not in (CLS, SEP, UNK, 0) and weight > 0:
            weights[token] = max(weight, weights.get(token, 0))
    return weights


@pytest.mark.slow("makes an engine and many requests")
def test_bge_m3_has_three_outputs(tmp_path: Path) -> None:
    model, colbert, sparse = bge_m3(tmp_path)
    ids = [CLS, *WORDS, SEP]
    with llm(tmp_path) as one:
        [dense] = one.embed(TEXT, use_tqdm=False)
        assert dense.outputs is not None
        near(dense.outputs.embedding, F.normalize(states(model, ids)[0], dim=-1).numpy())
        found_ids, found, kept = vectors(one, TEXT)
        assert (found_ids, kept.tolist()) == (ids, ids[1:])
        near(found, computed(model, colbert, ids)[1:])
        _, short, _ = vectors(one, TEXT, pooling_params=PoolingParams(dimensions=7))
        assert short.shape == (len(ids) - 1, 7)
        [output] = one.encode(TEXT, pooling_task="token_classify", use_tqdm=False)
        assert output.outputs is not None
        assert output.outputs.token_ids is not None
        assert output.outputs.token_ids.tolist() == WORDS
        with torch.no_grad():
            each = torch.relu(sparse(states(model, ids)))[1:-1].numpy()
        near(output.outputs.data, each)
        assert 0 < np.count_nonzero(each) < len(each)
        texts = [TEXT, "w60 unknown w61", [CLS, 9, 9, 20]]
        tokens = [ids, [CLS, *ids_of("w60"), UNK, *ids_of("w61"), SEP], [CLS, 9, 9, 20]]
        for made, own in zip(one.embed_sparse(texts, use_tqdm=False), tokens, strict=True):
            assert made.outputs is not None
            expected = lexical(model, sparse, own)
            assert expected
            assert list(made.outputs.weights) == sorted(expected)
            near(list(made.outputs.weights.values()), [expected[key] for key in sorted(expected)])
        # scores are cosines, unless a call asks for vectors of tokens
        [cosine] = one.score(TEXT, TEXT, use_tqdm=False)
        [late] = one.score(
            TEXT, LONG, use_tqdm=False, pooling_params=PoolingParams(task="token_embed")
        )
        assert cosine.outputs is not None
        assert late.outputs is not None
        near(cosine.outputs.score, 1.0)
        query, document = vectors(one, TEXT)[1], vectors(one, LONG)[1]
        near(late.outputs.score, maxsim(query, document))
    with llm(tmp_path, pooling={"similarity": "meanmaxsim"}) as one:  # FlagEmbedding's
        [late] = one.score(TEXT, LONG, use_tqdm=False)
        assert late.outputs is not None
        near(late.outputs.score, maxsim(query, document) / len(query))


def test_a_model_without_lexical_weights_says_so(tmp_path: Path) -> None:
    pylate(tmp_path)
    with llm(tmp_path) as one, pytest.raises(RequestError, match="can't do embed_sparse"):
        one.embed_sparse("w5")
    with pytest.raises(ConfigError, match="cosine compares results of embed"):
        llm(tmp_path, pooling={"similarity": "cosine"})


def test_a_checkpoint_of_colbert_s_own_program_is_checked(tmp_path: Path) -> None:
    stanford(tmp_path, query_token_id=["x"])
    with pytest.raises(ModelLoadError, match=r"artifact.metadata: expected tokens as texts"):
        llm(tmp_path)
    (tmp_path / "artifact.metadata").unlink()
    save_file({"linear.bias": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has no matrix linear.weight"):
        llm(tmp_path)


def packed(path: Path, size: int) -> None:
    """Write a file that unpacks to `size` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", bytes(size))


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: path.write_bytes(b"no zip"), "not a file that torch.save writes"),
    (lambda path: packed(path, 2**22), "4194304 bytes, and a layer of this model has at most"),
    (lambda path: packed(path, 100), "it can't be read"),
    (lambda path: torch.save({"weight": torch.zeros(49, 48)}, path), "at most 48 rows"),
    (lambda path: torch.save({"bias": torch.zeros(8)}, path), "found none"),
    (lambda path: torch.save({"weight": torch.zeros(8, 47)}, path), r"expected numbers of shape"),
    (lambda path: torch.save([torch.zeros(8, 48)], path), "expected tensors by their names"),
    (lambda path: torch.save({"weight": Path("x")}, path), "it can't be read"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_damaged_layer_is_refused(
    wrong: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    bge_m3(tmp_path)
    wrong(tmp_path / "colbert_linear.pt")
    with pytest.raises(ModelLoadError, match=words):
        llm(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"query_length": 0}, "query_length: expected a number of tokens"),
        ({"query_expansion": {"strategy": "all"}}, "query_expansion: expected strategy"),
        ({"skiplist_words": "abc"}, "skiplist_words: expected at most 10000 texts"),
        ({"query_prefix": 3}, "query_prefix: expected a text"),
        ({"query_prefix": "w" * 1001}, "query_prefix: expected a text of at most 1000"),
        ({"query_length": 10**9}, "its queries are filled to 1000000000 tokens"),
        ({"similarity_fn_name": "xtr"}, "'xtr' isn't served; served are maxsim, meanmaxsim"),
    ],
)
def test_files_that_can_t_be_honoured_are_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pylate(tmp_path, **config)
    with pytest.raises((ModelLoadError, UnsupportedError), match=words):
        llm(tmp_path)


def test_attention_of_the_model_s_own_doesn_t_hide_tokens(tmp_path: Path) -> None:
    pylate(tmp_path, "MPNetModel", attend_to_expansion_tokens=False)
    with pytest.raises(UnsupportedError, match="mask tokens that other tokens don't attend to"):
        llm(tmp_path)


def test_a_dense_model_with_the_files_of_late_interaction_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "BertModel")
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"query_prefix": ""}))
    with pytest.raises(ModelLoadError, match="json is missing"):
        llm(tmp_path)
