"""`AttentionFixedShapes`: checks of rows whose bits must not depend on where their blocks are."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_indexed import AttentionIndexed
from dovetail.testing.suites.attention_judging import assert_close


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
