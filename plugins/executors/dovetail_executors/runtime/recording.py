"""Records device work as CUDA graphs, in one piece or split at each attention layer.

Launching some hundred kernels from Python takes longer than a small step on the GPU; a replay is
one call. A graph replays the same kernels at the same addresses, so everything that differs between
steps is in tensors at fixed addresses. For some backends, the launches of attention kernels also
depend on the rows of a step: then the model is recorded in pieces, and attention is launched
between them (`LayerSplitter`):

      replayed     | embedding, norm, q k v, write |        | output, feed-forward, norm, q k v, write |        | … last norm |
      launched                                      attend                                              attend
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dovetail.api.attention import AttentionLayer, FusedCache, LayerCache, LayerSpec

T = TypeVar("T")

# Held during captures and starts of engines, of which a process may have several: torch allows one
# capture at a time, and what a start does on the device can end a capture of another thread.
ALONE = threading.RLock()


class Pool:
    """Memory that recordings share."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []  # torch may still ask those that failed

    def replace(self, failed: torch.cuda.CUDAGraph) -> None:
        """Use other memory from now on, since torch refuses that of a failed capture."""
        self._failed.append(failed)
        self.handle = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class Piece:
    """One CUDA graph, and the attention launched after it, from `q` to `out`; none after the last
    piece."""

    graph: torch.cuda.CUDAGraph
    layer: AttentionLayer | None = None
    q: torch.Tensor | None = None  # [size, heads, head_size]
    out: torch.Tensor | None = None  # [size, heads, out_size]


@dataclass(frozen=True, slots=True)
class Recording(Generic[T]):
    """Recorded device work. `outputs` is its result: each replay overwrites it, and replays of
    other recordings in the same pool may, too."""

    pieces: tuple[Piece, ...]
    outputs: T

    def replay(self) -> T:
        """Enqueue the work on the current stream."""
        for piece in self.pieces:
            piece.graph.replay()
            if piece.layer is not None and piece.q is not None and piece.out is not None:
                piece.out.copy_(piece.layer.attend(piece.q))
        return self.outputs


class Recorder:
    """Captures work on the current stream, as one graph or as pieces that share a memory `pool`."""

    def __init__(self, pool: Pool) -> None:
        self.pieces: list[Piece] = []
        self._pool = pool

    def begin(self) -> None:
        """Start capturing a piece."""
        self._graph = torch.cuda.CUDAGraph()
        try:
            # another thread may pin memory for transfers meanwhile
            self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        except RuntimeError:
            self._pool.replace(self._graph)
            raise

    def end(
        self,
        layer: AttentionLayer | None = None,
        q: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> None:
        """End the piece, after which `layer` attends from `q` to `out`."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._pool.replace(self._graph)
            raise
        self.pieces.append(Piece(self._graph, layer, q, out))


class LayerSplitter:
    """Wraps the attention layers of a model, so that recordings can be split there."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # set while recording in pieces
        # [heads, head_size, out_size] of a layer -> q and attention's output. The largest
        # recording, which is the first, creates them; all pieces of all sizes use them, one at a
        # time and in the order of recording.
        self._buffers: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}

    def wrap(
        self, make_layer: Callable[[LayerSpec], AttentionLayer]
    ) -> Callable[[LayerSpec], AttentionLayer]:
        """Return a `make_layer` that creates layers at which recordings can be split."""
        return lambda spec: SplitLayer(make_layer(spec), self)

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """Call `layer.attend`. While recording in pieces, end the piece at q instead; the next one
        starts with attention's output."""
        if self.recorder is None:
            return layer.attend(q)
        kind = torch.Size((*q.shape[1:], layer.spec.out_size))
        if kind not in self._buffers:
            self._buffers[kind] = (
                torch.empty_like(q),
                q.new_empty(*q.shape[:2], layer.spec.out_size),
            )
        own, out = (buffer[: len(q)] for buffer in self._buffers[kind])
        own.copy_(q)
        self.recorder.end(layer, own, out)
        self.recorder.begin()
        return out


class SplitLayer(AttentionLayer):
    """Attention layer at which a piecewise recording is split."""

    def __init__(self, layer: AttentionLayer, splitter: LayerSplitter) -> None:
        self.spec = layer.spec
        self._layer = layer
        self._splitter = splitter

    def bind(self, cache: LayerCache) -> None:
        self._layer.bind(cache)

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._layer.write(k, v)

    def cache_for_fused_write(self) -> FusedCache | None:
        return self._layer.cache_for_fused_write()

    def bind_sinks(self, sinks: torch.Tensor) -> None:
        self._layer.bind_sinks(sinks)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        return self._splitter.attend(self._layer, q)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device, while no other thread captures some, which would fail."""
    with ALONE:
        torch.cuda.synchronize(device)


def record(
    run: Callable[[], T],
    pool: Pool | None = None,
    stream: torch.cuda.Stream | None = None,
    warm_ups: int = 1,
    splitter: LayerSplitter | None = None,
) -> Recording[T]:
    """Record `run`, which does device work only, at fixed addresses; in pieces if there is a
    `splitter`. Recordings that share a `pool` must share a `stream`, because the allocator doesn't
    reuse memory across streams.

    `run` runs `warm_ups` times before, so that kernels are compiled and workspaces allocated:
    neither is possible while recording. An allocation that fails while recording isn't retried
    after freeing the allocator's cache: the caller frees it.
    """
    stream = torch.cuda.Stream() if stream is None else stream  # type: ignore[no-untyped-call]
    # Not on `stream`: recordings on the stream of their warm-ups replay 1 to 3 % slower with one
    # row (512 tokens of Qwen3-0.6B take 0.430 instead of 0.4175 s on an H100, 256 of Qwen3-8B 1.432
    # instead of 1.417 s). Probably because cuBLAS has a workspace for each stream, and allocates
    # one from the graphs' pool while it is recorded on a stream without.
    beside = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(beside):
        for _ in range(warm_ups):
            run()
    with ALONE:
        # each thread has a handle of its own, made when first used
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(stream.device)
        with torch.cuda.stream(stream):
            return _capture(run, Recorder(pool or Pool()), splitter)


def _capture(
    run: Callable[[], T], recorder: Recorder, splitter: LayerSplitter | None
) -> Recording[T]:
    """Record `run` on the current stream."""
    recorder.begin()
    if splitter is not None:
        splitter.recorder = recorder
    try:
        outputs = run()
    except BaseException:  # such as a dead rank
        with suppress(RuntimeError):  # the capture has ended already
            # releasing shared memory of ranks during a capture would kill the process
            recorder.end()
        raise
    finally:
        if splitter is not None:
            splitter.recorder = None
    recorder.end()
    return Recording(tuple(recorder.pieces), outputs)
