"""`SamplerGraphs`: checks of sampling in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dovetail.api.sampler import Capture, RowSampling, SampledTokens, SampleInputs, TopLogprobs
from dovetail.testing.checks import Untried, check, require
from dovetail.testing.suites.sampler_bench import Bench, Row
from dovetail.testing.suites.sampler_rows import VOCAB, mixed_rows, rows_with_long_words
from dovetail.testing.suites.sampler_subject import SamplerSubject, near, said


class SamplerGraphs(SamplerSubject):
    """Checks that `sample` returns the same with a capture as without."""

    @check("sampler.captured", since="1.0", capability="cuda_graph")
    def test_captured(self) -> None:
        """`sample` with `TOKENS` returns the tokens that it does without a capture if `capture_for`
        returns `TOKENS`, and padding rows (`max_rows`) get some id of the vocabulary and change
        nothing."""
        bench, rows = self.capturable(mixed_rows(), Capture.TOKENS)
        require(rows, "capture_for() returned TOKENS for no row, not even plain ones")
        _require_captured(bench, rows, Capture.TOKENS)

    @check("sampler.capturable", since="1.0", capability="cuda_graph")
    def test_capturable(self) -> None:
        """`capture_for` returns no capture that doesn't fully support what a row requests:
        logprobs, rules or penalties. One such row among others is enough."""
        more: tuple[dict[str, Any], ...] = (
            {"logit_bias": ((0, 9.0),)},
            {"bad_words": ((1,),)},
            {"repetition_penalty": 8.0},
            {"presence_penalty": 2.0},
            {"frequency_penalty": 2.0},
            {"allowed_token_ids": (0,)},
            {"min_tokens": 9, "stop_token_ids": (1,)},
            {"logprobs": 0},
        )
        logits = [0.0, 3.0, 2.5]
        plain = RowSampling(temperature=0.0)
        for fields in more:
            rows = [
                Row(logits, sampling, (0,), (1, 1))
                for sampling in (plain, replace(plain, **fields), plain)
            ]
            bench = self.bench(rows)
            if (capture := bench.capture()) is not None:
                _require_same(
                    rows,
                    bench.captured(capture),
                    bench.sample(),
                    f"capture_for() said {capture.name} to {fields}: ",
                )

    @check("sampler.captured_again", since="1.0", capability="cuda_graph")
    def test_captured_again(self) -> None:
        """`sample` with `TOKENS`, called again, returns the tokens that it does without a capture
        at that time: for the same rows, after `update`, after the history grew, and for tied
        logits."""
        bench, rows = self.capturable(mixed_rows(), Capture.TOKENS)
        if not rows:
            raise Untried("cuda_graph", f"capture_for() says TOKENS to no rows on {self.place}")
        _require_captured_again(bench, rows, Capture.TOKENS)

    @check("sampler.fully_captured_again", since="1.0", capability="full_graph")
    def test_fully_captured_again(self) -> None:
        """`sample` with `FULL`, called again, returns all that it does without a capture at that
        time, as in `sampler.captured_again`; also where rows exchange their numbers of
        log-probabilities, and rules, and where one more token completes or undoes words of several
        tokens."""
        for some in (
            [row for asked in (None, 0, 3) for row in _asking(mixed_rows()[::2], asked)],
            rows_with_long_words(),
        ):
            bench, rows = self.fully_capturable(some)
            _require_captured_again(bench, rows, Capture.FULL)

    @check("sampler.graph", since="1.0", capability="cuda_graph")
    def test_graph(self) -> None:
        """A captured graph replays for other rows and requests: parameters are read where `update`
        stored them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")
        bench, rows = self.capturable(mixed_rows(), Capture.TOKENS)
        self.replay(
            bench,
            rows,
            [replace(row, sampling=replace(row.sampling, seed=9)) for row in rows],
            Capture.TOKENS,
        )

    @check("sampler.fully_captured", since="1.0", capability="full_graph")
    def test_fully_captured(self) -> None:
        """`sample` with `FULL` returns all that it does without a capture if `capture_for` returns
        one: tokens, and the log-probabilities of each row that requests them, with at least as many
        columns as requested. Padding rows (`max_rows`) get some id of the vocabulary and change
        nothing."""
        bench, rows = self.fully_capturable(
            [row for asked in (None, 0, 3, 50) for row in _asking(mixed_rows(), asked)]
        )
        _require_captured(bench, rows, Capture.FULL)

    @check("sampler.full_graph", since="1.0", capability="full_graph")
    def test_full_graph(self) -> None:
        """A graph of `FULL` also replays for other requests: rules, penalties, and the number of
        log-probabilities are read where `update` stored them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("full_graph", f"the suite runs on {self.place}")
        bench, rows = self.fully_capturable(_asking(mixed_rows(), 2))
        others = [
            replace(
                row,
                sampling=replace(row.sampling, seed=9, logit_bias=((4, 30.0),), logprobs=index % 3),
            )
            for index, row in enumerate(rows)
        ]
        self.replay(bench, rows, others, Capture.FULL)

    def capturable(self, rows: Sequence[Row], *captures: Capture) -> tuple[Bench, list[Row]]:
        """Return a bench of those `rows` for which `capture_for` returns one of `captures`, and
        these rows; a bench of all rows if there are none."""
        bench = self.bench(rows)
        some = [
            row
            for place, row in zip(bench.places, rows, strict=True)
            if bench.sampler.capture_for(np.array([place])) in captures
        ]
        return self.bench(some or rows), some

    def fully_capturable(
        self, rows: Sequence[Row], capability: str = "full_graph"
    ) -> tuple[Bench, list[Row]]:
        """Return a bench of those `rows` that can be captured with `FULL`, and these rows."""
        bench, some = self.capturable(rows, *Capture)
        if bench.sampler.capture_for(bench.host_rows) is not Capture.FULL:
            raise Untried(capability, f"capture_for() says FULL to no rows on {self.place}")
        return bench, some

    def replay(
        self, bench: Bench, rows: Sequence[Row], others: Sequence[Row], capture: Capture
    ) -> None:
        """Record sampling for `rows`, and require that its replay for `others` in their places
        returns what launched sampling does."""
        bench.captured(capture)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        logits = bench.logits.clone()
        with torch.cuda.graph(graph):
            out = bench.sampler.sample(
                SampleInputs(logits=logits, lines=bench.lines, capture=capture)
            )
        bench.update(bench.places, bench.places, [row.sampling for row in others])
        logits.copy_(bench.logits)
        graph.replay()
        _require_same(others, out, bench.sample(), "replayed for other requests, ")


def _require_captured(bench: Bench, rows: Sequence[Row], capture: Capture) -> None:
    """Require the results of launched sampling, also with padding, which gets ids of the
    vocabulary."""
    expected = bench.sample()
    _require_same(rows, bench.captured(capture), expected)
    padded = bench.captured(capture, [*bench.places, bench.max_rows, bench.max_rows])
    _require_same(rows, padded, expected, "followed by padding, ")
    among = bench.captured(
        capture, [row for place in bench.places for row in (bench.max_rows, place)]
    )
    of = among.logprobs
    own = slice(1, None, 2)
    own_logprobs = (
        None if of is None else TopLogprobs(of.token_ids[own], of.logprobs[own], of.ranks[own])
    )
    _require_same(
        rows,
        SampledTokens(among.token_ids[own], own_logprobs),
        expected,
        "with padding before each row, ",
    )
    ids = [*padded.token_ids[len(rows) :].tolist(), *among.token_ids[::2].tolist()]
    require(
        all(0 <= token < VOCAB for token in ids),
        f"padding rows got {ids}, which isn't in the vocabulary",
    )


def _require_captured_again(bench: Bench, rows: Sequence[Row], capture: Capture) -> None:
    """Sample with the `capture` again each time that something has changed, and require what
    launched sampling gives then."""
    bench.captured(capture)
    _require_same(rows, bench.captured(capture), bench.sample(), "called again, ")
    others = [
        replace(row, sampling=before.sampling)
        for row, before in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    bench.update(bench.places, bench.places, [row.sampling for row in others])
    _require_same(others, bench.captured(capture), bench.sample(), "called again after update(), ")
    for place, row in zip(bench.places, others, strict=True):
        bench.tell(place, row.prompt, (*row.output, 1))
    _require_same(
        others,
        bench.captured(capture),
        bench.sample(),
        "called again with one more token in each row, ",
    )
    bench.logits = bench.logits.round()  # the columns of tied log-probabilities may have any order
    _require_same(
        _asking(others, None),
        bench.captured(capture),
        bench.sample(),
        "called again with tied logits, ",
    )


def _asking(rows: Sequence[Row], logprobs: int | None) -> list[Row]:
    return [replace(row, sampling=replace(row.sampling, logprobs=logprobs)) for row in rows]


def _require_same(
    rows: Sequence[Row], captured: SampledTokens, sampled: SampledTokens, when: str = ""
) -> None:
    """Require the same token of each row, and equal log-probabilities, as many as the row
    requests."""
    tokens = captured.token_ids[: len(rows)].tolist()
    expected = sampled.token_ids.tolist()
    require(tokens == expected, f"{when}sample() gave {expected}, with a capture {tokens}")
    for place, row in enumerate(rows):
        if row.sampling.logprobs is None:
            continue
        ours = captured.logprobs
        theirs = sampled.logprobs
        require(
            ours is not None and theirs is not None,
            f"{when}{said(row.sampling)}: no log-probabilities came",
        )
        columns = slice(1 + min(row.sampling.logprobs, VOCAB))
        same = (
            ours.token_ids[place, columns].tolist() == theirs.token_ids[place, columns].tolist()  # type: ignore[union-attr]
            and ours.ranks[place] == theirs.ranks[place]  # type: ignore[union-attr]
            and near(
                ours.logprobs[place, columns].cpu(),  # type: ignore[union-attr]
                theirs.logprobs[place, columns].double().cpu(),  # type: ignore[union-attr]
            )
        )
        require(
            same,
            f"{when}{said(row.sampling)}: with a capture, the log-probabilities aren't those "
            f"without",
        )
