"""`AttentionLatent`: checks of layers that store only K, with V as a part of it."""

from __future__ import annotations

import torch

from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_judging import assert_as_defined, assert_close, tensor_bytes
from dovetail.testing.suites.attention_scores import AttentionScores

SIZES = ((24, 16), (576, 512))  # of K, and of V in it
MANY_HEADS = 72


class AttentionLatent(AttentionScores):
    """The same contract, for layers with `LayerSpec.v_in_k`."""

    @check("attention.v_in_k", since="0.3", capability="v_in_k")
    def test_the_first_numbers_of_k_are_v(self) -> None:
        """With `LayerSpec.v_in_k` the first `v_head_size` numbers of K are V: `write(k, None)` stores K, in half the memory; scores are of all of K;
        `attend` returns `v_head_size` numbers a head. In a smaller dtype K's scale is V's too. All heads share one K."""
        small, large = SIZES
        self.assert_scores(heads=4, kv_heads=1, head_size=small[0], v_in_k=small[1])
        for heads, (size, v_size) in ((5, large), (MANY_HEADS, small), (3, (16, 16))):
            case = self.case((0, 20), (9, 1), heads=heads, kv_heads=1, head_size=size, v_in_k=v_size, windows=(None,), scale=0.1)
            assert_as_defined(self.bench(case), f"with {heads} heads: ")

    @check("attention.v_in_k_memory", since="0.3", capability="v_in_k")
    def test_a_block_of_latents_takes_the_memory_of_k_and_is_copied(self) -> None:
        """`bytes_per_block` and `allocate` count K once; `copy_blocks` copies it."""
        size = self.claims.default_block_size()
        bench = self.bench(self.case((size + 3,), (1,), heads=4, kv_heads=1, head_size=24, v_in_k=16))
        bench.compute()
        first, spare = int(bench.table[0, 0]), next(block for block in range(bench.case.num_blocks) if block not in bench.table[0])
        bench.backend.copy_blocks(*(torch.tensor([block], device=self.place) for block in (first, spare)))
        bench.table[0, 0] = spare
        bench.plan(bench.case.history, bench.case.lens)
        assert_close(bench, bench.attend(), "of a block that was copied: ")
        [spec] = bench.case.specs
        expected = size * spec.head_size * bench.case.torch_dtype.itemsize
        said = bench.backend.bytes_per_block(spec)
        require(said == expected, f"bytes_per_block says {said} bytes, K of a block is {expected}")
        bench.backend.allocate(64)
        few = tensor_bytes(bench.backend, bench.layers)
        bench.backend.allocate(576)
        per_block = (tensor_bytes(bench.backend, bench.layers) - few) / 512
        require(abs(per_block - said) <= 0.02 * said, f"bytes_per_block says {said} bytes, allocate() takes {per_block:.0f} for each block more")
