"""Text made token by token is the text of all tokens, never shows half a character, and ends where
a stop string says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dovetail.front.detokenizer import (
    MAX_HELD,
    START,
    ByteLevelText,
    IncrementalText,
    StopStrings,
    WindowText,
    special_names,
    token_text,
)
from dovetail.front.tokenizer import Tokenizer, TransformersTokenizer
from dovetail.request.sampling_params import SamplingParams
from tests.support import examples

WORDS = [
    "the cat sat on the mat",
    "naïve café",
    "你好，世界",
    "👍🏽 👩‍👩‍👧",
    "Grüße aus Köln",
    "a\tb\n\nc",
]
HELLO, WORLD, SMILE = "▁hello", "▁world", "😀".encode()


def wrapped(backend: Backend) -> Tokenizer:
    return TransformersTokenizer(SimpleNamespace(backend_tokenizer=backend))


@cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE: most characters beyond ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        WORDS * 5,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
        ),
    )
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("<ünï>")])
    return wrapped(backend)


@cache
def metaspace() -> Tokenizer:
    """Spelled as Llama 2 does: a word's token begins with its space, which is dropped at the start
    of a text; bytes as <0xNN>."""
    pieces = [
        "<unk>",
        "<s>",
        HELLO,
        WORLD,
        "▁",
        "lo",
        ",",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return wrapped(backend)


class Spelled:
    """A tokenizer written in Python (no backend): token i is the i-th string."""

    bytes_of = None

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[i] for i in token_ids)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text).ids
    return ids


def fed(text: IncrementalText, token_ids: Sequence[int], sizes: Sequence[int] = ()) -> list[str]:
    """The deltas, flush included, of token ids that come in groups of these sizes (then one by
    one)."""
    deltas, left, sizes = [], list(token_ids), list(sizes)
    while left:
        size = sizes.pop(0) if sizes else 1
        text.append(left[:size])
        del left[:size]
        deltas.append(text.take_delta())
    text.flush()
    return [*deltas, text.take_delta()]


def plain(tokenizer: Tokenizer, prompt: Sequence[int] = (), **params: object) -> IncrementalText:
    made = SamplingParams(max_tokens=None, **params)  # type: ignore[arg-type]
    return IncrementalText(tokenizer, made, prompt, StopStrings(made.stop) if made.stop else None)


TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from([*WORDS, "<tool call>", "<ünï>", "</s>"]), max_size=6
).map(" ".join)
SIZES = st.lists(st.integers(1, 4), max_size=10)


@examples(quick=200, full=3000)
@given(TEXTS, SIZES, st.booleans())
def test_deltas_add_up_to_the_text_of_all_tokens(text: str, sizes: list[int], skip: bool) -> None:
    ids = ids_of(byte_level(), text)
    assert "".join(
        fed(plain(byte_level(), skip_special_tokens=skip), ids, sizes)
    ) == byte_level().decode(ids, skip)


@examples(quick=200, full=3000)
@given(st.lists(st.integers(0, 303), max_size=30), SIZES, st.booleans())
def test_whatever_the_tokens(ids: list[int], sizes: list[int], skip: bool) -> None:
    """A model may say anything: broken UTF-8, ids that the tokenizer doesn't know."""
    assert "".join(
        fed(plain(byte_level(), skip_special_tokens=skip), ids, sizes)
    ) == byte_level().decode(ids, skip)


@examples(quick=100, full=2000)
@given(TEXTS, st.integers(0, 20))
def test_any_tokenizer_can_be_decoded_by_windows(text: str, split: int) -> None:
    ids = ids_of(byte_level(), text)
    made = WindowText(byte_level(), ids_of(byte_level(), WORDS[2]), skip_special_tokens=True)
    assert "".join([made.append([token]) for token in ids]) + made.flush() == byte_level().decode(
        ids, True
    )


@examples(quick=200, full=3000)
@given(
    st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=40),
    st.sampled_from([ByteLevelText, WindowText]),
)
def test_no_delta_holds_half_a_character(text: str, kind: type) -> None:
    made = plain(byte_level())
    if kind is WindowText:
        made._tokens = WindowText(byte_level(), [], True)
    assert not any("\ufffd" in delta for delta in fed(made, ids_of(byte_level(), text)))


def test_half_a_character_at_the_end_shows_only_at_the_flush() -> None:
    made, half = plain(byte_level()), ids_of(byte_level(), "a😀")[:-1]
    made.append(half)
    assert made.text == "a"
    made.flush()
    assert made.text == "a\ufffd"


@examples(quick=100, full=2000)
@given(
    st.lists(st.sampled_from([2, 3, 4, 5, 6, 1]), max_size=30),
    st.lists(st.sampled_from([2, 3, 6]), min_size=1, max_size=20),
)
def test_text_continues_from_the_prompt(output: list[int], prompt: list[int]) -> None:
    """Decoded alone, an output's first word would lose its space."""
    whole, before = metaspace().decode([*prompt, *output], True), metaspace().decode(prompt, True)
    assert before + "".join(fed(plain(metaspace(), prompt), output)) == whole


