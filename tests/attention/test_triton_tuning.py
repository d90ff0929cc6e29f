"""The tables of tile sizes: every shape that the backend declares has its choice, and what is
chosen can run."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from bench.compiling import GPUS

from dovetail.api.attention import AttentionContext, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.nn.kernels import gpu
from dovetail.nn.kernels.gpu import GPU
from dovetail_attention import triton_backend
from dovetail_attention.layer_shape import MOST_OF_LATENT, LayerShape
from dovetail_attention.triton_tuning import (
    CUDA,
    HOPPER,
    INTERPRETED,
    REGISTERS,
    Shape,
    Tilings,
    tilings_for,
)

SHARED_MEMORY_BYTES = 227 << 10  # of a multiprocessor (Hopper)
SHAPES = [
    Shape(2, head_size, itemsize, block_size)
    for head_size in (16, 32, 64, 128, 256)
    for itemsize in (2, 4)
    for block_size in (8, 16, 256)
]
SHAPES += [Shape(2, 512, 2, 16), Shape(2, 512, 2, 16, cache_itemsize=1)]
SHAPES += [
    Shape(2, head_size, itemsize, 16, cache_itemsize=1)
    for head_size in (64, 128, 256)
    for itemsize in (2, 4)
]
SHAPES += [Shape(group, 512, 2, 16, rest=64) for group in (1, 20, MOST_OF_LATENT)]
OTHERS = [other for other in GPUS.values() if not other.is_hopper]


@pytest.mark.parametrize("tilings", [HOPPER, INTERPRETED])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_its_choice_of_powers_of_two_that_fit_the_shared_memory(
    tilings: Tilings, shape: Shape
) -> None:
    decode, prefill = tilings.decode(shape), tilings.prefill(shape)
    for number in (decode.keys, decode.warps, prefill.queries, prefill.keys, prefill.warps):
        assert number & (number - 1) == 0
    key_bytes = shape.head_size * shape.itemsize
    assert decode.programs * decode.keys * shape.bytes_per_key <= SHARED_MEMORY_BYTES, (
        "K and V of a step of each program"
    )
    assert (prefill.queries + 2 * prefill.keys) * key_bytes <= SHARED_MEMORY_BYTES


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tilings_follow_the_shared_memory_of_the_gpu(other: GPU, shape: Shape) -> None:
    tilings = tilings_for(other)
    decode, prefill = tilings.decode(shape), tilings.prefill(shape)
    assert prefill.shared_bytes(shape) <= other.shared_bytes
    assert decode.shared_bytes(shape) <= other.shared_bytes
    assert (
        decode.programs == 1
        or decode.programs * decode.shared_bytes(shape) <= other.processor_shared_bytes
    )
    assert decode.programs * decode.warps * 32 * decode.registers <= REGISTERS
    assert decode.programs * decode.warps % 4 == 0 or decode.programs * decode.warps < 4
    assert not prefill.loads_apart, "that is for a Hopper"


@pytest.mark.parametrize("heads", [1, 16, 20, 37, 72, 128])
def test_heads_of_a_latent_layer_are_computed_in_equal_groups_that_have_room(heads: int) -> None:
    shape = LayerShape.of(LayerSpec(0, heads, 1, 576, 1.0, v_in_k=True, v_head_size=512))
    assert shape.group * shape.kv_heads == heads
    assert shape.group <= MOST_OF_LATENT
    assert (shape.head_size, shape.rest) == (512, 64)


def test_what_was_measured_is_chosen_where_it_has_room() -> None:
    [hopper], blackwell = [one for one in GPUS.values() if one.is_hopper], tilings_for(GPUS[100])
    assert tilings_for(hopper) == CUDA
    for shape in SHAPES:
        assert (blackwell.decode(shape), blackwell.prefill(shape)) == (
            CUDA.decode(shape),
            CUDA.prefill(shape),
        )
        assert HOPPER.decode(shape) == CUDA.decode(shape)


@pytest.mark.parametrize(
    ("block_size", "loads_apart"),
    [(1, False), (4, False), (8, True), (16, True), (24, False), (256, True)],
)
def test_only_blocks_of_whole_pieces_are_loaded_apart(block_size: int, loads_apart: bool) -> None:
    """Shared memory is swizzled in pieces of eight rows, which Triton refuses to split; and the
    keys of a step are whole blocks, or part of one."""
    assert HOPPER.prefill(Shape(2, 64, 2, block_size)).loads_apart == loads_apart


@pytest.mark.parametrize("arch", sorted(GPUS))
@pytest.mark.parametrize("gluon", [True, False])
def test_a_backend_takes_the_tilings_of_its_gpu(
    arch: int, gluon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU it uses the measured tilings, and the kernel with separate loading warps if
    this Triton supports it."""
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: GPUS[arch])
    monkeypatch.setattr(triton_backend, "_can_load_apart", lambda: gluon)
    backend = triton_backend.TritonAttention(NoOptions(), AttentionContext("cpu", "float16", 16))
    assert backend.processors == GPUS[arch].processors
    if arch == 90:
        assert backend.tilings == (HOPPER if gluon else CUDA)
    for shape in SHAPES:
        loads_apart = arch == 90 and gluon and shape.itemsize == 2 and shape.head_size in (64, 128)
        assert backend.tilings.prefill(shape).loads_apart == loads_apart


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_only_a_gpu_whose_matrix_units_triton_uses_pads_queries_for_them(arch: int) -> None:
    assert tilings_for(GPUS[arch]).matrix_units == (arch >= 80)
