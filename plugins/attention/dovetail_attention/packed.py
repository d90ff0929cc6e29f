"""Attention backend `packed`, for encoders: each row of a step is a whole prompt, and its tokens
attend to later ones, too.

Nothing is stored: `write` keeps K and V of the step until the next layer writes. Rows lie one after
the other, without padding. On a GPU one kernel of torch's FlashAttention computes all rows, in half
precision. Elsewhere each row is a scaled dot product of its own. A row with a window that it leaves
is cut into parts of consecutive queries, each with the keys that any of them sees and a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    LayerCache,
    LayerSpec,
)
from dovetail.errors import DovetailError

LEAST_PART = 64  # queries
FLASH_HEAD_SIZES = range(8, 257, 8)


@dataclass(frozen=True, slots=True)
class Part:
    """Queries of one row, and the keys that they see."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # [queries, keys] bool: which are seen; None: all


class PackedAttention(AttentionBackend):
    """Creates layers, and plans steps for all of them."""

    capabilities = AttentionCapabilities(
        groups=True, window=True, bidirectional=True, hidden_tails=True
    )

    def __init__(self, options: BaseModel, context: AttentionContext) -> None:
        super().__init__(options, context)
        self._windows: set[int | None] = set()
        # the layer that was written last, and its K and V
        self.written: tuple[LayerSpec, torch.Tensor, torch.Tensor] | None = None
        # Of the planned step:
        self.starts = [0]  # of each row's tokens, and the end of the last
        self.query_starts: torch.Tensor | None = None  # the same on the device
        self.longest = 0  # tokens of a row
        self.hides_tails = False  # some rows have tokens that no query sees
        self.parts: dict[int | None, list[Part]] = {}  # by window

    @classmethod
    def reasons_against(cls, context: AttentionContext, layers: Sequence[LayerSpec]) -> list[str]:
        reasons = super().reasons_against(context, layers)
        return (
            reasons
            if all(layer.shares is None for layer in layers)
            else [*reasons, "layers that share a cache aren't supported: there is none"]
        )

    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        self._windows.add(spec.window)
        return PackedLayer(spec, self)

    def tensor_bytes(self, spec: LayerSpec, block_size: int) -> tuple[int, ...]:
        return ()

    def prepare(self, max_rows: int, max_tokens: int, max_len: int) -> None:
        """Nothing is allocated."""

    def plan(self, batch: AttentionBatch) -> None:
        if (batch.host_query_lens != batch.host_kv_lens).any():
            row = int((batch.host_query_lens != batch.host_kv_lens).argmax())
            raise DovetailError(
                f"attention backend 'packed': row {row} has {batch.host_kv_lens[row]} tokens, of "
                f"which the step computes only "
                f"{batch.host_query_lens[row]}; without a cache, whole rows are computed"
            )
        self.written = None
        self.starts = [0, *np.cumsum(batch.host_query_lens).tolist()]
        self.query_starts, self.longest = (
            batch.query_starts[: batch.num_rows + 1],
            int(batch.host_query_lens.max(initial=0)),
        )
        seen = batch.host_query_lens if batch.host_seen is None else batch.host_seen
        self.hides_tails = batch.host_seen is not None
        device = batch.query_starts.device
        self.parts = {
            window: [*self._cut(window, seen.tolist(), device)] for window in self._windows
        }

    def _cut(self, window: int | None, seen: list[int], device: torch.device) -> Iterator[Part]:
        """Yield the parts of the step's rows for layers with this window. `seen`: of each row, the
        tokens that its queries see."""
        masks: dict[tuple[int, int, int], torch.Tensor] = {}
        for (start, end), count in zip(pairwise(self.starts), seen, strict=True):
            seen_end = start + count
            if window is None or end - start <= window:
                yield Part(slice(start, end), slice(start, seen_end), None)
                continue
            step = max(window, LEAST_PART)
            for first in range(start, end, step):
                last = min(first + step, end)
                low = max(start, min(first - window + 1, seen_end - 1))
                high = min(seen_end, last + window - 1)
                shape = last - first, high - low, first - low
                if shape not in masks:
                    masks[shape] = _band(*shape, window, device)
                yield Part(slice(first, last), slice(low, high), masks[shape])


class PackedLayer(AttentionLayer):
    """Attention of one layer over what it wrote in this step."""

    def __init__(self, spec: LayerSpec, backend: PackedAttention) -> None:
        self.spec = spec
        self._backend = backend
        dtype = backend.context.dtype
        device = backend.context.device
        self._flash = (
            device.startswith("cuda") and dtype != "float32" and spec.head_size in FLASH_HEAD_SIZES
        )

    def bind(self, cache: LayerCache) -> None:
        self.cache = cache

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        assert v is not None  # which is so with v_in_k only
        self._backend.written = self.spec, k, v

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        backend = self._backend
        spec = self.spec
        if backend.written is None or backend.written[0] is not spec:
            raise DovetailError(
                f"attention layer {spec.index}: attend() must follow write() of the same layer in "
                f"the same step"
            )
        _, k, v = backend.written
        gqa = spec.heads != spec.kv_heads
        if self._flash and backend.query_starts is not None and not backend.hides_tails:
            starts = backend.query_starts
            longest = backend.longest
            reach = -1 if spec.window is None else spec.window - 1
            if gqa:  # torch 2.11 has no `enable_gqa` here
                k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for x in (k, v))
            from torch.nn.attention.varlen import (
                varlen_attn,
            )  # loads torch's compiler, nearly a second

            attended = varlen_attn(
                q,
                k,
                v,
                starts,
                starts,
                longest,
                longest,
                scale=spec.scale,
                window_size=(reach, reach),
            )
            assert isinstance(attended, torch.Tensor)
            return attended
        out = q.new_empty(q.shape)
        out[backend.starts[-1] :] = 0
        for part in backend.parts[spec.window]:
            # [1, heads, tokens, head_size]
            own_q, own_k, own_v = (
                x.transpose(0, 1)[None] for x in (q[part.queries], k[part.keys], v[part.keys])
            )
            values = F.scaled_dot_product_attention(
                own_q, own_k, own_v, attn_mask=part.mask, scale=spec.scale, enable_gqa=gqa
            )
            out[part.queries] = values[0].transpose(0, 1)
        return out


def _band(queries: int, keys: int, ahead: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [queries, keys] bool: True for keys less than `window` tokens away. The first query is
    `ahead` tokens after the first key."""
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (query + ahead - key).abs() < window
