"""The drafters `ngram` and `suffix`: what they propose, after which text, and what they keep."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_drafters.own_text import MAX_READ, continued
from dovetail_drafters.token_index import MAX_FOUND, TokenIndex
from tests.drafters.helpers import Growing, drafter, drafts_of
from tests.support import examples

BUILT_IN = ["ngram", "suffix"]
TEXTS = st.lists(st.integers(0, 3), max_size=60)


def longest_match(
    text: Sequence[int], end: Sequence[int], shortest: int, longest: int
) -> tuple[int, list[int]]:
    """The oracle of `TokenIndex.places_after`: tries every length and place."""
    for length in range(min(longest, len(end)), shortest - 1, -1):
        wanted = list(end[len(end) - length :])
        places = [
            place
            for place in range(length, len(text))
            if list(text[place - length : place]) == wanted
        ]
        if places:
            return length, places[::-1]
    return 0, []


@examples(quick=200, full=5000)
@given(st.lists(TEXTS, max_size=5), st.integers(1, 5), st.integers(0, 6), TEXTS)
def test_the_index_finds_the_longest_match_wherever_it_is(
    parts: list[list[int]], width: int, more: int, end: list[int]
) -> None:
    index = TokenIndex(width)
    for part in parts:
        index.extend(part)
    text = [token for part in parts for token in part]
    assert list(index.token_ids) == text
    for sought in (end, text):
        length, places = longest_match(text, sought, width, width + more)
        assert index.places_after(array("i", sought), width + more) == (length, places[:MAX_FOUND])


@examples(quick=50, full=1000)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_text_that_ends_goes_on_as_a_loop(text: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    assert continued(text, place, 20) == (text[place:] * 20)[:20]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_repeated_text_is_continued(name: str) -> None:
    request = Growing("a", [5, 6, 7, 8, 9, 10, 11, 1, 5, 6, 7, 8])
    assert drafts_of(drafter(name), request, 3) == [9, 10, 11]
    request.output += [9, 10]
    assert drafts_of(drafter(name), request, 2) == [11, 1]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_text_without_repetition_has_no_drafts(name: str) -> None:
    assert drafts_of(drafter(name), Growing("a", range(100))) == []
    assert drafts_of(drafter(name), Growing("a", [7])) == []


def test_ngram_takes_the_newest_of_equally_long_matches_and_the_longer_before_it() -> None:
    assert drafts_of(drafter("ngram"), Growing("a", [1, 2, 3, 1, 2, 4, 1, 2]), 1) == [4]
    assert drafts_of(drafter("ngram"), Growing("a", [0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2]), 1) == [3]
    assert drafts_of(
        drafter("ngram", max_match=2), Growing("a", [0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2]), 1
    ) == [4]
    assert (
        drafts_of(drafter("ngram", min_match=4), Growing("a", [0, 1, 2, 3, 9, 1, 2, 4, 0, 1, 2]), 1)
        == []
    )


def test_suffix_takes_what_came_most_often() -> None:
    assert drafts_of(drafter("suffix"), Growing("a", [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]), 1) == [3]
    several = [token for last in range(10, 20) for token in (1, 2, last)]
    assert drafts_of(drafter("suffix"), Growing("a", [*several, 1, 2]), 1) == [], (
        "no continuation has a share of 0.3"
    )
    assert drafts_of(drafter("suffix", min_share=0.05), Growing("a", [*several, 1, 2]), 1) == [19]


def test_suffix_drafts_are_as_long_as_the_match_allows() -> None:
    text = [*range(100, 120)]
    for known in (2, 3, 4):
        assert (
            drafts_of(drafter("suffix", max_factor=1), Growing("a", [*text, 1, *text[:known]]))
            == text[known : 2 * known]
        )
        assert (
            drafts_of(drafter("suffix"), Growing("a", [*text, 1, *text[:known]]))
            == text[known : 3 * known]
        )
    assert (
        drafts_of(drafter("suffix", max_factor=2.5), Growing("a", [*text, 1, 100, 101]))
        == text[2:7]
    )


def test_suffix_goes_on_copying_after_an_edit() -> None:
    text = [*range(100, 130)]
    replaced, left_out = [*text[:9], 7], [*text[:9], text[12]]
    assert drafts_of(drafter("suffix"), Growing("a", [*text, 1, *replaced])) == text[10:18]
    assert drafts_of(drafter("suffix"), Growing("a", [*text, 1, *left_out])) == text[13:21]
    assert drafts_of(drafter("suffix"), Growing("a", [*text, 1, *text[:7], 7])) == [], (
        "too short a copy to go on with"
    )


def test_suffix_learns_from_answers_to_the_same_client_only() -> None:
    subject = drafter("suffix")
    answer = [*range(200, 230)]
    subject.on_finished(Growing("a", [1, 2], answer, client="ann"))
    subject.on_finished(Growing("b", [1, 2], answer))
    assert drafts_of(subject, Growing("c", [3, *answer[:6]], client="ann"), 4) == answer[6:10]
    assert drafts_of(subject, Growing("d", [0, 1, 2], client="ann"), 4) == answer[:4], (
        "an answer is remembered with the end of its prompt"
    )
    for client in ("bob", "", None):
        assert drafts_of(subject, Growing(f"of {client}", [3, *answer[:6]], client=client), 4) == []


def test_no_match_goes_from_one_answer_into_the_next() -> None:
    subject = drafter("suffix")
    subject.on_finished(Growing("a", [], [1, 2, 3, 4], client="ann"))
    subject.on_finished(Growing("b", [], [5, 6, 7, 8], client="ann"))
    assert drafts_of(subject, Growing("c", [2, 3], client="ann")) == [4]
    assert drafts_of(subject, Growing("d", [3, 4], client="ann")) == []


def test_suffix_keeps_no_more_answers_than_it_may() -> None:
    subject = drafter("suffix", kept_tokens=100, kept_clients=2)
    for number in range(40):
        subject.on_finished(
            Growing(f"r{number}", [], [*range(number * 10, number * 10 + 10)], client="ann")
        )

    calls = count()

    def knows(number: int, client: str = "ann") -> bool:
        return (
            drafts_of(
                subject,
                Growing(
                    f"{client} {number} {next(calls)}",
                    range(number * 10, number * 10 + 4),
                    client=client,
                ),
            )
            != []
        )

    known = [number for number in range(40) if knows(number)]
    assert known == list(range(known[0], 40))
    assert 4 <= len(known) <= 10, "at most 100 tokens, and no fewer than half of them"
    for client in ("bob", "carl"):
        subject.on_finished(Growing(client, [], range(20), client=client))
    assert not knows(39)
    assert knows(0, "bob")
    assert knows(0, "carl")
    subject = drafter("suffix", kept_tokens=0)
    subject.on_finished(Growing("a", [], range(20), client="ann"))
    assert drafts_of(subject, Growing("b", range(4), client="ann")) == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_id_that_comes_again_is_another_request(name: str) -> None:
    subject = drafter(name)
    request = Growing("a", [1, 2, 3, 4, 1, 2])
    assert drafts_of(subject, request, 2) == [3, 4]
    subject.on_finished(request)
    assert drafts_of(subject, Growing("a", [1, 2, 5, 6, 1, 2]), 2) == [5, 6]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_long_prompt_is_read_in_several_calls(name: str) -> None:
    subject = drafter(name)
    text = random.Random(1).choices(range(512), k=2 * MAX_READ)
    long, short = Growing("long", [*text, *text[:6]]), Growing("short", [1, 2, 3, 1, 2])
    assert [len(one) for one in subject.propose([long, short], [2, 1])] == [0, 0]
    assert [len(one) for one in subject.propose([long, short], [2, 1])] == [0, 0]
    assert subject.propose([long, short], [2, 1]) == [text[6:8], [3]]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_match_longer_than_the_longest_is_refused_as_an_option(name: str) -> None:
    drafter(name, min_match=25, max_match=25)
    with pytest.raises(ConfigError, match=r"max_match must be at least min_match \(26\), got 25"):
        drafter(name, min_match=26, max_match=25)
