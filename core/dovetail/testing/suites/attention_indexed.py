"""`AttentionIndexed`: checks of layers whose queries attend to the tokens that an indexer
selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dovetail.api.attention import Indexer
from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_bench import Bench, Case
from dovetail.testing.suites.attention_both_ways import AttentionBothWays
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_small_cache import LONG

FEW = Indexer(top_k=5, heads=3, size=8)
MANY = Indexer(top_k=300, heads=4, size=32)
AS_BEFORE = replace(FEW, selects=False)


class AttentionIndexed(AttentionBothWays):
    """The same contract, for layers with `LayerSpec.indexer`."""

    def indexed(self, history: tuple[int, ...], queries: tuple[int, ...], **fields: Any) -> Case:
        shape = {"heads": 4, "kv_heads": 1, "head_size": 24, "v_in_k": 16}
        return self.case(history, queries, **(shape | {"indexers": (FEW,)} | fields))

    def indexed_cases(self) -> Iterator[tuple[str, Case]]:
        """Yield steps in which one thing may be wrong."""
        size = self.claims.default_block_size()
        history = (0, 2 * size, 3 * size - 1, 0, 4, 0)
        queries = (2 * size + 3, 5, 1, 5, 1, 1)
        for dtype in self.tried_dtypes():
            yield f"in {dtype}: ", self.indexed(history, queries, dtype=dtype, padding=3)
        yield (
            "layers of which some don't select: ",
            self.indexed(
                (0, size),
                (9, 1),
                windows=(None,) * 4,
                indexers=(FEW, AS_BEFORE, FEW, AS_BEFORE),
            ),
        )
        yield "many tokens: ", self.indexed((LONG, 299), (1, 3), indexers=(MANY,))
        yield "many heads: ", self.indexed((40,), (2,), heads=72)
        yield "the best token only: ", self.indexed((9,), (20,), indexers=(replace(FEW, top_k=1),))
        if self.declares("cache_dtypes"):
            for name in self.claims.cache_dtypes:
                case = self.indexed((30, 0), (2, 9), cache_dtype=name, kv_scales=((0.037, 0.037),))
                yield f"with K in {name}: ", case
        if self.declares("mixed_graph"):
            mixed = self.indexed((0, 17, 40), (9, 1, 7), padding=3, mixed_graph=True)
            yield "planned with mixed_graph: ", mixed

    @check("attention.indexer", since="1.1", capability="indexer")
    def test_queries_attend_to_the_tokens_with_the_highest_scores(self) -> None:
        """With `LayerSpec.indexer` the query at position p attends to the min(top_k, p + 1) tokens,
        of those up to itself, with the highest scores, the sum over index heads of weight * max(0,
        q · key); of equal scores to the earliest. So in prefills, chunks and decodes. A layer that
        doesn't select uses what the last one before it selected in this step."""
        for what, case in self.indexed_cases():
            assert_as_defined(self.bench(case), what)

    @check("attention.indexer_keys", since="1.1", capability="indexer")
    def test_index_keys_are_kept_by_slot(self) -> None:
        """`write_index` stores index keys at the batch's slots, in the memory that `tensor_bytes`
        asked for: pages that get new owners have their keys, and those that are copied keep
        theirs."""
        size = self.claims.default_block_size()
        case = self.indexed((2 * size, 3 * size - 1), (3, 1))
        bench = self.bench(case)
        for keys in bench.index[0].keys:
            keys.neg_()
        bench.run()
        for keys in bench.index[0].keys:
            keys.neg_()
        assert_as_defined(bench, "after the slots had other index keys: ")
        for relabel in range(1, 3):
            assert_as_defined(self.bench(case, relabel), "with other physical blocks: ")
        self.assert_copied(replace(case, history=(size + 3,), queries=(1,)))

    @check("attention.indexer_reads", since="1.1", capability="indexer")
    def test_tokens_that_are_not_selected_are_not_read(self) -> None:
        """A decode reads K of the `top_k` selected tokens: K of the others may be NaN, which a
        weight of 0 turns into NaN too. So the cost of long contexts is that of their index keys."""
        for indexer, history in ((FEW, (90, 33)), (MANY, (LONG,))):
            bench = self.bench(self.indexed(history, (1,) * len(history), indexers=(indexer,)))
            self.hide_unselected(bench)
            [read] = bench.run()
            require(
                bool(read.isfinite().all()),
                "K of a token that isn't selected was read: the result isn't finite",
            )

    def hide_unselected(self, bench: Bench) -> None:
        """Make K of the tokens that no query of the step selects NaN."""
        for row, k in enumerate(bench.k[0]):
            k[~bench.index[0].selected(row).any(0)] = torch.nan
