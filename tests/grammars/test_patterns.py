"""Patterns as the backend follows them, against Python's `re`: whole answers, and strings within
JSON."""

from __future__ import annotations

import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import RequestError
from tests.grammars.helpers import STOP, answers, at, compiled
from tests.support import examples

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", r"\d", "1", "ab", r"\."])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(
            inner, st.sampled_from(["*", "+", "?", "??", "{2}", "{1,2}", "{0,2}", "{1,}"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
LETTERS, LONGEST = "ab1.", 4
TEXTS = ["".join(letters) for n in range(LONGEST + 1) for letters in product(LETTERS, repeat=n)]


@examples(quick=40, full=3000)
@given(PATTERNS)
def test_a_pattern_takes_what_re_matches(pattern: str) -> None:
    wanted = {text for text in TEXTS if re.fullmatch(pattern, text, re.ASCII)}
    answer = compiled("regex", pattern)
    assert answers(lambda text: at(answer, text), LETTERS, LONGEST) == wanted
    try:
        string = compiled("json_schema", {"type": "string", "pattern": f"^(?:{pattern})$"})
    except RequestError:  # an anchor within, or a class without characters
        return
    assert (
        answers(lambda text: at(string, f'"{text}'), LETTERS, LONGEST, end=(ord('"'), STOP))
        == wanted
    )
