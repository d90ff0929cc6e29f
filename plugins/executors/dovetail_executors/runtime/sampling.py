"""The stage of a step that follows the model: logits, masks, logits processors, the sampler, and
the growth of the rows.

`last_tokens` reads lines before the model and `append` extends their rows after the sampler, on the
device, so that a CUDA graph can record them. Each is a single kernel where kernels run
(`decode_rows_kernels`), instead of some ten torch operations dominated by launch time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Masks
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    Lines,
    Process,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    TopLogprobs,
)
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable, is_compiling_ahead
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.token_masks import mask_tokens
from dovetail.nn.transfer import to_device
from dovetail_executors.runtime.logits import WRONG, Asks, LogitsProcessors
from dovetail_executors.runtime.mask_buffer import MaskBuffer, masks_of_lines
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.sampler_rows import update_one_by_one
from dovetail_executors.runtime.step import LogprobsCopy, Sampled, SampledCopy, Step

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinePart:
    """Lines of a step that are computed and sampled together."""

    lines: Int64  # [m] ascending indices among the step's lines
    size: int  # of all tensors, m or more: the last line is repeated
    capture: Capture | None = None  # with which they are sampled

    def is_whole(self, count: int) -> bool:
        """Return True if it is all of a step's `count` lines, in their order."""
        return len(self.lines) == self.size == count

    @property
    def padded(self) -> Int64:
        """[size] indices among the step's lines."""
        return np.pad(self.lines, (0, self.size - len(self.lines)), "edge")


