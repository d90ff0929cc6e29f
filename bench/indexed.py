"""Attention to selected tokens, in a decode of DeepSeek-V3.2's layer on one GPU:

    python -m bench.indexed                        # 1 and 8 rows of 32k and 128k tokens
    python -m bench.indexed --lens 300 --rows 2 --device cpu      # in Triton's interpreter: no times

Compares each load's values with those of the `torch` backend, and prints the times of a layer,
replayed from a CUDA graph: scoring and selecting, attention to the selected tokens, and attention to
all tokens in a layer without an indexer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch

from bench.attention import replayed_seconds
from dovetail.api.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    Indexer,
    LayerSpec,
)
from dovetail.api.component import NoOptions
from dovetail.testing.memory import bind_layers
from dovetail_attention.sdpa import TorchAttention
from dovetail_attention.triton_backend import TritonAttention

BLOCK = 64
INDEXER = Indexer(top_k=2048, heads=64, size=128)
SPEC = LayerSpec(0, 128, 1, 576, 0.07, v_in_k=True, v_head_size=512, indexer=INDEXER)
PIECE = 1 << 13  # tokens that are written at once
CLOSE = 2e-2


class Decode:
    """A layer of a backend whose cache holds `rows` rows of `length` tokens, with a decode of them
    planned. Index keys and queries are whole numbers, so that all backends select the same tokens.
    """

    def __init__(
        self, kind: type[AttentionBackend], spec: LayerSpec, rows: int, length: int, device: str
    ) -> None:
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.device = device
        name = str(self.dtype).removeprefix("torch.")
        self.backend = kind(NoOptions(), AttentionContext(device, name, BLOCK))
        self.layer: AttentionLayer = self.backend.make_layer(spec)
        self.blocks = -(-length // BLOCK)
        bind_layers(self.backend, [self.layer], rows * self.blocks)
        self.backend.prepare(max(rows, 1), max(PIECE, rows), length)
        order = np.random.default_rng(0).permutation(rows * self.blocks)
        self.table = order.astype(np.int32).reshape(rows, self.blocks)
        self.generator = torch.Generator(device).manual_seed(0)
        for row in range(rows):
            for start in range(0, length, PIECE):
                self._write(row, start, min(start + PIECE, length))
        self._plan([*range(rows)], [length - 1] * rows, [length] * rows)
        self.q = self._normal(rows, spec.heads, spec.head_size)
        self.index_q = self._whole(rows, INDEXER.heads, INDEXER.size)
        self.weights = self._whole(rows, INDEXER.heads).float() + 0.5

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)

    def _whole(self, *shape: int) -> torch.Tensor:
        drawn = torch.randint(-1, 2, shape, generator=self.generator, device=self.device)
        return drawn.to(self.dtype)

    def _write(self, row: int, start: int, end: int) -> None:
        self._plan([row], [start], [end])
        self.layer.write(self._normal(end - start, 1, SPEC.head_size), None)
        keys = self._whole(end - start, INDEXER.size)
        if self.layer.spec.indexer is not None:
            self.layer.write_index(keys)

    def _plan(self, rows: list[int], starts: list[int], ends: list[int]) -> None:
        queries = np.subtract(ends, starts).astype(np.int32)
        positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        slots = np.concatenate(
            [
                self.table[row, p // BLOCK].astype(np.int64) * BLOCK + p % BLOCK
                for row, p in zip(rows, positions, strict=True)
            ]
        )
        lens = np.array(ends, np.int32)

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        self.backend.plan(
            AttentionBatch(
                len(rows),
                int(queries.sum()),
                tensor(np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)),
                tensor(lens),
                (tensor(self.table[rows])[None],),
                (tensor(slots)[None],),
                queries,
                lens,
            )
        )

    def select(self) -> None:
        self.layer.select(self.index_q, self.weights)

    def attend(self) -> torch.Tensor:
        return self.layer.attend(self.q)


def try_load(rows: int, length: int, device: str) -> None:
    """Print one line, or raise if the two backends differ."""
    plain = Decode(TorchAttention, SPEC, rows, length, device)
    plain.select()
    expected = plain.attend().float()
    del plain
    ours = Decode(TritonAttention, SPEC, rows, length, device)
    ours.select()
    error = float((ours.attend().float() - expected).abs().max())
    if not error < CLOSE:
        raise SystemExit(f"{rows} rows of {length}: off by {error:.3g}")
    line = f"{rows} rows of {length} tokens: largest difference {error:.2g}"
    if device == "cuda":
        scored = rows * length * INDEXER.size * 2
        selected = rows * min(length, INDEXER.top_k) * SPEC.head_size * 2
        times = replayed_seconds(ours.select), replayed_seconds(ours.attend)
        del ours
        all_of_it = Decode(TritonAttention, replace(SPEC, indexer=None), rows, length, device)
        dense = replayed_seconds(all_of_it.attend)
        line += (
            f"; select {times[0] * 1e6:.0f} us ({scored / times[0] / 1e12:.2f} TB/s of index keys)"
            f", attend {times[1] * 1e6:.0f} us ({selected / times[1] / 1e12:.2f} TB/s of K)"
            f", attention to all {dense * 1e6:.0f} us"
        )
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lens", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    for length in arguments.lens:
        for rows in arguments.rows:
            try_load(rows, length, arguments.device)


if __name__ == "__main__":
    main()
