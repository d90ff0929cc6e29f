"""Structural tags whose answer begins with a structure, ends after the first, or has no other text:
what may come is what a regular expression of it says."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from dovetail.api.grammar import Grammar, GrammarContext, GrammarSpec, Matcher
from dovetail.errors import RequestError
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions
from tests.grammars.helpers import answers
from tests.support import FULL

ALPHABET = ["a", "<", "f", "1", ">"]
CONTEXT = GrammarContext([*(letter.encode() for letter in ALPHABET), None], frozenset({5}), 6)
STRUCTURES = [
    {"begin": "<f", "schema": {"const": 1}, "end": ">"},
    {"begin": "<a", "schema": {"const": 1}, "end": ">"},
]
ONE, FREE = r"<[fa]1>", r"(?:(?!<[fa])[a<f1>])*"
FORMS = {
    (False, False): rf"(?:{FREE}{ONE})*{FREE}",
    (True, False): rf"{ONE}(?:{FREE}{ONE})*{FREE}",
    (False, True): rf"{FREE}(?:{ONE})?",
    (True, True): ONE,
}


def at(grammar: Grammar, text: str) -> Matcher | None:
    """Return a matcher behind `text`; None if it can't be written."""
    matcher = grammar.begin()
    return matcher if all(matcher.accept(ALPHABET.index(letter)) for letter in text) else None


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = at(grammar, text)
    return matcher is not None and matcher.accept(5)


@pytest.mark.parametrize("flags", FORMS)
def test_where_structures_stand_is_as_asked(flags: tuple[bool, bool]) -> None:
    backend = LLGuidance(GrammarOptions(), CONTEXT)
    tag = {
        "structures": STRUCTURES,
        "triggers": ["<f", "<a"],
        "at_least_one": flags[0],
        "stop_after_first": flags[1],
    }
    grammar = backend.compile(GrammarSpec("structural_tag", json.dumps(tag)))
    texts = ["".join(letters) for size in range(4) for letters in product(ALPHABET, repeat=size)]
    texts += [
        before + "<f1>" + behind
        for before in ("", "a", "<", "1>")
        for behind in ("", "a", "<f1>", "<a1>a", "<a")
    ]
    wrong = [
        text for text in texts if accepts(grammar, text) != bool(re.fullmatch(FORMS[flags], text))
    ]
    assert not wrong


@pytest.mark.parametrize("separator", ["", "a", "1>"])
@pytest.mark.parametrize("flags", FORMS)
def test_with_a_separator_there_is_no_free_text(separator: str, flags: tuple[bool, bool]) -> None:
    backend = LLGuidance(GrammarOptions(), CONTEXT)
    tag = {
        "structures": STRUCTURES,
        "triggers": ["<f", "<a"],
        "at_least_one": flags[0],
        "stop_after_first": flags[1],
        "separator": separator,
    }
    several = ONE if flags[1] else rf"{ONE}(?:{separator}{ONE})*"
    parts, most = ["<f1>", "<a1>", "a", "1>", "<"], 5 if FULL else 4
    texts = ["".join(chosen) for size in range(most + 1) for chosen in product(parts, repeat=size)]
    grammar = backend.compile(GrammarSpec("structural_tag", json.dumps(tag)))
    wanted = {
        text for text in texts if re.fullmatch(several if flags[0] else f"(?:{several})?", text)
    }
    assert answers(lambda text: at(grammar, text), parts, most, end=(5,)) == wanted


@pytest.mark.parametrize("flag", ["at_least_one", "stop_after_first"])
def test_a_flag_is_true_or_false(flag: str) -> None:
    tag = {"structures": STRUCTURES, "triggers": ["<f", "<a"], flag: "yes"}
    with pytest.raises(RequestError, match=f"{flag}: expected true or false"):
        LLGuidance(GrammarOptions(), CONTEXT).compile(
            GrammarSpec("structural_tag", json.dumps(tag))
        )
