"""`AttentionSmallCache`: checks of backends with K and V in a smaller dtype than they compute
in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dovetail.api.attention import AttentionContext
from dovetail.testing.checks import check
from dovetail.testing.suites.attention_bench import Case
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_memory import AttentionMemory

LONG = 1200  # tokens: enough for sums in half precision to be wrong
# of K and V, by layer: neither reciprocals nor powers of two
KV_SCALES = (
    (0.037, 0.21),
    (0.29, 0.053),
)


class AttentionSmallCache(AttentionMemory):
    """The same contract, with K and V in each of `capabilities.cache_dtypes`."""

    def small_case(
        self, history: Sequence[int], queries: Sequence[int], **fields: Any
    ) -> Iterator[Case]:
        """Make a step for a cache of each declared smaller dtype, with scales of K and V."""
        for name in self.claims.cache_dtypes:
            yield self.case(
                history, queries, **({"cache_dtype": name, "kv_scales": KV_SCALES} | fields)
            )

    @check("attention.cache_dtypes", since="1.0", capability="cache_dtypes")
    def test_k_and_v_in_a_smaller_dtype_are_attended_as_they_are_stored(self) -> None:
        """For each of `capabilities.cache_dtypes`: attention uses K / k_scale rounded to nearest,
        times k_scale; V likewise, with its own scale, and so each layer, for arbitrarily small
        scales. Sums over many tokens are accumulated in float32: matrix units that add products of
        FP8 lose precision that long contexts need. Scales that change later are read again."""
        for dtype in self.tried_dtypes():
            windows = (None, 20 if self.claims.window else None)
            for case in self.small_case(
                (0, 30, LONG, 5),
                (40, 9, 1, 1),
                windows=windows,
                heads=4,
                kv_heads=2,
                dtype=dtype,
                padding=3,
            ):
                bench = self.bench(case)
                for row in bench.q[0]:
                    row *= 0.1  # flat weights: every token counts in the sums
                assert_as_defined(bench, f"with K and V in {case.cache_dtype}: ")
            for tiny in dict.fromkeys(
                max(scale, torch.finfo(getattr(torch, dtype)).tiny / 64) for scale in (1e-20, 1e-7)
            ):
                for case in self.small_case(
                    (0, 20), (9, 1), dtype=dtype, kv_scales=((tiny, 1.3 * tiny),)
                ):
                    bench = self.bench(case)
                    for k, v, q in zip(bench.k[0], bench.v[0], bench.q[0], strict=True):
                        k *= 20 * tiny
                        v *= 20 * tiny
                        # in the range of float16, in which a backend may multiply FP8
                        q *= min(0.02 / tiny, 1e4)
                    assert_as_defined(
                        bench, f"with K and V in {case.cache_dtype}, divided by {tiny:.3g}: "
                    )
        for case in self.small_case((0, 20), (9, 1)):
            bench = self.bench(case)
            bench.compute()
            bench.scales[0].k.fill_(1.5)
            bench.scales[0].v.fill_(0.75)
            bench.case = replace(case, kv_scales=((1.5, 0.75),))
            assert_as_defined(bench, "after its scales have changed: ")

    @check("attention.cache_saturates", since="1.0", capability="cache_dtypes")
    def test_what_is_too_large_for_a_smaller_dtype_becomes_its_largest_number(self) -> None:
        """Values beyond the dtype's range must saturate: NaN or infinity would corrupt everything
        that attends to the token. Infinity saturates, too."""
        for case in self.small_case((0, 20), (9, 1)):
            bench = self.bench(case)
            limit = float(torch.finfo(getattr(torch, str(case.cache_dtype))).max)
            for values, scale in zip((bench.k, bench.v), case.scales_of(0), strict=True):
                for row in values[0]:
                    row[::3] *= limit * scale
                    row[1::5, :, ::2] *= torch.inf
            assert_as_defined(bench, f"with K and V beyond {limit:g} times the scales: ")

    @check("attention.cache_places", since="1.0", capability="cache_dtypes")
    def test_a_smaller_dtype_keeps_the_rest_of_the_contract(self) -> None:
        """With K and V in each of `capabilities.cache_dtypes`: blocks have the size of
        `tensor_bytes`, pages can be copied, k and v are only read, shared prefixes are read, an
        exposed cache has `scales` and is written like `write` does, and mixed graphs are
        planned."""
        size = self.claims.default_block_size()
        for case in self.small_case((size + 3, 0), (1, size + 1)):
            self.assert_copied(case)
            self.assert_memory(AttentionContext(self.place, case.dtype, size, case.cache_dtype))
        for case in self.small_case((20, 0, 33), (1, 7, 1), padding=2):
            self.assert_only_read(case)
        if self.declares("shared_prefix"):
            blocks = -(-160 // size)
            tails = tuple(blocks * size + n for n in (1, size, 7))
            for case in self.small_case(tails, (1, 1, 5), heads=2, kv_heads=1):
                self.assert_shares(self.bench(case), blocks, (blocks,))
        if self.declares("fused_write"):
            for case in self.small_case((0, 20), (9, 1)):
                self.assert_written_when_open(self.bench(case))
        if self.declares("mixed_graph"):
            for case in self.small_case((0, 17, 90), (30, 1, 7), padding=3, mixed_graph=True):
                assert_as_defined(self.bench(case), "planned with mixed_graph: ")
