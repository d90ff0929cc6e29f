"""Tile sizes of the `triton` kernels by shape: tables measured with `bench.attention --tune` on an
H200; nothing is tuned at run time.

Other GPUs have less shared memory, and older ones no matrix units that Triton uses. They get the
first tilings of the same tables that they have room for, which `bench.compiles` compiles for each
of them: none was measured there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dovetail.nn.kernels.gpu import GPU
from dovetail_attention.layer_shape import LayerShape

if TYPE_CHECKING:
    import torch

REGISTERS = 65_536  # of a multiprocessor
RESERVED_BYTES = 1024  # of shared memory reserved by CUDA, per program
SPARE_BYTES = 1536  # of shared memory: exchange between warps, barriers
# a piece, the tokens of a block that one load fetches, is a multiple of this: the swizzle of shared
# memory repeats every 8 rows
PIECE = 8
PARTS = 4  # of a multiprocessor that warps are distributed over


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a layer that may determine its tiling."""

    group: int  # query heads that share a kv head
    head_size: int  # padded to a power of two
    itemsize: int  # bytes, of a query's number
    block_size: int  # tokens
    windowed: bool = False
    cache_itemsize: int | None = None  # bytes of K and V in the cache, if different
    capped: bool = False  # scores have a softcap
    # of a latent layer, numbers of K that aren't V, padded; None: K and V are apart
    rest: int | None = None
    in_tiles: bool = True  # a descriptor of tiles fits the cache

    @classmethod
    def of(
        cls,
        layer: LayerShape,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        block_size: int,
        *,
        in_tiles: bool = True,
    ) -> Shape:
        smaller = cache_dtype.itemsize if cache_dtype != dtype else None
        return cls(
            layer.group,
            layer.padded_size,
            dtype.itemsize,
            block_size,
            layer.window is not None,
            smaller,
            layer.capped,
            layer.padded_rest if layer.latent else None,
            in_tiles,
        )

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a token's K and V for one head."""
        numbers = 2 * self.head_size if self.rest is None else self.head_size + self.rest
        return numbers * (self.cache_itemsize or self.itemsize)


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """`programs` run on each multiprocessor at once; each goes over its share of the tokens in
    steps of `keys`."""

    keys: int
    warps: int
    stages: int
    programs: int

    @property
    def registers(self) -> int:
        """Maximum registers per thread with which all programs fit."""
        return min(255, REGISTERS // (self.programs * self.warps * 32) // 8 * 8)

    def shared_bytes(self, shape: Shape) -> int:
        """Upper bound of a program's shared memory: K and V of each stage, and of a latent layer
        the queries, which registers don't hold."""
        queries = (
            0
            if shape.rest is None
            else (1 << (shape.group - 1).bit_length())
            * (shape.head_size + shape.rest)
            * shape.itemsize
        )
        return self.stages * self.keys * shape.bytes_per_key + queries + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """`queries` of a program (each query head of a group counts), which go over the keys in steps
    of `keys`. `loads_apart`: by `triton_prefill_hopper`, which has `warps` for each half of the
    queries, a fixed number, and one that loads."""

    queries: int
    keys: int
    warps: int
    stages: int
    loads_apart: bool = False

    def shared_bytes(self, shape: Shape) -> int:
        """The most shared memory that a program takes without `loads_apart`: K and V of each stage,
        and queries or weights of a step's keys."""
        kept = self.queries * max(shape.head_size + (shape.rest or 0), self.keys) * shape.itemsize
        return self.stages * self.keys * shape.bytes_per_key + kept + SPARE_BYTES


@dataclass(frozen=True, slots=True)
class Tilings:
    """Tilings for one kind of device."""

    decode: Callable[[Shape], DecodeTiling]
    prefill: Callable[[Shape], PrefillTiling]
    scatter: tuple[int, int]  # tokens, and numbers of each token's K, that a program writes
    matrix_units: bool = True  # numbers of 2 bytes are multiplied by them, 16 rows at least at once


# The interpreter pays for a tile, whatever its size, so tiles are large; but not so large that
# short tests never see two of them.
INTERPRETED = Tilings(
    lambda shape: DecodeTiling(16, 1, 1, 1), lambda shape: PrefillTiling(32, 32, 1, 1), (64, 1024)
)


# One H200 (device copy: 4.28 TB/s), blocks of 16. Each choice is followed by its measurement, and
# the next best ones.
#
# Decode: 16 heads over 8 kv heads, 256 rows of 100 to 2,000 tokens. `programs` is at most how many
# fit on a multiprocessor; programs of one warp have nobody to wait for at each step. A
# multiprocessor has four parts, which warps are dealt out to: 4, 8 or 12 are even, and others are
# slower. K and V in FP8 use the choice for the same number of bytes, not measured with FP8.
_HOPPER_DECODE = {  # bytes of one head's K of a token, at most: (keys, warps, stages, programs)
    128: DecodeTiling(
        32, 1, 3, 8
    ),  # 4.09 TB/s; (128, 4, 3, 3) 4.01, (32, 1, 4, 6) 3.71, (16, 1, 4, 8) 3.59
    # 4.08 to 4.15 TB/s; (16, 1, 3, 4) 4.18, (32, 4, 3, 3) 4.15, (16, 1, 3, 6) 4.10, (16, 1, 4, 6) 4.07, (16, 1, 3, 9) 3.43. Eight have just room, so
    # that no multiprocessor gets more than another: a whole step of 1, 16, 64, 128 rows of 800 (16:
    # 1,000), and of 256 of 680, takes 742, 1,295, 2,222, 3,745, 5,919 us; (32, 4, 3, 3) 745, 1,343,
    # 2,299, 3,793, 5,979; (16, 1, 7, 4) 767, 1,363, 2,307, 3,854, 6,070
    256: DecodeTiling(16, 1, 3, 8),
    512: DecodeTiling(
        16, 2, 3, 4
    ),  # 4.22 TB/s; (32, 4, 3, 3) 4.20, (16, 1, 3, 4) 4.19; float32 1.72 TB/s, (32, 4, 3, 3) 1.65
    1024: DecodeTiling(16, 4, 3, 2),  # not measured
    2048: DecodeTiling(16, 4, 1, 1),  # not measured: heads of 512 in float32
}
# Prefill: 32 heads over 8, 16 rows of 8,192 tokens (head size 256: 64 of 1,024). The first is
# measured, the others are for less shared memory.
_PREFILL = {  # bytes of a number, and head size at most: (queries, keys, warps, stages)
    # 422 TFLOP/s (head size 64: 385); (128, 128, 8, 3) 424 but 254 of 292 with rows of 1,024, (64,
    # 64, 4, 3) 360, (128, 64, 8, 2) 336
    (2, 128): (PrefillTiling(128, 64, 8, 3), PrefillTiling(128, 32, 8, 2)),
    # 316 TFLOP/s; (64, 32, 4, 2) 276, (128, 32, 8, 2) 267
    (2, 256): (
        PrefillTiling(128, 64, 8, 2),
        PrefillTiling(64, 64, 8, 2),
        PrefillTiling(64, 32, 8, 2),
    ),
    (2, 512): (
        PrefillTiling(64, 32, 8, 2),
        PrefillTiling(32, 32, 8, 1),
        PrefillTiling(16, 16, 8, 1),
    ),  # not measured
    (4, 64): (PrefillTiling(64, 32, 8, 2),),
    (4, 256): (PrefillTiling(32, 16, 8, 2),),
    (4, 512): (PrefillTiling(16, 16, 8, 1),),  # not measured
}
_PREFILL_WITHOUT_MATRIX_UNITS = {  # head size at most, for any number; not measured
    64: PrefillTiling(64, 32, 8, 1),
    128: PrefillTiling(32, 32, 8, 1),
    512: PrefillTiling(16, 16, 8, 1),
}


_LOADS_APART = {  # head size, of 2 bytes a number
    64: PrefillTiling(128, 128, 4, 4, loads_apart=True),  # 418 TFLOP/s
    128: PrefillTiling(128, 128, 4, 2, loads_apart=True),  # 567 TFLOP/s; (64, 3) 511, (64, 4) 519
}


# Latent layers, whose sums of V's size fill the registers; not measured.
_LATENT_DECODE = {  # bytes of a number: (keys, warps, stages, programs), the first that has room
    2: (DecodeTiling(32, 8, 3, 1), DecodeTiling(16, 8, 2, 1), DecodeTiling(16, 8, 1, 1)),
    4: (DecodeTiling(16, 16, 1, 1),),
}
_LATENT_PREFILL = {
    2: (PrefillTiling(64, 32, 8, 2), PrefillTiling(32, 32, 8, 1), PrefillTiling(16, 16, 8, 1)),
    4: (PrefillTiling(16, 16, 8, 1),),
}


def _hopper_decode(shape: Shape) -> DecodeTiling:
    if shape.rest is not None:
        return _LATENT_DECODE[shape.itemsize][0]
    return next(
        tiling for most, tiling in _HOPPER_DECODE.items() if shape.bytes_per_key <= 2 * most
    )


def _cuda_prefill(shape: Shape, shared_bytes: int | None = None) -> PrefillTiling:
    """Return the first that fits into `shared_bytes` of shared memory, if given."""
    if shape.rest is None:
        row = next(
            row
            for (itemsize, most), row in _PREFILL.items()
            if shape.itemsize == itemsize and shape.head_size <= most
        )
    else:
        row = _LATENT_PREFILL[shape.itemsize]
    return next(
        (
            tiling
            for tiling in row
            if shared_bytes is None or tiling.shared_bytes(shape) <= shared_bytes
        ),
        row[-1],
    )


def _hopper_prefill(shape: Shape) -> PrefillTiling:
    plain = not shape.windowed and not shape.capped and shape.rest is None and shape.in_tiles
    tiling = _LOADS_APART.get(shape.head_size) if shape.itemsize == 2 and plain else None
    if (
        tiling is None
        or shape.block_size % PIECE
        or (tiling.keys % shape.block_size and shape.block_size % tiling.keys)
    ):
        return _cuda_prefill(shape)
    return tiling


def _fitting_decode(gpu: GPU, shape: Shape) -> DecodeTiling:
    """Return a tiling with as many concurrent programs as fit on a multiprocessor, with evenly
    distributed warps."""
    tiling = _hopper_decode(shape)
    if shape.rest is not None:
        row = _LATENT_DECODE[shape.itemsize]
        tiling = next(
            (tiling for tiling in row if tiling.shared_bytes(shape) <= gpu.shared_bytes), row[-1]
        )
    if not gpu.has_matrix_units:
        tiling = replace(tiling, stages=1)
    programs = min(
        tiling.programs, gpu.processor_shared_bytes // (tiling.shared_bytes(shape) + RESERVED_BYTES)
    )
    even = max(1, PARTS // tiling.warps)
    return replace(tiling, programs=max(1, programs // even * even or programs))


def _prefill_without_matrix_units(shape: Shape) -> PrefillTiling:
    if shape.rest is not None:
        return _LATENT_PREFILL[4][-1]
    return next(
        tiling for most, tiling in _PREFILL_WITHOUT_MATRIX_UNITS.items() if shape.head_size <= most
    )


def tilings_for(gpu: GPU) -> Tilings:
    """Return tilings that fit the GPU, without measuring; for a Hopper `CUDA`, replaced by the
    faster `HOPPER` where it works."""
    if gpu.is_hopper:
        return CUDA
    prefill = (
        partial(_cuda_prefill, shared_bytes=gpu.shared_bytes)
        if gpu.has_matrix_units
        else _prefill_without_matrix_units
    )
    return Tilings(partial(_fitting_decode, gpu), prefill, SCATTER, gpu.has_matrix_units)


SCATTER = (4, 1024)
HOPPER = Tilings(_hopper_decode, _hopper_prefill, SCATTER)
# on a Hopper, with a Triton that can't load apart
CUDA = Tilings(_hopper_decode, _cuda_prefill, SCATTER)
