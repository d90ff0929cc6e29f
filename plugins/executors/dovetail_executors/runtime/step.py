"""One step of a device: what was asked, and what its parts have computed.

Results are copied to the host while later steps run; `Step` holds them until `Runner.collect`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, HostLogprobs
from dovetail.api.sampler import TopLogprobs
from dovetail.nn.state.states import CheckedDrafts
from dovetail.nn.transfer import HostCopy
from dovetail_executors.runtime.device_work import DeviceWork
from dovetail_executors.runtime.logits import Asks
from dovetail_executors.runtime.model_io import MODEL, SHARED, GraphKey, ModelOutputs
from dovetail_executors.runtime.step_inputs import HostLines

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens of `size` lines. The next replay overwrites the tensors."""

    tokens: torch.Tensor  # [3, size] int64: see `sampling.append`
    packed: torch.Tensor | None = None  # int32: `tokens`, followed by log-probabilities
    columns: int = 0  # of log-probabilities: the sampled token and the most likely

    @classmethod
    def pack(cls, tokens: torch.Tensor, top: TopLogprobs) -> Sampled:
        """Pack the results. Can be recorded in a graph."""
        parts = tokens, top.ranks, top.token_ids, top.logprobs
        packed = torch.cat([part.view(torch.int32).view(-1) for part in parts])
        return cls(
            packed[: 2 * tokens.numel()].view(torch.int64).view_as(tokens),
            packed,
            top.token_ids.shape[1],
        )


class SampledCopy:
    """`Sampled` being copied to the host.

    Values may be read once the device has passed the point of its creation.
    """

    __slots__ = ("_columns", "_copy", "_order", "_size")

    def __init__(
        self,
        sampled: Sampled,
        order: NDArray[np.int64] | None = None,
        *,
        with_logprobs: bool = False,
    ) -> None:
        """`order` [n]: indices of the step's lines for the first n of `sampled`; None: same
        order."""
        self._order = order
        self._size = sampled.tokens.shape[1]
        self._columns = sampled.columns if with_logprobs else 0
        self._copy = HostCopy(
            sampled.packed if with_logprobs and sampled.packed is not None else sampled.tokens
        )

    def tokens(self, n: int) -> NDArray[np.int64]:
        """Return [3, n], as `Sampled.tokens`."""
        words = self._copy.value.reshape(-1).view(np.int32)[: 6 * self._size]
        return self._sorted(words.view(np.int64).reshape(3, -1)[:, :n].T).T

    def logprobs(self, n: int, k: int) -> HostLogprobs:
        """Return log-probabilities of each line's token and of the k most likely, or as many as
        there are."""
        words = self._copy.value
        size = self._size
        columns = self._columns
        ends = np.cumsum([6 * size, 2 * size, 2 * size * columns]).tolist()
        _, ranks, token_ids, values = np.split(words, ends)
        return HostLogprobs(
            self._sorted(token_ids.view(np.int64).reshape(size, columns)[:n, : 1 + k]),
            self._sorted(values.view(np.float32).reshape(size, columns)[:n, : 1 + k]),
            self._sorted(ranks.view(np.int64)[:n]),
        )

    def _sorted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the first n lines, [n, …], in the step's order."""
        return values if self._order is None else values[np.argsort(self._order)]


@dataclass(slots=True)
class LogprobsCopy:
    """`TopLogprobs`, in one or more slices, being copied to the host."""

    slices: list[tuple[HostCopy, HostCopy, HostCopy]] = field(default_factory=list)

    def add(self, top: TopLogprobs) -> None:
        self.slices.append((HostCopy(top.token_ids), HostCopy(top.logprobs), HostCopy(top.ranks)))

    def value(self) -> HostLogprobs:
        token_ids, logprobs, ranks = (
            np.concatenate([part.value for part in parts])
            for parts in zip(*self.slices, strict=True)
        )
        return HostLogprobs(token_ids, logprobs, ranks)


class DeviceSpan:
    """Span of a GPU's queue, timed by the GPU, from its creation to `close`."""

    __slots__ = ("_begin", "_end", "_stream")

    def __init__(self, device: torch.device) -> None:
        # Looked up once: that takes longer than recording an event.
        self._stream = torch.cuda.current_stream(device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)

    def close(self) -> None:
        self._end.record(self._stream)

    def wait(self) -> None:
        """Wait until the device has passed the end."""
        self._end.synchronize()

    @property
    def passed(self) -> bool:
        """True once the device has passed the end."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """Return the span's seconds on the GPU, once the device has passed its end."""
        return float(self._begin.elapsed_time(self._end)) / 1000


