"""Of which sizes steps are recorded as CUDA graphs: numbers of tokens with prefills (`mixed_graphs`), of rows with decodes alone (`decode_graphs`).
Needs no torch: who simulates such an engine asks too."""

from __future__ import annotations

MOST_TOKENS = 2048  # with more, even a small model computes for longer than launching takes


def padded_sizes(most: int) -> tuple[int, ...]:
    """Tokens, rising, up to `most`: the finer, the smaller."""
    sizes = (*range(32, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, most, 256))
    return (*(size for size in sizes if size < most), most)


def row_sizes(most: int) -> tuple[int, ...]:
    """Rows of a step of decodes alone, rising, up to `most`: dense where padding would cost most."""
    sizes = {1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, most, 64)}
    return (*sorted(size for size in sizes if size < most), most)
