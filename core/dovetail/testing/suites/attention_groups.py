"""`AttentionGroups`: checks of layers in several cache groups, and of layers that share a cache."""

from __future__ import annotations

from typing import Any

from dovetail.testing.checks import check, require
from dovetail.testing.memory import Place
from dovetail.testing.suites.attention_bench import Case
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_latent import AttentionLatent

HISTORY = (0, 70, 131, 5)
QUERIES = (40, 9, 1, 1)


class AttentionGroups(AttentionLatent):
    """The same contract, where layers have different block tables. Tensors of the pool are shared
    as in an engine: what a layer writes to another group's pages is found there by that group's
    layers."""

    def window_of(self, length: int) -> int | None:
        return length if self.claims.window else None

    def group_case(
        self, windows: tuple[int | None, ...], places: tuple[Place, ...], **fields: Any
    ) -> Case:
        """Make a step of rows of all kinds for layers at these places."""
        if not self.claims.window:
            windows = (None,) * len(windows)
        return self.case(
            HISTORY,
            QUERIES,
            **(
                {"windows": windows, "places": places, "padding": 3, "heads": 4, "kv_heads": 2}
                | fields
            ),
        )

    @check("attention.groups", since="1.0", capability="groups")
    def test_layers_read_and_write_by_the_tables_of_their_own_group(self) -> None:
        """Each cache group has its own block tables and slots,
        `AttentionBatch.block_tables[cache.group]`; and its layers have the same window. All groups'
        pages come from one pool: page 7 of a tensor belongs to one group, page 8 to another."""
        places = (Place(0, first=0), Place(1, first=0), Place(2, first=0))
        assert_as_defined(self.bench(self.group_case((None, 12, 50), places)), "three groups: ")
        for name in self.claims.cache_dtypes:
            assert_as_defined(
                self.bench(self.group_case((None, 12, 50), places, cache_dtype=name)),
                f"three groups with K and V in {name}: ",
            )
        if self.declares("mixed_graph"):
            assert_as_defined(
                self.bench(self.group_case((None, 12, 50), places, mixed_graph=True)),
                "three groups, planned with mixed_graph: ",
            )

    @check("attention.group_pages", since="1.0", capability="groups")
    def test_a_layer_has_its_own_page_of_a_block(self) -> None:
        """A block of a group may be several pages, `pages_per_block`, neighbours or not: the
        layer's is `block_tables[group][cache.page]`, and `slots[group][cache.page]` lead to it. One
        layer of the group may be alone in using its page."""
        places = (
            Place(0, 0, first=0),
            *(Place(1, page, first=0) for page in range(3)),
            Place(1, 2, first=2),
        )
        assert_as_defined(
            self.bench(self.group_case((None, 20, 20, 20, 20), places)),
            "blocks of one page and of three: ",
        )

    @check("attention.group_block_sizes", since="1.0", capability="groups")
    def test_the_block_size_is_that_of_the_layers_group(self) -> None:
        """Groups may have blocks of different numbers of tokens, `LayerCache.block_size`; that of
        the context is the smallest. A page's row is as long as the largest of the layers' blocks
        that lie there, so that pages are further apart than a smaller block is long."""
        small = self.claims.default_block_size()
        large = next(
            size
            for size in (2 * small, *self.block_sizes()[::-1])
            if self.claims.supports_block_size(size)
        )
        sizes = min(self.head_sizes()), max(self.small(self.head_sizes()))
        for full, windowed, shapes in (
            (large, small, ()),
            (small, large, ((4, 2, sizes[0]), (6, 3, sizes[1]), (2, 1, sizes[1]))),
        ):
            places = (
                Place(0, block_size=full, first=0),
                Place(1, block_size=windowed, first=0),
                Place(1, 1, block_size=windowed, first=0),
            )
            case = self.group_case((None, 20, 20), places, shapes=shapes)
            assert_as_defined(self.bench(case), f"blocks of {full} and {windowed} tokens: ")
        if self.declares("fused_write"):
            case = self.case(
                (0, 20),
                (9, 1),
                padding=2,
                windows=(None, self.window_of(12), self.window_of(12)),
                places=places,
            )
            self.assert_written_when_open(self.bench(case), index=2)

    @check("attention.unseen_pages", since="1.0", capability="window")
    def test_pages_that_no_query_sees_do_not_matter(self) -> None:
        """Blocks before the windows of a row's queries may have been released, or never held (at a
        prefix hit): their entries are any pages, which may hold NaN. Don't load them, or mask V as
        well: 0 times NaN is NaN."""
        size = self.claims.default_block_size()
        history = (2 * size - 1, 2 * size, 3 * size + 3, 4 * size)
        for window, queries in (
            (1, (1,) * 4),
            (size // 2 + 1, (1, 2, size + 1, 1)),
            (size + 1, (1, 1, 3, size)),
        ):
            case = self.case(history, queries, windows=(window,), heads=2, kv_heads=1)
            assert_as_defined(self.bench(case), f"with a window of {window} and blocks of {size}: ")

    @check("attention.shares", since="1.0", capability="causal")
    def test_a_layer_reads_the_cache_that_it_shares(self) -> None:
        """A layer with `LayerSpec.shares` is bound to the cache of an earlier one: it attends over
        that layer's K and V with its own q, heads and scale, and writes nothing."""
        shares = (None, None, 0, 1)
        case = self.case((0, 20), (9, 1), windows=(None,) * 4, shares=shares, padding=2)
        bench = self.bench(case)
        assert_as_defined(bench, "layers that share the caches of others: ")
        before = [memory.clone() for memory in bench.pool]
        for layer in bench.layers[2:]:
            layer.attend(bench.tensor(bench.q[0], 2))
        same = all(bool((old == new).all()) for old, new in zip(before, bench.pool, strict=True))
        require(same, "attend() of a layer that shares a cache changed it")
