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
from dovetail_executors.runtime.logits import Asks
from dovetail_executors.runtime.model_io import MODEL, SHARED, GraphKey, ModelOutputs
from dovetail_executors.runtime.sampled import SampledCopy
from dovetail_executors.runtime.step_inputs import HostLines

Int64 = NDArray[np.int64]


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
    told: bool = False  # the sampler knows the rows that came and went
    # New rows that the sampler or a logits processor rejected, and others that one failed
    refused: dict[int, str] = field(default_factory=dict)
    # [n] the lines' rows in the masks, or -1; None: no line is masked
    masked: NDArray[np.int64] | None = None
    asks: Asks | None = None  # which logits processors the lines' rows ask for; None: none
    shared_blocks: int = 0  # leading ones that attention reads once for all rows
    key: GraphKey = MODEL  # of what has computed the model
    outputs: ModelOutputs | None = None  # until the tokens are sampled
    # [n] where in `outputs` the lines' last tokens are
    line_places: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
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

    @property
    def is_plain_decode(self) -> bool:
        """True if every row computes a token for each line, and has one, and no feature reads
        final states: so a recording of a whole step can replay it."""
        batch = self.batch
        one_each = bool((batch.num_tokens == batch.num_lines).all()) and not batch.checkpoints
        return one_each and not any(feature.reads_states for feature in self.notes)

    def tokens(self) -> NDArray[np.int64]:
        """Return [3, n]: see `decode_rows.append`."""
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

    token_ids: Int64
    broken: Int64  # [n] what is wrong with each: see `decode_rows.append`
    rows: Int64  # [n] indices in the batch
    lines: Int64  # [n] indices among the step's lines
    logprobs: HostLogprobs | None
    counts: NDArray[np.int32] | None  # [b] as of `Result`

    @classmethod
    def of(cls, step: Step) -> Yielded:
        """Read the results of a step that the device has passed."""
        batch, logprobs = step.batch, step.host_logprobs()
        token_ids, broken, gained = step.tokens()
        if batch.drafts is None:
            rows, lines = np.flatnonzero(batch.yields_token), np.arange(len(token_ids))
            return cls(token_ids, broken, rows, lines, logprobs, None)
        rows = np.arange(len(batch.rows)).repeat(batch.num_lines)
        counts = np.zeros(len(batch.rows), np.int32)
        np.add.at(counts, rows, gained.astype(np.int32))
        lines = np.flatnonzero(step.lines.ahead < counts[rows])
        if logprobs is not None:
            logprobs = HostLogprobs(
                logprobs.token_ids[lines], logprobs.logprobs[lines], logprobs.ranks[lines]
            )
        return cls(token_ids[lines], broken[lines], rows[lines], lines, logprobs, counts)

    def of_rows(self, batch: Batch) -> Int64:
        """Return the ids as of `Result.token_ids`."""
        if self.counts is not None:
            return self.token_ids
        token_ids = np.full(len(batch.rows), -1, np.int64)
        token_ids[self.rows] = self.token_ids
        return token_ids
