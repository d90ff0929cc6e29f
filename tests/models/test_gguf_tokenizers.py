"""Tokenizers in GGUF files are those of the models: they give the ids of the library's own classes,
and the same text back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as before
from tokenizers.trainers import BpeTrainer

from dovetail.errors import DovetailError
from dovetail.front.tokenizer import Tokenizer as Served
from dovetail.gguf.header import read_header
from dovetail.gguf.tokenizer import tokenizer_files

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\tand tabs ",
    "It's 12345 o'clock, I'LL say: 3.14",
    "naïve café 日本語 🙂 e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x**2  # ok\r\n",
    "<think>x</think>",
]
CONTROL = ["<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>", "</think>"]


def sample() -> list[str]:
    root = Path(__file__).parents[2]
    return [(root / name).read_text() for name in ("README.md", "CHANGELOG.md")]


def trained(normalizer: Any, pre_tokenizer: Any, decoder: Any, **fields: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(**fields))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoder
    return made


def byte_level(split: Any, normalizer: Any = None, **fields: Any) -> Tokenizer:
    made = trained(normalizer, split, decoders.ByteLevel(), **fields)
    alphabet = before.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(sample(), trainer)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    made.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    return made


def split_by(expression: str) -> Any:
    return before.Sequence(
        [
            before.Split(Regex(expression), "isolated"),
            before.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def qwen2() -> Tokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return byte_level(split_by(PRETOKENIZE_REGEX), normalizers.NFC())


def gpt2() -> Tokenizer:
    return byte_level(before.ByteLevel(add_prefix_space=False))


def smollm() -> Tokenizer:
    digits = before.Digits(individual_digits=True)
    return byte_level(before.Sequence([digits, before.ByteLevel(add_prefix_space=False)]))


def save(path: Path, made: Tokenizer, pre: str, **more: Any) -> None:
    model = json.loads(made.to_str())["model"]
    ids = made.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens]
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_bos_token_id(ids["<|im_start|>"])
    for key, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def served(path: Path, directory: Path) -> Served:
    for name, content in tokenizer_files(read_header(path)).items():
        (directory / name).write_text(json.dumps(content))
    return Served.load(directory)


KINDS = {"qwen2": qwen2, "smollm": smollm, "default": gpt2}


@pytest.mark.parametrize("pre", KINDS)
def test_a_byte_level_tokenizer_is_the_models(pre: str, tmp_path: Path) -> None:
    made = KINDS[pre]()
    save(tmp_path / "model.gguf", made, pre)
    found = served(tmp_path / "model.gguf", tmp_path)
    for text in (*TEXTS, *sample()):
        ids = found.encode(text)
        assert ids == made.encode(text).ids
        assert found.decode(ids) == made.decode(ids, skip_special_tokens=False)
        assert found.decode(ids, True) == made.decode(ids)
    assert found.special_ids == {made.token_to_id(token) for token in CONTROL}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Tokenizer]:
    made = smollm()
    directory = tmp_path_factory.mktemp("smollm")
    save(directory / "model.gguf", made, "smollm")
    return served(directory / "model.gguf", directory), made


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_has_the_same_ids(pair: tuple[Served, Tokenizer], text: str) -> None:
    found, made = pair
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert found.encode(text) == made.encode(text).ids


def test_llama3_splits_numbers_by_three_and_takes_whole_words(tmp_path: Path) -> None:
    made = gpt2()
    word = made.add_tokens(["Hello"])  # of no merges
    assert word
    save(tmp_path / "model.gguf", made, "llama-bpe")
    found = served(tmp_path / "model.gguf", tmp_path)
    assert found.encode("Hello") == [
        made.token_to_id("<|im_start|>"),
        made.token_to_id("Hello"),
    ], "BOS first, which files for Llama 3 don't say"
    digits = found.token_strings(found.encode("1234567")[1:])
    assert "".join(digits) == "1234567"
    assert max(map(len, digits)) <= 3


def test_flags_of_the_file_say_whether_bos_and_eos_are_added(tmp_path: Path) -> None:
    save(tmp_path / "model.gguf", gpt2(), "llama-bpe", add_bos_token=False, add_eos_token=True)
    found = served(tmp_path / "model.gguf", tmp_path)
    [eos] = found.encode("<|im_end|>", special_tokens=False)
    assert found.around == ([], [eos])
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [eos]}


def sentencepiece(has_prefix: bool) -> Tokenizer:
    """BPE with bytes for unknown characters, as Llama 2 and Gemma have it."""
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", 1, 0))
    made = trained(
        normalizers.Sequence(spaces),
        None,
        decoders.Sequence(after),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = " ".join(sample()).split()
    trainer = BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    made.train_from_iterator(words, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_pieces_of_sentencepiece_are_merged_by_their_scores(
    architecture: str, tmp_path: Path
) -> None:
    made = sentencepiece(has_prefix=architecture == "llama")
    tokens = sorted(made.get_vocab(), key=lambda token: made.get_vocab()[token])
    writer = GGUFWriter(str(tmp_path / "model.gguf"), architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([float(-index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    for key, number in (("bos", 1), ("eos", 2), ("unknown", 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = served(tmp_path / "model.gguf", tmp_path)
    for text in (*TEXTS, sample()[0]):
        ids = found.encode(text)
        assert ids[0] == 1, "BOS is added unless the file says otherwise"
        assert found.decode(ids[1:]) == made.decode(made.encode(text).ids)
        assert ids[1:] == made.encode(text).ids


WRONG = {
    "an unknown split": ({"pre": "chameleon"}, "pre is 'chameleon'; only default"),
    "a merge of three": ({"merges": ["a b c"]}, "'a b c' isn't two parts"),
    "kinds of others": ({"token_type": [1, 1, 1]}, "token_type has 3 entries for 2 tokens"),
    "an id of no token": ({"eos_token_id": 7}, "eos_token_id is 7, of 2 tokens"),
    "tokens that are numbers": ({"tokens": [1, 2]}, "tokens must be a list of str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tokenizer_is_refused_with_the_key(name: str) -> None:
    from dovetail.gguf.header import Header

    changed, said = WRONG[name]
    content = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": []} | changed
    metadata = {f"tokenizer.ggml.{key}": value for key, value in content.items()}
    with pytest.raises(DovetailError, match=f"^m.gguf: tokenizer.ggml.*{said}"):
        tokenizer_files(Header(Path("m.gguf"), metadata, {}))
