"""Tests the kernels of the `triton` backend on an untested GPU before an engine uses them; called
by `reasons_against`.

Both this backend and the plain one are given the same two steps: prompts, two of which begin alike;
then a decode of these two, beside a chunk, which attends in both directions if such layers may.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    KVScales,
    LayerCache,
    LayerSpec,
)
from dovetail.api.component import NoOptions
from dovetail.errors import DovetailError
from dovetail_attention.sdpa import TorchAttention

SHARED_TOKENS = 96  # at least, that two rows begin with: some steps of a decode
TOP_K = 40  # tokens that an indexer selects
CLOSE = 2e-2  # of numbers of about 1/5
KV_SCALE = 0.5
SCALES = (0.01, 0.02)  # of K and V in a cache of a smaller dtype


@dataclass(frozen=True, slots=True)
class Step:
    """Queries of each row, its tokens, and the number of shared leading blocks."""

    queries: tuple[int, ...]
    lens: tuple[int, ...]
    shared_blocks: int = 0


def check(backend: type[AttentionBackend], context: AttentionContext, spec: LayerSpec) -> None:
    """Raise unless such layers compute the same as plain torch; any exception counts."""
    ours, plain = (
        _attended(kind(NoOptions(), context), spec) for kind in (backend, TorchAttention)
    )
    if not torch.allclose(ours, plain, atol=CLOSE):
        raise DovetailError(
            f"heads of {spec.head_size} in {context.dtype}: it computes wrong numbers"
        )


def _attended(backend: AttentionBackend, spec: LayerSpec) -> torch.Tensor:
    """Compute the trial's steps with a layer of that kind. Returns [tokens, heads, head_size]
    float32."""
    size = backend.context.block_size
    device = torch.device(backend.context.device)
    shared_blocks = -(-SHARED_TOKENS // size)
    shared = shared_blocks * size
    steps = [
        Step((shared + 70, 3, 50), (shared + 70, shared + 3, 50)),
        Step(
            (1, 1, 40),
            (shared + 71, shared + 4, 90),
            shared_blocks if backend.capabilities.shared_prefix and spec.window is None else 0,
        ),
    ]
    table = _block_table([step.lens for step in steps][-1], shared_blocks, size)
    if spec.indexer is not None:
        spec = replace(spec, indexer=replace(spec.indexer, top_k=TOP_K, selects=True))
    layer = backend.make_layer(spec)
    if spec.sinks:
        layer.bind_sinks(torch.linspace(-1, 3, spec.heads, device=device))
    if backend.context.cache_dtype is not None:
        layer.kv_scales = KVScales(*(torch.tensor(scale, device=device) for scale in SCALES))
    pages = int(table.max()) + 2  # one is waste
    layer.bind(
        LayerCache(
            tuple(
                torch.zeros((pages, row), dtype=torch.uint8, device=device)
                for row in backend.tensor_bytes(spec, size)
            ),
            size,
        )
    )
    backend.prepare(max_rows=3, max_tokens=sum(steps[0].queries), max_len=table.shape[1] * size)
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for step in steps:
        queries = np.array(step.queries, np.int32)
        lens = np.array(step.lens, np.int32)
        tokens = int(queries.sum())
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        position = np.concatenate(
            [np.arange(n - asked, n) for asked, n in zip(queries, lens, strict=True)]
        )
        row = np.repeat(np.arange(3), queries)
        slots = table[row, position // size].astype(np.int64) * size + position % size
        at, seen, blocks, places = (
            torch.from_numpy(array).to(device) for array in (starts, lens, table, slots)
        )
        backend.plan(
            AttentionBatch(
                3,
                tokens,
                at,
                seen,
                (blocks[None],),
                (places[None],),
                queries,
                lens,
                step.shared_blocks,
                host_both_ways=np.array([False, False, spec.both_ways]),
            )
        )
        qkv = (
            torch.randn(tokens, spec.heads + 2 * spec.kv_heads, spec.head_size, generator=generator)
            * KV_SCALE
        )
        qkv = qkv.to(device, getattr(torch, backend.context.dtype))
        q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        layer.write(k, None if spec.v_in_k else v)
        if spec.indexer is not None and spec.indexer.selects:
            # whole numbers, so that both select the same tokens
            heads, size = spec.indexer.heads, spec.indexer.size
            whole = torch.randint(-1, 2, (tokens, heads + 1, size), generator=generator)
            index = whole.to(device, q.dtype)
            layer.write_index(index[:, 0])
            layer.select(index[:, 1:], index[:, 1:, 0].float() + 0.5)
        outputs.append(layer.attend(q).float())
    return torch.cat(outputs)


def _block_table(lens: tuple[int, ...], shared_blocks: int, size: int) -> np.ndarray:
    """Return [rows, blocks] int32: the second row begins with the first one's blocks, in arbitrary
    block order."""
    width = max(-(-seen // size) for seen in lens)
    table = (
        np.random.default_rng(0)
        .permutation(len(lens) * width)
        .astype(np.int32)
        .reshape(len(lens), width)
    )
    table[1, :shared_blocks] = table[0, :shared_blocks]
    return table
