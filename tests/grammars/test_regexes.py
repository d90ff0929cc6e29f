"""Patterns are rewritten without a change of what they match, and what isn't regular is refused by
name."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.grammar import GrammarSpec
from dovetail.errors import RequestError
from dovetail_grammars.regexes import rewritten
from tests.support import examples

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "-",
        r"\d",
        r"\W",
        r"\s",
        "[ab]",
        "[^a]",
        "[a-]",
        r"[\w-]",
        ".",
        r"\.",
        "é",
        "(?i:B)",
        "(?s:.)",
        "[^\\W1]",
        "😀",
    ]
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+?", "?", "{2}", "{1,2}", "{1,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = ["".join(letters) for n in range(4) for letters in product("aB1\n.é", repeat=n)]


@examples(quick=400, full=2000)
@given(PATTERNS)
def test_the_rewritten_pattern_matches_the_same_texts(pattern: str) -> None:
    ours, theirs = (
        re.compile(rewritten(GrammarSpec("regex", pattern))),
        re.compile(pattern, re.ASCII),
    )
    for text in TEXTS:
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text)), (ours.pattern, text)


@pytest.mark.parametrize("pattern", ["^ab$", r"\Aab\Z", "^^ab$$"])
def test_anchors_at_the_ends_change_nothing(pattern: str) -> None:
    assert rewritten(GrammarSpec("regex", pattern)) == "ab"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("(?=a)b", "lookarounds"),
        ("a(?<!b)", "lookarounds"),
        (r"(a)\1", "backreferences"),
        ("(a)?(?(1)b|c)", "conditions on groups"),
        ("(?>a)b", "atomic groups"),
        ("a++", "possessive"),
        (r"a\bc", "word boundaries"),
        ("a^b", "anchors within"),
        ("(a", "unterminated"),
        (r"\p{L}", "bad escape"),
        (r"[^\s\S]", "without any character"),
        ("(?:" * 5000 + "a" + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_cant_be_followed_is_rejected_by_name(pattern: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        rewritten(GrammarSpec("regex", pattern))
