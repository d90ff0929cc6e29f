"""`AttentionSuite`: checks that an attention backend conforms to the contract of
`dovetail.api.attention`.

Values are compared with attention in float64 (`attention_oracle`): a backend's error may be a few
times that of direct arithmetic in the same dtype. Where possible, values are chosen to reveal the
fault: with q = 0 and V = its position, the result is the mean of the attended positions.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import torch
from hypothesis import given

from dovetail.api.attention import AttentionContext, Indexer, LayerSpec
from dovetail.api.graphs import GraphSupport
from dovetail.testing.checks import Untried, check, require
from dovetail.testing.suites.attention_bench import Bench, Case, cases
from dovetail.testing.suites.attention_fixed_shapes import AttentionFixedShapes
from dovetail.testing.suites.attention_judging import assert_as_defined, assert_close, assert_sees
from dovetail.testing.suites.attention_small_cache import LONG
from dovetail.testing.suites.repeatable import repeatable

LONGER = 4500  # tokens: more than a kernel processes in one part
MANY_ROWS = 70


class AttentionSuite(AttentionFixedShapes):
    """Suite of attention backends: computed values and declared capabilities."""

    @check("attention.values", since="1.0")
    def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined(self) -> None:
        """One step may contain all kinds of rows, including padding, in any order. The pool's other
        slots hold NaN: reading outside of the row's tokens makes the result NaN, even with weight
        0. Mask before the softmax and never multiply by values outside."""

        blocks, heads = self.small(self.block_sizes()), self.small(self.head_sizes())

        @repeatable(self.examples)
        @given(
            cases(
                max_len=self.max_len,
                block_sizes=blocks,
                head_sizes=heads,
                windows=self.claims.window,
            )
        )
        def each(case: Case) -> None:
            assert_as_defined(
                self.bench(replace(case, device=self.place, dtype=self.tried_dtypes()[0]))
            )

        each()
        # typical faults of kernels with tiles of rows, or parts of a row
        assert_as_defined(
            self.bench(self.case((3,) * MANY_ROWS, (1, 2) * (MANY_ROWS // 2), heads=2, kv_heads=1))
        )
        assert_as_defined(self.bench(self.case((LONGER, LONGER), (1, 3), heads=2, kv_heads=1)))

    @check("attention.causal", since="1.0", capability="causal")
    def test_a_query_sees_the_tokens_up_to_its_own(self) -> None:
        """A query at position p attends to positions 0 to p, including those of its own step, for
        any history. Off-by-one errors are typical if queries are counted from the start of the step
        and keys from the start of the row."""
        size = self.claims.default_block_size()
        assert_sees(
            self.bench(
                self.case((0, size - 1, size, 3 * size + 1, 5), (2 * size + 1, 2, size + 1, 1, 7))
            )
        )

    @check("attention.window", since="1.0", capability="window")
    def test_a_query_with_a_window_sees_that_many_tokens_itself_included(self) -> None:
        """With `LayerSpec.window = w` a query at position p attends to positions p - w + 1 to p.
        Blocks wholly before the windows of a row's queries have been released: the entries of its
        table are any pages."""
        size = self.claims.default_block_size()
        for window in (1, size, size + 1, 2 * size + 3):
            assert_sees(
                self.bench(
                    self.case(
                        (0, size, 3 * size + 1),
                        (size + 5, 7, 1),
                        windows=(window, None),
                        heads=2,
                        kv_heads=1,
                    )
                )
            )
        bench = self.bench(self.case((LONG + 300,), (1,), windows=(LONG,), heads=2, kv_heads=1))
        for row in bench.v[0]:
            row += 1  # so that the mean of many isn't near 0
        assert_as_defined(bench, f"with a window of {LONG}: ")

    @check("attention.bidirectional", since="1.0", capability="bidirectional")
    def test_tokens_of_an_encoder_attend_to_later_ones(self) -> None:
        """With `LayerSpec.causal` False each token attends to all tokens of its row, or with a
        window w to those less than w tokens away on both sides, and to no other row; for any
        lengths, beside padding, whatever the step before was. Such a layer is written and attends
        before the next one is written."""
        size = self.claims.default_block_size()
        for window in (None, 1, size, 2 * size + 3) if self.claims.window else (None,):
            case = self.case(
                (),
                (1, 2 * size + 1, size, 7, size, 5 * size),
                windows=(window,),
                heads=2,
                kv_heads=1,
            ).whole(LONG)
            assert_sees(self.bench(case))
        windows = (None, 20) if self.claims.window and self.claims.groups else (None,)
        for dtype in self.tried_dtypes():
            bench = self.bench(
                self.case((), (90, 3, 41, 200), windows=windows, padding=5, dtype=dtype).whole(LONG)
            )
            assert_as_defined(bench, f"in {dtype}, all tokens of each row: ")
            bench.write((0, 0, 0, 0), (5, 0, 41, 0))
            bench.write(bench.case.history, bench.case.lens)
            for _ in range(2):
                assert_close(bench, bench.attend(), f"in {dtype}, after a smaller step: ")

    @check("attention.hidden_tails", since="1.1", capability="hidden_tails")
    def test_no_query_sees_the_end_of_its_row(self) -> None:
        """With `AttentionBatch.host_seen`, in layers without `LayerSpec.causal`, each query of a row
        attends to the row's first `host_seen` tokens, within its window, and to no later ones. In
        the next step, without `host_seen`, it attends to all tokens."""
        lens = (90, 3, 41, 70)
        seen = (60, 1, 41, 69)
        windows = (None, 50) if self.claims.window and self.claims.groups else (None,)
        for dtype in self.tried_dtypes():
            case = self.case((), lens, windows=windows, padding=5, dtype=dtype).whole(LONG)
            bench = self.bench(replace(case, seen=seen))
            assert_as_defined(bench, f"in {dtype}, with hidden tokens at the end of rows: ")
            assert_as_defined(self.bench(case), f"in {dtype}, without hidden tokens: ")

    @check("attention.gqa", since="1.0")
    def test_heads_share_kv_heads_in_groups_that_follow_each_other(self) -> None:
        """Head h reads kv head h // (heads // kv_heads), for any ratio: 1, odd, larger than a tile;
        and for any number of kv heads."""
        for heads, kv_heads in (
            (2, 2),
            (3, 1),
            (6, 2),
            (7, 1),
            (9, 3),
            (16, 1),
            (12, 4),
            (5, 5),
            (40, 2),
        ):
            case = self.case((0, 20), (9, 1), heads=heads, kv_heads=kv_heads)
            bench = self.bench(case)
            for row in bench.v[0]:
                row[:] = torch.arange(kv_heads)[:, None]
            read = bench.run()[0]
            for head in range(heads):
                expected = head // (heads // kv_heads)
                error = float((read[:, head] - expected).abs().max())
                require(
                    error < 0.25,
                    f"with {heads} heads and {kv_heads} kv heads, head {head} reads "
                    f"{read[0, head, 0]:.2f} instead of kv head {expected}",
                )

    @check("attention.scale", since="1.0")
    def test_scores_are_scaled_by_what_the_layer_says(self) -> None:
        """`LayerSpec.scale` multiplies q·k, also with a window; 1 / sqrt(head_size) is only its
        usual value."""
        windows = (None, 12) if self.claims.window else (None,)
        for size in (min(self.head_sizes()), max(self.head_sizes())):
            for scale in (
                0.02,
                min(1.0, 8 * size**-0.5),
            ):  # scores of a larger one would be rounded by more than values are judged by
                assert_as_defined(
                    self.bench(
                        self.case((0, 20), (30, 1), scale=scale, head_size=size, windows=windows)
                    )
                )

    @check("attention.huge_scores", since="1.0")
    def test_huge_scores_overflow_nothing(self) -> None:
        """Subtract a row's largest score before exp()."""
        bench = self.bench(self.case((0, 20, 30), (25, 1, 3)))
        for q in bench.q[0]:
            q *= 300
        assert_as_defined(bench)

    @check("attention.dtypes", since="1.0")
    def test_each_declared_dtype_is_as_exact_as_plain_arithmetic_in_it(self) -> None:
        """Sums over many tokens must be accumulated in float32, for any dtype of K and V. If a
        dtype isn't supported, remove it from `capabilities.dtypes`."""
        for dtype in self.tried_dtypes():
            windows = (None, 20) if self.claims.window else (None,)
            bench = self.bench(
                self.case(
                    (0, 30, LONG), (40, 9, 1), dtype=dtype, windows=windows, heads=2, kv_heads=1
                )
            )
            for row in (row for layer in bench.q for row in layer):
                row *= 0.1  # flat weights: every token counts in the sums
            assert_as_defined(bench)

    @check("attention.head_sizes", since="1.0")
    def test_each_declared_head_size_is_served(self) -> None:
        """All of `capabilities.head_sizes`, or a selection if any is allowed; each with a dtype and
        a block size in turn."""
        sizes = self.head_sizes()
        for size, dtype, block_size in zip(
            sizes, cycle(self.tried_dtypes()), cycle(self.small(self.block_sizes())), strict=False
        ):
            self.assert_claimed(
                AttentionContext(self.claims.devices[0], dtype, block_size), self.layer(size)
            )
            assert_as_defined(
                self.bench(
                    self.case(
                        (30, 3),
                        (1, 6),
                        head_size=size,
                        dtype=dtype,
                        block_size=block_size,
                        heads=2,
                        kv_heads=1,
                    )
                )
            )

    @check("attention.block_sizes", since="1.0")
    def test_each_declared_block_size_is_served(self) -> None:
        """All of `capabilities.block_sizes`, or some multiples of `block_size_multiple`; with rows
        ending right before, at and right after a block's end."""
        for size in self.block_sizes():
            self.assert_claimed(
                AttentionContext(self.claims.devices[0], self.tried_dtypes()[0], size),
                self.layer(self.head_sizes()[0]),
            )
            history = (max(0, size - 2), size - 1, size, 0)
            assert_as_defined(
                self.bench(
                    self.case(history, (1, 1, 1, size + 1), block_size=size, heads=2, kv_heads=1)
                )
            )

    @check("attention.refusals", since="1.0")
    def test_what_is_not_declared_is_refused_in_words(self) -> None:
        """`reasons_against` must have a sentence for each unsupported feature, naming the value.
        The default derives them from `capabilities`; an override may add reasons, but not remove
        any."""
        require(
            self.claims.causal or self.claims.bidirectional,
            "neither causal nor bidirectional is declared: such a backend serves no layer",
        )
        for value, context, layer in self.undeclared():
            fine = replace(self.layer(self.head_sizes()[0]), kv_heads=layer.kv_heads)
            reasons = self.component_class.reasons_against(context, [fine, layer])
            named = [
                r for r in reasons if isinstance(r, str) and str(value) in r and len(r.split()) > 2
            ]
            require(
                named,
                f"{value} is not declared, but no reason names it: reasons_against gives "
                f"{list(reasons)}",
            )

    def undeclared(self) -> list[tuple[object, AttentionContext, LayerSpec]]:
        """Return, for each capability, a layer that violates only this one."""
        claims = self.claims
        layer = self.layer(self.head_sizes()[0])
        fine = AttentionContext(claims.devices[0], claims.dtypes[0], claims.default_block_size())
        beyond: list[tuple[object, AttentionContext, LayerSpec]] = [
            ("abacus", replace(fine, device="abacus:0"), layer),
            ("float8_e5m2", replace(fine, dtype="float8_e5m2"), layer),
            ("float8_e5m2", replace(fine, cache_dtype="float8_e5m2"), layer),
        ]
        if claims.head_sizes is not None:
            size = max(claims.head_sizes) + 8
            beyond.append((size, fine, replace(layer, head_size=size)))
        if claims.block_sizes is not None or claims.block_size_multiple > 1:
            size = next(n for n in range(1, 10_000) if not claims.supports_block_size(n))
            beyond.append((size, replace(fine, block_size=size), layer))
        features = (
            ("window", claims.window, {"window": 4}),
            ("sinks", claims.sinks, {"sinks": True}),
            ("softcap", claims.softcap, {"softcap": 30.0}),
            ("groups", claims.groups or not claims.window, {"window": 4}),
            ("v_in_k", claims.v_in_k, {"v_in_k": True}),
            ("indexer", claims.indexer, {"v_in_k": True, "indexer": Indexer(4, 2, 8)}),
            ("causal", claims.causal, {"causal": True}),
            ("later tokens", claims.bidirectional, {"causal": False}),
        )
        for name, declared, fields in features:
            if not declared:
                beyond.append((name, fine, replace(layer, **fields)))
        return beyond

    def layer(self, head_size: int) -> LayerSpec:
        """Return a layer that any backend serves that has this head size."""
        return LayerSpec(0, 2, 1, head_size, 1.0, causal=self.claims.causal)

    def assert_claimed(self, context: AttentionContext, layer: LayerSpec) -> None:
        reasons = self.component_class.reasons_against(context, [layer])
        require(
            not reasons,
            f"{context} with head size {layer.head_size} is declared, but refused: {list(reasons)}",
        )

    @check("attention.shared_prefix", since="1.0", capability="shared_prefix")
    def test_a_prefix_that_rows_share_is_attended_as_defined(self) -> None:
        """`shared_prefix_blocks` means that the first blocks of all rows are the same in the first
        group, so that they may be read once; it changes no value. Rows may still be of any kind,
        and other layers may have windows. The prefix of one step isn't that of the next, even if
        they look alike."""
        size = self.claims.default_block_size()
        blocks = -(-160 // size)
        tails = tuple(blocks * size + n for n in (1, size, 2 * size + 3, 7, 30))
        for last, windows, told in (
            (1, (None,), (blocks, 1)),
            (5, (None, 40) if self.claims.groups else (None,), (blocks,)),
        ):
            bench = self.bench(
                self.case(
                    tails, (1,) * 4 + (last,), heads=2, kv_heads=1, padding=2, windows=windows
                )
            )
            self.assert_shares(bench, blocks, told)

    @check("attention.fused_write", since="1.0", capability="fused_write")
    def test_what_is_written_into_the_open_cache_is_what_write_writes(self) -> None:
        """`cache_for_fused_write` exposes the cache: token i's K at k[slots[i] // block_size,
        slots[i] % block_size]. It must be the memory that `attend` reads, with `slots` of the last
        plan, of the layer's group and page, at the same addresses after each plan; after another
        `bind` it is the new memory."""
        self.assert_written_when_open(
            self.bench(self.case((0, 20), (9, 1), padding=2, poisoned=False))
        )

    @check("attention.mixed_graph", since="1.0", capability="mixed_graph")
    def test_a_step_planned_for_a_mixed_graph_is_attended_as_any_other(self) -> None:
        """With `mixed_graph`, `attend` launches kernels for any step with the same padded number of
        tokens: decodes, prefills, both, or none at all. Size grids for all tokens, let idle
        programs exit, and don't touch padding. `num_rows` may be 0."""
        window = 20 if self.claims.window else None
        for history, queries in (
            ((0, 17, 90, 5, 0), (30, 1, 7, 1, 2)),
            ((17, 90), (1, 1)),
            ((0,), (41,)),
            ((3,) * MANY_ROWS, (1, 2) * (MANY_ROWS // 2)),
        ):
            case = self.case(
                history,
                queries,
                heads=4,
                kv_heads=2,
                padding=3,
                windows=(None, window),
                mixed_graph=True,
            )
            bench = self.bench(case)
            assert_as_defined(bench, "planned with mixed_graph: ")
            bench.plan_padding(8)
            bench.layers[0].attend(bench.tensor(bench.q[0])[:1].repeat(8, 1, 1))

    @check("attention.graph", since="1.0", capability="cuda_graph")
    def test_a_captured_step_serves_any_other_of_its_size(self) -> None:
        """A graph replays the kernels of its capture: everything that differs between steps must be
        in buffers that `plan` fills, at fixed addresses. `plan` doesn't wait for the device and
        isn't part of the graph. Rows that became padding aren't touched. A captured decode serves
        any step with the same number of rows; a capture with `mixed_graph`, if declared, any step
        with the same number of tokens."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")
        scores = {
            "sinks": (self.claims.sinks,),
            "softcaps": (20.0 if self.claims.softcap else None,),
        }
        bench = self.bench(self.case((300, 5, 17, 90), (1,) * 4, heads=4, kv_heads=2, **scores))
        bench.compute()
        bench.plan((0, 1, 2, 16), (1, 2, 3, 17))
        self.capture_and_replay(bench, "replayed for another step: ")
        if self.claims.cuda_graph is GraphSupport.ALL:
            bench = self.bench(
                self.case(
                    (300, 5, 0, 90),
                    (1, 1, 40, 7),
                    heads=4,
                    kv_heads=2,
                    padding=15,
                    mixed_graph=True,
                    **scores,
                )
            )
            bench.compute()
            bench.plan_padding(64)
            self.capture_and_replay(bench, "a mixed step, replayed by a graph of padding: ")

    def capture_and_replay(self, bench: Bench, what: str) -> None:
        """Capture the planned step in a graph, and replay it for the case's step."""
        layer = bench.layers[0]
        case = bench.case
        tokens = sum(bench.case.queries)
        q = bench.tensor(bench.q[0], case.padding)
        layer.attend(q)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.attend(q)
        for _ in range(2):
            out.fill_(torch.nan)
            bench.plan(case.history, case.lens, case.padding)
            graph.replay()
            assert_close(bench, [out[:tokens].double().cpu()], what)
