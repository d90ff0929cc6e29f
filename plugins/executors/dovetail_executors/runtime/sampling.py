"""The stage of a step that follows the model: logits, masks, logits processors, the sampler, and
the growth of the rows.

`last_tokens` reads lines before the model and `append` extends their rows after the sampler, on the
device, so that a CUDA graph can record them. Each is a single kernel where kernels run
(`decode_rows_kernels`), instead of some ten torch operations dominated by launch time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Masks
from dovetail.api.sampler import (
    Capture,
    Lines,
    Process,
    RowSampling,
    SampledRow,
    SampleInputs,
    Sampler,
    TopLogprobs,
)
from dovetail.errors import DovetailError
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
        if len(batch.removed) or batch.added:
            self._change(step, batch)
        if self.processors.names:
            step.asks = self.processors.asked_by(step.lines.rows)
        for row in self._refused.keys() & set(batch.rows.tolist()) if self._refused else ():
            name = self.rows.request_ids[row]
            raise DovetailError(
                f"request {name!r} goes on, but not on every rank alike: here {self._refused[row]}"
            )

    def _change(self, step: Step, batch: Batch) -> None:
        """Remove and add the rows that are sampled; others yield no token."""
        removed = [row for row in batch.removed.tolist() if row in self._knows]
        added = [
            SampledRow(row=new.row, sampling=new.sampling)
            for new in batch.added
            if new.sampling is not None
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

    def draw(self, step: Step, logits: torch.Tensor, lines: Lines, hidden: torch.Tensor) -> None:
        """Launch the sampling of the step's lines [n] from logits [n, vocab], and fetch the
        results. `hidden` [n, hidden]: of the lines' last tokens. Log-probabilities are those of the
        unmasked logits."""
        host_rows = step.lines.rows
        asks = step.asks
        masked = None
        process = None
        raw = logits
        if step.masked is not None:
            masked = to_device(step.masked, self.rows.device)
            raw = logits.clone() if (self.rows.logprobs[host_rows] >= 0).any() else logits
        failures: dict[int, str] = {}
        if asks is not None:
            process = self.processors.process(lines, asks, masked, self.masks.words, failures)
        parts = step.parts_of_lines()
        tokens, logprobs = self._sample(
            logits, lines, None, hidden, masked, process, host_rows, parts=parts
        )
        if asks is not None:
            for index, reason in failures.items():
                step.refused |= dict.fromkeys(host_rows[asks[:, index]].tolist(), reason)
        if masked is not None and logprobs is not None:
            k = logprobs.token_ids.shape[1] - 1
            of_parts = [tokens[0, part] for part in parts]
            logprobs = _joined(
                [
                    top_logprobs(raw[part], ids, k)
                    for part, ids in zip(parts, of_parts, strict=True)
                ],
                of_parts,
            )
        self.fetch(Sampled(tokens), step)
        if logprobs is not None:
            step.logprobs = LogprobsCopy()
            step.logprobs.add(logprobs)

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
        tokens, logprobs = self._sample(
            logits, lines, positions, hidden, masked, process, capture=capture
        )
        return Sampled(tokens) if logprobs is None else Sampled.pack(tokens, logprobs)

    def _sample(
        self,
        logits: torch.Tensor,
        lines: Lines,
        positions: torch.Tensor | None,
        hidden: torch.Tensor,
        masked: torch.Tensor | None,
        process: Process | None,
        host_rows: Int64 | None = None,
        capture: Capture | None = None,
        parts: Sequence[slice] = (slice(None),),
    ) -> tuple[torch.Tensor, TopLogprobs | None]:
        """Mask the logits, sample the lines, and extend their rows. `parts`: lines that are sampled
        together.

        Samplers don't know about masks: a forbidden token looks like one that the model finds
        impossible. Returns the tokens as `append` does, and the log-probabilities of the masked
        logits.
        """
        if masked is not None:
            mask_tokens(logits, masked, self.masks.words)
        sampled = [
            self.sampler.sample(
                SampleInputs(
                    logits=settled(logits if len(parts) == 1 else logits[part].clone()),
                    lines=lines if len(parts) == 1 else lines.take(part),
                    host_rows=host_rows if host_rows is None else host_rows[part],
                    process=_from(process, part.start or 0),
                    capture=capture,
                )
            )
            for part in parts
        ]
        of_parts = [part.token_ids for part in sampled]
        token_ids = of_parts[0] if len(parts) == 1 else torch.cat(of_parts)
        logprobs = _joined([part.logprobs for part in sampled], of_parts)
        if positions is None:
            positions = last_tokens(self.rows, lines)[1]
        tokens = append(self.rows, lines, positions, token_ids, hidden)
        if process is not None:
            self.processors.add_wrong(tokens)
        return tokens, logprobs

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


def _from(process: Process | None, first: int) -> Process | None:
    """Return `process` for the lines from number `first` on."""
    if process is None or not first:
        return process
    whole = process
    return lambda logits, start: whole(logits, first + start)


def _joined(
    parts: Sequence[TopLogprobs | None], token_ids: Sequence[torch.Tensor]
) -> TopLogprobs | None:
    """Return log-probabilities of lines in parts as one. `token_ids`: [n] of each part. Parts may
    lack columns that others have, which none of their rows asked for: these are 0."""
    columns = max((part.token_ids.shape[1] for part in parts if part is not None), default=0)
    if len(parts) == 1 or not columns:
        return parts[0]
    ids = token_ids[0].new_zeros(sum(map(len, token_ids)), columns)
    joined = TopLogprobs(ids, torch.zeros_like(ids, dtype=torch.float32), ids[:, 0].clone())
    start = 0
    for part, own in zip(parts, token_ids, strict=True):
        end = start + len(own)
        if part is not None:
            width = part.token_ids.shape[1]
            joined.token_ids[start:end, :width] = part.token_ids
            joined.logprobs[start:end, :width] = part.logprobs
            joined.ranks[start:end] = part.ranks
        start = end
    return joined


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