class Sampling:
    """Samples the lines of steps with one sampler, and extends their rows."""

    def __init__(
        self,
        sampler: Sampler,
        rows: RowState,
        vocab_size: int,
        processors: LogitsProcessors,
    ) -> None:
        self.sampler = sampler
        self.rows = rows
        self.processors = processors
        self.vocab_size = vocab_size
        self.masks = MaskBuffer(rows.max_lines, vocab_size, rows.device)
        # Rows of collected steps in `Step.refused`: their requests have ended
        self._refused: dict[int, str] = {}
        self._knows = set[int]()  # rows that the sampler has

    # Once a step, on the host

    def tell(self, step: Step) -> None:
        """Tell the sampler and the processors of rows that came and went, unless they know. Raises
        `DovetailError` if a rejected request continues: then another rank's sampler has accepted
        what this one rejected."""
        if step.told:
            return
        step.told = True
        batch = step.batch
        if len(batch.removed) or batch.added or batch.changes is not None:
            self._change(step, batch)
        if self.processors.names:
            step.asks = self.processors.asked_by(step.lines.rows)
        for row in self._refused.keys() & set(batch.rows.tolist()) if self._refused else ():
            name = self.rows.request_ids[row]
            raise DovetailError(
                f"request {name!r} goes on, but not on every rank alike: here {self._refused[row]}"
            )

    def _change(self, step: Step, batch: Batch) -> None:
        """Remove and add the rows that are sampled; others yield no token. Those that change are
        removed and added, since their samplers may keep what they have seen of forgotten tokens."""
        removed = [row for row in batch.removed.tolist() if row in self._knows]
        added = [
            SampledRow(row=new.row, sampling=new.sampling)
            for new in batch.added
            if new.sampling is not None
        ]
        if (changes := batch.changes) is not None:
            changed = changes.rows.tolist()
            removed += changed
            added += [
                SampledRow(row=row, sampling=sampling)
                for row, sampling in zip(changed, changes.samplings, strict=True)
            ]
        fresh = [one.row for one in added]
        self._knows.difference_update(removed)
        self._knows.update(fresh)
        if self._refused:
            for row in (*removed, *fresh):
                self._refused.pop(row, None)
        try:
            self.sampler.update(removed, added)
        except Exception:
            if not added:
                raise
            name = f"sampler {type(self.sampler).__name__}"
            update = self.sampler.update
            step.refused = update_one_by_one(name, update, removed, added, _with_defaults)
        if self.processors.names:
            step.refused = self.processors.update(removed, added) | step.refused

    def mask(self, step: Step, masks: Masks) -> None:
        """Enqueue the copy of a late step's masks."""
        if len(masks.lines):
            self.masks.send(masks)
            step.masked = masks_of_lines(masks, len(step.lines.rows))

    def capture_for(self, host_rows: Int64, asks: Asks | None) -> Capture | None:
        """Return the capture that serves lines of these rows; None if none does."""
        if asks is not None and not self.processors.can_capture(asks):
            return None
        return self.sampler.capture_for(host_rows)

    def fetch(self, sampled: Sampled, step: Step, order: Int64 | None = None) -> None:
        """Enqueue the copy of the results of the step's lines to the host, in this order."""
        if sampled.packed is not None:
            step.asked_logprobs = int(self.rows.logprobs[step.lines.rows].max())
        step.sampled = SampledCopy(sampled, order, with_logprobs=step.asked_logprobs >= 0)

    def keep_refused(self, step: Step) -> None:
        """Keep what a collected step says of rejected rows, until these have gone."""
        ids = self.rows.request_ids
        for row, reason in step.refused.items():
            if ids[row] == step.request_ids[row]:
                self._refused[row] = reason

    def why_broken(self, step: Step, flags: int, line: int) -> str:
        """Return why a line has no token, for a client. `flags`: see `sampling.append`."""
        if flags == WRONG and step.asks is not None:
            return self.processors.reason(step.asks, line)
        return "the model's hidden state holds NaN"

    # Device work

    def parts_of_lines(
        self, step: Step, changes_logits: Callable[[Step, int], bool]
    ) -> list[LinePart]:
        """Return the step's lines in parts that are computed and sampled together: those of
        deterministic rows apart from all others. `changes_logits`: True for a row of the step whose
        logits features change.

        A deterministic line is in a part of `fixed_lines` or `many_lines`, whose work a graph could
        record: its operations have shapes that don't follow from the other lines. Or it is
        alone."""
        others = np.flatnonzero(~step.apart)
        parts = [LinePart(others, len(others))] if len(others) else []
        apart = np.flatnonzero(step.apart)
        rows, row_of = np.unique(step.lines.rows[apart], return_inverse=True)
        captures = [
            None if changes_logits(step, row) else self._fixed_for(row) for row in rows.tolist()
        ]
        alone = np.array([capture is None for capture in captures], np.bool_)[row_of]
        if step.masked is not None:
            alone |= step.masked[apart] >= 0
        parts += [LinePart(np.array([line]), 1) for line in apart[alone].tolist()]
        for capture in dict.fromkeys(filter(None, captures)):
            own = np.array([each is capture for each in captures], np.bool_)[row_of]
            lines = apart[own & ~alone]
            while len(lines):
                is_many = len(lines) > 2 * self.rows.fixed_lines
                size = self.rows.many_lines if is_many else self.rows.fixed_lines
                parts.append(LinePart(lines[:size], size, capture))
                lines = lines[size:]
        return parts

    def _fixed_for(self, row: int) -> Capture | None:
        """Return the capture with which lines of a row are sampled with others; None: alone. It
        doesn't depend on other rows, nor on what the step asks of processors."""
        support = self.sampler.capabilities.cuda_graph
        if self.rows.fixed_lines == 1 or self.processors.names or not support:
            return None
        capture = self.sampler.capture_for(np.array([row]))
        return None if capture is Capture.FULL and not self._captures_all else capture

    @cached_property
    def _captures_all(self) -> bool:
        """True if the sampler takes `Capture.FULL` on this device."""
        if self.sampler.capabilities.cuda_graph is not GraphSupport.ALL:
            return False
        row = torch.tensor([self.rows.max_rows], device=self.rows.device)  # padding
        lines = Lines(rows=row, ahead=torch.zeros_like(row, dtype=torch.int32))
        logits = torch.zeros(1, self.vocab_size, device=self.rows.device)
        try:
            self.sampler.sample(SampleInputs(logits=logits, lines=lines, capture=Capture.FULL))
        except UnsupportedError:
            return False
        return True

    def draw(
        self,
        step: Step,
        parts: Sequence[LinePart],
        logits_of: Callable[[LinePart], torch.Tensor],
        recorded: Callable[[LinePart], SampledTokens | None],
        lines: Lines,
        hidden: torch.Tensor,
    ) -> None:
        """Launch the sampling of the step's lines [n], part by part, and fetch the results.
        `logits_of`: returns those of a part, [part.size, vocab]. `recorded`: samples a part with a
        recording, if there is one, whose next replay overwrites the result. `hidden` [n, hidden]:
        of the lines' last tokens. Log-probabilities are those of the unmasked logits."""
        asks = step.asks
        masked = None if step.masked is None else to_device(step.masked, self.rows.device)
        process = None
        failures: dict[int, str] = {}
        if asks is not None:
            process = self.processors.process(lines, asks, masked, self.masks.words, failures)
        drawn = []
        for part in parts:
            sampled = recorded(part)
            if sampled is None:
                sampled = self._draw_part(step, part, logits_of(part), lines, masked, process)
            if not part.is_whole(len(step.lines.rows)):
                # the next part is sampled before these are read
                sampled = _first(sampled, len(part.lines))
            drawn.append(sampled)
        if asks is not None:
            for index, reason in failures.items():
                rows = step.lines.rows[asks[:, index]]
                step.refused |= dict.fromkeys(rows.tolist(), reason)
        order = np.argsort(np.concatenate([part.lines for part in parts]))
        sampled = _joined(drawn, to_device(order, self.rows.device))
        positions = last_tokens(self.rows, lines)[1]
        self.fetch(Sampled(self._grow(lines, positions, sampled.token_ids, hidden, process)), step)
        if sampled.logprobs is not None:
            step.logprobs = LogprobsCopy()
            step.logprobs.add(sampled.logprobs)

    def _draw_part(
        self,
        step: Step,
        part: LinePart,
        logits: torch.Tensor,
        lines: Lines,
        masked: torch.Tensor | None,
        process: Process | None,
    ) -> SampledTokens:
        """Sample a part of the step's lines [n], with its padding. `masked` [n] and `process` are
        those of all lines."""
        host_rows = step.lines.rows[part.lines]
        raw = logits
        if not part.is_whole(len(step.lines.rows)):
            index = to_device(part.padded, self.rows.device)
            lines = lines.take(index)
            masked = None if masked is None else masked[index]
            process = None if process is None else _of_lines(process, part.lines)
        if masked is not None and (self.rows.logprobs[host_rows] >= 0).any():
            raw = logits.clone()
        inputs = SampleInputs(
            logits=logits,
            lines=lines,
            host_rows=host_rows if part.capture is None else None,
            process=process,
            capture=part.capture,
        )
        sampled = self._sample(inputs, masked)
        top = sampled.logprobs
        if top is not None and masked is not None:
            top = top_logprobs(raw, sampled.token_ids, top.token_ids.shape[1] - 1)
        return SampledTokens(sampled.token_ids, top)

    def record(
        self,
        logits: torch.Tensor,
        lines: Lines,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        capture: Capture,
        masked: torch.Tensor | None = None,
        *,
        processed: bool = False,
    ) -> Sampled:
        """Do as `draw`, with work that a graph can record and replay for other lines. `positions`
        [n] int64: of the lines' last tokens. `masked` [n] int64: index of the line's mask, or -1.
        `processed`: apply the processors, which needs `Capture.FULL`."""
        process = None
        if processed:
            process = self.processors.process_captured(lines, masked, self.masks.words)
        inputs = SampleInputs(logits=logits, lines=lines, process=process, capture=capture)
        sampled = self._sample(inputs, masked)
        tokens = self._grow(lines, positions, sampled.token_ids, hidden, process)
        top = sampled.logprobs
        return Sampled(tokens) if top is None else Sampled.pack(tokens, top)

    def _sample(self, inputs: SampleInputs, masked: torch.Tensor | None) -> SampledTokens:
        """Mask the logits, and sample the lines. Samplers don't know about masks: a forbidden token
        looks like one that the model finds impossible. Log-probabilities are of the masked
        logits."""
        if masked is not None:
            mask_tokens(inputs.logits, masked, self.masks.words)
        return self.sampler.sample(replace(inputs, logits=settled(inputs.logits)))

    def _grow(
        self,
        lines: Lines,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        process: Process | None,
    ) -> torch.Tensor:
        """Extend the lines' rows. Returns the tokens as `append` does."""
        tokens = append(self.rows, lines, positions, token_ids, hidden)
        if process is not None:
            self.processors.add_wrong(tokens)
        return tokens

    def draft(
        self,
        logits: torch.Tensor,
        lines: Lines,
        host_rows: Int64 | None = None,
        capture: Capture | None = None,
    ) -> torch.Tensor:
        """Sample a draft for each of `lines` [n]: launched with `host_rows`, or with work that a
        graph can record. Returns ids [n] int64."""
        sampled = self.sampler.sample(
            SampleInputs(logits=settled(logits), lines=lines, host_rows=host_rows, capture=capture)
        )
        return settled(sampled.token_ids)


