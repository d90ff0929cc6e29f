"""`AttentionFixedShapes`: checks of rows whose bits must not depend on others, nor on where their
blocks are."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_indexed import AttentionIndexed
from dovetail.testing.suites.attention_judging import assert_close

QUERIES = 32  # of a row


class AttentionFixedShapes(AttentionIndexed):
    """The same contract, for steps with `AttentionBatch.fixed_shapes`."""

    @check("attention.fixed_shapes", since="1.1", capability="fixed_shapes")
    def test_bits_do_not_depend_on_where_blocks_are(self) -> None:
        """With `AttentionBatch.fixed_shapes` the outputs of the batch's row have the same bits with
        its blocks in order and scattered, in its first step and in a later one."""
        size = self.claims.default_block_size()
        window = size + 3 if self.claims.window else None
        for dtype in self.tried_dtypes():
            for history, queries in ((0, 32), (64, 32), (96, 7), (5 * size, 1)):
                case = self.case((history,), (queries,), dtype=dtype, windows=(None, window))
                case = replace(case, fixed_shapes=True)
                in_order = self.bench(case, relabel=None)
                expected = in_order.run()
                assert_close(in_order, expected)
                for what, bench in (
                    ("again", in_order),
                    ("with scattered blocks", self.bench(case, relabel=1)),
                ):
                    for layer, (one, other) in enumerate(zip(expected, bench.run(), strict=True)):
                        require(
                            torch.equal(one, other),
                            f"{queries} queries after {history} tokens in {dtype}, {what}: layer "
                            f"{layer} has other bits, though fixed_shapes was asked for",
                        )

    @check("attention.fixed_shapes_beside_others", since="1.1", capability="fixed_shapes")
    def test_bits_do_not_depend_on_other_rows(self) -> None:
        """With `AttentionBatch.fixed_shapes` the outputs of each row have the same bits alone, with
        padding in place of the other rows, and beside these in any order."""
        size = self.claims.default_block_size()
        window = size + 3 if self.claims.window else None
        history = (96, 0, 64, 64)
        for dtype in self.tried_dtypes():
            case = self.case(
                history, (QUERIES,) * len(history), dtype=dtype, windows=(None, window)
            )
            bench = self.bench(replace(case, fixed_shapes=True))
            together = bench.run()
            assert_close(bench, together)
            for rows in ((0,), (3,), (2, 1), (3, 0, 2, 1)):
                for layer, outputs in enumerate(bench.attend_rows(rows)):
                    for place, row in enumerate(rows):
                        one = together[layer][QUERIES * row : QUERIES * (row + 1)]
                        other = outputs[QUERIES * place : QUERIES * (place + 1)]
                        require(
                            torch.equal(one, other),
                            f"{QUERIES} queries after {history[row]} tokens in {dtype}: layer "
                            f"{layer} has other bits in a step of rows {rows}, though fixed_shapes "
                            f"was asked for",
                        )
