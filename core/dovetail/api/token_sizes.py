"""Sizes for which steps are recorded as CUDA graphs (`graphs`): numbers of tokens for steps with
prefills, of lines for decode-only steps. Needs no torch, since simulations use it, too."""

from __future__ import annotations

from collections.abc import Sequence

ALWAYS_TOKENS = 2048  # always recorded, for any model
# tokens times parameters: above, a step takes an H200 15 ms, longer than an idle host needs to
# launch it
RECORDED_WORK = 5e12
# with drafts: more take longer to compute than weights to read, so that drafts don't pay
MOST_LINES = 512


def most_recorded(max_tokens: int, parameters: int) -> int:
    """Tokens of the largest step with prefills that is recorded, of steps with up to `max_tokens`:
    a small model computes large ones in less time than launching them takes."""
    return min(max_tokens, max(ALWAYS_TOKENS, int(RECORDED_WORK / max(1, parameters))))


def padded_sizes(most: int) -> tuple[int, ...]:
    """Return ascending numbers of tokens up to `most`; smaller ones are denser."""
    sizes = (
        *range(32, 256, 32),
        *range(256, 512, 64),
        *range(512, 1024, 128),
        *range(1024, 4096, 256),
        *range(4096, most, 512),
    )
    return (*(size for size in sizes if size < most), most)


def sharing_token_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Choose from ascending `sizes` in tokens those for steps that read a shared prefix once: few,
    since each costs start-up time."""
    return tuple(
        size for size in sizes if size == sizes[-1] or (size >= 256 and size.bit_count() == 1)
    )


def typical(sizes: Sequence[int]) -> list[int]:
    """Choose the largest of `sizes`, the powers of two, and three times these: between two of them,
    mostly the same kernels are launched."""
    most = max(sizes, default=0)
    return [size for size in sizes if size == most or size // (size & -size) in (1, 3)]


def half_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Choose from `sizes`, rising, the small ones and every second of the others: for recordings
    that not every engine needs, as each costs start-up time."""
    few = [size for size in sizes if size <= 8]
    many = [size for size in sizes if size > 8]
    return (*few, *reversed(many[::-2]))


def most_lines(max_rows: int, max_drafts: int, max_tokens: int) -> int:
    """Return how many lines a step may sample that has at most `max_drafts` drafts a row: see
    `dovetail.api.executor.Batch`."""
    return max(max_rows, min(max_rows * (1 + max_drafts), max_tokens, MOST_LINES))


def row_sizes(most: int, *, with_drafts: bool = False) -> tuple[int, ...]:
    """Return ascending numbers of rows, or lines, of decode-only steps up to `most`: dense where
    padding would cost most."""
    sizes = {
        1,
        2,
        4,
        *((3, 5, 6, 12) if with_drafts else ()),
        *range(8, 128, 8),
        *range(128, 256, 16),
        *range(256, 512, 32),
        *range(512, most, 64),
    }
    return (*sorted(size for size in sizes if size < most), most)


def sharing_row_sizes(most: int) -> tuple[int, ...]:
    """Return sizes for steps that read a shared prefix once: fewer."""
    return tuple(sorted({min(1 << power, most) for power in range(2, most.bit_length() + 1)}))
