"""Small steps that aren't decodes alone, as CUDA graphs: all of the model between its attention layers is replayed, attention itself is launched.

How attention's kernels are launched depends on what a step mixes, so they can't be recorded; all else depends on the number of tokens only. The
model is recorded once for each padded number of tokens, and the recording is cut at each call of `attend`:

      replayed     | embedding, norm, q k v, write |        | output, feed-forward, norm, q k v, write |        | … last norm |
      launched                                      attend                                              attend
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionBatch, AttentionLayer, FusedCache, LayerSpec

MOST_TOKENS = 2048  # with more, even a small model computes for longer than launching takes


@dataclass(frozen=True, slots=True)
class Piece:
    """What is replayed, and then what is launched: attention from `q` to `out`, none after the last piece."""

    graph: torch.cuda.CUDAGraph
    layer: AttentionLayer | None = None
    q: torch.Tensor | None = None  # [size, heads, head_size]
    out: torch.Tensor | None = None  # like q


@dataclass(frozen=True, slots=True)
class Recording:
    """One size. `hidden` is overwritten by the next run of any size."""

    token_ids: torch.Tensor  # [size] int64
    positions: torch.Tensor  # [size] int64
    hidden: torch.Tensor  # [size, hidden]
    pieces: tuple[Piece, ...]


class CutLayer(AttentionLayer):
    """An attention layer at which a recording may be cut."""

    def __init__(self, layer: AttentionLayer, cuts: Cuts) -> None:
        self.spec, self._layer, self._cuts = layer.spec, layer, cuts

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._layer.write(k, v)

    def cache_for_fused_write(self) -> FusedCache | None:
        return self._layer.cache_for_fused_write()

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        if self._cuts.recorder is None:
            return self._layer.attend(q)
        return self._cuts.recorder.cut(self._layer, q)


class Cuts:
    """Makes the layers of a model that may be recorded in pieces."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # while one records

    def wrap(self, make_layer: Callable[[LayerSpec], AttentionLayer]) -> Callable[[LayerSpec], AttentionLayer]:
        return lambda spec: CutLayer(make_layer(spec), self)


class Recorder:
    """Records one run of a model. All pieces, of all sizes, share a memory `pool`: one run at a time uses it, and in the order of recording."""

    def __init__(self, pool: Any) -> None:
        self.pieces: list[Piece] = []
        self._pool = pool
        self._buffers: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def cut(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """End the piece where q is known; the next begins with what attention makes of it. Layers that are alike take turns with two buffers."""
        self._buffers.setdefault(q.shape, (torch.empty_like(q), torch.empty_like(q)))
        own, out = self._buffers[q.shape]
        own.copy_(q)
        self._graph.capture_end()
        self.pieces.append(Piece(self._graph, layer, own, out))
        self.begin()
        return out

    def end(self) -> None:
        self._graph.capture_end()
        self.pieces.append(Piece(self._graph))


def token_sizes(max_tokens: int) -> list[int]:
    """Padded numbers of tokens, largest first."""
    last = min(max_tokens, MOST_TOKENS)
    sizes = {last} | set(range(32, 256, 32)) | set(range(256, 512, 64)) | set(range(512, 1024, 128)) | set(range(1024, last, 256))
    return sorted((size for size in sizes if size <= last), reverse=True)


class MixedGraphs:
    """All sizes of one model."""

    def __init__(self, model: Any, cuts: Cuts, backend: AttentionBackend, max_tokens: int, device: torch.device) -> None:
        self._model, self._cuts, self._backend, self._device = model, cuts, backend, device
        self._sizes = token_sizes(max_tokens)
        self._recordings: dict[int, Recording] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size. The KV pool must be there."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(self._sizes):
                self._recordings[size] = self._record(size, pool, warm_up=done == 0)
                if progress is not None:
                    progress("capturing CUDA graphs of mixed steps", done + 1, len(self._sizes))
        torch.cuda.current_stream().wait_stream(stream)

    def size_for(self, num_tokens: int) -> int | None:
        """The padded number of tokens; None if there are too many."""
        return next((size for size in reversed(self._sizes) if size >= num_tokens), None)

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's hidden states [tokens, hidden] of the step that the backend has planned, with slots padded to `size_for` its tokens. What is
        returned is overwritten by the next run."""
        tokens = len(token_ids)
        recording = self._recordings[self.size_for(tokens) or 0]
        recording.token_ids[:tokens].copy_(token_ids)
        recording.positions[:tokens].copy_(positions)
        for piece in recording.pieces:
            piece.graph.replay()
            if piece.layer is not None and piece.q is not None and piece.out is not None:
                piece.out.copy_(piece.layer.attend(piece.q))
        return recording.hidden[:tokens]

    def _record(self, size: int, pool: Any, warm_up: bool) -> Recording:
        token_ids, positions = torch.zeros((2, size), dtype=torch.int64, device=self._device)
        self._backend.plan(self._padding(size))
        if warm_up:  # kernels are compiled, workspaces made
            self._model(token_ids, positions)
        torch.cuda.synchronize(self._device)
        recorder = self._cuts.recorder = Recorder(pool)
        try:
            recorder.begin()
            hidden = self._model(token_ids, positions)
            recorder.end()
        finally:
            self._cuts.recorder = None
        return Recording(token_ids, positions, hidden, tuple(recorder.pieces))

    def _padding(self, size: int) -> AttentionBatch:
        """A step of padding alone, which reads and writes nothing."""
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self._device}
        nothing = np.zeros(0, np.int32)
        return AttentionBatch(
            num_rows=0,
            num_tokens=0,
            query_starts=torch.zeros(1, **ints),
            kv_lens=torch.zeros(0, **ints),
            block_table=torch.zeros((0, 1), **ints),
            slots=torch.full((size,), -1, dtype=torch.int64, device=self._device),
            host_query_lens=nothing,
            host_kv_lens=nothing,
        )
