"""Steps that aren't decodes alone, as CUDA graphs, but for large ones. The model is recorded once for each padded number of tokens, with all that
depends on that number alone.

That includes attention where its backend says so (`cuda_graph="mixed"`): one graph is the whole model. How the kernels of other backends are launched
depends on what a step mixes; then a recording is cut at each call of `attend`:

      replayed     | embedding, norm, q k v, write |        | output, feed-forward, norm, q k v, write |        | … last norm |
      launched                                      attend                                              attend
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionBatch, AttentionLayer, FusedCache, LayerSpec
from dovetail.runtime.row_state import RowState
from dovetail.runtime.step_inputs import FixedInputs
from dovetail.runtime.token_sizes import padded_sizes, typical


@dataclass(frozen=True, slots=True)
class Piece:
    """One graph of a piecewise recording, and the attention launched after it, from `q` to `out`: none after the last piece, perhaps the only one."""

    graph: torch.cuda.CUDAGraph
    layer: AttentionLayer | None = None
    q: torch.Tensor | None = None  # [size, heads, head_size]
    out: torch.Tensor | None = None  # [size, heads, out_size]


@dataclass(frozen=True, slots=True)
class Recording:
    """One size. `hidden` is overwritten by the next run of any size."""

    inputs: FixedInputs
    hidden: torch.Tensor  # [size, hidden]; without all states [most_wanted, hidden]
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Tokens, padding included."""
        return self.inputs.size

    @property
    def all_states(self) -> bool:
        """True if the states of all tokens are computed to the end; False if those of wanted tokens alone."""
        return len(self.inputs.wanted) == 0

    @property
    def whole(self) -> bool:
        """Attention is in it: its steps are planned with `AttentionBatch.mixed_graph`."""
        return len(self.pieces) == 1


class SplitLayer(AttentionLayer):
    """An attention layer at which a recording is split, if it is split at all."""

    def __init__(self, layer: AttentionLayer, splitter: LayerSplitter) -> None:
        self.spec, self._layer, self._splitter = layer.spec, layer, splitter

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self._layer.write(k, v)

    def cache_for_fused_write(self) -> FusedCache | None:
        return self._layer.cache_for_fused_write()

    def bind_sinks(self, sinks: torch.Tensor) -> None:
        self._layer.bind_sinks(sinks)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        if self._splitter.recorder is None:
            return self._layer.attend(q)
        return self._splitter.recorder.split(self._layer, q)


class LayerSplitter:
    """Wraps the attention layers of a model so that it can be recorded in pieces, as piecewise CUDA graphs."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # while one records

    def wrap(self, make_layer: Callable[[LayerSpec], AttentionLayer]) -> Callable[[LayerSpec], AttentionLayer]:
        return lambda spec: SplitLayer(make_layer(spec), self)


Buffers = dict[torch.Size, tuple[torch.Tensor, torch.Tensor]]  # [heads, head_size] of a layer -> its q, and what attention makes of it


class Recorder:
    """Records one run of a model. All pieces, of all sizes, share a memory `pool`, and `buffers`, which the largest size makes: it is the first. One
    run at a time uses them, and in the order of recording."""

    def __init__(self, pool: Any, buffers: Buffers) -> None:
        self.pieces: list[Piece] = []
        self._pool, self._buffers = pool, buffers

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def split(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """End the piece where q is known; the next begins with what attention makes of it. Layers that are alike take turns with two buffers."""
        kind = torch.Size((*q.shape[1:], layer.spec.out_size))
        if kind not in self._buffers:
            self._buffers[kind] = torch.empty_like(q), q.new_empty(*q.shape[:2], layer.spec.out_size)
        own, out = (buffer[: len(q)] for buffer in self._buffers[kind])
        own.copy_(q)
        self._graph.capture_end()
        self.pieces.append(Piece(self._graph, layer, own, out))
        self.begin()
        return out

    def end(self) -> None:
        self._graph.capture_end()
        self.pieces.append(Piece(self._graph))


def sharing_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Choose from `sizes`, rising, the ones for steps that read a shared prefix once: few, for each costs start-up time."""
    return tuple(size for size in sizes if size == sizes[-1] or (size >= 256 and size.bit_count() == 1))


