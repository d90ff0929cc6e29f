"""`AttentionSuite`: it checks that an attention backend keeps the contract of `dovetail.api.attention`.

Values are judged against attention in float64 (`attention_oracle`): a backend may err a few times as much as plain arithmetic in the same dtype.
Where a check can tell what went wrong, values are chosen to show it: with q = 0 and V = its position, the result is the mean position seen.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import given

from dovetail.api.attention import AttentionCapabilities, AttentionContext, LayerSpec
from dovetail.testing.checks import CheckFailed, Untried, check, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.attention_bench import Bench, Case, cases
from dovetail.testing.suites.repeatable import repeatable

SOME_HEAD_SIZES = (4, 8, 20, 64, 80, 128, 256)  # tried where any is declared
SOME_BLOCK_SIZES = (1, 3, 8, 16, 64, 256)
COPIES = ((), ((0, 1),), ((0, 1), (1, 2), (2, 3)), ((0, 1), (1, 0)), ((0, 1), (2, 1), (1, 3)), ((3, 0), (0, 3), (2, 0), (0, 1)))  # (from, to)
LONG = 1200  # tokens: enough for sums in half precision to go astray
LONGER = 4500  # tokens: more than a kernel takes in one part
MANY_ROWS = 70


class AttentionSuite(Suite):
    """The suite of attention backends. It runs on `device`: by default on a GPU if the backend claims it and there is one, else on the CPU.

    A device that the backend doesn't declare can be given, for an emulation of its own (kernels in Triton's interpreter on "cpu"); `dtypes`
    then names those that the emulation gets right. Both are part of the verdict.
    """

    kind = "attention"
    settings = Suite.settings | {"device", "dtypes", "max_len", "examples"}

    device: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...] | None] = None  # None: all that are declared
    max_len: ClassVar[int] = 80  # tokens of random rows
    examples: ClassVar[int] = 40  # random steps

    # ---- what to try

    @property
    def place(self) -> str:
        """The device that checks run on. Raises `CheckFailed` if there is none, as then nothing could be tested."""
        if self.device is not None:
            return self.device
        for name in ("cuda", "cpu"):
            if name in self.claims.devices and (name == "cpu" or torch.cuda.is_available()):
                return name
        raise CheckFailed(f"this machine has none of the declared devices ({', '.join(self.claims.devices)}): run the suite on one that has")

    def declares(self, capability: str) -> bool:
        """`cuda_graph` is declared by another word than "none", `mixed_graph` by that word, `fused_write` by laying a cache open."""
        if capability == "cuda_graph":
            return self.claims.cuda_graph != "none"
        if capability == "mixed_graph":
            return self.claims.cuda_graph == "mixed"
        if capability == "fused_write":
            return self.bench(self.case((0,), (1,))).layers[0].cache_for_fused_write() is not None
        return super().declares(capability)

    @property
    def claims(self) -> AttentionCapabilities:
        claims: AttentionCapabilities = self.component_class.capabilities
        return claims

    def case(self, history: Sequence[int], queries: Sequence[int], **fields: Any) -> Case:
        """Make a step on the suite's device, with supported values for what `fields` doesn't give."""
        defaults: dict[str, Any] = {
            "block_size": self.claims.default_block_size(),
            "head_size": self.head_sizes()[0],
            "dtype": self.tried_dtypes()[0],
            "device": self.place,
        }
        return Case(tuple(history), tuple(queries), **(defaults | fields))

    def bench(self, case: Case, relabel: int = 0) -> Bench:
        return Bench(self.make, case, relabel=relabel)

    def tried_dtypes(self) -> tuple[str, ...]:
        return self.dtypes or self.claims.dtypes

    def head_sizes(self) -> tuple[int, ...]:
        return self.claims.head_sizes or SOME_HEAD_SIZES

    def block_sizes(self) -> tuple[int, ...]:
        """The declared block sizes, or a selection with the smallest and an odd multiple."""
        multiple = self.claims.block_size_multiple
        candidates = self.claims.block_sizes or sorted({*SOME_BLOCK_SIZES, multiple, 3 * multiple})
        return tuple(size for size in candidates if self.claims.supports_block_size(size))

    def small(self, sizes: Sequence[int], limit: int = 64) -> Sequence[int]:
        """Return the sizes that are quick to try, at least one."""
        return [size for size in sizes if size <= limit] or [min(sizes)]

    # ---- values

    @check("attention.values", since="0.1")
    def test_any_mix_of_prefills_chunks_and_decodes_is_attended_as_defined(self) -> None:
        """One step may hold rows of every sort, padding included, in any order. The pool's other slots hold NaN: what is read where no token of
        the row lies turns the result into NaN, even with weight 0. Mask before the softmax and never multiply by what lies outside."""

        blocks, heads = self.small(self.block_sizes()), self.small(self.head_sizes())

        @repeatable(self.examples)
        @given(cases(max_len=self.max_len, block_sizes=blocks, head_sizes=heads, windows=self.claims.window))
        def each(case: Case) -> None:
            assert_as_defined(self.bench(replace(case, device=self.place, dtype=self.tried_dtypes()[0])))

        each()
        # what a kernel with tiles of rows, or parts of a row, can get wrong
        assert_as_defined(self.bench(self.case((3,) * MANY_ROWS, (1, 2) * (MANY_ROWS // 2), heads=2, kv_heads=1)))
        assert_as_defined(self.bench(self.case((LONGER, LONGER), (1, 3), heads=2, kv_heads=1)))

    @check("attention.causal", since="0.1")
    def test_a_query_sees_the_tokens_up_to_its_own(self) -> None:
        """A query at position p sees positions 0 to p, those of its own step included, whatever the row's history. One more or one less is the
        usual mistake where queries are counted from the start of the step and keys from the start of the row."""
        size = self.claims.default_block_size()
        assert_sees(self.bench(self.case((0, size - 1, size, 3 * size + 1, 5), (2 * size + 1, 2, size + 1, 1, 7))))

    @check("attention.window", since="0.1", capability="window")
    def test_a_query_with_a_window_sees_that_many_tokens_itself_included(self) -> None:
        """With `LayerSpec.window = w` a query at position p sees positions p - w + 1 to p. Layers of one model may differ in it."""
        size = self.claims.default_block_size()
        for window in (1, size, size + 1, 2 * size + 3):
            assert_sees(self.bench(self.case((0, size, 3 * size + 1), (size + 5, 7, 1), windows=(window, None), heads=2, kv_heads=1)))

    @check("attention.gqa", since="0.1")
    def test_heads_share_kv_heads_in_groups_that_follow_each_other(self) -> None:
        """Head h reads kv head h // (heads // kv_heads), for any ratio: 1, odd, larger than a tile; and for any number of kv heads."""
        for heads, kv_heads in ((2, 2), (3, 1), (6, 2), (7, 1), (9, 3), (16, 1), (12, 4), (5, 5), (40, 2)):
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
                    f"with {heads} heads and {kv_heads} kv heads, head {head} reads {read[0, head, 0]:.2f} instead of kv head {expected}",
                )

    @check("attention.scale", since="0.1")
    def test_scores_are_scaled_by_what_the_layer_says(self) -> None:
        """`LayerSpec.scale` multiplies q·k, in a layer with a window too; 1 / sqrt(head_size) is only the usual value of it."""
        windows = (None, 12) if self.claims.window else (None,)
        for scale in (0.02, 1.0):
            assert_as_defined(self.bench(self.case((0, 20), (30, 1), scale=scale, windows=windows)))

    @check("attention.huge_scores", since="0.1")
    def test_huge_scores_overflow_nothing(self) -> None:
        """Subtract a row's largest score before exp()."""
        bench = self.bench(self.case((0, 20, 30), (25, 1, 3)))
        for q in bench.q[0]:
            q *= 300
        assert_as_defined(bench)

    @check("attention.dtypes", since="0.1")
    def test_each_declared_dtype_is_as_exact_as_plain_arithmetic_in_it(self) -> None:
        """Sums over many tokens must be kept in float32, whatever the dtype of K and V. If a dtype is not meant to be served, declare fewer in
        `capabilities.dtypes`."""
        for dtype in self.tried_dtypes():
            windows = (None, 20) if self.claims.window else (None,)
            bench = self.bench(self.case((0, 30, LONG), (40, 9, 1), dtype=dtype, windows=windows, heads=2, kv_heads=1))
            for row in (row for layer in bench.q for row in layer):
                row *= 0.1  # flat weights: every token counts in the sums
            assert_as_defined(bench)

    @check("attention.head_sizes", since="0.1")
    def test_each_declared_head_size_is_served(self) -> None:
        """All of `capabilities.head_sizes`, or some of every kind where any is declared; with a dtype and a block size for each in turn."""
        sizes = self.head_sizes()
        for size, dtype, block_size in zip(sizes, cycle(self.tried_dtypes()), cycle(self.small(self.block_sizes())), strict=False):
            self.assert_claimed(AttentionContext(self.claims.devices[0], dtype, block_size), LayerSpec(0, 2, 1, size, 1.0))
            assert_as_defined(self.bench(self.case((30, 3), (1, 6), head_size=size, dtype=dtype, block_size=block_size, heads=2, kv_heads=1)))

    @check("attention.block_sizes", since="0.1")
    def test_each_declared_block_size_is_served(self) -> None:
        """All of `capabilities.block_sizes`, or some multiples of `block_size_multiple`; rows end just before, at and just after a block's end."""
        for size in self.block_sizes():
            self.assert_claimed(AttentionContext(self.claims.devices[0], self.tried_dtypes()[0], size), LayerSpec(0, 2, 1, self.head_sizes()[0], 1.0))
            history = (max(0, size - 2), size - 1, size, 0)
            assert_as_defined(self.bench(self.case(history, (1, 1, 1, size + 1), block_size=size, heads=2, kv_heads=1)))

    # ---- where K and V lie

    @check("attention.block_table", since="0.1")
    def test_which_physical_blocks_a_row_has_changes_nothing(self) -> None:
        """K and V of token t lie at slot block_table[row, t // block_size] * block_size + t % block_size: blocks are in no order, and entries past a
        row's blocks must not be followed."""
        size = self.claims.default_block_size()
        case = self.case((0, 2 * size, 3 * size - 1), (3 * size + 1, size, 1))
        results = []
        for relabel in range(3):
            bench = self.bench(case, relabel)
            results.append(bench.run()[0])
            assert_as_defined(bench, f"with the blocks {bench.table.tolist()}, ")
        changes = [(result - results[0]).abs().amax((1, 2)) for result in results]
        for change in changes:
            require((change <= bench.allowed_errors()[0]).all(), f"other physical blocks change the result by {change.max():.3g}")

    @check("attention.layers", since="0.1")
    def test_layers_have_caches_of_their_own(self) -> None:
        """`make_layer` may be called with equal specs: each layer still keeps its own K and V."""
        bench = self.bench(self.case((0, 20), (9, 1), windows=(None, None, None)))
        assert_as_defined(bench)

    @check("attention.write_first", since="0.1")
    def test_a_row_sees_what_another_row_writes_in_the_same_step(self) -> None:
        """Rows may share blocks that are only now computed (a common prefix), so `write` stores K and V of the whole step before `attend` reads,
        and `attend` reads the cache, not the step's own k and v alone."""
        size = self.claims.default_block_size()
        bench = self.bench(self.case((size, 0, size), (4, size + 4, 1)))  # the middle row computes what both others look back at
        for values in (bench.k[0], bench.v[0]):
            values[0][:size] = values[2][:size] = values[1][:size]
        bench.table[[0, 2], 0] = bench.table[1, 0]
        bench.write(bench.case.history, bench.case.lens)
        assert_close(bench, bench.attend(), "a row that shares a block with one that computes it in this step: ")

    @check("attention.padding", since="0.1")
    def test_padding_touches_nothing(self) -> None:
        """A token with slot -1 is padding: its K and V (NaN here) go nowhere, not even to slot 0 or to the last one (-1 counts from the end)."""
        for size in self.small(self.block_sizes(), 16)[-2:]:
            whole = 4 * size
            case = self.case((whole - 1, 0), (1, whole), block_size=size, spare_blocks=0)  # every slot of the pool is somebody's
            bench = self.bench(case)
            bench.compute()
            bench.write((whole - 1, whole), case.lens, padding=9)
            bench.plan(case.history, case.lens)
            assert_close(bench, bench.attend(), "after a step with padding: ")

    @check("attention.again", since="0.1")
    def test_nothing_of_one_call_is_left_in_the_next(self) -> None:
        """`attend` depends on the cache, the plan and q alone: buffers that are used again are filled, or masked, each time."""
        bench = self.bench(self.case((20, 30, 0), (1, 1, 5)))
        bench.compute()
        for layer in bench.layers:
            layer.attend(torch.full_like(bench.tensor(bench.q[0]), torch.nan))
        assert_close(bench, bench.attend(), "after a call with NaN: ")
        bench.plan((20, 30, 4), bench.case.lens)  # a smaller step between
        bench.plan(bench.case.history, bench.case.lens)
        assert_close(bench, bench.attend(), "after the plan of a smaller step: ")

    @check("attention.strides", since="0.1")
    def test_q_k_and_v_may_be_parts_of_one_tensor(self) -> None:
        """A model's projection makes q, k and v in one piece: they come as views of it, with strides of their own."""
        bench = self.bench(self.case((0, 0), (12, 5)))
        heads, kv_heads = bench.case.heads, bench.case.kv_heads
        whole = torch.cat([bench.tensor(values[0]) for values in (bench.q, bench.k, bench.v)], dim=1)  # [tokens, heads + 2 * kv_heads, size]
        q, k, v = torch.split(whole, [heads, kv_heads, kv_heads], dim=1)
        bench.plan(bench.case.history, bench.case.lens)
        bench.layers[0].write(k, v)
        assert_close(bench, [bench.layers[0].attend(q).double().cpu()], "q, k and v as parts of one tensor: ")

    @check("attention.copies", since="0.1")
    def test_copies_of_blocks_run_as_if_one_after_the_other(self) -> None:
        """`copy_blocks` may name a block twice, and copy what an earlier pair has written; all layers take part, with K and V."""
        size = self.claims.default_block_size()
        for pairs in COPIES:
            bench = self.bench(self.case((0,), (4 * size,), windows=(None, None), spare_blocks=0))
            number_blocks(bench)
            blocks = list(range(4))
            for src, dst in pairs:
                blocks[dst] = blocks[src]
            sources, targets = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64, device=self.place) for i in range(2))
            bench.backend.copy_blocks(sources, targets)
            for index, layer in enumerate(bench.layers):
                for what, found in numbers_of_blocks(bench, layer).items():
                    told = f"after the copies {pairs} (from, to), layer {index} holds {what} of the blocks {found}, expected {blocks}"
                    require(found == [block % size if what == "K" else block for block in blocks], told)

    @check("attention.memory", since="0.1")
    def test_blocks_take_the_memory_that_bytes_per_block_says(self) -> None:
        """The engine sizes the pool by `bytes_per_block`: K and V of one block, of this layer, in the cache's dtype. `allocate` drops what it made
        before."""
        context = AttentionContext(self.place, self.tried_dtypes()[-1], self.claims.default_block_size())
        backend = self.make(context)
        layers = [backend.make_layer(LayerSpec(i, 4, 2, self.head_sizes()[0], 1.0)) for i in range(2)]
        said = sum(backend.bytes_per_block(layer.spec) for layer in layers)

        def taken(blocks: int) -> int:
            backend.allocate(blocks)
            return tensor_bytes(backend, layers)

        few, many = taken(64), taken(64 + 512)
        per_block = (many - few) / 512
        require(
            abs(per_block - said) <= 0.02 * said,
            f"bytes_per_block says {said} bytes for a block of both layers, allocate() takes {per_block:.0f} for each block more",
        )

    # ---- claims

    @check("attention.refusals", since="0.1")
    def test_what_is_not_declared_is_refused_in_words(self) -> None:
        """`reasons_against` has a sentence for each thing that the backend can't do, naming the value. The default does that from `capabilities`;
        one of your own adds to it, never takes away."""
        for value, context, layer in self.undeclared():
            reasons = self.component_class.reasons_against(context, [layer])
            named = [r for r in reasons if isinstance(r, str) and str(value) in r and len(r.split()) > 2]
            require(named, f"{value} is not declared, but no reason names it: reasons_against gives {list(reasons)}")

    def undeclared(self) -> list[tuple[object, AttentionContext, LayerSpec]]:
        """Return, for each claim, a layer that exceeds this claim alone."""
        claims, layer = self.claims, LayerSpec(0, 2, 1, self.head_sizes()[0], 1.0)
        fine = AttentionContext(claims.devices[0], claims.dtypes[0], claims.default_block_size())
        beyond: list[tuple[object, AttentionContext, LayerSpec]] = [
            ("abacus", replace(fine, device="abacus:0"), layer),
            ("float8_e5m2", replace(fine, dtype="float8_e5m2"), layer),
        ]
        if claims.head_sizes is not None:
            size = max(claims.head_sizes) + 8
            beyond.append((size, fine, replace(layer, head_size=size)))
        if claims.block_sizes is not None or claims.block_size_multiple > 1:
            size = next(n for n in range(1, 10_000) if not claims.supports_block_size(n))
            beyond.append((size, replace(fine, block_size=size), layer))
        if not claims.window:
            beyond.append(("window", fine, replace(layer, window=4)))
        return beyond

    def assert_claimed(self, context: AttentionContext, layer: LayerSpec) -> None:
        reasons = self.component_class.reasons_against(context, [layer])
        require(not reasons, f"{context} with head size {layer.head_size} is declared, but refused: {list(reasons)}")

    @check("attention.shared_prefix", since="0.1", capability="shared_prefix")
    def test_a_prefix_that_rows_share_is_attended_as_defined(self) -> None:
        """`shared_prefix_blocks` says that the first blocks of all rows are the same, so that they may be read once; it changes no value. Rows may
        still be of any sort, and layers may have windows."""
        size = self.claims.default_block_size()
        blocks = -(-160 // size)
        tails = tuple(blocks * size + n for n in (1, size, 2 * size + 3, 7, 30))
        for last, window, told in ((1, None, (blocks, 1)), (5, 40 if self.claims.window else None, (blocks,))):
            bench = self.bench(self.case(tails, (1,) * 4 + (last,), heads=2, kv_heads=1, padding=2, windows=(window,)))
            share_prefix(bench, blocks)
            bench.write((0,) * len(tails), tails)
            for shared in told:
                bench.write(bench.case.history, bench.case.lens, bench.case.padding, shared)
                assert_close(bench, bench.attend(bench.case.padding), f"with {shared} shared blocks: ")

    @check("attention.fused_write", since="0.1", capability="fused_write")
    def test_what_is_written_into_the_open_cache_is_what_write_writes(self) -> None:
        """`cache_for_fused_write` lays the cache open: token i's K at k[slots[i] // block_size, slots[i] % block_size]. It must be the memory that
        `attend` reads, and `slots` those of the last plan, at the same address each step."""
        bench = self.bench(self.case((0, 20), (9, 1)))
        if any(bench.case.history):
            bench.write((0,) * 2, bench.case.history)
        bench.plan(bench.case.history, bench.case.lens, padding=2)
        cache, size = bench.layers[0].cache_for_fused_write(), bench.case.block_size
        require(cache is not None, "cache_for_fused_write() returned None once a step was planned")
        slots = cache.slots[:10]  # type: ignore[union-attr]
        for into, values in ((cache.k, bench.k), (cache.v, bench.v)):  # type: ignore[union-attr]
            step = bench.tensor([row[start:] for row, start in zip(values[0], bench.case.history, strict=True)])
            into[slots // size, slots % size] = step
        assert_close(bench, bench.attend(padding=2), "K and V written into the open cache: ")
        address = cache.slots.data_ptr()  # type: ignore[union-attr]
        bench.plan(bench.case.history, bench.case.lens)
        again = bench.layers[0].cache_for_fused_write()
        require(again is not None and again.slots.data_ptr() == address, "`slots` moved from one plan to the next")

    @check("attention.mixed_graph", since="0.1", capability="mixed_graph")
    def test_a_step_planned_for_a_mixed_graph_is_attended_as_any_other(self) -> None:
        """With `mixed_graph`, `attend` launches what any step of as many padded tokens needs: decodes, prefills, both, or none at all. Grids are as
        large as the tokens allow, programs that have nothing to do end, and padding is left alone. `num_rows` may be 0."""
        window = 20 if self.claims.window else None
        for history, queries in (
            ((0, 17, 90, 5, 0), (30, 1, 7, 1, 2)),
            ((17, 90), (1, 1)),
            ((0,), (41,)),
            ((3,) * MANY_ROWS, (1, 2) * (MANY_ROWS // 2)),
        ):
            case = self.case(history, queries, heads=4, kv_heads=2, padding=3, windows=(None, window), mixed_graph=True)
            bench = self.bench(case)
            assert_as_defined(bench, "planned with mixed_graph: ")
            bench.plan_rows(bench.table[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), padding=8)
            bench.layers[0].attend(bench.tensor(bench.q[0])[:1].repeat(8, 1, 1))

    @check("attention.graph", since="0.1", capability="cuda_graph")
    def test_a_captured_step_serves_any_other_of_its_size(self) -> None:
        """A graph replays the kernels of its capture: everything that differs between steps lies in buffers that `plan` fills, at the same
        addresses. `plan` neither waits for the device nor is part of the graph. Rows that became padding are left alone. A captured decode serves
        any step of as many rows; what was captured with `mixed_graph`, where that is declared, any step of as many tokens."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")
        case = self.case((300, 5, 17, 90), (1,) * 4, heads=4, kv_heads=2)
        bench = self.bench(case)
        bench.compute()
        bench.plan((0, 1, 2, 16), (1, 2, 3, 17))
        self.capture_and_replay(bench, "replayed for another step: ")
        if self.claims.cuda_graph == "mixed":
            bench = self.bench(self.case((300, 5, 0, 90), (1, 1, 40, 7), heads=4, kv_heads=2, padding=15, mixed_graph=True))
            bench.compute()
            bench.plan_rows(bench.table[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), padding=64)
            self.capture_and_replay(bench, "a mixed step, replayed by a graph of padding: ")

    def capture_and_replay(self, bench: Bench, what: str) -> None:
        """Capture the planned step in a graph, and replay it for the case's step."""
        layer, case, tokens = bench.layers[0], bench.case, sum(bench.case.queries)
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


def assert_as_defined(bench: Bench, what: str = "") -> None:
    assert_close(bench, bench.run(), what)


def assert_close(bench: Bench, results: list[torch.Tensor], what: str = "") -> None:
    """Check that each layer's values are the exact ones, within rounding errors."""
    for spec, result, exact, allowed in zip(bench.case.specs, results, bench.expected(), bench.allowed_errors(), strict=True):
        errors = (result - exact).abs().nan_to_num(torch.inf).amax((1, 2))  # of each token
        token = int((errors / allowed).argmax())
        require(
            errors[token] <= allowed[token],
            f"{what}token {token} of the step is off by {errors[token]:.3g}, allowed are {allowed[token]:.3g} "
            f"({int((errors > allowed).sum())} of {len(errors)} tokens are off; layer {spec}; {bench.case})",
        )


def assert_sees(bench: Bench) -> None:
    """Check that each query's mean position seen is that of the positions that it should see."""
    for layer, spec in enumerate(bench.case.specs):
        for q, v in zip(bench.q[layer], bench.v[layer], strict=True):
            q.zero_()
            v[:] = torch.arange(len(v))[:, None, None]
        bench.compute()
        seen = bench.layers[layer].attend(bench.tensor(bench.q[layer])).double().cpu().mean((1, 2))
        at = np.concatenate([np.arange(start, end) for start, end in zip(bench.case.history, bench.case.lens, strict=True)])
        first = np.maximum(0, at - (spec.window or len(at) + max(at)) + 1)
        for position, begin, mean in zip(at.tolist(), first.tolist(), seen.tolist(), strict=True):
            expected = (begin + position) / 2
            require(
                abs(mean - expected) < 0.25,
                f"the query at position {position} sees positions whose mean is {mean:.2f}; it should see {begin} to {position}, mean {expected} "
                f"(window {spec.window}, block size {bench.case.block_size})",
            )


def number_blocks(bench: Bench) -> None:
    """Give each block of the pool its number (below 8): its K makes a query look at the token of that number, its V tells it and the token's."""
    case, size = bench.case, bench.case.block_size
    block, token = torch.arange(case.num_blocks).repeat_interleave(size), torch.arange(size).repeat(case.num_blocks)
    k, v = 30.0 * (token == block % size), 8.0 * block + token
    bench.write_pool(*(values[:, None, None].expand(-1, case.kv_heads, case.head_size) for values in (k, v)))


def numbers_of_blocks(bench: Bench, layer: Any) -> dict[str, list[int]]:
    """Return the numbers that the K and the V of each block hold, as attention reads them; -1 where it reads NaN."""
    count, size = bench.case.num_blocks, bench.case.block_size
    bench.plan_rows(np.arange(count, dtype=np.int32)[:, None], np.ones(count, np.int64), np.full(count, size))
    q = torch.ones((count, bench.case.heads, bench.case.head_size), dtype=bench.case.torch_dtype, device=bench.case.device)
    values = [round(value) for value in layer.attend(q).double().cpu().mean((1, 2)).nan_to_num(-1).tolist()]
    return {"K": [value % 8 if value >= 0 else -1 for value in values], "V": [value // 8 for value in values]}


def share_prefix(bench: Bench, blocks: int) -> None:
    """Let all rows begin with the first row's first blocks."""
    tokens = blocks * bench.case.block_size
    for values in (*bench.k, *bench.v):
        for row in values[1:]:
            row[:tokens] = values[0][:tokens]
    bench.table[1:, :blocks] = bench.table[0, :blocks]


def tensor_bytes(*roots: Any) -> int:
    """Return the bytes of the tensors that can be reached from these objects."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    queue = list(roots)
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        else:
            queue.extend(gc.get_referents(thing))
    return sum(storages.values())
