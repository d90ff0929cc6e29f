"""The text of a token is what it adds to the text before it: joined they are the whole, for each
kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from dovetail.front.detokenizer import IncrementalText
from dovetail.front.token_texts import TokenTexts, speller, texts_of_prompt
from dovetail.front.tokenizer import Tokenizer, TransformersTokenizer
from dovetail.request.sampling_params import SamplingParams
from tests.front.test_detokenizer import byte_level, metaspace
from tests.support import examples

WORDS = ["Hello world, hello", "don't say the word 'playing'", "naïve café"]


def wrapped(backend: Backend) -> Tokenizer:
    return TransformersTokenizer(SimpleNamespace(backend_tokenizer=backend))


@cache
def word_piece() -> Tokenizer:
    """Spelled as BERT does: spaces are between tokens, "##" joins; some marks draw near to the
    word before."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        WORDS * 5,
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"]),
    )
    return wrapped(backend)


@cache
def unigram() -> Tokenizer:
    """Spelled as T5 does: Metaspace, without byte tokens."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -3.0),
        ("▁Hello", -2.0),
        ("▁world", -2.0),
        *((char, -5.0) for char in "abcdeéo漢👍"),
    ]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>"])
    return wrapped(backend)


@cache
def in_python() -> Tokenizer:
    """Without a backend that tells the bytes of its tokens."""
    return TransformersTokenizer(transformers.ByT5Tokenizer())


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": metaspace,
    "WordPiece": word_piece,
    "unigram": unigram,
    "Python": in_python,
}
IDS = st.lists(st.integers(0, 383), max_size=30)


def appended(texts: TokenTexts, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The texts of tokens that come in groups of these sizes, then one by one, the rest of the
    text included."""
    own, left, groups = [], list(ids), list(sizes)
    while left:
        size = groups.pop(0) if groups else 1
        own += texts.append(left[:size]).own
        del left[:size]
    return [*own, texts.flush()]


@pytest.mark.parametrize("kind", KINDS)
@examples(quick=60, full=2000)
@given(ids=IDS, prompt=IDS, sizes=st.lists(st.integers(1, 5), max_size=6), skip=st.booleans())
def test_joined_they_are_the_text(
    kind: str, ids: list[int], prompt: list[int], sizes: list[int], skip: bool
) -> None:
    """Whatever the tokens: broken UTF-8 and unknown ids, too. Special tokens that the text
    leaves out have names instead."""
    tokenizer = KINDS[kind]()
    text = IncrementalText(tokenizer, SamplingParams(skip_special_tokens=skip), prompt, None)
    text.append(ids)
    text.flush()
    own = appended(TokenTexts(tokenizer, skip, prompt), ids, sizes)
    left_out = tokenizer.special_ids if skip else frozenset()
    names = [tokenizer.decode([token]) if token in left_out else "" for token in ids]
    assert all(one.endswith(name) for one, name in zip(own, names, strict=False))
    assert (
        "".join([one.removesuffix(name) for one, name in zip(own, [*names, ""], strict=True)])
        == text.text
    )


@pytest.mark.parametrize("kind", KINDS)
@examples(quick=60, full=2000)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.lists(st.sampled_from(WORDS)).map(" ".join),
    token=st.integers(0, 383),
)
def test_another_token_in_a_place_has_the_text_that_it_would_have_had(
    kind: str, text: str, token: int
) -> None:
    tokenizer = KINDS[kind]()
    ids = (
        tokenizer.encode(text)[:12]
        if tokenizer.backend is None
        else tokenizer.backend.encode(text).ids[:12]
    )
    source = TokenTexts(tokenizer, skip_special_tokens=True)
    texts = source.append(ids)
    for place in range(len(ids)):
        would = TokenTexts(tokenizer, skip_special_tokens=True)
        would.append(ids[:place])
        [expected] = would.append([token]).own
        [_, other] = texts.of(place, [ids[place], token])
        assert other.lstrip("\ufffd") == expected.lstrip("\ufffd"), (
            "but for how many U+FFFD a broken character becomes"
        )


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    smile = [metaspace().backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    for tokenizer, ids in (
        (metaspace(), smile),
        (byte_level(), byte_level().backend.encode("😀").ids),
    ):
        assert TokenTexts(tokenizer, True).append(ids).own == [*[""] * (len(ids) - 1), "😀"]


def test_words_keep_the_spaces_that_the_text_has() -> None:
    hello, world = 2, 3
    assert TokenTexts(metaspace(), True).append([hello, world]).own == ["hello", " world"]
    assert TokenTexts(metaspace(), True, context=[hello]).append([hello, world]).own == [
        " hello",
        " world",
    ]


def test_half_a_character_at_the_end_is_not_lost() -> None:
    half = byte_level().backend.encode("a😀").ids[:-1]
    texts = TokenTexts(byte_level(), True)
    assert "".join(texts.append(half).own) == "a"
    assert texts.flush() == "\ufffd"


def test_a_prompts_text_has_no_tokens_that_the_tokenizer_puts_around_it() -> None:
    backend = Backend.from_str(metaspace().backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )

    class WithBos(TransformersTokenizer):
        around = ([1], [])

    tokenizer = WithBos(SimpleNamespace(backend_tokenizer=backend))
    assert texts_of_prompt(tokenizer, "hello world", [1, 2, 3]).append([1, 2, 3]).own == [
        "<s>",
        "hello",
        " world",
    ]
    assert "".join(
        texts_of_prompt(tokenizer, None, [1, 2, 3]).append([1, 2, 3]).own
    ) == tokenizer.decode([1, 2, 3])


def test_the_bytes_of_tokens_are_known_by_the_decoder() -> None:
    word = metaspace().backend.token_to_id("▁world")
    byte = metaspace().backend.token_to_id("<0xC3>")
    known = speller(metaspace())
    assert known is not None
    assert (known(word), known(byte)) == (b" world", b"\xc3")
    assert speller(word_piece()) is None
    backend = Backend.from_str(metaspace().backend.to_str())
    backend.decoder = decoders.Decoder.custom(SimpleNamespace(decode_chain=lambda tokens: tokens))
    assert speller(wrapped(backend)) is None
