"""The tables of tile sizes: every shape that the backend declares has its choice, and what is chosen can run."""

from __future__ import annotations

import pytest

from dovetail_attention.triton_tuning import HOPPER, INTERPRETED, Shape, Tilings

SHARED_MEMORY_BYTES = 227 << 10  # of a multiprocessor (Hopper)


@pytest.mark.parametrize("tilings", [HOPPER, INTERPRETED])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_size", [16, 32, 64, 128, 256])
def test_every_shape_has_its_choice_of_powers_of_two_that_fit_the_shared_memory(tilings: Tilings, itemsize: int, head_size: int) -> None:
    for block_size in (8, 16, 256):
        shape = Shape(2, head_size, itemsize, block_size)
        decode, prefill = tilings.decode(shape), tilings.prefill(shape)
        for number in (decode.keys, decode.warps, prefill.queries, prefill.keys, prefill.warps):
            assert number & (number - 1) == 0
        key_bytes = head_size * itemsize
        assert decode.programs * decode.keys * 2 * key_bytes <= SHARED_MEMORY_BYTES, "K and V of a step of each program"
        assert (prefill.queries + 2 * prefill.keys) * key_bytes <= SHARED_MEMORY_BYTES
