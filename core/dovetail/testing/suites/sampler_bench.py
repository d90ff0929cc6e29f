"""Rows to sample from: a history, parameters, and a sampler; uses only the interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Capture, RowHistory, RowSampling, SampledTokens, Sampler, SamplerContext

MakeSampler = Callable[[SamplerContext], Sampler]
STALE = 7  # content of the history after a row's tokens


@dataclass(frozen=True)
class Row:
    """One request at one moment."""

    logits: Sequence[float]
    sampling: RowSampling
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()


class Bench:
    """A sampler with `rows`, each at its index in the history (0, 1, … if not given)."""

    def __init__(
        self,
        make: MakeSampler,
        rows: Sequence[Row],
        places: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.places = list(range(len(rows))) if places is None else list(places)
        self.max_rows = max(self.places) + 1
        longest = max(len(r.prompt) + len(r.output) for r in rows) + 3

        def made(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self.history = RowHistory(made(self.max_rows, longest, value=STALE), made(self.max_rows, value=0), made(self.max_rows, value=0))
        for place, row in zip(self.places, rows, strict=True):
            self.tell(place, row.prompt, row.output)
        self.sampler = make(SamplerContext(device, len(rows[0].logits), self.history))
        self.sampler.prepare(self.max_rows)
        self.sampler.update([], [(place, row.sampling) for place, row in zip(self.places, rows, strict=True)])
        self.logits = torch.tensor(np.array([row.logits for row in rows]), dtype=dtype, device=device)
        self.rows, self.host_rows = torch.tensor(self.places, device=device), np.array(self.places, dtype=np.int32)

    def tell(self, place: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Set the tokens of the history's row `place`."""
        tokens = [*prompt, *output]
        self.history.token_ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.history.num_tokens[place], self.history.prompt_lens[place] = len(tokens), len(prompt)

    def sample(self, some: Sequence[int] | None = None) -> SampledTokens:
        """Sample from all rows, or from some, given by their index in the batch, in that order."""
        picked = list(range(len(self.places))) if some is None else list(some)
        index = torch.tensor(picked, dtype=torch.int64, device=self.logits.device)
        return self.sampler.sample(self.logits[index], self.rows[index], self.host_rows[picked])

    def tokens(self, some: Sequence[int] | None = None) -> list[int]:
        tokens: list[int] = self.sample(some).token_ids.tolist()
        return tokens

    def captured(self, capture: Capture, rows: Sequence[int] | None = None) -> SampledTokens:
        """Return the result of `sample_captured`. `rows` may contain `max_rows`, which is padding, with the first row's logits."""
        wanted = self.places if rows is None else list(rows)
        where = [self.places.index(row) if row in self.places else 0 for row in wanted]
        return self.sampler.sample_captured(self.logits[where].clone(), torch.tensor(wanted, device=self.logits.device), capture)


def draws(
    make: MakeSampler, logits: Sequence[float], sampling: RowSampling, count: int, *, seeds: int = 500, output: tuple[int, ...] = (), device: str
) -> NDArray[np.int64]:
    """Count each token in `count` draws of one distribution: `seeds` seeds, each at count / seeds output positions, after the prompt 0 and `output`.
    Tokens generated from there on are assumed to be 0."""
    positions = max(1, count // seeds)
    rows = [Row(logits, replace(sampling, seed=seed), (0,), (*output, *(0,) * positions)) for seed in range(seeds)]
    bench = Bench(make, rows, device=device)
    counts = np.zeros(len(logits), dtype=np.int64)
    for position in range(positions):
        bench.history.num_tokens.fill_(1 + len(output) + position)
        counts += np.bincount(bench.sample().token_ids.cpu().numpy(), minlength=len(logits))
    return counts
