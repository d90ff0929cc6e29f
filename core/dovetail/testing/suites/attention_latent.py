"""`AttentionLatent`: checks of layers that store only K, with V as a part of it."""

from __future__ import annotations

from dovetail.api.attention import AttentionContext
from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_scores import AttentionScores

SIZES = ((24, 16), (576, 512))  # of K, and of V in it
MANY_HEADS = 72


class AttentionLatent(AttentionScores):
    """The same contract, for layers with `LayerSpec.v_in_k`."""

    @check("attention.v_in_k", since="1.0", capability="v_in_k")
    def test_the_first_numbers_of_k_are_v(self) -> None:
        """With `LayerSpec.v_in_k` the first `v_head_size` numbers of K are V: `write(k, None)`
        stores K, in half the memory; scores are of all of K; `attend` returns `v_head_size` numbers
        a head. In a smaller dtype K's scale is V's too. All heads share one K."""
        small, large = SIZES
        self.assert_scores(heads=4, kv_heads=1, head_size=small[0], v_in_k=small[1])
        for heads, (size, v_size) in ((5, large), (MANY_HEADS, small), (3, (16, 16))):
            case = self.case(
                (0, 20),
                (9, 1),
                heads=heads,
                kv_heads=1,
                head_size=size,
                v_in_k=v_size,
                windows=(None,),
                scale=0.1,
            )
            assert_as_defined(self.bench(case), f"with {heads} heads: ")

    @check("attention.v_in_k_memory", since="1.0", capability="v_in_k")
    def test_a_block_of_latents_takes_the_memory_of_k_and_is_copied(self) -> None:
        """`tensor_bytes` has one tensor, with K; a page that is copied there holds V too."""
        size = self.claims.default_block_size()
        case = self.case((size + 3,), (1,), heads=4, kv_heads=1, head_size=24, v_in_k=16)
        [spec] = case.specs
        expected = (size * spec.head_size * case.torch_dtype.itemsize,)
        said = self.make(AttentionContext(self.place, case.dtype, size)).tensor_bytes(spec, size)
        require(said == expected, f"tensor_bytes says {said} bytes, K of a block is {expected}")
        self.assert_copied(case)
