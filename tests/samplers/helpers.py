"""Rows to sample from: a history, parameters, and a sampler that knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.api.component import NoOptions
from dovetail.api.sampler import RowHistory, SampledTokens, SamplerContext
from dovetail.testing.suites.sampler_bench import STALE, Row
from dovetail_samplers.default import DefaultSampler


@dataclass(frozen=True)
class Ready:
    """A sampler that knows its rows, and what `sample` takes."""

    sampler: DefaultSampler
    logits: torch.Tensor
    rows: torch.Tensor
    host_rows: np.ndarray

    def sample(self) -> SampledTokens:
        return self.sampler.sample(self.logits, self.rows, self.host_rows)


def ready(rows: Sequence[Row], places: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Ready:
    """One batch of all; `places` are their rows in the history (0, 1, … if not given)."""
    vocab = len(rows[0].logits)
    places = list(range(len(rows))) if places is None else list(places)
    max_rows, longest = max(places) + 1, max(len(r.prompt) + len(r.output) for r in rows) + 3
    history = RowHistory(
        torch.full((max_rows, longest), STALE, dtype=torch.int32),
        torch.zeros(max_rows, dtype=torch.int32),
        torch.zeros(max_rows, dtype=torch.int32),
    )
    for place, row in zip(places, rows, strict=True):
        tokens = row.prompt + row.output
        history.token_ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        history.num_tokens[place], history.prompt_lens[place] = len(tokens), len(row.prompt)
    history = RowHistory(history.token_ids.to(device), history.num_tokens.to(device), history.prompt_lens.to(device))
    sampler = DefaultSampler(NoOptions(), SamplerContext(device, vocab, history))
    sampler.prepare(max_rows)
    sampler.update([], [(place, row.sampling) for place, row in zip(places, rows, strict=True)])
    logits = torch.tensor(np.array([row.logits for row in rows]), dtype=dtype, device=device)
    return Ready(sampler, logits, torch.tensor(places, device=device), np.array(places, dtype=np.int32))


def sample(rows: Sequence[Row], places: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> SampledTokens:
    return ready(rows, places, dtype, device).sample()


def changed(rows: Sequence[Row]) -> np.ndarray:
    """The logits after rules and penalties, before temperature: [rows, vocab]."""
    r = ready(rows)
    r.sampler._change_logits(r.logits, r.rows, r.host_rows, r.sampler._table.needs[r.host_rows])
    return r.logits.numpy()


def tokens(rows: Sequence[Row], places: Sequence[int] | None = None) -> list[int]:
    return sample(rows, places).token_ids.tolist()
