"""Attention of the `triton` backend to the tokens that an indexer selects: buffers of a step, and
launches of the kernels in `triton_index`.

Scores are computed for some lines at a time, so that their memory is bounded whatever the number of
queries and the length of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch

from dovetail.api.attention import AttentionBatch, Indexer, LayerCache, LayerSpec
from dovetail.errors import DovetailError
from dovetail.nn.kernels.launch import launch
from dovetail.nn.transfer import Mirror
from dovetail_attention import triton_cache
from dovetail_attention.layer_shape import LayerShape, power_of_two
from dovetail_attention.memory import index_layer, pages_of, selects
from dovetail_attention.triton_step import MERGE_NUMBERS, LayerKind, Limits

SCORES = 32 << 20  # float32 numbers of all lines that are scored at a time
SHARE = 1024  # index keys that a program scores
KEYS = 64  # of a tile, on matrix units
FEW_KEYS = 16  # of a tile without them, whose products are in registers
CHOSEN = 1024  # scores, or selected tokens, that a program visits at a time
MOST_SPLITS = 16  # of a line's selected tokens
PROGRAMS = 2  # on a multiprocessor, for lines to be split
WARPS = 4
MOST_HEADS = 128  # of index queries
INDEX_SIZES = range(8, 257, 8)
# of the kernels of all layers, those that `attend_selected` has
CONSTANTS = (
    *("scale", "Q_TOKEN_STRIDE", "HEADS", "GROUP", "SCALED", "PRECISION"),
    *("D", "D_PADDED", "REST", "REST_PADDED"),
)


def reasons_against(layers: Sequence[LayerSpec]) -> list[str]:
    """Return the reasons against the indexers of layers."""
    indexers = {layer.indexer for layer in layers if layer.indexer is not None}
    return [
        f"an indexer with {indexer.heads} heads of {indexer.size} numbers: there may be up to "
        f"{MOST_HEADS} of a multiple of 8 up to {INDEX_SIZES[-1]}"
        for indexer in indexers
        if indexer.heads > MOST_HEADS or indexer.size not in INDEX_SIZES
    ]


class SelectionBuffers:
    """The lines of a step, what was selected for them last, and room for scores and parts."""

    def __init__(self, limits: Limits, kinds: Collection[LayerKind]) -> None:
        """`kinds`: of the layers with an indexer."""
        self.limits = limits
        tokens = limits.tokens
        device = limits.device
        self.tilings = {kind: limits.tilings.decode(limits.shape_of(kind)) for kind in kinds}
        shapes = {kind.shape for kind in kinds}
        top_k = max(shape.top_k or 0 for shape in shapes)
        self._mirror = Mirror([np.zeros((tokens, 2), np.int32)], device)
        [self.lines] = self._mirror.tensors  # [tokens, 2]: row, and tokens up to the line's own
        self.selected = torch.zeros(tokens * top_k, dtype=torch.int32, device=device)
        self.entries = torch.zeros_like(self.selected)
        some = max(1, min(tokens, SCORES // limits.length))
        self.scores = torch.zeros((some, limits.length), dtype=torch.float32, device=device)
        numbers = max(
            self._most_parts(shape) * shape.heads * (shape.head_size + 1) for shape in shapes
        )
        self._parts = torch.zeros(numbers, dtype=torch.float32, device=device)
        self.num_lines = 0  # of the step, with padding

    def fill(self, batch: AttentionBatch) -> None:
        [lines] = self._mirror.arrays
        queries = batch.host_query_lens[: batch.num_rows]
        lens = batch.host_kv_lens[: batch.num_rows]
        row = np.repeat(np.arange(len(queries)), queries)
        ends = np.cumsum(queries)
        # of each line, how many lines of its row come after it
        after = np.repeat(ends, queries) - 1 - np.arange(len(row))
        lines[: len(row), 0] = row
        lines[: len(row), 1] = lens[row] - after
        self.num_lines = batch.slots[0].shape[1]
        lines[len(row) : self.num_lines] = 0
        self._mirror.send(0, self.num_lines * 2)

    def splits(self, groups: int) -> int:
        """Return the parts of each line, for layers with this many groups of heads."""
        programs = self.limits.processors * PROGRAMS
        return max(1, min(MOST_SPLITS, programs // (groups * max(1, self.num_lines))))

    def parts(self, spec: LayerSpec, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for values [numbers] and log-sum-exps of the step's parts."""
        heads = self.num_lines * splits * spec.heads
        values = heads * spec.out_size
        return self._parts[:values], self._parts[values : values + heads]

    def _most_parts(self, shape: LayerShape) -> int:
        """Return the parts of a step with more than one for each line, at most."""
        return max(1, self.limits.processors * PROGRAMS // shape.kv_heads)


class SelectedTokens:
    """One layer's index keys, its selection, and its attention to that."""

    def __init__(self, spec: LayerSpec, indexer: Indexer, dtype: torch.dtype) -> None:
        self.spec = spec
        self.indexer = indexer
        self._dtype = dtype
        self._shape = LayerShape.of(spec)
        self._keys = torch.empty(0)

    def bind(self, of_index: LayerCache, k: torch.Tensor) -> None:
        """`of_index`: the tensors of index keys, if any; k [num_pages + 1, 1, block_size,
        head_size]."""
        size = of_index.block_size
        page, _, token, _ = k.stride()
        self._entry = gcd(page, token)
        self._k = k
        if len(k) * (page // self._entry) >= 1 << 31:
            raise DovetailError(
                f"attention layer {self.spec.index}: {len(k)} pages are too many to number the "
                f"tokens that an indexer selects"
            )
        self._finding = {
            "BLOCK_SIZE": size,
            "BLOCK_ENTRIES": page // self._entry,
            "TOKEN_ENTRIES": token // self._entry,
        }
        if selects(self.spec):
            shape = (size, self.indexer.size)
            [self._keys] = pages_of(of_index, index_layer(self.spec), self._dtype, shape)
            block, token, _ = self._keys.stride()
            self._paging = {"BLOCK_SIZE": size, "BLOCK_STRIDE": block, "TOKEN_STRIDE": token}

    def write(self, keys: torch.Tensor, slots: torch.Tensor, scatter: tuple[int, int]) -> None:
        """keys [tokens, size], slots [tokens or more] int64. `scatter`: as of `Tilings`."""
        keys = (keys if keys.stride(1) == 1 else keys.contiguous())[:, None]
        triton_cache.write(
            keys,
            keys,
            (self._keys, self._keys),
            slots,
            (slots, slots),
            scatter,
            scaled=False,
            latent=True,
            paging={"HEAD_STRIDE": 0, **self._paging},
        )

    def select(
        self, q: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, step: SelectionBuffers
    ) -> None:
        """q [lines, heads, size], weights [lines, heads] float32, table [rows, blocks] int32."""
        from dovetail_attention import triton_index

        heads, size = self.indexer.heads, self.indexer.size
        most, length = step.scores.shape
        q = q.contiguous()
        weights = weights.contiguous()
        for first in range(0, step.num_lines, most):
            count = min(most, step.num_lines - first)
            launch(triton_index.index_scores, (-(-length // SHARE), count))(
                q,
                weights,
                self._keys,
                table,
                step.lines,
                step.scores,
                first,
                TABLE_STRIDE=table.stride(0),
                SCORES_STRIDE=length,
                HEADS=heads,
                M=step.limits.tile_rows(heads),
                D=size,
                D_PADDED=max(16, power_of_two(size)),
                N=KEYS if step.limits.on_matrix_units else FEW_KEYS,
                SHARE=SHARE,
                TOP_K=self.indexer.top_k,
                PRECISION="ieee",
                num_warps=WARPS,
                **self._paging,
            )
            launch(triton_index.choose, (count,))(
                step.scores,
                step.lines,
                step.selected,
                first,
                SCORES_STRIDE=length,
                TOP_K=self.indexer.top_k,
                N=CHOSEN,
                num_warps=WARPS,
            )

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        table: torch.Tensor,
        step: SelectionBuffers,
        kind: LayerKind,
        constants: dict[str, Any],
        k_scale: torch.Tensor,
    ) -> None:
        """Write out [lines, heads, out_size] of q [lines, heads, head_size]. `kind`: this
        layer's. `constants`: of the kernel, and `scale`; `k_scale`: an unused tensor if K isn't
        scaled."""
        from dovetail_attention import triton_index

        top_k = self.indexer.top_k
        lines = step.num_lines
        if not lines:
            return
        launch(triton_index.find_entries, (lines, -(-top_k // CHOSEN)))(
            step.selected,
            step.lines,
            table,
            step.entries,
            TABLE_STRIDE=table.stride(0),
            TOP_K=top_k,
            N=CHOSEN,
            num_warps=WARPS,
            **self._finding,
        )
        tiling = step.tilings[kind]
        splits = step.splits(self._shape.kv_heads)
        values, lse = step.parts(self.spec, splits) if splits > 1 else (out, out)
        launch(triton_index.attend_selected, (lines, self._shape.kv_heads, splits))(
            q,
            out,
            self._k,
            step.entries,
            step.lines,
            values,
            lse,
            k_scale,
            M=step.limits.tile_rows(self._shape.group),
            N=tiling.keys,
            ENTRY=self._entry,
            TOP_K=top_k,
            SPLITS=splits,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **constants,
        )
        if splits > 1:
            launch(triton_index.merge_splits, (lines, self.spec.heads))(
                values,
                lse,
                out,
                HEADS=self.spec.heads,
                D=self.spec.out_size,
                D_PADDED=constants["D_PADDED"],
                SPLITS=splits,
                N=min(power_of_two(splits), max(1, MERGE_NUMBERS // constants["D_PADDED"])),
                num_warps=WARPS,
            )
