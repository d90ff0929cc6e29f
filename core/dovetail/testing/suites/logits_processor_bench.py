"""Lines to process: rows that ask for a logits processor with some arguments, and rows that don't;
uses only the interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.api.logits_processor import LogitsProcessor, LogitsProcessorContext, ProcessedRow
from dovetail.api.sampler import Lines, RowSampling
from dovetail.testing.checks import fail
from dovetail.testing.suites.sampler_bench import Row, RowsBench

VOCAB = 300  # ids of the suite's tokenizer are the bytes
MOST_DRAFTS = 3
WIDTH = 64  # tokens of the history's rows
MOST_TOKENS = 45  # of a row, without drafts
LETTERS = b"abcdefgh \n"  # most tokens of texts

MakeProcessor = Callable[[LogitsProcessorContext], LogitsProcessor]


@dataclass(frozen=True)
class Asking(Row):
    """A line of a row. `arguments`: those for the processor; None: its request doesn't ask for
    it."""

    arguments: BaseModel | None = None


class ProcessorBench(RowsBench):
    """A processor with `lines`, as `RowsBench` places them."""

    def __init__(
        self,
        make: MakeProcessor,
        lines: Sequence[Asking],
        places: Sequence[int] | None = None,
        *,
        device: str = "cpu",
        width: int = WIDTH,
        max_drafts: int | None = None,
    ) -> None:
        super().__init__(lines, places, device=device, width=width)
        most = max(len(line.drafts) for line in lines) if max_drafts is None else max_drafts
        self.processor = make(
            LogitsProcessorContext(device, len(lines[0].logits), self.history, most)
        )
        self.processor.prepare(self.max_rows)
        self.update([], lines)

    def update(
        self, removed: Sequence[int], lines: Sequence[Asking], places: Sequence[int] | None = None
    ) -> None:
        """Remove rows, then add the rows of lines that ask, in their places or in others."""
        asking = dict(zip(self.places if places is None else places, lines, strict=True))
        added = [
            ProcessedRow(row=place, arguments=line.arguments, sampling=line.sampling)
            for place, line in asking.items()
            if line.arguments is not None
        ]
        self.processor.update(removed, added)

    def batch(self, some: Sequence[int | None] | None = None) -> tuple[torch.Tensor, Lines]:
        """Return the logits and lines of all lines, or of some, given by their index. None is
        padding, with the logits of the first line."""
        picked = list(range(len(self.places))) if some is None else some
        index = torch.tensor(
            [one or 0 for one in picked], dtype=torch.int64, device=self.logits.device
        )
        padding = torch.tensor(
            [one is None for one in picked], dtype=torch.bool, device=self.logits.device
        )
        rows = self.lines.rows[index].masked_fill(padding, self.max_rows)
        ahead = self.lines.ahead[index].masked_fill(padding, 0)
        return self.logits[index], Lines(rows=rows, ahead=ahead)

    @torch.inference_mode()
    def apply(self, some: Sequence[int | None] | None = None) -> torch.Tensor:
        """Return the logits of `batch` after the processor changed them."""
        logits, lines = self.batch(some)
        self.processor.apply(logits, lines)
        return logits


def lines_of(
    arguments: Sequence[BaseModel], *, rows: int = 16, vocab: int = VOCAB, drafts: bool = True
) -> tuple[list[Asking], list[int]]:
    """Return lines and the row of each. All of `arguments` are asked for at least twice, and every
    third row asks for nothing. Rows have 1 to `MOST_TOKENS` tokens, in which passages come again,
    and up to `MOST_DRAFTS` drafts. Some logits are -inf, as rules leave them."""
    rng = np.random.default_rng(7)
    lines = []
    places = []
    for place in range(max(rows, 4 * len(arguments))):
        asked = None if place % 3 == 2 else arguments[(place - place // 3) % len(arguments)]
        length = (1, 2, MOST_TOKENS)[place] if place < 3 else int(rng.integers(1, MOST_TOKENS + 1))
        most = place % (1 + MOST_DRAFTS) if drafts else 0
        text = [token % vocab for token in repetitive_text(rng, length + most)]
        prompt = int(rng.integers(1, length + 1))
        sampling = RowSampling(
            seed=int(rng.integers(-(2**63), 2**63)), temperature=float(rng.choice([0.0, 0.7, 1.5]))
        )
        for ahead in range(1 + most):
            logits = rng.normal(size=vocab) * rng.choice([1.0, 4.0])
            if place % 4 == 3:
                logits[rng.integers(0, vocab, vocab // 4)] = -np.inf
            known = (
                tuple(text[:prompt]),
                tuple(text[prompt:length]),
                tuple(text[length : length + ahead]),
            )
            lines.append(
                Asking(logits.astype(np.float32).tolist(), sampling, *known, arguments=asked)
            )
            places.append(place)
    return lines, places


def repetitive_text(rng: np.random.Generator, length: int) -> list[int]:
    """Return tokens, about half of which repeat a passage from before."""
    tokens: list[int] = []
    while len(tokens) < length:
        span = int(rng.integers(1, 9))
        if tokens and rng.random() < 0.5:
            start = int(rng.integers(0, len(tokens)))
            tokens += tokens[start : start + span]
        else:
            tokens += [LETTERS[place] for place in rng.integers(0, len(LETTERS), span)]
    return tokens[:length]


def require_same(
    lines: Sequence[Asking], found: torch.Tensor, expected: torch.Tensor, what: str
) -> None:
    """Require equal bits of logits [n, vocab], one for each of `lines`."""
    if found.shape != expected.shape:
        fail(
            f"{what}: the logits have the shape {list(found.shape)}, expected "
            f"{list(expected.shape)}"
        )
    unlike = (found.view(torch.int32) != expected.view(torch.int32)).nonzero()
    if len(unlike):
        index, token = unlike[0].tolist()
        told = (
            f"the logit of token {token} became {found[index, token]:.9g}, expected "
            f"{expected[index, token]:.9g}"
        )
        fail(f"{said(lines[index])}: {what}: {told}")


def said(line: Asking) -> str:
    asks = (
        "without the processor"
        if line.arguments is None
        else f"with {shown_arguments(line.arguments)}"
    )
    return (
        f"a row {asks}, after {len(line.prompt)} + {len(line.output)} tokens and "
        f"{len(line.drafts)} drafts"
    )


def shown_arguments(arguments: BaseModel) -> Any:
    text = repr(arguments.model_dump())
    return text if len(text) <= 200 else f"{text[:200]}…"
