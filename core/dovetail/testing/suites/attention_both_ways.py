"""`AttentionBothWays`: checks of rows that attend in both directions, as images do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from dovetail.testing.checks import check
from dovetail.testing.suites.attention_bench import Case
from dovetail.testing.suites.attention_groups import AttentionGroups
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_small_cache import LONG

Spans = tuple[tuple[int, int], ...]


class AttentionBothWays(AttentionGroups):
    """The same contract, for steps with `AttentionBatch.host_both_ways`."""

    @check("attention.both_ways", since="1.1", capability="both_ways")
    def test_rows_in_both_directions_see_all_of_their_tokens(self) -> None:
        """With `LayerSpec.both_ways` the queries of rows in `AttentionBatch.host_both_ways` attend
        to all `kv_lens` tokens of their row; a window hides only tokens before them. Other rows and
        layers are causal, among them the rows of the same sequence before and after: they have its
        block table, and see what the step wrote for the tokens before theirs."""
        for what, case in self.both_ways_cases():
            assert_as_defined(self.bench(case), what)
        for seed in range(self.examples // 2):
            assert_as_defined(self.bench(self.drawn(Random(seed))), f"case {seed}: ")

    def both_ways_cases(self) -> list[tuple[str, Case]]:
        """Return steps in which one thing may be wrong."""
        size = self.claims.default_block_size()
        window = size + 3 if self.claims.window else None
        spans: tuple[Spans, ...] = (
            ((2, size + 5),),  # between text
            ((0, 3), (7, 7 + 2 * size)),  # two, the last at the end
            ((size, 4 * size),),  # whose first tokens were computed before
            (),
            (),
        )
        history = (0, 0, 2 * size, size + 1, 3)
        queries = (2 * size, 7 + 2 * size, 3 * size, 1, size)
        steps: list[tuple[str, Case]] = []
        for dtype in self.tried_dtypes():
            case = self.case(
                history,
                queries,
                dtype=dtype,
                windows=(None, window),
                padding=3,
                spans=spans,
                both_ways=(True,),
            )
            steps.append((f"in {dtype}: ", case))
        one: tuple[Spans, ...] = (((9, 9 + size),),)
        ignored = self.case((4,), (size + 9,), windows=(None, None), spans=one)
        steps.append(("in layers without it: ", ignored))
        for heads, kv_heads in ((7, 1), (3, 3)):
            case = self.case(
                (4,), (size + 9,), heads=heads, kv_heads=kv_heads, spans=one, both_ways=(True,)
            )
            steps.append((f"with {heads} heads and {kv_heads} kv heads: ", case))
        for head_size in {64, 128}.intersection(self.head_sizes()):  # of most models
            case = self.case(
                (70, 0),
                (300, 41),
                head_size=head_size,
                dtype=self.tried_dtypes()[-1],
                spans=(((80, 290), (291, 370)), ()),
                both_ways=(True,),
            )
            steps.append((f"with heads of {head_size}: ", case))
        large = self.case((5,), (LONG,), heads=2, kv_heads=1, spans=(((9, LONG),),))
        for width in (None, 100) if self.claims.window else (None,):
            steps.append(
                (
                    f"a large one, window {width}: ",
                    replace(large, windows=(width,), both_ways=(True,)),
                )
            )
        if self.declares("cache_dtypes"):
            for case in self.small_case((0, 90), (30, 41)):
                small = replace(case, spans=(((3, 29),), ((80, 120),)), both_ways=(True,))
                steps.append((f"with K and V in {case.cache_dtype}: ", small))
        return steps

    def drawn(self, draw: Random) -> Case:
        """Draw rows of text with a few spans."""
        history, queries, spans = [], [], []
        for _ in range(draw.randint(1, 4)):
            past = draw.choice([0, draw.randint(1, self.max_len)])
            end = past
            own: list[tuple[int, int]] = []
            for _ in range(draw.randint(0, 3)):
                start = max(0, end + draw.randint(0, 9) - (0 if own else draw.choice([0, 9])))
                end = max(past, start) + draw.randint(1, self.max_len // 2)
                own.append((start, end))
            end += draw.randint(0 if own else 1, 9)
            history.append(past)
            queries.append(end - past)
            spans.append(tuple(own))
        widths = [None, None, 1, 7, 30] if self.claims.window else [None]
        return self.case(
            history,
            queries,
            block_size=draw.choice(self.small(self.block_sizes())),
            windows=(draw.choice(widths), draw.choice(widths)),
            spans=tuple(spans),
            both_ways=(True, draw.choice([False, True])),
            padding=draw.choice([0, 3]),
            seed=draw.randint(0, 2**31),
        )
