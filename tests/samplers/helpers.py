"""Rows to sample from: a history, parameters, and a sampler that knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.api.component import NoOptions
from dovetail.api.sampler import (
    Capture,
    Lines,
    Process,
    RowHistory,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    SamplerContext,
)
from dovetail.testing.suites.sampler_bench import STALE, Row
from dovetail_samplers.default import DefaultSampler


@dataclass(frozen=True)
class Ready:
    """A sampler that knows its rows, and what `sample` takes."""

    sampler: DefaultSampler
    logits: torch.Tensor
    lines: Lines
    host_rows: np.ndarray

    def sample(self, process: Process | None = None) -> SampledTokens:
        return self.sampler.sample(
            SampleInputs(
                logits=self.logits, lines=self.lines, host_rows=self.host_rows, process=process
            )
        )

    def captured(self, capture: Capture, process: Process | None = None) -> SampledTokens:
        return self.sampler.sample(
            SampleInputs(logits=self.logits, lines=self.lines, process=process, capture=capture)
        )

    def update(self, removed: Sequence[int], added: Sequence[tuple[int, RowSampling]]) -> None:
        self.sampler.update(removed, sampled_rows(added))


def sampled_rows(samplings: Sequence[tuple[int, RowSampling]]) -> list[SampledRow]:
    return [SampledRow(row=row, sampling=sampling) for row, sampling in samplings]


def plain(rows: Sequence[int], device: str = "cpu") -> Lines:
    """A line of each of these rows, without drafts."""
    return Lines(
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        ahead=torch.zeros(len(rows), dtype=torch.int32, device=device),
    )


def with_drafts(
    rows: Sequence[Row], drafts: Sequence[Sequence[int]]
) -> tuple[list[Row], list[int], list[Row]]:
    """Return the lines of rows with these drafts, the row of each, and a row of its own for each,
    whose output the drafts are."""
    lines = [
        replace(row, drafts=tuple(own[:ahead]))
        for row, own in zip(rows, drafts, strict=True)
        for ahead in range(len(own) + 1)
    ]
    places = [place for place, own in enumerate(drafts) for _ in range(len(own) + 1)]
    return (
        lines,
        places,
        [replace(line, output=line.output + line.drafts, drafts=()) for line in lines],
    )


def ready(
    rows: Sequence[Row],
    places: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Ready:
    """One batch of all; `places` are their rows in the history (0, 1, … if not given). Lines of one
    row have the same place, and share its drafts: the last has the most."""
    vocab = len(rows[0].logits)
    places = list(range(len(rows))) if places is None else list(places)
    max_rows, longest = max(places) + 1, max(len(r.tokens) for r in rows) + 3
    history = RowHistory(
        torch.full((max_rows + 1, longest), STALE, dtype=torch.int32),
        torch.zeros(max_rows + 1, dtype=torch.int32),
        torch.zeros(max_rows + 1, dtype=torch.int32),
    )
    for place, row in zip(places, rows, strict=True):
        history.token_ids[place, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        history.num_tokens[place], history.prompt_lens[place] = (
            len(row.prompt) + len(row.output),
            len(row.prompt),
        )
    history = RowHistory(
        history.token_ids.to(device), history.num_tokens.to(device), history.prompt_lens.to(device)
    )
    sampler = DefaultSampler(
        NoOptions(), SamplerContext(device, vocab, history, max(len(r.drafts) for r in rows))
    )
    sampler.prepare(max_rows)
    samplings = [row.sampling for row in rows]
    sampler.update([], sampled_rows(list(zip(places, samplings, strict=True))))
    logits = torch.tensor(np.array([row.logits for row in rows]), dtype=dtype, device=device)
    ahead = torch.tensor([len(row.drafts) for row in rows], dtype=torch.int32, device=device)
    return Ready(
        sampler,
        logits,
        Lines(rows=torch.tensor(places, device=device), ahead=ahead),
        np.array(places, dtype=np.int32),
    )


def sample(
    rows: Sequence[Row],
    places: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> SampledTokens:
    return ready(rows, places, dtype, device).sample()


def changed(rows: Sequence[Row]) -> np.ndarray:
    """The logits after rules and penalties, before temperature: [rows, vocab]."""
    r = ready(rows)
    r.sampler._change_logits(r.logits, r.lines, r.host_rows, r.sampler._table.needs[r.host_rows])
    return r.logits.numpy()


def tokens(rows: Sequence[Row], places: Sequence[int] | None = None) -> list[int]:
    return sample(rows, places).token_ids.tolist()
