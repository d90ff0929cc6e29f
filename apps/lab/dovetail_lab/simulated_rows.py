"""Rows of the executor `simulated`: the tokens that they yield, and which drafts are accepted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Drafts, Masks, NewRow
from dovetail.testing.fake_executor import next_allowed
from dovetail_lab.step_profile import chance
from dovetail_lab.traces.request import stream_of

FILLER = np.ones(1, np.int32)  # a request's answer if none was set


class StepWork(NamedTuple):
    """A step's tokens, contexts and lines, from which its duration and results follow. With drafts,
    each line of a row that has some is a decode of its own, as the device computes it."""

    new_tokens: NDArray[np.int32]  # [rows], with drafts [decodes]
    context: NDArray[np.int64]  # tokens computed before, as `new_tokens`
    lines: NDArray[np.intp]  # index in the batch of the row of each line
    token_ids: NDArray[np.int64]  # [rows], -1 for none; with drafts [lines]


class SimulatedRows:
    """The number of computed tokens and the answer of each row."""

    def __init__(self, rows: int, seed: int, acceptance: tuple[float, ...]) -> None:
        """`acceptance`: probability that a simulated draft is accepted, by place, of requests
        without one of their own."""
        self._seed = seed
        self._acceptance = acceptance
        self._expected: dict[str, tuple[NDArray[np.int32], tuple[float, ...]]] = {}
        self._computed = np.zeros(rows, np.int64)
        self._position = np.zeros(rows, np.int64)  # of the next answer
        self._last = np.zeros(rows, np.int64)  # position of the last token of the answer
        self._answers = np.zeros((rows, 1), np.int64)
        self._streams: dict[int, int] = {}  # row -> the stream of random numbers for its drafts
        # row -> probability that a draft is accepted, by place
        self._odds: dict[int, tuple[float, ...]] = {}

    def expect(
        self, request_id: str, answer: NDArray[np.int32], acceptance: float | None = None
    ) -> None:
        """Set a request's answer: ids [at least 1], the last of which is repeated as needed, and
        the probability that a simulated draft of it is accepted; None: the one of all requests."""
        self._expected[request_id] = (
            answer,
            self._acceptance if acceptance is None else (acceptance,),
        )

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._expected.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._expected.clear()

    def begin(self, new: NewRow) -> None:
        """Give a row to a request."""
        answer, self._odds[new.row] = self._expected.get(new.request_id, (FILLER, self._acceptance))
        if len(answer) > self._answers.shape[1]:
            more = len(answer) - self._answers.shape[1]
            self._answers = np.pad(self._answers, ((0, 0), (0, more)))
        self._answers[new.row, : len(answer)] = answer
        self._last[new.row] = len(answer) - 1
        self._position[new.row] = len(new.token_ids) - new.prompt_len
        self._computed[new.row] = new.computed
        self._streams[new.row] = stream_of("drafts", self._seed, new.request_id)

    def advance(self, batch: Batch) -> StepWork:
        """Return the work of a batch, and advance its rows by it; those with drafts advance in
        `yielded`, since what is accepted is known when the results are."""
        rows = batch.rows
        context = self._computed[rows]
        if batch.drafts is None:
            lines, token_ids = self._next_tokens(batch)
            self._computed[rows] = context + batch.num_tokens
            return StepWork(batch.num_tokens, context, lines, token_ids)
        drafts = batch.drafts.counts
        lines = np.repeat(np.arange(len(rows)), batch.num_lines)
        token_ids = self._answers_at(rows[lines], _ahead(batch.num_lines))
        repeats = 1 + drafts
        new_tokens = np.repeat(np.where(drafts > 0, 1, batch.num_tokens), repeats)
        context = np.repeat(context, repeats) + _ahead(repeats)
        self._computed[rows] += np.where(drafts > 0, 0, batch.num_tokens)
        return StepWork(new_tokens.astype(np.int32), context, lines, token_ids)

    def yielded(
        self,
        rows: NDArray[np.int32],
        lines: NDArray[np.intp],
        token_ids: NDArray[np.int64],
        drafts: Drafts,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the tokens of a step with drafts, and how many each row yields; the rows advance
        by them. `lines`, `token_ids`: of its `StepWork`."""
        tokens = iter(token_ids.tolist())
        ids = iter(drafts.token_ids.tolist())
        num_lines = np.bincount(lines, minlength=len(rows)).tolist()
        yielded: list[int] = []
        counts: list[int] = []
        for row, num_drafts, count in zip(
            rows.tolist(), drafts.counts.tolist(), num_lines, strict=True
        ):
            of_row = [next(tokens) for _ in range(count)]
            guesses = [next(ids) for _ in range(num_drafts)]
            accepted = next(
                (
                    place
                    for place, guess in enumerate(guesses)
                    if not self._accepts(row, place, guess, of_row[place])
                ),
                num_drafts,
            )
            kept = of_row[: 1 + accepted]
            yielded += kept
            counts.append(len(kept))
            self._position[row] += len(kept)
            self._computed[row] += len(kept) if num_drafts else 0
        return np.array(yielded, np.int64), np.array(counts, np.int32)

    def _next_tokens(self, batch: Batch) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return the rows of a batch without drafts that yield a token, by their index in it, and
        the tokens of all rows, -1 for none. Advances these rows."""
        rows = batch.rows
        lines = batch.yields_token.nonzero()[0]
        if len(lines) == len(rows):
            token_ids = self._answers_at(rows)
            self._position[rows] += 1
            return lines, token_ids
        token_ids = np.full(len(rows), -1, np.int64)
        token_ids[lines] = self._answers_at(rows[lines])
        self._position[rows[lines]] += 1
        return lines, token_ids

    def _answers_at(
        self, rows: NDArray[np.int32], ahead: NDArray[np.int64] | int = 0
    ) -> NDArray[np.int64]:
        """Return the tokens of the answers of `rows`, `ahead` of their next one."""
        at = np.minimum(self._position[rows] + ahead, self._last[rows])
        tokens: NDArray[np.int64] = self._answers[rows, at]
        return tokens

    def _accepts(self, row: int, place: int, draft: int, token: int) -> bool:
        """Return True if a draft is right: by chance if it is the simulated drafter's, which
        depends on its position in the answer."""
        if draft >= 0:
            return draft == token
        odds = self._odds[row]
        return (
            chance(self._seed, int(self._position[row]) + place, self._streams[row])
            < odds[min(place, len(odds) - 1)]
        )


def _ahead(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return 0, 1, … for each of `counts`, one after the other."""
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(
        np.cumsum(counts) - counts, counts
    )


def allowed(masks: Masks, tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """Return the tokens of all lines; the next allowed id for one that its mask forbids."""
    found = tokens.copy()
    masked = tokens[masks.lines]
    bits = masks.words[np.arange(len(masked)), masked >> 5] >> (masked & 31).astype(
        np.uint32
    ) & np.uint32(1)
    for index in np.flatnonzero(bits == 0).tolist():
        found[masks.lines[index]] = next_allowed(int(masked[index]), masks.words[index], vocab_size)
    return found
