"""Rows to sample from: a history, parameters, and a sampler; uses only the interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    Lines,
    RowHistory,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    SamplerContext,
)
from dovetail.testing.threads import one_thread

MakeSampler = Callable[[SamplerContext], Sampler]
STALE = 7  # content of the history after a row's tokens


@dataclass(frozen=True)
class Row:
    """One request at one moment, or one of its lines: after `drafts`."""

    logits: Sequence[float]
    sampling: RowSampling
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output, *self.drafts)


class RowsBench:
    """A history with `rows`, each at its index (0, 1, … if not given), and their logits. Neighbours
    with the same index are lines of one row, of which the last has the most drafts. `width` of the
    history in tokens: by default a few more than the longest row."""

    def __init__(
        self,
        rows: Sequence[Row],
        places: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        width: int | None = None,
    ) -> None:
        self.places = list(range(len(rows))) if places is None else list(places)
        self.max_rows = max(self.places) + 1

        def made(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        count = self.max_rows + 1
        longest = max(len(r.tokens) for r in rows) + 3
        self.history = RowHistory(
            made(count, width or longest, value=STALE), made(count, value=0), made(count, value=0)
        )
        for place, row in zip(self.places, rows, strict=True):
            self.tell(place, row.prompt, row.output, row.drafts)
        self.logits = torch.tensor(
            np.array([row.logits for row in rows]), dtype=dtype, device=device
        )
        ahead = torch.tensor([len(row.drafts) for row in rows], dtype=torch.int32, device=device)
        self.lines, self.host_rows = (
            Lines(rows=torch.tensor(self.places, device=device), ahead=ahead),
            np.array(self.places, dtype=np.int32),
        )

    def tell(
        self, place: int, prompt: Sequence[int], output: Sequence[int], drafts: Sequence[int] = ()
    ) -> None:
        """Set the tokens of the history's row `place`."""
        tokens = [*prompt, *output, *drafts]
        self.history.token_ids[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.history.num_tokens[place], self.history.prompt_lens[place] = (
            len(prompt) + len(output),
            len(prompt),
        )


class Bench(RowsBench):
    """A sampler with `rows`."""

    def __init__(
        self,
        make: MakeSampler,
        rows: Sequence[Row],
        places: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        super().__init__(rows, places, dtype=dtype, device=device)
        self.sampler = make(
            SamplerContext(
                device, len(rows[0].logits), self.history, max(len(r.drafts) for r in rows)
            )
        )
        self.sampler.prepare(self.max_rows)
        self.update([], self.places, [row.sampling for row in rows])

    def update(
        self, removed: Sequence[int], places: Sequence[int], samplings: Sequence[RowSampling]
    ) -> None:
        """Remove rows, then start the rows at `places` with these parameters; of equal places the
        last counts."""
        added = dict(zip(places, samplings, strict=True))
        self.sampler.update(
            removed,
            [SampledRow(row=place, sampling=sampling) for place, sampling in added.items()],
        )

    @one_thread()
    def sample(self, some: Sequence[int] | None = None) -> SampledTokens:
        """Sample from all lines, or from some, given by their index in the batch, in that order."""
        picked = list(range(len(self.places))) if some is None else list(some)
        index = torch.tensor(picked, dtype=torch.int64, device=self.logits.device)
        return self.launched(self.logits[index], self.lines.take(index), self.host_rows[picked])

    def launched(
        self, logits: torch.Tensor, lines: Lines, host_rows: NDArray[np.int32]
    ) -> SampledTokens:
        """Return the result of `sample` without a capture."""
        return self.sampler.sample(SampleInputs(logits=logits, lines=lines, host_rows=host_rows))

    def tokens(self, some: Sequence[int] | None = None) -> list[int]:
        tokens: list[int] = self.sample(some).token_ids.tolist()
        return tokens

    def capture(self) -> Capture | None:
        """Return what `capture_for` does for all lines; None if the sampler doesn't declare it."""
        can = self.sampler.capabilities
        capture = self.sampler.capture_for(self.host_rows)
        whole = can.cuda_graph is GraphSupport.ALL
        declared = bool(can.cuda_graph) if capture is Capture.TOKENS else whole
        return capture if declared else None

    @one_thread()
    def captured(self, capture: Capture, rows: Sequence[int] | None = None) -> SampledTokens:
        """Return the result of `sample` with this `capture`, for all lines, or for the first of
        each of `rows`, which may contain `max_rows`: padding, with the first line's logits."""
        if rows is None:
            return self.sampler.sample(
                SampleInputs(logits=self.logits.clone(), lines=self.lines, capture=capture)
            )
        where = [self.places.index(row) if row in self.places else 0 for row in rows]
        lines = Lines(
            rows=torch.tensor(rows, device=self.logits.device), ahead=self.lines.ahead[where]
        )
        return self.sampler.sample(
            SampleInputs(logits=self.logits[where].clone(), lines=lines, capture=capture)
        )


def draws(
    make: MakeSampler,
    logits: Sequence[float],
    sampling: RowSampling,
    count: int,
    *,
    seeds: int = 500,
    output: tuple[int, ...] = (),
    device: str,
) -> NDArray[np.int64]:
    """Count each token in `count` draws of one distribution: `seeds` seeds, each at count / seeds
    output positions, after the prompt 0 and `output`. Tokens generated from there on are assumed to
    be 0."""
    positions = max(1, count // seeds)
    rows = [
        Row(logits, replace(sampling, seed=seed), (0,), (*output, *(0,) * positions))
        for seed in range(seeds)
    ]
    bench = Bench(make, rows, device=device)
    counts = np.zeros(len(logits), dtype=np.int64)
    for position in range(positions):
        bench.history.num_tokens.fill_(1 + len(output) + position)
        counts += np.bincount(bench.sample().token_ids.cpu().numpy(), minlength=len(logits))
    return counts
