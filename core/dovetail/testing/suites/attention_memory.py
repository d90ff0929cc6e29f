"""`AttentionMemory`: checks of where a backend stores K and V, and of what it may read and
modify."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from dovetail.api.attention import AttentionBatch, AttentionContext, FusedCache, LayerSpec
from dovetail.testing.checks import check, fail, require
from dovetail.testing.memory import bind_layers
from dovetail.testing.suites.attention_bench import ALL_BITS, Bench, Case
from dovetail.testing.suites.attention_judging import (
    assert_as_defined,
    assert_close,
    share_prefix,
    tensor_bytes,
)
from dovetail.testing.suites.attention_subject import AttentionSubject

MEMORY_BESIDE = 1.25  # maximum size of a block, as a multiple of K and V
GAP = 64  # bytes of a page's row beyond the layer's own
LARGE = 2**16 + 2**12  # slots
POOLS = (64, 64 + 512)  # pages


class AttentionMemory(AttentionSubject):
    """Blocks, copies, padding, and state between calls."""

    @check("attention.block_table", since="1.0", capability="causal")
    def test_which_physical_blocks_a_row_has_changes_nothing(self) -> None:
        """K and V of token t are at slot block_table[row, t // block_size] * block_size + t %
        block_size: blocks are in no order, and entries that no query sees are any pages, whose
        content must not matter."""
        size = self.claims.default_block_size()
        case = self.case((0, 2 * size, 3 * size - 1), (3 * size + 1, size, 1))
        results = []
        for relabel in range(3):
            bench = self.bench(case, relabel)
            results.append(bench.run()[0])
            assert_as_defined(bench, f"with the blocks {bench.table.tolist()}, ")
        changes = [(result - results[0]).abs().amax((1, 2)) for result in results]
        for change in changes:
            require(
                (change <= bench.allowed_errors()[0]).all(),
                f"other physical blocks change the result by {change.max():.3g}",
            )

    @check("attention.layers", since="1.0", capability="causal")
    def test_layers_have_caches_of_their_own(self) -> None:
        """`make_layer` may be called with equal specs: each layer still has its own K and V. A
        result is valid until the next `attend`: `write` of another layer and a plan must not change
        it."""
        bench = self.bench(self.case((0, 20), (9, 1), windows=(None, None, None)))
        assert_as_defined(bench)
        first, second, _ = bench.layers
        result = first.attend(bench.tensor(bench.q[0]))
        before = result.clone()
        second.write(
            *(
                bench.tensor(
                    [row[start:] for row, start in zip(rows[1], bench.case.history, strict=True)]
                )
                for rows in (bench.k, bench.v)
            )
        )
        require(
            torch.equal(result, before), "the next layer's write() changed a result of attend()"
        )
        bench.plan((0, 0), (1, 1))
        require(torch.equal(result, before), "the next plan() changed a result of attend()")

    @check("attention.unlike_layers", since="1.0")
    def test_layers_of_one_model_may_have_different_shapes(self) -> None:
        """A layer was assumed to have the same number of heads, or head size, as another one. Each
        has its own `LayerSpec`; values that a plan derives from one shape don't apply to
        another."""
        small = min(self.head_sizes())
        large = max(self.small(self.head_sizes(), 128))
        shapes = ((4, 2, small), (6, 1, large), (2, 2, small))
        windows = (None, None, 12 if self.claims.groups else None)
        assert_as_defined(
            self.bench(self.case((0, 20), (9, 1), shapes=shapes, windows=windows)),
            "beside layers of other shapes, ",
        )

    @check("attention.write_first", since="1.0", capability="causal")
    def test_a_row_sees_what_another_row_writes_in_the_same_step(self) -> None:
        """Rows may share blocks that are computed in this step (a common prefix), so `write` stores
        K and V of the whole step before `attend` reads, and `attend` reads the cache, not the
        step's own k and v."""
        size = self.claims.default_block_size()
        # the middle row computes what both others attend to
        bench = self.bench(self.case((size, 0, size), (4, size + 4, 1)))
        for values in (bench.k[0], bench.v[0]):
            values[0][:size] = values[2][:size] = values[1][:size]
        bench.table[[0, 2], 0] = bench.table[1, 0]
        bench.write(bench.case.history, bench.case.lens)
        assert_close(
            bench,
            bench.attend(),
            "a row that shares a block with one that computes it in this step: ",
        )

    @check("attention.padding", since="1.0", capability="causal")
    def test_padding_touches_nothing(self) -> None:
        """K and V of padding tokens (NaN here) are stored in the waste page, where their slots are,
        and nowhere else."""
        for size in self.small(self.block_sizes(), 16)[-2:]:
            whole = 4 * size
            # every slot of the pool is in use
            case = self.case(
                (whole - 1, 0), (1, whole), block_size=size, spare_blocks=0, padding=70
            )
            bench = self.bench(case)
            bench.compute()
            bench.write((whole - 1, whole), case.lens, padding=70)
            bench.plan(case.history, case.lens)
            assert_close(bench, bench.attend(), "after a step with padding: ")

    @check("attention.again", since="1.0", capability="causal")
    def test_nothing_of_one_call_is_left_in_the_next(self) -> None:
        """`attend` depends only on the cache, the plan and q: fill or mask reused buffers each
        time."""
        bench = self.bench(self.case((20, 30, 0), (1, 1, 5)))
        bench.compute()
        for layer in bench.layers:
            layer.attend(torch.full_like(bench.tensor(bench.q[0]), torch.nan))
        for _ in range(6):
            assert_close(bench, bench.attend(), "after a call with NaN: ")
        bench.plan((20, 30, 4), bench.case.lens)  # a smaller step between
        bench.plan(bench.case.history, bench.case.lens)
        assert_close(bench, bench.attend(), "after the plan of a smaller step: ")

    @check("attention.replan", since="1.0", capability="causal")
    def test_a_plan_is_that_of_its_own_step(self) -> None:
        """A step's plan was taken for that of the previous step, because rows and lengths were the
        same. Successive decodes have one more token per row, and rows of the same lengths may have
        other blocks: compare everything that a plan depends on, or plan each step anew."""
        bench = self.bench(self.case((21,) * 3, (1,) * 3))
        bench.write((0,) * 3, (20,) * 3)
        for length in (20, 21):
            bench.write((length,) * 3, (length + 1,) * 3)
            result = bench.attend()
        assert_close(bench, result, "after a step of as many rows, a token shorter each: ")
        bench.reorder((2, 0, 1))
        bench.write(bench.case.history, bench.case.lens)
        assert_close(bench, bench.attend(), "after a step of the same lengths in other blocks: ")
        self.assert_plans_what_was_refilled(bench)

    def assert_plans_what_was_refilled(self, bench: Bench) -> None:
        """Check steps of 3 rows that come in the same tensors: other blocks alone, and other
        lengths alone."""
        case, (layer,) = bench.case, bench.layers
        queries = np.array(case.queries)
        lens = np.array(case.lens)
        used = bench.batch(range(3), queries, lens)
        for order, fewer in (((0, 1, 2), 0), ((1, 2, 0), 0), ((0, 1, 2), 3), ((0, 1, 2), 0)):
            bench.reorder(order)
            for array, other in zip(
                _arrays(used).values(),
                _arrays(bench.batch(range(3), queries, lens - fewer)).values(),
                strict=True,
            ):
                array[:] = other
            bench.backend.plan(used)
            now = zip(bench.k[0], bench.v[0], case.history, strict=True)
            k, v = (
                list(rows)
                for rows in zip(
                    *((k[start - fewer :][:1], v[start - fewer :][:1]) for k, v, start in now),
                    strict=True,
                )
            )
            layer.write(bench.tensor(k), bench.tensor(v))
            result = layer.attend(bench.tensor(bench.q[0])).double().cpu()
            if not fewer:
                assert_close(
                    bench, [result], "after a plan of the same tensors, which held another step: "
                )

    @check("attention.limits", since="1.0")
    def test_what_was_prepared_for_can_be_used_up(self) -> None:
        """A step with exactly `max_rows` rows and `max_tokens` tokens, with sequences of exactly
        `max_len`, failed or was wrong. `max_len` may not be a multiple of the block size: a block
        table has ceil(max_len / block_size) valid columns."""
        for size in self.small(self.block_sizes(), 16)[-2:]:
            longest = 3 * size + 1
            case = self.case(
                (0, longest - 1, 1, 1),
                (longest, 1, 1, 1),
                block_size=size,
                heads=2,
                kv_heads=1,
                exact=True,
            )
            assert_as_defined(
                self.bench(case),
                f"prepared for {len(case.lens)} rows, {sum(case.queries)} tokens, sequences of "
                f"{longest}: ",
            )

    @check("attention.large_pool", since="1.0", capability="causal")
    def test_slots_are_numbered_beyond_16_bits(self) -> None:
        """In a pool of more than 65,536 slots a row used the wrong slot: slots are int64, page ids
        int32, and indices computed from them need 64 bits."""
        size = min(self.block_sizes())
        case = self.case(
            (0, 5, 2 * size),
            (2 * size + 1, 1, 3),
            block_size=size,
            heads=2,
            kv_heads=1,
            poisoned=False,
            spare_blocks=-(-LARGE // size),
        )
        assert_as_defined(
            self.bench(case), f"in a pool of {case.num_pages} pages of {size} tokens: "
        )

    @check("attention.read_only", since="1.0")
    def test_what_it_is_given_is_only_read(self) -> None:
        """q, k, v or a tensor of the batch was modified. They belong to the model and the runner,
        which reuse them: work on copies."""
        self.assert_only_read(self.case((20, 0, 33), (1, 7, 1), padding=2))

    def assert_only_read(self, case: Case) -> None:
        """Check a step of 3 rows and 2 tokens of padding."""
        bench = self.bench(case)
        bench.write((0,) * 3, case.history)
        batch = bench.batch(
            range(3), np.array(bench.case.queries), np.array(bench.case.lens), padding=2
        )
        step = _arrays(batch)
        for name, values in (("k", bench.k), ("v", bench.v), ("q", bench.q)):
            starts = (0,) * 3 if name == "q" else bench.case.history
            step[name] = bench.tensor(
                [row[start:] for row, start in zip(values[0], starts, strict=True)], padding=2
            )
        before = {name: copy.deepcopy(value) for name, value in step.items()}
        bench.backend.plan(batch)
        bench.layers[0].write(step["k"], step["v"])
        bench.layers[0].attend(step["q"])
        for name, value in step.items():
            same = np.array_equal(_host(value), _host(before[name]), equal_nan=True)
            require(same, f"{name} isn't what it was before plan(), write() and attend()")

    @check("attention.strides", since="1.0")
    def test_q_k_and_v_may_be_parts_of_one_tensor(self) -> None:
        """q, k and v may be strided views of one tensor, the output of a merged projection."""
        for rows in (((0, 0), (12, 5)), ((20, 5), (1, 1))):
            bench = self.bench(self.case(*rows))
            history = bench.case.history
            if any(history):
                bench.write((0, 0), history)
            heads = bench.case.heads
            kv_heads = bench.case.kv_heads
            new_k, new_v = (
                [row[start:] for row, start in zip(values[0], history, strict=True)]
                for values in (bench.k, bench.v)
            )
            # [tokens, heads + 2 * kv_heads, size]
            whole = torch.cat([bench.tensor(rows) for rows in (bench.q[0], new_k, new_v)], dim=1)
            q, k, v = torch.split(whole, [heads, kv_heads, kv_heads], dim=1)
            bench.plan(history, bench.case.lens)
            bench.layers[0].write(k, v)
            assert_close(
                bench,
                [bench.layers[0].attend(q).double().cpu()],
                "q, k and v as parts of one tensor: ",
            )

    @check("attention.pages", since="1.0", capability="causal")
    def test_a_page_is_all_that_a_block_is(self) -> None:
        """The executor copies pages: row `page` of each of `LayerCache.memory`. All of a block's K
        and V must lie there, in this layer's part, and depend on neither the page's number nor
        other memory. Nothing else may be written, in the row or in other pages, but in the waste
        page."""
        size = self.claims.default_block_size()
        self.assert_copied(self.case((size + 3, 0), (1, size + 1), padding=2))

    def assert_copied(self, case: Case) -> None:
        """Check the case's step after each of its pages was moved to another pool, in which they
        are elsewhere and rows are longer."""
        first = self.bench(case)
        second = self.bench(case, relabel=1)
        first.compute()
        longer = [
            memory.new_full((len(memory), memory.shape[1] + GAP), ALL_BITS)
            for memory in second.pool
        ]
        for layer in second.layers:
            cache = layer.cache
            require(cache is not None, "bind() kept no cache in `layer.cache`")
            if cache is not None:
                places = [
                    next(i for i, own in enumerate(second.pool) if own is memory)
                    for memory in cache.memory
                ]
                layer.bind(replace(cache, memory=tuple(longer[place] for place in places)))
        second.backend.prepare(second.max_rows, second.max_tokens, second.max_len)
        for old, new in zip(first.pool, longer, strict=True):
            for before, after in zip(first.tables, second.tables, strict=True):
                new[after.ravel().tolist(), : old.shape[1]] = old[before.ravel().tolist()]
        second.plan(case.history, case.lens, case.padding)
        assert_close(
            second, second.attend(case.padding), "of pages that were copied to another pool: "
        )
        second.write(case.history, case.lens, case.padding)
        assert_close(second, second.attend(case.padding), "in pages with room for more: ")
        for memory in longer:
            require(
                bool((memory[:, -GAP:] == ALL_BITS).all()),
                "write() changed bytes of a page beyond its `tensor_bytes`",
            )
        unused = sorted(
            set(range(case.num_pages))
            - {page for table in second.tables for page in table.ravel().tolist()}
        )
        for memory in longer:
            require(
                bool((memory[unused] == ALL_BITS).all()),
                f"write() changed one of the pages {unused}, which no row has",
            )

    @check("attention.memory", since="1.0", capability="causal")
    def test_blocks_take_the_memory_that_tensor_bytes_says(self) -> None:
        """The engine sizes the pool by `tensor_bytes`: K and V of one block, of this layer, in the
        cache's dtype. A backend has no memory of its own that grows with the pool, and after
        another `bind` neither the earlier memory nor state that refers to it."""
        self.assert_memory(
            AttentionContext(self.place, self.tried_dtypes()[-1], self.claims.default_block_size())
        )
        for pages in (1, 20):
            case = self.case((0, 20), (9, 1), padding=2, spare_blocks=0, earlier_pages=pages)
            assert_as_defined(self.bench(case), f"after an earlier pool of {pages} pages: ")

    def assert_memory(self, context: AttentionContext) -> None:
        backend = self.make(context)
        size = context.block_size
        layers = [
            backend.make_layer(LayerSpec(i, 4, kv_heads, self.head_sizes()[0], 1.0))
            for i, kv_heads in enumerate((2, 4))
        ]
        dtype: torch.dtype = getattr(torch, context.cache_dtype or context.dtype)
        for layer in layers:
            said = backend.tensor_bytes(layer.spec, size)
            own = size * layer.spec.kv_heads * layer.spec.head_size * dtype.itemsize
            told = f"K and V of a block are {own} bytes each in {dtype}, tensor_bytes says {said}"
            require(len(said) == 2 and 2 * own <= sum(said) <= MEMORY_BESIDE * 2 * own, told)
            other = backend.tensor_bytes(layer.spec, 3 * size)
            require(
                other == tuple(3 * tensor for tensor in said),
                f"tensor_bytes says {said} for blocks of {size} tokens, {other} for {3 * size}",
            )

        def beside(pages: int) -> int:
            pool = bind_layers(backend, layers, pages)
            backend.prepare(4, 16, 64 * size)
            return tensor_bytes(backend, layers) - sum(memory.nbytes for memory in pool)

        few, many, again = map(beside, (*POOLS, POOLS[0]))
        one = sum(sum(backend.tensor_bytes(layer.spec, size)) for layer in layers)
        told = (
            f"beside pools of {POOLS} pages the backend holds {few} and {many} bytes, and "
            f"{again} after it was bound to the first size again"
        )
        require(max(many, again) - few < one, told)

    def assert_shares(self, bench: Bench, blocks: int, told: Sequence[int]) -> None:
        """Check the bench's step with rows that begin with the same blocks, for several values of
        `shared_prefix_blocks`; then with other K and V in these blocks, and in other blocks."""
        own = bench.table[:, :blocks].copy()
        for row, numbers, what in (
            (0, told, ""),
            (0, told[:1], "other K and V in "),
            (1, told[:1], "other blocks after "),
        ):
            share_prefix(bench, blocks, own[row])
            bench.write((0,) * len(bench.case.history), bench.case.history)
            for shared in numbers:
                bench.write(bench.case.history, bench.case.lens, bench.case.padding, shared)
                assert_close(
                    bench, bench.attend(bench.case.padding), f"with {what}{shared} shared blocks: "
                )

    def assert_written_when_open(self, bench: Bench, index: int = 0) -> None:
        """Check a step of 10 tokens in two rows in which K and V of a layer are written to its
        exposed cache: as exposed for the step, as exposed before a larger and a smaller step, and
        after another `bind`."""
        case = bench.case
        bench.write((0,) * 2, case.history)
        kept = self.opened(bench, index)
        # whose slots aren't those of a later step's padding
        bench.plan(case.history, case.lens, padding=4)
        larger = [max(0, length - 20) for length in case.lens]
        bench.plan(larger, case.lens, padding=3)
        bench.plan((0, 0), (1, 1))
        again = self.opened(bench, index)
        require(
            again.slots.data_ptr() == kept.slots.data_ptr(),
            "`slots` moved from one plan to the next",
        )
        self.assert_takes(bench, index, kept, "a cache that was laid open in an earlier step: ")
        bench.bind()
        bench.write((0,) * 2, case.history)
        self.assert_takes(
            bench,
            index,
            self.opened(bench, index),
            "a cache that was laid open after a second bind(): ",
        )

    def opened(self, bench: Bench, index: int) -> FusedCache:
        """Plan the bench's step, with 2 tokens of padding, and return a layer's exposed cache."""
        bench.plan(bench.case.history, bench.case.lens, padding=2)
        cache = bench.layers[index].cache_for_fused_write()
        if cache is None:
            fail("cache_for_fused_write() returned None once a step was planned")
        return cache

    def assert_takes(self, bench: Bench, index: int, cache: FusedCache, what: str) -> None:
        """Check the bench's step, in which K and V of a layer are written into its open cache as a
        kernel would."""
        case = bench.case
        size = bench.groups[bench.case.placed[index].group].block_size
        bench.write(case.history, case.lens, padding=2, without=index)
        slots = cache.slots[:12]
        wasted = all(slot // size == bench.waste_page for slot in slots[10:].tolist())
        require(
            wasted,
            f"{what}the slots of two tokens of padding are {slots[10:].tolist()}, expected some of "
            f"page {bench.waste_page}",
        )
        for into, values, scale in zip(
            (cache.k, cache.v), (bench.k, bench.v), case.scales_of(index), strict=True
        ):
            step = bench.tensor(
                [row[start:] for row, start in zip(values[index], case.history, strict=True)]
            )
            at = slots[:10] // size, slots[:10] % size
            if case.cache_dtype is None:
                into[at] = step
            else:
                require(
                    cache.scales is not None, "the open cache has a smaller dtype, and no scales"
                )
                into.view(torch.uint8)[at] = (step.float() / scale).to(into.dtype).view(torch.uint8)
        assert_close(bench, bench.attend(padding=2), f"K and V written into {what}")


def _arrays(batch: AttentionBatch) -> dict[str, Any]:
    """Return all arrays and tensors of a batch by name."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    flat = {
        f"{name}[{i}]": part
        for name, value in values.items()
        if isinstance(value, tuple)
        for i, part in enumerate(value)
    }
    return {
        name: value
        for name, value in (values | flat).items()
        if isinstance(value, np.ndarray | torch.Tensor)
    }


def _host(values: Any) -> Any:
    return values.double().cpu().numpy() if isinstance(values, torch.Tensor) else values
