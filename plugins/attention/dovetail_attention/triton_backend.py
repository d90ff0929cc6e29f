"""Attention backend `triton`: Dovetail's kernels for paged K and V on a GPU.

`plan` copies a step's inputs and the host's schedule into buffers whose addresses never change;
`attend` launches at most two kinds of kernel: rows of one query token go to `triton_decode`, the
others to `triton_prefill`, or on a Hopper to `triton_prefill_hopper`, if that can serve the layer.
All rows of a layer with an indexer go to `triton_selected`.

A CUDA graph may be captured of a step whose rows have one query token each, and replayed after any
`plan` of as many (padded) rows of that kind; or of a step planned with `mixed_graph`, whose grids
are as large as any step of as many tokens needs. It serves steps with or without a shared prefix if
the captured step had one, without if it had none.

      a page of a layer    [kv_heads, block_size, head_size], K and V apart; K alone if V is in it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from pydantic import BaseModel

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    FusedCache,
    LayerCache,
    LayerSpec,
)
from dovetail.api.graphs import GraphSupport
from dovetail.errors import DovetailError
from dovetail.nn.kernels.available import runs_kernels, works
from dovetail.nn.kernels.dependent_launch import pdl_options
from dovetail.nn.kernels.gpu import gpu_of
from dovetail.nn.kernels.launch import is_compiling_ahead, launch
from dovetail_attention import (
    triton_cache,
    triton_decode,
    triton_prefill,
    triton_selected,
    triton_trial,
)
from dovetail_attention.layer_shape import LayerShape, sinks_of
from dovetail_attention.memory import all_bytes, cache_of, pages_of, without_index
from dovetail_attention.scaled import CACHE_DTYPES, as_bytes
from dovetail_attention.triton_schedule import TILE_NUMBERS
from dovetail_attention.triton_selected import SelectedTokens, SelectionBuffers
from dovetail_attention.triton_step import (
    LEAST_TOGETHER,
    MERGE_NUMBERS,
    PREFIX_PARTS,
    LayerKind,
    Limits,
    Schedule,
    StepBuffers,
)
from dovetail_attention.triton_tuning import (
    CUDA,
    HOPPER,
    INTERPRETED,
    PrefillTiling,
    Tilings,
    tilings_for,
)

LOG2_E = math.log2(math.e)
LEAST_OF_FP8 = 32  # minimum head size: matrix units need 16, and kernels read FP8 in pairs
INTERPRETED_PROCESSORS = 4
# numbers of K that are V too, and that aren't
LATENT_SIZES = range(8, 513, 8)
LATENT_RESTS = range(0, 129, 8)
LEAST_FOR_FP8 = (8, 9)  # compute capability from which Triton has the type
LOADS_APART = "prefill with separate warps for loading"


def _reasons_against_latent(layers: Sequence[LayerSpec]) -> list[str]:
    """Return the reasons against layers whose V lies in K."""
    latent = [layer for layer in layers if layer.v_in_k]
    reasons = []
    if any(layer.kv_heads > 1 for layer in latent):
        reasons.append("latent attention with more than one KV head isn't supported")
    sizes = {(layer.out_size, layer.head_size - layer.out_size) for layer in latent}
    for size, rest in sorted(sizes):
        if size not in LATENT_SIZES or rest not in LATENT_RESTS:
            reasons.append(
                f"latent attention with K of {size + rest} numbers, {size} of them V: "
                f"these must be a multiple of 8 up to {LATENT_SIZES[-1]}, "
                f"and the others up to {LATENT_RESTS[-1]}"
            )
    return reasons


class TritonAttention(AttentionBackend):
    """Creates layers, and owns the buffers of a step. `tilings` may be replaced before
    `prepare`."""

    capabilities = AttentionCapabilities(
        devices=("cuda",),
        head_sizes=(*range(8, 257, 8), 512),
        cuda_graph=GraphSupport.ALL,
        shared_prefix=True,
        cache_dtypes=CACHE_DTYPES,
        sinks=True,
        softcap=True,
        v_in_k=True,
        groups=True,
        window=True,
        causal=True,
        both_ways=True,
        indexer=True,
        fixed_shapes=True,
    )

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self.device = torch.device(context.device)
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.cache_dtype: torch.dtype = getattr(torch, context.cache_dtype or context.dtype)
        gpu = gpu_of(self.device)
        self.tilings: Tilings = (
            INTERPRETED
            if gpu is None
            else HOPPER
            if gpu.is_hopper and _can_load_apart()
            else tilings_for(gpu)
        )
        self.processors = INTERPRETED_PROCESSORS if gpu is None else gpu.processors
        self.step: StepBuffers | None = None
        self.selection: SelectionBuffers | None = None  # None: no layer has an indexer
        self._layers: list[TritonLayer] = []

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        """Where the kernels were never measured, they are tried with such layers first: a GPU for
        which one doesn't compile, or computes something else, is served by another backend."""
        reasons = super().reasons_against(context, layers) + _reasons_against_latent(layers)
        reasons += triton_selected.reasons_against(layers)
        if reasons:
            return reasons
        device = torch.device(context.device)
        if (gpu := gpu_of(device)) is None:
            return []
        if not runs_kernels(device):
            return [f"Triton can't run kernels on {gpu}: see the previous warning"]
        if context.cache_dtype is not None and gpu.capability < LEAST_FOR_FP8:
            return [
                f"K and V in {context.cache_dtype} need compute capability "
                f"{'.'.join(map(str, LEAST_FOR_FP8))} or more, this is {gpu}"
            ]

        def check() -> None:
            for spec in {replace(spec, index=0) for spec in layers}:
                triton_trial.check(cls, context, spec)

        indexed = any(layer.indexer is not None for layer in layers)  # measured nowhere yet
        if (gpu.is_hopper and not indexed) or works(f"attention on {gpu}", check):
            return []
        return [f"its kernels don't work on {gpu}: see the previous warning"]

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = TritonLayer(spec, self)
        self._layers.append(layer)
        return layer

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return all_bytes(spec, block_size, self.cache_dtype, self.dtype)

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        limits = Limits(
            max_rows,
            max_tokens,
            max_len,
            self.dtype,
            self.cache_dtype,
            self.device,
            self.processors,
            self.tilings,
        )
        caches = [cache_of(layer) for layer in self._layers]
        kinds = {layer.kind for layer in self._layers if layer.spec.indexer is None}
        indexed = {layer.kind for layer in self._layers if layer.spec.indexer is not None}
        if (
            self.tilings == HOPPER
            and not is_compiling_ahead()
            and not all(_loads_apart_well(kind, limits) for kind in kinds)
        ):
            self.tilings = CUDA
            limits = replace(limits, tilings=CUDA)
        self.step = StepBuffers(limits, kinds, caches)
        self.selection = SelectionBuffers(limits, indexed) if indexed else None

    def plan(self, batch: AttentionBatch) -> None:
        self.planned.fill(batch)
        if self.selection is not None:
            self.selection.fill(batch)

    @property
    def planned(self) -> StepBuffers:
        if self.step is None:
            raise DovetailError("attention backend 'triton': plan() was called before prepare()")
        return self.step


