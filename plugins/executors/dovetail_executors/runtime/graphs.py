"""CUDA graphs of a model's steps: one list of recordings by key and size.

A step is replayed with the smallest recording that fits; the rest of its inputs is padding. What is
recorded, and how to add a kind: `recorded_steps`.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBatch
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import Capture
from dovetail.api.token_sizes import most_recorded, typical
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.kernels.available import has_triton
from dovetail.nn.kernels.launch import compiling_ahead
from dovetail_executors.runtime.logits import Asks
from dovetail_executors.runtime.model_io import (
    DECODE,
    MIXED,
    PROCESSED,
    SHARED,
    GraphKey,
    PartOfStep,
)
from dovetail_executors.runtime.recorded_steps import (
    Builder,
    OfFeature,
    StepParts,
    decode_builders,
    mixed_builders,
    with_axes_of_features,
)
from dovetail_executors.runtime.recording import ALONE, LayerSplitter, Pool, Recording, record

log = logging.getLogger("dovetail")

Int64 = NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # task, number done, total
Agree = Callable[[bool], bool]  # True if all ranks call it with True; waits for all

# Keys of which more than the largest size is recorded at the start: those of the first requests
FIRST_KEYS = (DECODE, GraphKey("sampling", Capture.TOKENS))
MOST_FIRST = 8  # the largest of these sizes but one
IDLE_S = 0.1  # an idle engine waits for another one that starts
MOST_THREADS = 16  # for compilation; more don't help, since its Python part is serialized


def first_sizes(builder: Builder) -> tuple[int, ...]:
    """Return the sizes of a key that are recorded before the first step, in ascending order, unless
    all are."""
    most = builder.sizes[-1]
    if builder.key not in FIRST_KEYS:
        return (most,)
    return tuple(size for size in builder.sizes if size <= MOST_FIRST or size == most)


@dataclass(frozen=True, slots=True)
class Graph:
    """A recording of one key and size."""

    key: GraphKey
    size: int  # lines or tokens of its inputs, including padding
    inputs: Any  # from its builder: fill it, then replay
    recording: Recording[Any]

    @property
    def whole(self) -> bool:
        """True if attention is recorded, too: mixed steps are then planned with
        `AttentionBatch.mixed_graph`."""
        return len(self.recording.pieces) == 1


@dataclass(slots=True)
class Recorded:
    """Recordings of one key by size; None where one failed, and steps are launched instead."""

    builder: Builder
    graphs: dict[int, Graph | None] = field(default_factory=dict)

    @property
    def missing(self) -> Iterator[int]:
        """Sizes to record while the engine is idle, in ascending order."""
        sizes = () if self.builder.on_demand else self.builder.sizes
        return (size for size in sizes if size not in self.graphs)


class Graphs:
    """Table of recordings.

    Call `compile_ahead`, then `capture` once the KV pool is allocated, then `find` and `replay` for
    each step. Ranks of a group call these in the same order, and replay the same recordings: a sum
    waits for as many programs as a recording of its size has on the other ranks.
    """

    def __init__(
        self, builders: Sequence[Builder], parts: StepParts, agree: Agree | None = None
    ) -> None:
        """Keys are recorded in the order of `builders`. `agree`: of the group's ranks; None: there
        is one rank."""
        self._builders = tuple(builders)
        self._parts = parts
        self._agree = agree
        self._replayed: list[GraphKey] = []
        self._table: dict[GraphKey, Recorded] = {}  # without keys that can't be recorded
        self._pools: dict[str, Pool] = {}
        self._stream: torch.cuda.Stream | None = None

    @classmethod
    def of(
        cls,
        parts: StepParts,
        splitter: LayerSplitter,
        max_tokens: int,
        parameters: int,
        of_features: Sequence[OfFeature] = (),
        more: Sequence[Builder] = (),
        agree: Agree | None = None,
    ) -> Graphs:
        """Return graphs of all keys that the parts support, for steps of up to `max_tokens` tokens,
        and `more`. `parameters`: number of parameters that the model uses per token. The backend
        must support CUDA graphs. `agree`: of the group's ranks; None: there is one rank."""
        mixed: list[Builder] = []
        # The kernels of states have grids that depend on the rows of a step.
        if parts.rows.states is None:
            mixed = mixed_builders(parts, splitter, most_recorded(max_tokens, parameters))
        builders = [
            *mixed,
            *decode_builders(parts, min(parts.rows.max_lines, max_tokens), of_features),
            *more,
        ]
        return cls([*builders, *with_axes_of_features(builders, parts)], parts, agree)

    @property
    def keys(self) -> Iterator[tuple[GraphKey, tuple[int, ...]]]:
        """Keys of the recordings with their ascending sizes, in the order of recording."""
        return ((builder.key, builder.sizes) for builder in self._builders)

    @property
    def recorded(self) -> Iterator[tuple[GraphKey, tuple[int, ...]]]:
        """Keys of the recordings with the ascending sizes that are recorded by now."""
        for key, each in self._table.items():
            yield key, tuple(size for size in each.builder.sizes if each.graphs.get(size))

    def __str__(self) -> str:
        keys = {builder.key for builder in self._builders}
        return ", ".join(key.part for key in (DECODE, MIXED) if key in keys) or "none"

    def compile_ahead(self, prepare: Callable[[], None], progress: Progress | None = None) -> None:
        """Compile what recording will launch, many kernels in parallel.

        `prepare` prepares the backend, for a pool of any size.
        """
        if not has_triton():
            return
        tell = None if progress is None else partial(progress, "compiling kernels")
        try:
            with compiling_ahead(
                self._parts.rows.device, min(MOST_THREADS, os.cpu_count() or 1), tell
            ):
                prepare()
                self.rehearse()
        except Exception as error:  # actual errors surface on launch
            log.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run what will be recorded once for each typical size, while kernels are only compiled."""
        for builder in self._builders:
            for size in typical(builder.sizes) if builder.warm_ups else ():
                builder.rehearse(builder.inputs(size))

    def capture(self, progress: Progress | None = None, *, all_sizes: bool = True) -> None:
        """Record the sizes of every key. The KV pool must be allocated.

        Unless `all_sizes`, only each key's largest, whose memory the others share, and those in
        `first_sizes`; `find` and `record_next` record the others.
        """
        names = {builder.pool for builder in self._builders}
        self._pools = {name: Pool() for name in names}
        self._stream = torch.cuda.Stream(self._parts.rows.device)  # type: ignore[no-untyped-call]
        sizes = {
            builder.key: builder.sizes if all_sizes else first_sizes(builder)
            for builder in self._builders
            if not builder.on_demand
        }
        done = 0
        total = sum(map(len, sizes.values()))
        for builder in self._builders:
            self._table[builder.key] = recorded = Recorded(builder)
            try:
                for size in reversed(sizes.get(builder.key, ())):
                    torch.cuda.empty_cache()
                    if all_sizes or size == builder.sizes[-1]:
                        graph = self._record(builder, size, builder.warm_ups)
                    else:
                        graph = self._record_at_once(builder, size)
                    recorded.graphs[size] = graph
                    done += 1
                    if progress is not None:
                        progress("capturing CUDA graphs", done, total)
            except UnsupportedError as error:
                if not builder.optional:
                    raise
                log.info("steps of kind %s aren't recorded: %s", builder.key, error)
                del self._table[builder.key]

    @property
    def _missing(self) -> Iterator[tuple[Recorded, int]]:
        return ((each, size) for each in self._table.values() for size in each.missing)

    @property
    def is_complete(self) -> bool:
        """True if `record_next` has nothing to record."""
        return next(self._missing, None) is None

    def record_next(self) -> bool:
        """Record a size that is missing, if there is one. Returns True if more are missing."""
        found = next(self._missing, None)
        if found is not None:
            self._record_late(*found, IDLE_S)
        return not self.is_complete

    def find(self, key: GraphKey, size: int) -> Graph | None:
        """Return the smallest recording of the key for `size` lines or tokens, which is recorded
        now if it hasn't been; None if there is none. One with all features' work also serves steps
        with the work of some."""
        for each in (key, replace(key, axes=key.axes.union(self._parts.model.axes))):
            recorded = self._table.get(each)
            sizes = () if recorded is None else recorded.builder.sizes
            index = bisect_left(sizes, size)
            if recorded is not None and index < len(sizes):
                if sizes[index] not in recorded.graphs:
                    self._record_late(recorded, sizes[index])
                return recorded.graphs.get(sizes[index])
            if not key.axes.intersection(self._parts.model.axes):
                return None  # steps without such work don't pay for it
        return None

    def _record_late(self, recorded: Recorded, size: int, wait_s: float = 0.0) -> None:
        """Record a size while serving, unless another engine starts for longer than `wait_s`, in
        the process of any rank; if that fails, its steps are launched kernel by kernel."""
        alone = ALONE.acquire(timeout=wait_s)
        builder = recorded.builder
        try:
            if self._on_all(alone):
                recorded.graphs[size] = None
                recorded.graphs[size] = self._record_at_once(builder, size)
        except Exception as error:  # of memory, mostly; one of the device will show in the step
            log.warning(
                "steps of kind %s and size %d aren't recorded: %s: %s",
                builder.key,
                size,
                type(error).__name__,
                error,
            )
        finally:
            if alone:
                ALONE.release()

    def _record_at_once(self, builder: Builder, size: int) -> Graph:
        """Record a size without running it first, as the key's largest has run; after running it if
        that fails: there is no memory, or a backend does something when the size first runs. It
        isn't run if memory ran out on one of several ranks: the others' sums would wait for its."""
        try:
            return self._record_on_all(builder, size, 0)
        except UnsupportedError:
            raise
        except Exception as error:
            log.debug("%s of size %d is recorded once more: %s", builder.key, size, error)
            torch.cuda.empty_cache()
            lacks = self._agree is not None and isinstance(error, torch.OutOfMemoryError)
            graph = self._record_on_all(builder, size, 1 if self._on_all(not lacks) else 0)
            torch.cuda.empty_cache()  # of the stream that it ran on
            return graph

    def _record_on_all(self, builder: Builder, size: int, warm_ups: int) -> Graph:
        """Record a size as `_record` does. Raises `DovetailError` if another rank can't; what every
        rank finds to be unsupported is raised at once."""
        failure: Exception | None = None
        try:
            graph = self._record(builder, size, warm_ups)
        except UnsupportedError:
            raise
        except Exception as error:
            failure = error
        on_all = self._on_all(failure is None)
        if failure is not None:
            raise failure
        if not on_all:
            raise DovetailError("another rank can't record it")
        return graph

    def _on_all(self, fine: bool) -> bool:
        """Return True if all ranks call it with True."""
        return fine if self._agree is None else self._agree(fine)

    @torch.inference_mode()
    def _record(self, builder: Builder, size: int, warm_ups: int) -> Graph:
        """Record a size of a key. `capture` has made the pools."""
        inputs = builder.inputs(size)
        recording = record(
            partial(builder.run, inputs),
            self._pools[builder.pool],
            self._stream,
            warm_ups,
            builder.splitter,
        )
        return Graph(builder.key, size, inputs, recording)

    def replay(self, graph: Graph, batch: AttentionBatch | None = None) -> Any:
        """Enqueue the step in the graph's inputs. `batch`, if given, is planned in the attention
        backend first. Returns the result of the builder's `run`; the next replay may overwrite
        it."""
        self._replayed.append(graph.key)
        if batch is not None:
            self._parts.backend.plan(batch)
        return graph.recording.replay()

    def take_replayed(self) -> tuple[str, ...]:
        """Return the keys of what was replayed since the last call, in order: "decode"."""
        keys = tuple(map(str, self._replayed))
        self._replayed.clear()
        return keys

    def for_model(self, num_tokens: int, axes: frozenset[str], *, all_states: bool) -> Graph | None:
        """Return the graph for the model of any step.

        `axes`: of its features, and "shared". None if the step is too large, or needs `all_states`
        but only wanted ones are computed.
        """
        if self._parts.backend.capabilities.cuda_graph is not GraphSupport.ALL:
            axes -= SHARED
        graph = self.find(GraphKey("mixed", axes=axes), num_tokens)
        return None if graph is None or (all_states and not graph.inputs.all_states) else graph

    def for_decode(
        self, host_rows: Int64, axes: frozenset[str], *, late: bool, asks: Asks | None = None
    ) -> Graph | None:
        """Return the graph for a decode step of lines of these rows; for a `late` one, only of its
        model. `axes`: as for `for_model`. `asks`: see `LogitsProcessors.asked_by`. None if no graph
        supports everything that they need."""
        if not self._parts.backend.capabilities.shared_prefix:
            axes -= SHARED
        if late:
            return self.find(GraphKey("model", axes=axes), len(host_rows))
        return self._sampling("decode", host_rows, axes, asks)

    def for_sampling(
        self, host_rows: Int64, *, masked: bool, asks: Asks | None = None
    ) -> Graph | None:
        """Return the graph that samples for lines of these rows, some of which may be `masked`.

        None if no graph supports everything that they need: e.g. log-probabilities are of raw
        logits, which a graph with masks doesn't keep.
        """
        if masked and (self._parts.rows.logprobs[host_rows] >= 0).any():
            return None
        return self._sampling("sampling", host_rows, frozenset(), asks)

    def for_drafts(self, host_rows: Int64, axes: frozenset[str] = frozenset()) -> Graph | None:
        """Return the graph of a draft for each of these rows. `axes`: which one."""
        capture = self._parts.sampling.sampler.capture_for(host_rows)
        key = GraphKey("draft", capture, axes)
        return None if capture is None else self.find(key, len(host_rows))

    def _sampling(
        self, part: PartOfStep, host_rows: Int64, axes: frozenset[str], asks: Asks | None
    ) -> Graph | None:
        capture = self._parts.sampling.capture_for(host_rows, asks)
        if capture is None:
            return None
        if asks is not None:
            capture = Capture.FULL
            axes = axes | PROCESSED
        return self.find(GraphKey(part, capture, axes), len(host_rows))
