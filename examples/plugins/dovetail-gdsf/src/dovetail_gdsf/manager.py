"""Greedy-Dual-Size-Frequency (Cherkasova, HP Laboratories, HPL-98-69R1, 1998)."""

from dovetail.api.prefix_cache import CachedBlock, PrefixCache


class GDSF(PrefixCache):
    """Evicts the block with the least uses times cost over size, plus the age of the cache.

    The cost of a block is the number of tokens to be computed without it, its size the pages that
    it takes. The age is the rank of the block evicted last, so that blocks that were popular once
    are evicted eventually.
    """

    age = 0.0

    def rank(self, block: CachedBlock) -> float:
        uses = 1 + block.hits
        return self.age + uses * block.tokens / block.pages

    def on_evict(self, block: CachedBlock, rank: float) -> None:
        self.age = max(self.age, rank)  # lower if the block had to wait for those after it
