"""For which numbers of tokens a step with prefills is recorded (`mixed_graphs`). Needs no torch: who simulates such an engine asks too."""

from __future__ import annotations

MOST_TOKENS = 2048  # with more, even a small model computes for longer than launching takes


def padded_sizes(most: int) -> tuple[int, ...]:
    """Rising, up to `most`: the finer, the smaller."""
    sizes = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, most, 256))
    return (*(size for size in sizes if size < most), most)