@dataclass(slots=True, eq=False)
class Step:
    """A submitted step: what was asked, and results being copied to the host."""

    batch: Batch
    request_ids: list[str]  # of all rows: by `collect` a row may have another request
    lines: HostLines  # [n]
    started: float  # when submitted, in seconds on the engine's clock
    span: DeviceSpan | None = None  # on a GPU
    notes: dict[Any, Any] = field(default_factory=dict)  # of the features that it concerns
    axes: frozenset[str] = frozenset()  # of these features
    # Every row computes a token for each line, and has one, and no feature reads final states: so a
    # recording of a whole step can replay it
    is_plain_decode: bool = False
    # [b] rows whose results must not depend on the others; [n] lines of these
    in_slabs: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    apart: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    told: bool = False  # the sampler knows the rows that came and went
    # New rows that the sampler or a logits processor rejected, and others that one failed
    refused: dict[int, str] = field(default_factory=dict)
    # [n] the lines' rows in the masks, or -1; None: no line is masked
    masked: NDArray[np.int64] | None = None
    asks: Asks | None = None  # which logits processors the lines' rows ask for; None: none
    shared_blocks: int = 0  # leading ones that attention reads once for all rows
    key: GraphKey = MODEL  # of what has computed the model
    outputs: ModelOutputs | None = None  # until the tokens are sampled
    line_places: NDArray[np.int64] | None = None  # [n] where in them the lines' last tokens are
    sampled: SampledCopy | None = None  # None if n is 0
    # Largest number of alternatives requested of a replayed sampling; -1: no log-probabilities
    asked_logprobs: int = -1
    logprobs: LogprobsCopy | None = None  # if sampling wasn't replayed
    checked: CheckedDrafts | None = None  # drafts whose changes to recurrent states come later
    replayed: tuple[str, ...] = ()  # keys of the replayed recordings
    ended: float | None = None  # when it had been computed, if `submit` knows

    @property
    def number(self) -> int:
        return self.batch.step

    @property
    def rows(self) -> NDArray[np.int32]:
        return self.batch.rows

    @property
    def passed(self) -> bool:
        """True once the device has computed the step, so that `collect` needn't wait."""
        return self.span is None or self.span.passed

    @property
    def graph_axes(self) -> frozenset[str]:
        """Axes of the recording that replays its model."""
        return self.axes | SHARED if self.shared_blocks else self.axes

    def works_of_row(self, row: int) -> list[DeviceWork]:
        """Return the device work of features that this row asks for."""
        return [
            feature.work
            for feature in self.notes
            if feature.axis is not None and feature.asking is not None and row in feature.asking
        ]

    def tokens(self) -> NDArray[np.int64]:
        """Return [3, n]: see `sampling.append`."""
        n = len(self.lines.rows)
        return np.zeros((3, 0), np.int64) if self.sampled is None else self.sampled.tokens(n)

    def host_logprobs(self) -> HostLogprobs | None:
        """Return the log-probabilities of all lines, if any row requests them."""
        if self.sampled is not None and self.asked_logprobs >= 0:
            return self.sampled.logprobs(len(self.lines.rows), self.asked_logprobs)
        return self.logprobs.value() if self.logprobs else None


@dataclass(frozen=True, slots=True)
class Yielded:
    """Tokens [n] of the lines of a step that its rows got: of drafts, those up to the first that
    was rejected."""

    broken: Int64  # [n] what is wrong with each: see `sampling.append`
    rows: Int64  # [n] indices in the batch
    lines: Int64  # [n] indices among the step's lines
    token_ids_of_rows: Int64  # as of `Result.token_ids`
    logprobs: HostLogprobs | None
    counts: NDArray[np.int32] | None  # [b] as of `Result`

    @classmethod
    def of(cls, step: Step) -> Yielded:
        """Read the results of a step that the device has passed."""
        batch = step.batch
        logprobs = step.host_logprobs()
        token_ids, broken, gained = step.tokens()
        if batch.drafts is None:
            rows = np.flatnonzero(batch.yields_token)
            lines = np.arange(len(token_ids))
            of_rows = np.full(len(batch.rows), -1, np.int64)
            of_rows[rows] = token_ids
            return cls(broken, rows, lines, of_rows, logprobs, None)
        rows = np.arange(len(batch.rows)).repeat(batch.num_lines)
        counts = np.zeros(len(batch.rows), np.int32)
        np.add.at(counts, rows, gained.astype(np.int32))
        lines = np.flatnonzero(step.lines.ahead < counts[rows])
        if logprobs is not None:
            logprobs = HostLogprobs(
                logprobs.token_ids[lines], logprobs.logprobs[lines], logprobs.ranks[lines]
            )
        return cls(broken[lines], rows[lines], lines, token_ids[lines], logprobs, counts)