class TritonLayer(AttentionLayer):
    """Cache of one layer, and the kernels over it."""

    kind: LayerKind  # the key of its schedule, set by `bind`

    def __init__(self, spec: LayerSpec, backend: TritonAttention) -> None:
        self.spec = spec
        self._backend = backend
        self._shape = LayerShape.of(spec)
        self._k = self._v = torch.empty(0)
        least = LEAST_OF_FP8 if backend.cache_dtype != backend.dtype else 0
        self._padded_size = max(self._shape.padded_size, least)
        self._padded_rest = max(self._shape.padded_rest, least) if self._shape.rest else 0
        self._selected: SelectedTokens | None = None
        if spec.indexer is not None:
            self._selected = SelectedTokens(spec, spec.indexer, backend.dtype)
        # descriptors of K and V for the tensor memory accelerator
        self._described: list[Any] | None = None

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache
        self._place = (cache.group, cache.page)
        shape = self.spec.kv_heads, cache.block_size, self.spec.head_size
        cache, of_index = without_index(cache, self.spec)
        # [num_pages + 1, kv_heads, block_size, head_size]
        own = pages_of(cache, self.spec, self._backend.cache_dtype, shape)
        self._k = own[0]
        self._v = own[-1]
        page_stride, head_stride, token_stride, _ = self._k.stride()
        if self._backend.cache_dtype.itemsize == 1 and page_stride % 2:
            raise DovetailError(
                f"attention layer {self.spec.index}: a page has {page_stride} bytes, and FP8 is "
                f"read in pairs"
            )
        rows, rest = divmod(page_stride, self.spec.head_size)
        self.kind = LayerKind(self._shape, cache.block_size, 0 if rest else rows)
        self._described = None
        if self._selected is not None:
            self._selected.bind(of_index, self._k)
        self._paging: dict[str, Any] = {
            "BLOCK_SIZE": cache.block_size,
            "BLOCK_STRIDE": page_stride,
            "TOKEN_STRIDE": token_stride,
            "HEAD_STRIDE": 0
            if self.spec.v_in_k
            else head_stride,  # groups of a latent layer read the same K
        }

    def cache_for_fused_write(self) -> FusedCache | None:
        if self.spec.v_in_k:
            return None
        return FusedCache(
            self._k.transpose(1, 2), self._v.transpose(1, 2), self._slots, self.kv_scales
        )

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        k = _heads_together(k)
        triton_cache.write(
            k,
            k if v is None else _heads_together(v),
            (as_bytes(self._k), as_bytes(self._v)),
            self._slots,
            self._scales,
            self._backend.tilings.scatter,
            scaled=self.kv_scales is not None,
            latent=self.spec.v_in_k,
            paging=self._paging,
        )

    def write_index(self, keys: torch.Tensor) -> None:
        tokens, _ = self._selection
        tokens.write(keys, self._slots, self._backend.tilings.scatter)

    def select(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        tokens, step = self._selection
        tokens.select(q, weights, self._backend.planned.tables[self._place], step)

    @property
    def _selection(self) -> tuple[SelectedTokens, SelectionBuffers]:
        """Return the layer's selected tokens, and the step's. Raises `DovetailError` if it has no
        indexer."""
        step = self._backend.selection
        if self._selected is None or step is None:
            raise DovetailError(f"attention layer {self.spec.index} has no indexer")
        return self._selected, step

    def _attend_selected(self, q: torch.Tensor, out: torch.Tensor) -> None:
        tokens, buffers = self._selection
        constants = self._constants(q)
        known = {name: constants[name] for name in triton_selected.CONSTANTS}
        table = self._backend.planned.tables[self._place]
        tokens.attend(q, out, table, buffers, self.kind, known, self._scales[0])

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        step = self._backend.planned
        q = _heads_together(q)
        out = q.new_empty(*q.shape[:2], self.spec.out_size)
        if self.spec.indexer is not None:
            self._attend_selected(q, out)
            return out
        schedule = step.schedules[self.kind]
        if schedule.zero_from is not None:
            out[schedule.zero_from :] = 0
        if schedule.decodes:
            self._decode(q, out, step, schedule)
        if schedule.num_tiles:
            self._prefill(q, out, step, schedule)
        return out

    @property
    def _slots(self) -> torch.Tensor:
        return self._backend.planned.slots[self._place]

    @property
    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of K and V, or unused tensors without any."""
        scales = self.kv_scales
        return (
            (self._slots,) * 2
            if scales is None
            else (scales.k, scales.k if self.spec.v_in_k else scales.v)
        )

    def _constants(self, q: torch.Tensor) -> dict[str, Any]:
        softcap = self.spec.softcap
        return {
            "scale": self._scale,
            "cap": 0.0 if softcap is None else softcap * LOG2_E,
            "CAPPED": softcap is not None,
            "Q_TOKEN_STRIDE": q.stride(0),
            "Q_HEAD_STRIDE": self.spec.head_size,
            "HEADS": self.spec.heads,
            "GROUP": self._shape.group,
            "D": self._shape.head_size,
            "D_PADDED": self._padded_size,
            "REST": self._shape.rest,
            "REST_PADDED": self._padded_rest,
            "LATENT": self._shape.latent,
            "PRECISION": "ieee",
            "SCALED": self.kv_scales is not None,
            **self._paging,
        }

    @property
    def _scale(self) -> float:
        """Return the multiplier of scores in kernels, before the base-2 softmax or tanh."""
        return (
            self.spec.scale * LOG2_E
            if self.spec.softcap is None
            else self.spec.scale / self.spec.softcap
        )

    @property
    def _sinks(self) -> torch.Tensor:
        """Return the sinks, or an unused tensor without any."""
        sinks = sinks_of(self)
        return self._slots if sinks is None else sinks

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, step: StepBuffers, schedule: Schedule
    ) -> None:
        tables = schedule.tables
        tiling = schedule.decode_tiling
        known = {
            "bounds": schedule.bounds,
            "rows": schedule.rows,
            "partial": schedule.partial,
            "partial_lse": schedule.partial_lse,
            "prefix_slot": tables.slots,
            "prefix_stride": tables.max_rows,
            "k_scale": self._scales[0],
            "v_scale": self._scales[1],
            "N": tiling.keys,
            **self._constants(q),
            **pdl_options(q.device),
        }
        captured = schedule.mixed_graph or (q.is_cuda and torch.cuda.is_current_stream_capturing())
        prefixed = schedule.prefix.parts > 0 or (schedule.may_share and captured)
        if prefixed:
            tiles = -(-schedule.decodes * self._shape.group // schedule.prefix_queries)
            launch(triton_decode.attend_prefix, (self._shape.kv_heads, tiles, PREFIX_PARTS))(
                q,
                self._k,
                self._v,
                step.tables[self._place],
                M=schedule.prefix_queries,
                num_warps=4,
                num_stages=tiling.stages,
                **known,
            )
        merged = max(1, MERGE_NUMBERS // (self._shape.padded_group * self._padded_size))
        launch(triton_decode.decode_shares, (self._shape.kv_heads, tables.shares))(
            q,
            out,
            self._k,
            self._v,
            step.tables[self._place],
            schedule.decode,
            segments=schedule.segments,
            arrived=schedule.arrived,
            sinks=self._sinks,
            SINKS=self.spec.sinks,
            TABLE_STRIDE=step.limits.blocks(self.kind.block_size),
            M=step.limits.tile_rows(self._shape.group),
            PREFIXED=prefixed,
            MERGED=merged,
            TOGETHER=max(LEAST_TOGETHER, 2 * merged),
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            maxnreg=tiling.registers,
            **known,
        )

    def _prefill(
        self, q: torch.Tensor, out: torch.Tensor, step: StepBuffers, schedule: Schedule
    ) -> None:
        tiling = schedule.prefill_tiling
        if tiling.loads_apart:
            self._prefill_on_a_hopper(tiling, q, out, step, schedule)
            return
        launch(triton_prefill.prefill_tiles, (self._shape.kv_heads, schedule.num_tiles))(
            q,
            out,
            self._k,
            self._v,
            step.tables[self._place],
            schedule.tiles,
            *self._scales,
            self._sinks,
            SINKS=self.spec.sinks,
            TABLE_STRIDE=step.limits.blocks(self.kind.block_size),
            M=tiling.queries,
            N=tiling.keys,
            WINDOW=self.spec.window or 0,
            SPARSE=schedule.mixed_graph,
            RECORD=TILE_NUMBERS,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **self._constants(q),
        )

    def _prefill_on_a_hopper(
        self,
        tiling: PrefillTiling,
        q: torch.Tensor,
        out: torch.Tensor,
        step: StepBuffers,
        schedule: Schedule,
    ) -> None:
        from dovetail_attention import triton_prefill_hopper

        if self._described is None:
            self._described = [
                triton_prefill_hopper.describe(cache_of, self.kind.block_size, tiling.keys)
                for cache_of in (self._k, self._v)
            ]
        triton_prefill_hopper.attend(
            q,
            out,
            self._described,
            step.tables[self._place],
            schedule.tiles,
            schedule.num_tiles,
            schedule.tile_parts,
            self._scale,
            self.kv_scales,
            sinks_of(self),
            kind=self.kind,
            tiling=tiling,
        )


@cache
def _can_load_apart() -> bool:
    """Return True if this Triton can import `triton_prefill_hopper`, which is written in Gluon."""
    return works(LOADS_APART, lambda: import_module("dovetail_attention.triton_prefill_hopper"))


@cache
def _loads_apart_well(kind: LayerKind, limits: Limits) -> bool:
    """Return True if `triton_prefill_hopper` computes such layers correctly, or isn't used for
    them."""
    tiling = limits.tilings.prefill(limits.shape_of(kind))
    if not tiling.loads_apart:
        return True

    def check() -> None:
        from dovetail_attention import triton_prefill_hopper

        triton_prefill_hopper.check(kind, limits, tiling)

    return works(LOADS_APART, check)


def _heads_together(tensor: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, size] with contiguous tokens; a slice of a wider tensor is returned
    unchanged."""
    _, _, size = tensor.shape
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == size else tensor.contiguous()
