"""While kernels are only compiled, a decoder runs blocks of all kinds, but few of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dovetail.nn import rehearsal
from dovetail.nn.rehearsal import Rehearsal, first_of_each_pair
from tests.support import examples

Launch = tuple[str, ...]


@given(st.lists(st.integers(0, 2), max_size=12))
@examples(quick=50, full=2000)
def test_a_beginning_with_each_pair_is_the_shortest(kinds: list[int]) -> None:
    pairs = {*pairwise(kinds)}
    beginnings = [kinds[:end] for end in range(len(kinds) + 1)]
    shortest = next(some for some in beginnings if {*pairwise(some)} == pairs)
    chosen = kinds[: len(first_of_each_pair(kinds))]
    assert chosen == (shortest if pairs else kinds)


class Blocks:
    """Blocks that launch kernels of these names, and a compiler that notes them."""

    def __init__(self, launches: Sequence[str], widths: Sequence[int] | None = None) -> None:
        self.launches = launches
        sizes = widths or [1] * len(launches)
        self.modules = [nn.Linear(size, 1, bias=False) for size in sizes]
        self.asked: list[Launch] | None = []

    def run(self, subject: Rehearsal, taps: Sequence[int] = ()) -> list[int]:
        """Return the blocks that are run."""
        ran = []
        for index in subject.indices(taps):
            ran.append(index)
            if self.asked is not None:
                self.asked += [(name,) for name in self.launches[index]]
        return ran


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Blocks:
    made = Blocks(*request.param)
    monkeypatch.setattr(rehearsal, "asked_kinds", lambda: made.asked)
    return made


ALIKE = (["ab"] * 12,)
MIXED = ([*["s", "s", "s", "f"] * 4],)
WIDER = (["ab"] * 12, [1] * 6 + [2] * 6)


@pytest.mark.parametrize(
    ("blocks", "run"),
    [
        (ALIKE, [0, 1, 10, 11]),
        ((["a", *["b"] * 11],), [0, 1, 2, 10, 11]),
        (MIXED, [0, 1, 2, 3, 4, 14, 15]),
        (WIDER, [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]),
        ((["a"],), [0]),
        ((["a", "b"],), [0, 1]),
    ],
    indirect=["blocks"],
)
def test_blocks_that_launch_the_same_run_once_all_have_been_seen(
    blocks: Blocks, run: list[int]
) -> None:
    last = len(blocks.modules) - 1
    subject = Rehearsal(blocks.modules, last)
    assert blocks.run(subject) == [*range(last + 1)]
    assert blocks.run(subject) == run
    assert blocks.run(subject, [last // 2, last + 1]) == sorted({*run, last // 2})


@pytest.mark.parametrize("blocks", [ALIKE], indirect=True)
def test_steps_run_all_blocks(blocks: Blocks) -> None:
    subject = Rehearsal(blocks.modules, 11)
    blocks.run(subject)
    blocks.run(subject)
    blocks.asked = None
    assert blocks.run(subject) == [*range(12)]


def test_blocks_behind_the_one_that_reduces_the_stream_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Blocks(["a"] * 8)
    monkeypatch.setattr(rehearsal, "asked_kinds", lambda: made.asked)
    subject = Rehearsal(made.modules, 5)
    made.run(subject)
    assert made.run(subject) == [0, 1, 4, 5, 6, 7]