def _of_lines(process: Process, lines: Int64) -> Process:
    """Return `process` for the lines with these ascending indices."""

    def of_lines(logits: torch.Tensor, start: int) -> None:
        own = lines[start : start + len(logits)]
        edges = np.flatnonzero(np.diff(own) > 1) + 1
        for first, end in pairwise([0, *edges.tolist(), len(own)]):
            process(logits[first:end], int(own[first]))

    return of_lines


def _first(sampled: SampledTokens, count: int) -> SampledTokens:
    """Return a copy of the first `count` tokens, with their log-probabilities."""
    top = sampled.logprobs
    if top is not None:
        numbers = top.token_ids, top.logprobs, top.ranks
        top = TopLogprobs(*(each[:count].clone() for each in numbers))
    return SampledTokens(sampled.token_ids[:count].clone(), top)


def _joined(parts: Sequence[SampledTokens], order: torch.Tensor) -> SampledTokens:
    """Return what was sampled in parts as one, in this order. Parts may lack columns of
    log-probabilities that others have, which none of their rows asked for: these are 0."""
    if len(parts) == 1:
        return parts[0]
    ids = torch.cat([part.token_ids for part in parts])[order]
    tops = [part.logprobs for part in parts]
    columns = max((top.token_ids.shape[1] for top in tops if top is not None), default=0)
    if not columns:
        return SampledTokens(ids)
    token_ids = ids.new_zeros(len(ids), columns)
    joined = TopLogprobs(token_ids, torch.zeros_like(token_ids, dtype=torch.float32), ids.clone())
    end = 0
    for part, top in zip(parts, tops, strict=True):
        start = end
        end += len(part.token_ids)
        if top is not None:
            width = top.token_ids.shape[1]
            joined.token_ids[start:end, :width] = top.token_ids
            joined.logprobs[start:end, :width] = top.logprobs
            joined.ranks[start:end] = top.ranks
    return SampledTokens(
        ids, TopLogprobs(joined.token_ids[order], joined.logprobs[order], joined.ranks[order])
    )