@pytest.mark.parametrize(
    "prompt",
    [[2] + [1] * 8, [metaspace().backend.token_to_id(f"<0x{byte:02X}>") for byte in SMILE * 3]],
)
def test_text_continues_from_a_prompt_whose_last_tokens_say_nothing(prompt: list[int]) -> None:
    """Special tokens, which aren't shown, and bytes that begin in the middle of a character."""
    smile = [metaspace().backend.token_to_id(f"<0x{byte:02X}>") for byte in SMILE]
    assert "".join(fed(plain(metaspace(), prompt), [3, *smile, 3])) == " world😀 world"


@examples(quick=100, full=1000)
@given(st.text(min_size=1, max_size=20).filter(lambda text: "\ufffd" not in text))
def test_characters_spelled_in_byte_tokens_come_whole(text: str) -> None:
    ids = [metaspace().backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    deltas = fed(plain(metaspace(), [2, 3]), ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_endless_half_characters_are_not_held_forever() -> None:
    """A tokenizer's half character is a few tokens; a window that grows would cost more with each
    token."""
    broken = metaspace().backend.token_to_id("<0xE4>")
    made = WindowText(metaspace(), [2], True)
    texts = [made.append([broken]) for _ in range(500)]
    assert len(made._ids) <= 4 * MAX_HELD
    assert len("".join(texts) + made.flush()) == 500


def test_a_tokenizer_without_backend_works() -> None:
    assert "".join(fed(plain(Spelled(["He", "llo", " you"])), [0, 1, 2, 1])) == "Hello youllo"  # type: ignore[arg-type]


def test_byte_level_tokenizers_take_the_quick_way() -> None:
    assert isinstance(token_text(byte_level(), [], True), ByteLevelText)
    assert isinstance(token_text(metaspace(), [], True), WindowText)


def test_half_a_surrogate_pair_is_text_if_the_tokenizer_says_so() -> None:
    text = IncrementalText(Spelled(["a", "\ud83d", "b"]), SamplingParams(), [], None)  # type: ignore[arg-type]
    text.append([0, 1])
    assert text.take_delta() == "a\ud83d"
    text.append([2])
    assert (text.take_delta(), text.text) == ("b", "a\ud83db")


def test_text_and_deltas_may_be_read_in_turn() -> None:
    made = plain(Spelled("abcdef"))  # type: ignore[arg-type]
    seen = []
    for token in range(6):
        made.append([token])
        seen.append(made.text)
        if token % 2:
            seen.append(made.take_delta())
    assert seen == ["a", "ab", "ab", "abc", "abcd", "cd", "abcde", "abcdef", "ef"]


# ---- stop strings

PIECES = ["a", "b", "ab", "ba", "aab", "", "c", "abc"]
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)
SPELLING = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


def expected(
    ids: Sequence[int], stops: Sequence[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Text, the stop string that matched and how many tokens it took: character by character, the
    first that ends, the longest of them."""
    text = ""
    for count, token in enumerate(ids, start=1):
        for char in PIECES[token]:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and count >= min_tokens:
                stop = max(ended, key=len)
                return (text if include else text[: -len(stop)]), stop, count
    return text, None, len(ids)


def run_until_stop(made: IncrementalText, ids: Sequence[int]) -> tuple[str, str | None, int]:
    count = 0
    while count < len(ids) and made.stopped is None:
        made.append_and_check(ids[count])
        count += 1
    made.flush()
    return made.text, made.stopped, count


@examples(quick=500, full=10_000)
@given(SPELLING, STOPS, st.booleans(), st.integers(0, 5))
def test_the_first_stop_string_to_end_wins(
    ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> None:
    params = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    made = plain(Spelled(PIECES), **params)  # type: ignore[arg-type]
    assert run_until_stop(made, ids) == expected(ids, stops, include, min_tokens)


@examples(quick=300, full=10_000)
@given(st.lists(st.text("abc", max_size=5), max_size=8), STOPS, st.integers(0, 5))
def test_the_automaton_finds_and_holds_what_a_loop_over_the_stop_strings_does(
    texts: list[str], stops: list[str], min_tokens: int
) -> None:
    automaton, state, held = StopStrings(stops), START, ""
    for count, text in enumerate(texts, start=1):
        window = held + text
        state, length, behind = automaton.advance(state, text, stop=count >= min_tokens)
        match = _first_match(window, stops, len(held)) if count >= min_tokens and text else None
        end = len(window) - behind
        assert match == ((end - length, window[end - length : end]) if length else None)
        if match is not None:
            return
        held = _held_suffix(window, stops)
        assert automaton.held(state) == len(held)


def _held_suffix(window: str, stops: Sequence[str]) -> str:
    """The longest suffix of `window` that begins a stop string and isn't all of it."""
    begin = len(window)
    for stop in stops:
        at = window.find(stop[0], max(0, len(window) - len(stop) + 1))
        while at >= 0 and not stop.startswith(window[at:]):
            at = window.find(stop[0], at + 1)
        if at >= 0:
            begin = min(begin, at)
    return window[begin:]


def _first_match(window: str, stops: Sequence[str], known: int) -> tuple[int, str] | None:
    """Return the start of the first stop string that ends after the first `known` characters, and
    the string."""
    found = []
    for stop in stops:
        start = window.find(stop, max(0, known - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), start, stop))
    return min(found)[1:] if found else None


SPECIAL = {0: "<s>", 1: "</s>"}
STOPPING = [
    ["</s>"],
    ["</s>\n"],
    ["c</s>", "zz"],
    ["<s></s>"],
    ["</s><s>", "t"],
    ["/s"],
    ["</s>", "s>"],
]


def with_marks(text: str) -> str:
    """Return a text with each special token's name as one character."""
    return text.replace("</s>", "\ue001").replace("<s>", "\ue000")


@pytest.mark.parametrize("stops", STOPPING, ids=str)
@pytest.mark.parametrize("include", [False, True])
@examples(quick=60, full=3000)
@given(
    text=st.lists(
        st.sampled_from(["<s>", "</s>", "c", "\n", "t", "</", "s>", "z"]), max_size=8
    ).map("".join)
)
def test_a_stop_string_matches_special_tokens_that_the_text_leaves_out(
    stops: list[str], include: bool, text: str
) -> None:
    """The oracle reads special tokens as characters of their own: those that are in a stop string,
    since others leave no trace."""
    tokenizer = byte_level()
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    made = IncrementalText(tokenizer, params, [], StopStrings(stops, special_names(tokenizer)))
    ids = ids_of(tokenizer, text)
    named = {
        token: name
        for token, name in SPECIAL.items()
        if any(with_marks(name) in with_marks(stop) for stop in stops)
    }
    symbols = "".join(
        with_marks(named.get(token, "")) if token in SPECIAL else tokenizer.decode([token])
        for token in ids
    )
    spellings = [
        (spelling, stop)
        for stop in stops
        for spelling in {stop, with_marks(stop)}
        if spelling in symbols
    ]
    found = [
        (symbols.find(spelling) + len(spelling), symbols.find(spelling), stop)
        for spelling, stop in spellings
    ]
    end, stopped = (len(symbols), None) if not found else min(found)[1:]
    expected = symbols[:end].replace("\ue000", "").replace("\ue001", "") + (
        stopped or "" if include else ""
    )
    assert run_until_stop(made, ids)[:2] == (expected, stopped)


def test_an_automaton_is_no_larger_than_its_stop_strings() -> None:
    stops = [f"{i} of many" for i in range(200)]
    automaton = StopStrings([*stops, *stops])
    assert len(automaton._held) <= sum(map(len, stops)) + 1
    assert automaton._held[START] == 0


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [(["abc", "b"], "a", "b"), (["bc", "abc"], "", "abc"), (["abcd", "bc"], "a", "bc")],
)
def test_of_several_stop_strings_in_one_token_the_first_to_end_wins(
    stops: list[str], text: str, stop: str
) -> None:
    assert run_until_stop(plain(Spelled(["abcde"]), stop=stops), [0]) == (text, stop, 1)  # type: ignore[arg-type]


@examples(quick=200, full=5000)
@given(SPELLING, STOPS)
def test_nothing_of_a_stop_string_is_ever_released(ids: list[int], stops: list[str]) -> None:
    """At any time the text is what it would be if it ended here with a stop string, or all but a
    suffix that may begin one."""
    made, said = plain(Spelled(PIECES), stop=stops), ""  # type: ignore[arg-type]
    for token in ids:
        if made.append_and_check(token) is not None:
            break
        said += PIECES[token]
        held = said[len(made.text) :]
        assert said.startswith(made.text)
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(
            made.text.endswith(stop[:n]) and not held for stop in stops for n in range(1, len(stop))
        )
    before = made.text
    made.flush()
    assert made.text.startswith(before)


def test_a_stop_string_across_tokens_and_characters() -> None:
    made = plain(byte_level(), stop=["é, 世"])
    made.append(ids_of(byte_level(), "café, 世界"))
    made.flush()
    assert made.stopped == "é, 世"
    assert made.text == "caf"


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    made = plain(Spelled(PIECES), stop="c")  # type: ignore[arg-type]
    made.append([0, 6, 0])
    made.append([1])
    made.flush()
    assert (made.text, made.stopped) == ("a", "c")


@pytest.mark.parametrize(("stopped", "text"), [(False, "ab"), (True, "")])
def test_what_could_begin_a_stop_string_is_released_at_the_end(stopped: bool, text: str) -> None:
    made = plain(Spelled(PIECES), stop="abb")  # type: ignore[arg-type]
    made.append([2])
    assert made.text == ""
    made.flush(stopped=stopped)
    assert made.text == text


def test_importing_it_needs_neither_torch_nor_transformers_nor_tokenizers() -> None:
    code = (
        "import sys, dovetail.front.detokenizer, dovetail.front.tokenizer; print({'torch', "
        "'transformers', 'tokenizers'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )
