"""Tables: no word is broken, nothing is lost, and what isn't a terminal gets them plain."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.cli.streams import fitting_widths, print_table
from tests.support import examples

ROWS = [
    ("NAME", "TYPE", "DESCRIPTION"),
    (
        "aging_s",
        "float | None",
        "Seconds after arrival that count as one step of priority [sic], and so on",
    ),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[str, ...]],
    columns: int,
    *,
    terminal: bool = True,
) -> str:
    out = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_table(rows, "  ", headed=True)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # what makes the header bold


def test_elsewhere_than_on_a_terminal_a_table_is_plain_and_as_wide_as_need_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header, row = printed(monkeypatch, ROWS, 40, terminal=False).splitlines()
    assert (header, row) == (
        "  NAME     TYPE          DESCRIPTION",
        f"  aging_s  float | None  {ROWS[1][2]}",
    )


@pytest.mark.parametrize("columns", [30, 40, 80, 140])
def test_on_a_terminal_it_fits_and_keeps_its_words(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    text = printed(monkeypatch, ROWS, columns)
    assert sorted(text.split()) == sorted(" ".join(cell for row in ROWS for cell in row).split())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns


WORD = st.text("abc", min_size=1, max_size=12)
CELLS = st.lists(WORD, max_size=8).map(" ".join)


@examples(quick=100, full=5000)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=4), st.integers(1, 150))
def test_widths_hold_every_word_and_fit_unless_no_widths_would(
    rows: list[tuple[str, ...]], room: int
) -> None:
    words = [
        max((len(word) for row in rows for word in row[column].split()), default=0)
        for column in range(3)
    ]
    widths = fitting_widths(rows, room)
    assert (widths is None) == (sum(words) + 4 > room)
    if widths is not None:
        assert sum(widths) + 4 <= room
        assert all(width >= longest for width, longest in zip(widths, words, strict=True))
