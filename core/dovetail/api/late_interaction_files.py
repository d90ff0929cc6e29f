"""How the files of a model of late interaction have texts made into tokens, and which of these have
vectors that count: `LateInteraction`.

Such a model (ColBERT, arXiv:2004.12832) has a vector for each token, and compares texts by MaxSim.
Files are those of sentence-transformers' `MultiVectorEncoder`, of PyLate's `ColBERT`, or of
ColBERT's own program.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dovetail.api.json_files import read_json_list, read_json_object
from dovetail.api.sentence_transformers_files import (
    MASK,
    MODULES,
    OWN_FILE,
    is_late,
    module_of,
    read_checked,
    read_own,
    read_transformer,
)
from dovetail.errors import ModelLoadError, shown

Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
STANFORD = "HF_ColBERT"  # the architecture of ColBERT's own program
MAX_PREFIX = 1000  # characters
MAX_WORDS = 10_000  # of a skiplist

_USUAL_QUERY = 32  # tokens of a query that mask tokens fill, if the files don't say so
_PYLATE = (  # keys of which PyLate writes some
    "query_length",
    "document_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Mask tokens that fill a query. Their vectors are its, too."""

    length: int  # tokens of a filled query
    is_fixed: bool  # longer queries are cut to it
    is_attended: bool  # by the query's other tokens
    token: str | None = None  # None: the tokenizer's mask token


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """Settings of a late-interaction model, read from its files. They are plain values, which can be
    sent to another process."""

    # before a text: a token that is inserted, or if the tokenizer has none of this name, text
    prefixes: Mapping[Side, str] = field(default_factory=dict)
    lengths: Mapping[Side, int] = field(default_factory=dict)  # to which texts are cut
    expansion: Expansion | None = None
    skipped: tuple[str, ...] = ()  # tokens whose vectors are left out
    skipped_of: tuple[str, ...] = ("document",)  # sides whose vectors these are

    @classmethod
    def read(cls, directory: Path) -> LateInteraction | None:
        """Return what a checkpoint's files say; None if it is no model of late interaction. Raises
        `ModelLoadError` for wrong values, `UnsupportedError` for what isn't served."""
        own = read_own(directory)
        if not is_late(own):
            return _of_stanford(directory) if is_stanford(directory) else None
        own_path = directory / OWN_FILE
        path, transformer = read_transformer(directory)
        own_lengths = _lengths(own, own_path)
        expansion = _own_expansion(own, own_lengths, own_path)
        lengths = {**own_lengths, **_lengths(transformer, path)}
        if "query_expansion" in transformer:
            expansion = _expansion(transformer["query_expansion"], path)
        if expansion is not None:
            if expansion.is_fixed:
                lengths["query"] = expansion.length
            elif "query" in lengths:
                lengths["query"] = max(lengths["query"], expansion.length)
        prefixes = {side: own.get(f"{side}_prefix") or "" for side in SIDES}
        for side, prefix in prefixes.items():
            if not isinstance(prefix, str) or len(prefix) > MAX_PREFIX:
                raise ModelLoadError(
                    f"{own_path}: {side}_prefix: expected a text of at most {MAX_PREFIX} "
                    f"characters, got {shown(prefix)}"
                )
        masks = _masks(directory)
        words = own.get("skiplist_words")
        if not masks and words is None:
            words = list(string.punctuation)  # PyLate's
        skipped = _texts(masks.get("skiplist_words") if masks else words, "skiplist_words")
        of = masks.get("skiplist_tasks") or ["document"]
        sides = _texts([of] if isinstance(of, str) else of, "skiplist_tasks")
        return cls(prefixes, lengths, expansion, skipped, sides)


def is_stanford(directory: Path) -> bool:
    """Return True for a checkpoint of ColBERT's own program (colbert-ir/colbertv2.0). Raises
    `ModelLoadError` if its config can't be read."""
    config = read_json_object(directory / "config.json", missing_ok=True)
    return config.get("architectures") == [STANFORD]


def _of_stanford(directory: Path) -> LateInteraction:
    """Return what `artifact.metadata` says, which such a checkpoint may lack. Of its many keys,
    others are about training and indexing."""
    path = directory / "artifact.metadata"
    own = read_json_object(path, missing_ok=True)
    lengths = _lengths(
        {"query_length": own.get("query_maxlen"), "document_length": own.get("doc_maxlen")}, path
    )
    length = lengths["query"] = lengths.get("query", _USUAL_QUERY)
    tokens = own.get("query_token_id") or "[unused0]", own.get("doc_token_id") or "[unused1]"
    for token in tokens:
        if not isinstance(token, str) or len(token) > MAX_PREFIX:
            raise ModelLoadError(f"{path}: expected tokens as texts, got {shown(token)}")
    words = list(string.punctuation) if own.get("mask_punctuation", True) else []
    return LateInteraction(
        {side: f"{token} " for side, token in zip(SIDES, tokens, strict=True)},
        lengths,
        Expansion(length, is_fixed=True, is_attended=bool(own.get("attend_to_mask_tokens"))),
        tuple(words),
    )


def _lengths(content: Mapping[str, Any], path: Path) -> dict[Side, int]:
    found: dict[Side, int] = {}
    for side in SIDES:
        length = content.get(f"{side}_length")
        if length is None:
            continue
        if type(length) is not int or length < 1:
            raise ModelLoadError(
                f"{path}: {side}_length: expected a number of tokens, got {shown(length)}"
            )
        found[side] = length
    return found


def _own_expansion(
    own: Mapping[str, Any], lengths: Mapping[Side, int], path: Path
) -> Expansion | None:
    """Return the expansion that `config_sentence_transformers.json` says. PyLate's files have it
    unless they say otherwise."""
    if "query_expansion" in own:
        return _expansion(own["query_expansion"], path)
    if own.get("do_query_expansion") is False or not any(key in own for key in _PYLATE):
        return None
    attends = own.get("attend_to_expansion_tokens", own.get("attend_to_mask_tokens"))
    return Expansion(lengths.get("query", _USUAL_QUERY), True, bool(attends))


def _expansion(value: Any, path: Path) -> Expansion | None:
    if value is None:
        return None
    if isinstance(value, dict) and not value.keys() - {"strategy", "attend", "token", "length"}:
        length = value.get("length")
        token = value.get("token")
        attends = value.get("attend", False)
        if (
            value.get("strategy") in ("fixed", "min")
            and type(length) is int
            and length >= 1
            and isinstance(token, str | None)
            and type(attends) is bool
        ):
            return Expansion(length, value["strategy"] == "fixed", attends, token)
    raise ModelLoadError(
        f"{path}: query_expansion: expected strategy, fixed or min, length, attend and token, got "
        f"{shown(value)}"
    )


def _masks(directory: Path) -> dict[str, Any]:
    """Return the config of the module that says which vectors count; empty if there is none."""
    path = directory / MODULES.file
    if not path.is_file():
        return {}
    for module in read_json_list(path):
        kind, folder = module_of(module, path)
        if kind.rpartition(".")[2] == "MultiVectorMask":
            # not empty, even without its file
            return {"skiplist_words": None} | read_checked(directory / folder / "config.json", MASK)
    return {}


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or len(value) > MAX_WORDS
        or not all(isinstance(text, str) for text in value)
    ):
        raise ModelLoadError(f"{name}: expected at most {MAX_WORDS} texts, got {shown(value)}")
    return tuple(value)
