"""A damaged or hostile GGUF file is refused with a sentence, before anything large is allocated."""

from __future__ import annotations

import math
import os
import shutil
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import DovetailError, ModelLoadError
from dovetail.gguf.config import FAMILIES, checkpoint_name, model_config
from dovetail.gguf.header import read_header
from dovetail.gguf.tokenizer import tokenizer_files
from dovetail.gguf.unpacked import gguf_in, rope_factors, unpacked_model

MOST_BYTES = 8 << 20


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = bytes(64),
) -> bytes:
    counts = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join((*keys, *tensors))
    return head + bytes(-len(head) % 32) + data


HUGE = 1 << 62
NAMED = [key("general.architecture", 8, text("llama"))]
WRONG = {
    "another file": (b"PK\x03\x04" + bytes(64), "doesn't begin with 'GGUF'"),
    "nothing": (b"", "doesn't begin with 'GGUF'"),
    "a magic alone": (b"GGUF", "the header ends"),
    "version 1": (file(version=1), "version 1 isn't read"),
    "big-endian": (file(version=3 << 24), "version 50331648 isn't read"),
    "endless keys": (file(counts=(0, HUGE)), f"{HUGE} keys; no model has more than"),
    "endless tensors": (file(counts=(HUGE, 0)), f"{HUGE} tensors; no model has more than"),
    "more keys than there are": (file(NAMED, counts=(0, 9999)), "ends within|occurs twice"),
    "a long key": (file([struct.pack("<Q", HUGE)]), f"a key of {HUGE} bytes"),
    "a long value": (file([key("a", 8, struct.pack("<Q", HUGE))]), f"'a' of {HUGE} bytes"),
    "a long array": (file([key("a", 9, array(5, HUGE))]), f"'a' has {HUGE} entries"),
    "a large array": (file([key("a", 9, array(12, 3_999_999))]), "ends within 31999992 bytes"),
    "many texts": (file([key("a", 9, array(8, 3_999_999))]), "ends within"),
    "arrays of arrays": (file([key("a", 9, array(9, 3))]), "a value of type 9"),
    "an unknown value": (file([key("a", 77, b"")]), "'a' has a value of type 77"),
    "one key twice": (file([*NAMED, *NAMED]), "'general.architecture' occurs twice"),
    "an odd alignment": (
        file([key("general.alignment", 4, struct.pack("<I", 0))]),
        "general.alignment is 0",
    ),
    "many dimensions": (file(tensors=[tensor("a", [1] * 9)]), "has 9 dimensions"),
    "no dimension": (file(tensors=[tensor("a", [])]), "has 0 dimensions"),
    "a shape of nothing": (file(tensors=[tensor("a", [4, 0])]), r"has the shape \[0, 4\]"),
    "a huge shape": (file(tensors=[tensor("a", [HUGE, HUGE])]), "has the shape"),
    "a large tensor": (file(tensors=[tensor("a", [1 << 30])]), "would end at byte"),
    "a far tensor": (file(tensors=[tensor("a", [1], 0, HUGE)]), "would end at byte"),
    "an unknown type": (file(tensors=[tensor("a", [1], 99)]), "of ggml's type 99"),
    "a part of a block": (file(tensors=[tensor("a", [31], 2)]), "rows of 31 numbers"),
    "one tensor twice": (file(tensors=[tensor("a", [1])] * 2), "'a' occurs twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_header_is_refused_without_memory(name: str, tmp_path: Path) -> None:
    data, said = WRONG[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=said) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def whole(*others: bytes) -> bytes:
    """Return a file; `others`: keys, instead of those of their names."""
    numbers = {
        "context_length": 64,
        "embedding_length": 8,
        "block_count": 1,
        "feed_forward_length": 8,
        "attention.head_count": 2,
    }
    tokens = b"".join(map(text, ("a", "b", "ab")))
    keys = [
        *NAMED,
        *(key(f"llama.{name}", 4, struct.pack("<I", value)) for name, value in numbers.items()),
        key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        key("tokenizer.ggml.model", 8, text("gpt2")),
        key("tokenizer.ggml.pre", 8, text("smollm")),
        key("tokenizer.ggml.tokens", 9, array(8, 3, tokens)),
        key("tokenizer.ggml.merges", 9, array(8, 1, text("a b"))),
    ]
    tensors = [tensor("rope_freqs.weight", [2]), tensor("output.weight", [2, 2])]
    names = {name_of(one) for one in others}
    keys = [*(one for one in keys if name_of(one) not in names), *others]
    return file(keys, tensors, data=struct.pack("<16f", *[1.0] * 16))


def name_of(entry: bytes) -> bytes:
    """Return the name of a key, which is the beginning of its entry."""
    return entry[8 : 8 + struct.unpack_from("<Q", entry)[0]]


# keys with values of other types than theirs, and what is said
ODD_VALUES = {
    "a list of kinds of words": (
        [key("tokenizer.ggml.pre", 9, array(4, 1, struct.pack("<I", 1)))],
        r"pre is \[1\]",
    ),
    "a text of parts": ([key("split.count", 8, text("two"))], "a part of a model in several"),
    "a list of parts": ([key("split.count", 9, array(4, 0))], "a part of a model in several"),
    "a local base of Llama": (
        [key("llama.rope.freq_base_swa", 6, struct.pack("<f", 1e4))],
        "freq_base_swa isn't implemented for llama",
    ),
    "scores without an order": (
        [
            key("tokenizer.ggml.model", 8, text("llama")),
            key("tokenizer.ggml.scores", 9, array(6, 3, struct.pack("<3f", 0.0, math.nan, 1.0))),
        ],
        "scores has entries that are NaN",
    ),
}


@pytest.mark.parametrize("name", ODD_VALUES)
def test_values_of_other_types_are_refused_by_name(name: str, tmp_path: Path) -> None:
    keys, said = ODD_VALUES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(whole(*keys))
    with pytest.raises(DovetailError, match=said) as caught:
        made_of(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("layer", ["9" * 5000, "\u0663", "-1", "1_0", ""])
def test_a_layer_that_is_no_number_is_not_known(layer: str) -> None:
    assert checkpoint_name(f"blk.{layer}.ffn_up.weight", FAMILIES["llama"]) is None


def test_texts_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.gguf.header.MAX_TEXTS", 100)
    path = tmp_path / "m.gguf"
    path.write_bytes(file([key(name, 8, text("x" * 40)) for name in "abc"]))
    with pytest.raises(ModelLoadError, match="strings of more than 100 bytes together"):
        read_header(path)


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp reads it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(whole(key("llama.rope.scaling.factor", 6, struct.pack("<f", 4.0))))
    scaling = model_config(read_header(path), None)["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("damage", ["gone", "empty", "no link", "a file", "a link to nothing"])
def test_a_damaged_directory_is_made_again(damage: str, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole())
    directory = unpacked_model(path)
    content = {file.name: file.read_bytes() for file in directory.iterdir()}
    if damage == "gone":
        (directory / "tokenizer.json").unlink()
    elif damage == "empty":
        (directory / "config.json").write_text("")
    elif damage == "no link":
        (directory / "model.gguf").unlink()
    else:
        shutil.rmtree(directory)
        directory.touch() if damage == "a file" else directory.symlink_to(tmp_path / "nowhere")
    assert unpacked_model(path) == directory
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == content
    assert [*directory.parent.iterdir()] == [directory]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_without_a_home_directory_the_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = tmp_path / "m.gguf"
    path.write_bytes(whole())
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fails)
    with pytest.raises(ModelLoadError, match=r"no home directory.*set XDG_CACHE_HOME"):
        unpacked_model(path)


def test_only_files_are_models(tmp_path: Path) -> None:
    """Opening a pipe would wait for its other end."""
    os.mkfifo(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").mkdir()
    (tmp_path / "c.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "d.gguf").touch()
    assert gguf_in(tmp_path) == [tmp_path / "d.gguf"]


def made_of(path: Path) -> None:
    header = read_header(path)
    model_config(header, rope_factors(header))
    tokenizer_files(header)


def test_the_file_that_is_damaged_below_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(whole())
    made_of(path)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damage_anywhere_is_a_sentence_or_no_harm(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(whole())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.integers(0, 255))
        else:
            del content[at : at + data.draw(st.integers(1, 9))]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(content))
    refusal = ""
    try:
        made_of(path)
    except DovetailError as error:
        refusal = str(error)
    assert not refusal or str(path) in refusal
