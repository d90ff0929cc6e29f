"""`tokenizer_files`: `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` of the
tokenizer in a GGUF file.

Two kinds are served: byte-level BPE ("gpt2"), whose merges are in the file, and BPE of
SentencePiece ("llama"), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.gguf.header import Header

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_PREFIX = "tokenizer.ggml."
SPACE = "\u2581"
# kinds of tokens
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6
_PADDING = re.compile(r"\[PAD\d+\]")
_LONGEST_MERGED = 512  # characters of a piece that merges make

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# how texts are split before merges, by `tokenizer.ggml.pre`: an expression whose matches are words,
# or None for GPT-2's own
_EXPRESSIONS = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _WORDS + "{1,3}" + _REST,
    "llama3": _WORDS + "{1,3}" + _REST,
    "llama-v3": _WORDS + "{1,3}" + _REST,
    "qwen2": _WORDS + _REST,
    "deepseek-r1-qwen": _WORDS + _REST,
}
_SINGLE_DIGITS = ("smollm",)
# whole words are tokens even if no merges make them; and BOS begins each text unless told
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
# tokens that end an answer besides EOS, of which files name only one
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
)
_GEMMA = ("gemma", "gemma2", "gemma3")  # architectures


def tokenizer_files(header: Header) -> dict[str, dict[str, Any]]:
    """Return name -> content. Raises `UnsupportedError` for another kind of tokenizer, and
    `ModelLoadError` for one that isn't whole."""
    vocabulary = _Vocabulary(header)
    kind = vocabulary.values.get("model")
    if kind == "gpt2":
        parts = _byte_level(vocabulary)
    elif kind == "llama":
        parts = _sentencepiece(vocabulary)
    else:
        raise UnsupportedError(
            f"{header.path}: {_PREFIX}model is {shown(kind)}; only gpt2 and llama are served. "
            f"Name another tokenizer by `tokenizer` in the config"
        )
    adds_bos = vocabulary.values.get(
        "add_bos_token", kind == "llama" or vocabulary.values.get("pre") in _LLAMA3
    )
    adds_eos = vocabulary.values.get("add_eos_token", False)
    special = {
        name: vocabulary.tokens[token_id]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
        if (token_id := vocabulary.token_id(key)) is not None
    }
    around = (
        special.get("bos_token") if adds_bos else None,
        special.get("eos_token") if adds_eos else None,
    )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "post_processor": _around(*around, vocabulary),
        **parts,
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    contents = (tokenizer, config, {"eos_token_id": vocabulary.ends()})
    return dict(zip(TOKENIZER_FILES, contents, strict=True))


class _Vocabulary:
    """The tokens of a file, with their kinds."""

    def __init__(self, header: Header) -> None:
        self.path = header.path
        self.is_gemma = header.metadata.get("general.architecture") in _GEMMA
        self.values: Mapping[str, Any] = {
            key.removeprefix(_PREFIX): value
            for key, value in header.metadata.items()
            if key.startswith(_PREFIX)
        }
        self.tokens: list[str] = self.listed("tokens", str)
        self.kinds: list[int] = (
            self.listed("token_type", int) if "token_type" in self.values else [1] * len(self)
        )
        if not self.tokens or len(self.kinds) != len(self):
            raise ModelLoadError(
                f"{self.path}: {_PREFIX}token_type has {len(self.kinds)} entries for {len(self)} "
                f"tokens"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def listed(self, key: str, kind: type) -> list[Any]:
        """Return a list of the metadata."""
        values = self.values.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ModelLoadError(
                f"{self.path}: {_PREFIX}{key} must be a list of {kind.__name__}, got "
                f"{shown(values)}"
            )
        return values

    def token_id(self, key: str) -> int | None:
        """Return the id of a special token; None if the file has none."""
        value = self.values.get(f"{key}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(self)):
            raise ModelLoadError(
                f"{self.path}: {_PREFIX}{key}_token_id is {shown(value)}, of {len(self)} tokens"
            )
        return value

    def ends(self) -> list[int]:
        """Return the ids that end an answer."""
        named = [self.token_id("eos"), self.token_id("eot"), self.token_id("eom")]
        known = [
            token_id
            for token_id, token in enumerate(self.tokens)
            if token in _ENDS and self.kinds[token_id] == _CONTROL
        ]
        return list(dict.fromkeys(one for one in (*named, *known) if one is not None))

    def added(self) -> list[dict[str, Any]]:
        """Return the tokens that are found in texts as a whole."""
        whole = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.kinds[token_id] != _USER_DEFINED,
            }
            for token_id, token in enumerate(self.tokens)
            if self.kinds[token_id] in whole and token.strip(f" {SPACE}")  # merges make spaces
        ]

    def by_token(self) -> dict[str, int]:
        """Return token -> id, without the padding of a vocabulary to the size of the model's."""
        return {
            self.spelled(token): token_id
            for token_id, token in enumerate(self.tokens)
            if self.kinds[token_id] != _UNUSED or not _PADDING.fullmatch(token)
        }

    def spelled(self, token: str) -> str:
        """Return a piece with its spaces as SentencePiece writes them: converters write those of
        Gemma's user-defined pieces as they are."""
        return token.replace(" ", SPACE) if self.is_gemma and not token.strip(" ") else token


def _around(bos: str | None, eos: str | None, vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """Return the post-processor that puts special tokens around a text."""
    if bos is None and eos is None:
        return None
    before = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 0}}]
    after = [] if eos is None else [{"SpecialToken": {"id": eos, "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [
            *before,
            {"Sequence": {"id": "A", "type_id": 0}},
            *after,
            *before,
            {"Sequence": {"id": "B", "type_id": 1}},
            *after,
        ],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]}
            for token in (bos, eos)
            if token is not None
        },
    }


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a tokenizer like GPT-2's."""
    name = vocabulary.values.get("pre", "default")
    if not isinstance(name, str) or name not in _EXPRESSIONS:
        raise UnsupportedError(
            f"{vocabulary.path}: {_PREFIX}pre is {shown(name)}; only {', '.join(_EXPRESSIONS)} are "
            f"served. Name the original model's tokenizer by `tokenizer` in the config"
        )
    merges = []
    for merge in vocabulary.listed("merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ModelLoadError(
                f"{vocabulary.path}: {_PREFIX}merges: {shown(merge)} isn't two parts of a token"
            )
        merges.append([left, right])
    prefix = bool(vocabulary.values.get("add_space_prefix", False))
    expression = _EXPRESSIONS[name]
    whole = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True}
    before: list[dict[str, Any]] = []
    if name in _SINGLE_DIGITS:
        before = [{"type": "Digits", "individual_digits": True}]
    elif expression is not None:
        before = [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            }
        ]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*before, {**whole, "use_regex": expression is None}],
        },
        "decoder": {**whole, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=name in _LLAMA3),
    }


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return the parts of a tokenizer of SentencePiece's BPE, with bytes for unknown characters."""
    has_prefix = bool(vocabulary.values.get("add_space_prefix", True)) and not vocabulary.is_gemma
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.token_id("unknown")
    if unknown is None and _UNKNOWN in vocabulary.kinds:
        unknown = vocabulary.kinds.index(_UNKNOWN)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _merges(vocabulary),
            unknown=None if unknown is None else vocabulary.tokens[unknown],
            byte_fallback=True,
        ),
    }


def _bpe(
    vocabulary: _Vocabulary,
    merges: Sequence[Sequence[str]],
    *,
    unknown: str | None = None,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.by_token(),
        "merges": merges,
    }


def _merges(vocabulary: _Vocabulary) -> list[list[str]]:
    """Return the merges that make SentencePiece's pieces, those of the best piece first: by its
    score, or in Gemma, whose scores don't say it, by its place in the vocabulary."""
    ids = vocabulary.by_token()
    scores: Sequence[float] = range(0, -len(vocabulary), -1)
    if not vocabulary.is_gemma:
        scores = vocabulary.listed("scores", float)
        if len(scores) != len(vocabulary):
            raise ModelLoadError(
                f"{vocabulary.path}: {_PREFIX}scores has {len(scores)} entries for "
                f"{len(vocabulary)} tokens"
            )
        if any(map(math.isnan, scores)):  # which have no order
            raise ModelLoadError(f"{vocabulary.path}: {_PREFIX}scores has entries that are NaN")
    merges = [
        (scores[token_id], len(left), len(right), left, right)
        for token, token_id in ids.items()
        if vocabulary.kinds[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
        for left, right in _halves(token, ids)
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for _, _, _, left, right in merges]


def _halves(token: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that a token can be made of, those of the first ids first."""
    if len(token) > _LONGEST_MERGED:
        return
    pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
    known = [(left, right) for left, right in pairs if left in ids and right in ids]
    yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
