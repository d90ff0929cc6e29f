"""The bytes of tokens: spelled with them, a text is itself, for each kind of tokenizer that models
have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

import dovetail_models
from dovetail.errors import UnsupportedError
from dovetail.front.grammars import token_bytes
from dovetail.front.tokenizer import Tokenizer, TransformersTokenizer
from tests.support import examples

DEMO = Path(dovetail_models.__file__).parent / "demo"
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30)
CORPUS = [
    '{"name": "Anna", "age": 31}',
    "to be or not to be",
    "Größe 漢字 \U0001f600",
    "\n\t  a",
] * 3


def covered(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(
        [AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")]
    )
    return TransformersTokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
        )
    )


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return covered(backend)


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces are \u2581, what isn't in the vocabulary is spelled in
    bytes."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    content = json.loads(trained.to_str())
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(content["model"]["vocab"], key=content["model"]["vocab"].get),
    ]
    content["model"] |= {
        "vocab": {piece: place for place, piece in enumerate(pieces)},
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    backend = Backend.from_str(json.dumps(content))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return covered(backend)


TOKENIZERS = {
    "demo": Tokenizer.load(DEMO),
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@examples(quick=100, full=5000)
@given(text=TEXTS)
def test_a_text_is_the_bytes_of_its_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    plain, _ = token_bytes(tokenizer, tokenizer.vocab_size)
    pieces = [plain[token] for token in tokenizer.encode(text, special_tokens=False)]
    assert None not in pieces
    spelled = b"".join(piece for piece in pieces if piece is not None)
    assert spelled.removeprefix(b" ") == text.encode().removeprefix(b" "), (
        "but for a space before the first word"
    )


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_special_tokens_are_no_text_but_can_be_looked_for(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    plain, spelled = token_bytes(tokenizer, tokenizer.vocab_size)
    [end], [think] = (
        tokenizer.encode(text, special_tokens=False)[-1:] for text in ("</s>", "</think>")
    )
    assert (plain[end], spelled[end]) == (None, b"</s>")
    assert plain[think] == spelled[think] == b"</think>"


def test_ids_beyond_the_tokenizers_are_never_text() -> None:
    tokenizer = TOKENIZERS["demo"]
    plain, spelled = token_bytes(tokenizer, tokenizer.vocab_size + 3)
    assert plain[-3:] == [None] * 3
    assert len(plain) == len(spelled) == tokenizer.vocab_size + 3


def test_a_smaller_model_leaves_out_the_last_ids() -> None:
    plain, _ = token_bytes(TOKENIZERS["demo"], 300)
    assert len(plain) == 300


def word_piece() -> Any:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return TransformersTokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (word_piece(), "decodes by WordPiece"),
        (TransformersTokenizer(transformers.ByT5Tokenizer()), "is written in Python"),
    ],
)
def test_a_tokenizer_of_an_unknown_kind_is_refused(tokenizer: Tokenizer, said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"structured: this model's tokenizer {said}"):
        token_bytes(tokenizer, 3)


def test_a_tokenizer_that_does_more_than_its_parts_say_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizers.Lowercase()
    tokenizer.backend.decoder = decoders.ByteLevel()
    token_bytes(tokenizer, tokenizer.vocab_size)
    tokenizer.backend.normalizer = normalizers.Replace("a", "b")
    with pytest.raises(UnsupportedError, match="spelled with them, a text is another one"):
        token_bytes(tokenizer, tokenizer.vocab_size)