class MixedGraphs:
    """The recorded mixed steps of one model, in all sizes. A backend that can read a shared prefix once in a graph gets separate ones for that."""

    def __init__(self, model: Any, splitter: LayerSplitter, backend: AttentionBackend, rows: RowState, most_tokens: int) -> None:
        """Plan recordings for steps of up to `most_tokens` tokens."""
        self._model, self._splitter, self._backend, self._rows, self._device = model, splitter, backend, rows, rows.device
        self._whole = backend.capabilities.cuda_graph == "mixed"
        sizes = padded_sizes(most_tokens)
        self._sizes = {False: sizes, True: sharing_sizes(sizes) if self._whole and backend.capabilities.shared_prefix else ()}  # shares a prefix
        self._all_states_below = 2 * rows.max_rows  # tokens; larger recordings compute wanted states alone, of at most half of the tokens
        self._recordings: dict[tuple[bool, int], Recording] = {}
        self._buffers: Buffers = {}

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the model once for each kind of size: what that launches is what will be recorded."""
        for shares, sizes in self._sizes.items():
            for size in typical(sizes):
                self._run(self._padding_inputs(shares, size))

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Record every size. The KV pool must be there."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        todo = [(shares, size) for shares, sizes in self._sizes.items() for size in reversed(sizes)]
        with torch.cuda.stream(stream):
            for done, (shares, size) in enumerate(todo):
                self._recordings[shares, size] = self._record(shares, size, pool)
                if progress is not None:
                    progress("capturing CUDA graphs of mixed steps", done + 1, len(todo))
        torch.cuda.current_stream().wait_stream(stream)

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states that the latest run of the largest size wrote."""
        return self._recordings[False, self._sizes[False][-1]].hidden

    def recording_for(self, num_tokens: int, shared_prefix_blocks: int, *, all_states: bool = False) -> Recording | None:
        """The smallest that holds such a step; None if there are too many tokens, or if `all_states` are needed and it hasn't all."""
        shares = self._whole and shared_prefix_blocks > 0
        sizes = self._sizes[shares]
        index = bisect_left(sizes, num_tokens)
        if index == len(sizes) or (all_states and sizes[index] >= self._all_states_below):
            return None
        return self._recordings[shares, sizes[index]]

    def run(self, recording: Recording) -> torch.Tensor:
        """The hidden states, [size, hidden] or of wanted tokens, of the step that the recording's inputs hold and the backend has planned, with the
        slots of these. What is returned is overwritten by the next run."""
        for piece in recording.pieces:
            piece.graph.replay()
            if piece.layer is not None and piece.q is not None and piece.out is not None:
                piece.out.copy_(piece.layer.attend(piece.q))
        return recording.hidden

    def _padding_inputs(self, shares: bool, size: int) -> FixedInputs:
        """Make the inputs of a step of padding alone, and tell the backend of it."""
        max_rows = self._rows.max_rows
        inputs = FixedInputs(size, max_rows, max_rows if size >= self._all_states_below else 0, self._device)
        self._backend.plan(self._padding(inputs, int(shares)))
        return inputs

    def _run(self, inputs: FixedInputs) -> torch.Tensor:
        token_ids = self._rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        hidden: torch.Tensor = self._model(token_ids, inputs.positions, inputs.wanted if len(inputs.wanted) else None)
        return hidden

    def _record(self, shares: bool, size: int, pool: Any) -> Recording:
        inputs = self._padding_inputs(shares, size)
        self._run(inputs)  # kernels are compiled, workspaces made
        torch.cuda.synchronize(self._device)
        recorder = Recorder(pool, self._buffers)
        recorder.begin()
        self._splitter.recorder = None if self._whole else recorder
        try:
            hidden = self._run(inputs)
        except BaseException:  # a rank has died, say
            with suppress(RuntimeError):  # nothing was being captured any more
                recorder.end()  # releasing memory that ranks share, while a stream captures, would end the process
            raise
        finally:
            self._splitter.recorder = None
        recorder.end()
        return Recording(inputs, hidden, tuple(recorder.pieces))

    def _padding(self, inputs: FixedInputs, shared_prefix_blocks: int) -> AttentionBatch:
        """A step of padding alone, which reads and writes nothing."""
        of_no_rows, nothing = inputs.rows(0), np.zeros(0, np.int32)
        return AttentionBatch(
            num_rows=0,
            num_tokens=0,
            query_starts=of_no_rows.query_starts,
            kv_lens=of_no_rows.kv_lens,
            block_table=self._rows.block_table[:0, :1],
            slots=of_no_rows.slots,
            host_query_lens=nothing,
            host_kv_lens=nothing,
            shared_prefix_blocks=shared_prefix_blocks,
            mixed_graph=self._whole,
        )
