"""Sampler `default`. Each row takes only the steps it needs: greedy rows an argmax, rows with a
temperature a race against noise over the vocabulary, rows with top-k or top-p a race over the
remaining tokens.

Drawing a token with probability p_i is a race: the token with the largest p_i / e_i wins, with e_i
independent exponential noise. Since noise depends on the vocabulary id (`noise`), it can be
computed only for the tokens that take part, with the same winner.

A line's result is a function of its logits, its row's parameters and its history: lines share
kernels, not numbers. On a GPU with Triton, all lines are changed by `changes_kernels` and drawn by
`fused` at once; the other steps below are for all other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    Lines,
    Process,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    SamplerCapabilities,
)
from dovetail.errors import UnsupportedError
from dovetail.nn.kernels.available import has_triton, use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.transfer import to_device
from dovetail_samplers import penalties, rules
from dovetail_samplers.device_changes import DeviceChanges
from dovetail_samplers.filters import (
    cut_top_k,
    cut_top_p,
    first_argmax,
    on_cpu,
    retained,
    retained_min_p,
)
from dovetail_samplers.noise import exponentials, stream_keys
from dovetail_samplers.table import DeviceRows, Needs, RowTable

Rows = NDArray[np.int64]  # row indices, or indices in the batch, on the host
# logits, or history tokens, that rules and penalties process at once: each needs some 30 bytes of
# temporary memory
AT_ONCE = 2**24
UNCAPTURABLE = ~(Needs.RANDOM | Needs.FILTERS)
CAPTURED_LOGPROBS = 20  # most likely tokens; with more, a step is sampled outside of graphs
CPU_CHUNK = 2**17  # logits processed at once on the CPU, to fit its cache


class DefaultSampler(Sampler):
    """Sampler with all parameters of `RowSampling`, for any mix of rows."""

    capabilities = SamplerCapabilities(
        cuda_graph=GraphSupport.ALL if has_triton() else GraphSupport.NONE,
        logprobs=True,
        drafts=True,
        processors=True,
    )

    def prepare(self, max_rows: int) -> None:
        self._device = torch.device(self.context.device)
        self._table = RowTable(max_rows, self.context.vocab_size, self._device)
        self._device_rows = DeviceRows(max_rows, self.context.vocab_size, self._device)
        self._changes: DeviceChanges | None = None
        if use_kernels(self._device_rows.records):
            self._changes = DeviceChanges(max_rows, self.context)

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        self._table.remove(removed)
        changed = self._table.add(added)
        if changed:
            rows = np.array(list(changed), np.int64)
            self._device_rows.send(self._table, rows)
            if self._changes is not None:
                self._changes.send(self._table, rows)
            self._table.sent |= changed

    def capture_for(self, host_rows: Rows) -> Capture | None:
        """Return `TOKENS` for rows that need only temperature and filters, and `FULL` for others,
        unless one asks for many log-probabilities."""
        if not int(np.bitwise_or.reduce(self._table.needs[host_rows])) & UNCAPTURABLE:
            return Capture.TOKENS
        few = int(self._table.logprobs[host_rows].max()) <= CAPTURED_LOGPROBS
        return Capture.FULL if few and self._changes is not None else None

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        logits = inputs.logits
        lines = inputs.lines
        process = inputs.process
        if inputs.capture is not None:
            return self._sample_captured(logits, lines, process, inputs.capture)
        host_rows = np.asarray(inputs.host_rows, dtype=np.int64)
        needs = self._table.needs[host_rows]
        union = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
        raw = logits
        if (token_ids := self._drawn_by_kernels(logits, lines, union, process)) is None:
            if union & Needs.CHANGED_LOGITS or process is not None:
                logits = logits.to(torch.float32, copy=bool(union & Needs.LOGPROBS)).contiguous()
                self._change_logits(logits, lines, host_rows, needs)
            if process is not None:
                process(logits, 0)
            token_ids = self._draw(logits, lines, host_rows, needs, union)
        if not union & Needs.LOGPROBS:
            return SampledTokens(token_ids)
        k = min(int(self._table.logprobs[host_rows].max()), logits.shape[1])
        return SampledTokens(token_ids, top_logprobs(raw, token_ids, k))

    def _sample_captured(
        self, logits: torch.Tensor, lines: Lines, process: Process | None, capture: Capture
    ) -> SampledTokens:
        if capture is Capture.TOKENS:
            return SampledTokens(self._device_rows.draw(logits, lines, self.context.history))
        changes = self._changes
        if changes is None:
            raise UnsupportedError(
                f"sampler default can't record {capture.name} without Triton's kernels"
            )
        token_ids = self._draw_changed(changes, logits, lines, process)
        return SampledTokens(
            token_ids,
            top_logprobs(logits, token_ids, CAPTURED_LOGPROBS, lines.rows, changes.asked_logprobs),
        )

    def _drawn_by_kernels(
        self, logits: torch.Tensor, lines: Lines, union: int, process: Process | None
    ) -> torch.Tensor | None:
        """Return token ids [n] int64, or None without kernels, or if logits must be changed and
        those kernels are unavailable."""
        if self._changes is None:
            return None
        if not union & Needs.CHANGED_LOGITS and process is None:
            return self._device_rows.draw(logits, lines, self.context.history)
        with suppress(KernelUnavailable):
            return self._draw_changed(self._changes, logits, lines, process)
        return None

    def _draw_changed(
        self, changes: DeviceChanges, logits: torch.Tensor, lines: Lines, process: Process | None
    ) -> torch.Tensor:
        """logits [n, vocab], unchanged, and lines [n] -> token ids [n] int64. May raise
        `KernelUnavailable`."""
        drawn = []
        for start in range(0, max(1, len(logits)), changes.most):
            part = slice(start, start + changes.most)
            own = lines.take(part)
            changed = changes.change(logits[part], own)
            if process is not None:
                process(changed, start)
            drawn.append(self._device_rows.draw(changed, own, self.context.history))
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    # ---- changes to logits, before temperature

    def _change_logits(
        self, logits: torch.Tensor, lines: Lines, host_rows: Rows, needs: NDArray[np.uint8]
    ) -> None:
        """Apply rules and penalties in place to the lines of rows that have them. logits [n, vocab]
        float32."""
        most = max(1, AT_ONCE // max(self.context.history.token_ids.shape[1], logits.shape[1]))
        changes = {
            Needs.RULES: self._apply_rules,
            Needs.REPETITION: self._penalise_repetition,
            Needs.FREQUENCY: self._penalise_output,
        }
        for need, change in changes.items():
            for indices in _cut(np.flatnonzero(needs & need), most):
                at = self._index(indices)
                part = logits[at]
                change(part, lines.take(at), host_rows[indices])
                if not isinstance(at, slice):
                    logits[at] = part

    def _apply_rules(self, logits: torch.Tensor, lines: Lines, host_rows: Rows) -> None:
        rules.apply(logits, self._table.rules_of(host_rows.tolist()), self.context.history, lines)

    def _penalise_repetition(self, logits: torch.Tensor, lines: Lines, host_rows: Rows) -> None:
        penalties.repetition(
            logits,
            penalties.seen(self.context.history, lines),
            self._table.send(self._table.repetition, host_rows),
        )

    def _penalise_output(self, logits: torch.Tensor, lines: Lines, host_rows: Rows) -> None:
        table = self._table
        presence = table.send(table.presence, host_rows)
        frequency = table.send(table.frequency, host_rows)
        penalties.presence_and_frequency(
            logits, penalties.seen(self.context.history, lines), presence, frequency
        )

    # ---- drawing

    def _draw(
        self,
        logits: torch.Tensor,
        lines: Lines,
        host_rows: Rows,
        needs: NDArray[np.uint8],
        union: int,
    ) -> torch.Tensor:
        """logits [n, vocab] -> token ids [n] int64."""
        if not union & Needs.RANDOM:
            return first_argmax(logits)
        history = self.context.history
        positions = (history.lengths(lines) - history.prompt_lens[lines.rows]).to(torch.int64)
        # [n, 2]
        keys = stream_keys(self._table.send(self._table.seed_states, host_rows), positions)
        token_ids = torch.empty(len(needs), dtype=torch.int64, device=self._device)
        most = max(1, CPU_CHUNK // logits.shape[1]) if on_cpu(logits) else len(needs)
        for way, indices in _alike(needs, most):
            if len(indices) == len(needs):
                return self._draw_alike(way, logits, keys, host_rows)
            at = self._index(indices)
            token_ids[at] = self._draw_alike(way, logits[at], keys[at], host_rows[indices])
        return token_ids

    def _index(self, indices: Rows) -> torch.Tensor | slice:
        """Return an index that selects these ascending indices of a batch: a slice, which avoids a
        copy, if they are contiguous."""
        first = int(indices[0])
        last = int(indices[-1])
        if last - first + 1 == len(indices):
            return slice(first, last + 1)
        return to_device(indices, self._device)

    def _draw_alike(
        self, way: int, logits: torch.Tensor, keys: torch.Tensor, host_rows: Rows
    ) -> torch.Tensor:
        """Draw rows with the same way of drawing: logits [n, vocab], keys [n, 2] -> token ids
        [n]."""
        if not way & Needs.RANDOM:
            return first_argmax(logits)
        scores = self._scores(logits, host_rows)
        if not way & Needs.FILTERS:
            return self._race(scores.exp_(), keys)
        weights = scores.exp()
        kept = self._kept(way, scores, weights, host_rows)
        return self._race_of_few(weights.mul_(kept), kept, keys)

    def _scores(self, logits: torch.Tensor, host_rows: Rows) -> torch.Tensor:
        """Return [n, vocab] float32: (logits - the row's largest) / temperature. The largest is
        finite at any temperature, and none is NaN."""
        logits = logits.to(torch.float32)
        # for rows of -inf: a finite value to subtract
        largest = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        return (logits - largest).div_(
            self._table.send(self._table.temperature, host_rows)[:, None]
        )

    def _kept(
        self, way: int, scores: torch.Tensor, weights: torch.Tensor, host_rows: Rows
    ) -> torch.Tensor:
        """[n, vocab] float32: 1 for the tokens that pass the rows' filters, otherwise 0."""
        table = self._table
        parts = []
        if way & Needs.TOP_K:
            max_k = int(table.top_k[host_rows].max())
            parts.append(
                retained(
                    scores,
                    cut_top_k(
                        scores,
                        table.send(table.top_k, host_rows).long(),
                        table.send(table.top_p, host_rows),
                        max_k,
                    ),
                )
            )
        elif way & Needs.TOP_P:
            parts.append(
                retained(scores, cut_top_p(scores, weights, table.send(table.top_p, host_rows)))
            )
        if way & Needs.MIN_P:
            parts.append(retained_min_p(weights, table.send(table.min_p, host_rows)))
        return parts[0] if len(parts) == 1 else parts[0].mul_(parts[1])

    def _race(self, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """weights [n, vocab], overwritten -> the winners [n]."""
        return first_argmax(weights.div_(exponentials(keys, self._device_rows.hashes)))

    def _race_of_few(
        self, weights: torch.Tensor, kept: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """The same, for weights that are 0 where `kept` is: on the CPU, noise is computed only for
        kept tokens."""
        if not on_cpu(weights):
            return self._race(weights, keys)
        indices = np.flatnonzero(kept.numpy())
        if len(indices) > weights.numel() // 8:
            return self._race(weights, keys)
        row = np.repeat(np.arange(len(kept)), kept.sum(-1).numpy().astype(np.int64))
        token = torch.from_numpy(indices - row * kept.shape[1])
        noise = exponentials(
            keys[torch.from_numpy(row)], self._device_rows.hashes[token][:, None]
        ).squeeze(1)
        weights.view(-1)[torch.from_numpy(indices)] /= noise
        return first_argmax(weights)


def _alike(needs: NDArray[np.uint8], most: int) -> Iterator[tuple[int, Rows]]:
    """Return the indices [n] in the batch, grouped by their way of drawing, at most `most` per
    group."""
    ways = needs & (Needs.RANDOM | Needs.FILTERS)
    for way in np.unique(ways).tolist():
        for indices in _cut(np.flatnonzero(ways == way), most):
            yield way, indices


def _cut(indices: Rows, most: int) -> Iterator[Rows]:
    """Yield slices of at most `most` indices."""
    for start in range(0, len(indices), most):
        yield indices[start : start + most]
