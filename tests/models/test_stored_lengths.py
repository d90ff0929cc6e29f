"""Texts beyond the length that sentence-transformers has stored are cut as it cuts them; pairs have
the token types that its tokenizer tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dovetail import LLM
from dovetail.errors import RequestError
from tests.models.pooling_checkpoints import save, sentence_transformer, states
from tests.rounding import rounded, roundings_of

CLS, SEP = 1, 2
WORDS = {
    "[PAD]": 0,
    "[CLS]": CLS,
    "[SEP]": SEP,
    "[UNK]": 3,
    **{f"w{index}": 4 + index for index in range(80)},
}
LONG = [4 + index % 80 for index in range(500)]
TYPED = ["input_ids", "token_type_ids", "attention_mask"]


def text(ids: list[int]) -> str:
    return " ".join(f"w{token - 4}" for token in ids)


def save_tokenizer(directory: Path, **settings: Any) -> None:
    """Save one whose tokens are words, and that puts special tokens around texts and pairs as
    BERT's does."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", **settings
    ).save_pretrained(directory)


@pytest.mark.parametrize("prompt", [[5, 9, 7, 7], [5, 7, 9], [7, 7, 7], [9, 5], [7, 5, 7]], ids=str)
def test_a_classifier_skips_the_pad_token_at_the_end_as_transformers_does(
    prompt: list[int], classifier: Any
) -> None:
    llm, theirs = classifier
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([prompt])).logits.softmax(-1)[0]
    [output] = llm.classify([prompt], use_tqdm=False)
    assert list(output.prompt_token_ids) == prompt
    np.testing.assert_allclose(output.outputs.probs, expected.numpy(), atol=1e-5)
    [each] = llm.encode([prompt], pooling_task="token_classify", use_tqdm=False)
    assert len(each.outputs.data) == len(prompt)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("classifier")
    model = save(directory, "Qwen3ForSequenceClassification", num_labels=3, pad_token_id=7)
    with LLM(str(directory)) as llm:
        yield llm, model


@pytest.mark.parametrize(
    ("files", "settings", "kept"),
    [
        ({"sentence_bert_config": {"max_seq_length": 12}}, {}, slice(0, 10)),
        ({}, {"model_max_length": 12}, slice(0, 10)),
        ({}, {"model_max_length": 12, "truncation_side": "left"}, slice(490, 500)),
        ({}, {}, slice(0, 62)),
    ],
    ids=str,
)
def test_a_longer_text_is_cut(
    files: dict[str, Any], settings: dict[str, Any], kept: slice, tmp_path: Path
) -> None:
    model = save(tmp_path, "BertModel")
    save_tokenizer(tmp_path, **settings)
    sentence_transformer(tmp_path, "Pooling", pooling={"pooling_mode": "mean"}, **files)
    expected = states(model, [CLS, *LONG[kept], SEP]).mean(0)
    with LLM(str(tmp_path)) as llm:
        [output] = llm.embed(text(LONG), use_tqdm=False)
        assert output.outputs is not None
        np.testing.assert_allclose(output.outputs.embedding, expected.numpy(), atol=1e-5)
        with pytest.raises(RequestError, match="at most"):
            llm.embed([[CLS, *LONG, SEP]], use_tqdm=False)


def test_a_checkpoint_that_sentence_transformers_has_not_saved_refuses_longer_texts(
    tmp_path: Path,
) -> None:
    save(tmp_path, "BertModel")
    save_tokenizer(tmp_path)
    with (
        LLM(str(tmp_path)) as llm,
        pytest.raises(RequestError, match=r"at most 64 fit .*truncate_prompt_tokens=-1 cuts it"),
    ):
        llm.embed(text(LONG[:63]), use_tqdm=False)


@pytest.mark.parametrize("names", [TYPED, ["input_ids", "attention_mask"]])
def test_pairs_are_cut_and_typed_as_cross_encoders_are(names: list[str], tmp_path: Path) -> None:
    model = save(
        tmp_path,
        "BertForSequenceClassification",
        num_labels=1,
        sentence_transformers={"version": "5.0.0"},
    )
    save_tokenizer(tmp_path, model_max_length=20, model_input_names=names)
    query, document = LONG[:3], LONG[100:]
    ids = [CLS, *query, SEP, *document[: 20 - 6], SEP]
    types = [0] * 5 + [1] * 15 if names == TYPED else [0] * 20
    with torch.no_grad():
        expected = model(
            input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])
        ).logits.sigmoid()
    with LLM(str(tmp_path)) as llm:
        [output] = llm.score(text(query), text(document), use_tqdm=False)
    assert output.outputs is not None
    assert output.outputs.score == rounded(float(expected), roundings_of(model.config, 20))


def test_a_request_may_set_another_length(tmp_path: Path) -> None:
    model = save(tmp_path, "BertModel")
    save_tokenizer(tmp_path, model_max_length=12)
    sentence_transformer(tmp_path, "Pooling", pooling={"pooling_mode": "cls"})
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 12
    with LLM(str(tmp_path), max_model_len=30) as llm:
        for asked, most in ((None, 30), (7, 7), (-1, 30)):
            [output] = llm.embed(text(LONG), truncate_prompt_tokens=asked, use_tqdm=False)
            expected = states(model, [CLS, *LONG[: most - 2], SEP])[0]
            assert output.outputs is not None
            np.testing.assert_allclose(output.outputs.embedding, expected.numpy(), atol=1e-5)