def _with_defaults(row: int) -> SampledRow:
    return SampledRow(row=row, sampling=RowSampling())


def settled(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers`, zeroed while kernels are only compiled ahead, since they are then undefined
    and may be used as indices."""
    return numbers.zero_() if is_compiling_ahead() else numbers


def last_tokens(
    state: RowState, lines: Lines, drafts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the last tokens of lines [n], which may be padding, and the positions of
    these, [n] int64 each. `drafts` [n] int32: those of 0 and above are the ids, and are written to
    the rows first."""
    if use_kernels(lines.rows, lines.ahead):
        from dovetail_executors.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.last_tokens(state, lines, drafts)
    positions = state.history.lengths(lines).long() - 1
    ids = state.token_ids.view(-1)
    places = lines.rows * state.row_width + positions
    if drafts is not None:
        ids[places] = torch.where(drafts >= 0, drafts, ids[places])
    return ids[places].long(), positions


def put_drafts(
    state: RowState, lines: Lines, positions: torch.Tensor, token_ids: torch.Tensor, vocab_size: int
) -> None:
    """Write token_ids [n] int64 as the drafts that follow lines [n], whose last tokens are at
    `positions` [n] int64. Unlike `append` it leaves the number of known tokens as it is. Ids
    sampled from NaN may be any; drafts are in the vocabulary."""
    places = lines.rows * state.row_width + positions + 1
    state.token_ids.view(-1)[places] = token_ids.clamp(0, vocab_size - 1).to(torch.int32)


def append(
    state: RowState,
    lines: Lines,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Append to each row the token_ids [n] int64 of its lines [n] up to the first that differs from
    its draft, that one included. The lines' last tokens are at `positions` [n] int64. All lines of
    a row are neighbours; the padding row may occur repeatedly, keeps its length of 1, and is
    undefined after that. The caller updates the host's counts.

    Returns [3, n] int64: the ids; whether `hidden` [n, hidden] holds NaN in that line; and how many
    tokens its row got, 0 except in its first line.
    """
    if use_kernels(lines.rows, lines.ahead, positions, token_ids, hidden):
        from dovetail_executors.runtime import decode_rows_kernels as kernels

        with suppress(KernelUnavailable):
            return kernels.append(state, lines, positions, token_ids, hidden)
    ids = state.token_ids.view(-1)
    places = lines.rows * state.row_width + positions + 1
    followed = torch.zeros_like(token_ids, dtype=torch.bool)  # by another line of its row
    followed[:-1] = lines.ahead[1:] > 0
    ends = (~followed | (ids[places] != token_ids)).long()  # its row gets nothing of later lines
    before = ends.cumsum(0) - ends
    first = torch.arange(len(ends), device=ends.device) - lines.ahead
    reached = before == before[first]
    counts = torch.zeros_like(token_ids).index_add_(0, first, reached.long())
    ids[places] = torch.where(reached, token_ids, ids[places].long()).to(torch.int32)
    state.num_tokens[lines.rows] = (positions + 1 + counts)[first].to(torch.int32)
    state.num_tokens[state.max_rows :].fill_(1)
    return torch.stack((token_ids, hidden.isnan().any(dim=1).long(), counts))
