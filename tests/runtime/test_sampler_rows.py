"""Rows passed one by one to a sampler or logits processor that has rejected all of them."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.sampler import RowSampling, SampledRow
from dovetail_executors.runtime.sampler_rows import update_one_by_one

GOOD = RowSampling(seed=1)
BAD = RowSampling(seed=2)
INSTEAD = RowSampling(seed=3)


class Owner:
    """Rejects BAD, and the addition of rows that it has."""

    def __init__(self, *rows: int) -> None:
        self.rows = dict.fromkeys(rows, GOOD)

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        for row in removed:
            self.rows.pop(row, None)
        for one in added:
            if one.row in self.rows or one.sampling == BAD:
                raise ValueError(f"row {one.row}")
            self.rows[one.row] = one.sampling


def sampled(row: int, sampling: RowSampling) -> SampledRow:
    return SampledRow(row=row, sampling=sampling)


ADDED = [sampled(4, GOOD), sampled(5, BAD), sampled(6, GOOD)]


def test_a_rejected_row_begins_with_other_parameters_and_the_rest_with_their_own() -> None:
    owner = Owner(0, 4)  # the failed call got as far as row 4
    refused = update_one_by_one(
        "sampler odd", owner.update, [0, 1], ADDED, lambda row: sampled(row, INSTEAD)
    )
    assert owner.rows == {4: GOOD, 5: INSTEAD, 6: GOOD}
    assert refused == {5: "sampler odd raised in update(): ValueError: row 5"}


def test_a_rejected_row_is_removed_if_nothing_can_begin_in_its_place() -> None:
    owner = Owner(5)
    assert [*update_one_by_one("processor odd", owner.update, [], ADDED)] == [5]
    assert owner.rows == {4: GOOD, 6: GOOD}
