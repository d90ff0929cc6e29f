"""`SamplerGraphs`: checks of sampling in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dovetail.api.sampler import RowSampling, SampledTokens
from dovetail.testing.checks import Untried, check, require
from dovetail.testing.suites.sampler_bench import Bench, Row
from dovetail.testing.suites.sampler_rows import VOCAB, mixed_rows
from dovetail.testing.suites.sampler_subject import SamplerSubject, near, said


class SamplerGraphs(SamplerSubject):
    """Checks that captured sampling returns the same as `sample`."""

    @check("sampler.captured", since="0.1", capability="cuda_graph")
    def test_captured(self) -> None:
        """`sample_captured` returns the tokens of `sample` if `capturable` is True, and padding rows (`max_rows`) get some id of the vocabulary and
        change nothing."""
        bench = self.bench(mixed_rows())
        places = [place for place in bench.places if bench.sampler.capturable(np.array([place]))]
        require(places, "capturable() said no to every row, plain ones too")
        sampled, captured = bench.tokens(places), bench.captured(places)
        require(sampled == captured, f"sample() gave {sampled}, sample_captured() {captured}")
        padded = bench.captured([*places, bench.max_rows, bench.max_rows])
        require(padded[:-2] == sampled, "padding rows changed the tokens of others")
        require(all(0 <= token < VOCAB for token in padded), f"padding rows got {padded[-2:]}, which isn't in the vocabulary")

    @check("sampler.capturable", since="0.1", capability="cuda_graph")
    def test_capturable(self) -> None:
        """`capturable` returns False for rows that `sample_captured` doesn't fully support: logprobs, rules or penalties. One such row among others
        is enough."""
        more: tuple[dict[str, Any], ...] = (
            {"logit_bias": ((0, 9.0),)},
            {"bad_words": ((1,),)},
            {"repetition_penalty": 8.0},
            {"presence_penalty": 2.0},
            {"frequency_penalty": 2.0},
            {"allowed_token_ids": (0,)},
            {"min_tokens": 9, "stop_token_ids": (1,)},
        )
        logits, plain = [0.0, 3.0, 2.5], RowSampling(temperature=0.0)
        for fields in more:
            bench = self.bench([Row(logits, plain, (0,), (1, 1)), Row(logits, replace(plain, **fields), (0,), (1, 1))])
            if bench.sampler.capturable(bench.host_rows):
                require(bench.captured() == bench.tokens(), f"capturable() said yes to {fields}, but sample_captured() leaves it out")
        bench = self.bench([Row(logits, plain), Row(logits, replace(plain, logprobs=0))])
        require(not bench.sampler.capturable(bench.host_rows), "capturable() said yes to a row that asks for logprobs, which a graph can't return")

    @check("sampler.graph", since="0.1", capability="cuda_graph")
    def test_graph(self) -> None:
        """A captured graph replays for other rows and requests: parameters are read where `update` stored them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")
        rows = [row for row in mixed_rows() if self.bench([row]).sampler.capturable(np.array([0]))]
        bench = self.bench(rows)
        index = torch.tensor(bench.places, device=self.place)
        bench.sampler.sample_captured(bench.logits.clone(), index)
        torch.cuda.synchronize()
        graph, logits = torch.cuda.CUDAGraph(), bench.logits.clone()
        with torch.cuda.graph(graph):
            out = bench.sampler.sample_captured(logits, index)
        bench.sampler.update(bench.places, [(place, replace(row.sampling, seed=9)) for place, row in zip(bench.places, rows, strict=True)])
        logits.copy_(bench.logits)
        graph.replay()
        require(out.tolist() == bench.tokens(), f"replayed for other seeds: {out.tolist()}, sample() gives {bench.tokens()}")

    @check("sampler.fully_captured", since="0.1", capability="cuda_graph_full")
    def test_fully_captured(self) -> None:
        """`sample_fully_captured` returns all that `sample` does if `fully_capturable` is True: tokens, and the log-probabilities of each row that
        requests them, with at least as many columns as requested. Padding rows (`max_rows`) get some id of the vocabulary and change nothing."""
        bench, rows = self.fully_capturable([row for asked in (None, 0, 3, 50) for row in _asking(mixed_rows(), asked)])
        expected, captured = bench.sample(), bench.fully_captured()
        _require_same(rows, captured, expected)
        padded = bench.fully_captured([*bench.places, bench.max_rows, bench.max_rows])
        _require_same(rows, padded, expected, "followed by padding, ")
        ids = padded.token_ids[len(rows) :].tolist()
        require(all(0 <= token < VOCAB for token in ids), f"padding rows got {ids}, which isn't in the vocabulary")

    @check("sampler.full_graph", since="0.1", capability="cuda_graph_full")
    def test_full_graph(self) -> None:
        """A graph of `sample_fully_captured` also replays for other requests: rules, penalties, and the number of log-probabilities are read where
        `update` stored them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph_full", f"the suite runs on {self.place}")
        bench, rows = self.fully_capturable(_asking(mixed_rows(), 2))
        bench.fully_captured()
        torch.cuda.synchronize()
        graph, logits = torch.cuda.CUDAGraph(), bench.logits.clone()
        with torch.cuda.graph(graph):
            out = bench.sampler.sample_fully_captured(logits, bench.rows)
        others = [replace(row, sampling=replace(row.sampling, seed=9, logit_bias=((4, 30.0),), logprobs=index % 3)) for index, row in enumerate(rows)]
        bench.sampler.update(bench.places, [(place, row.sampling) for place, row in zip(bench.places, others, strict=True)])
        logits.copy_(bench.logits)
        graph.replay()
        _require_same(others, out, bench.sample(), "replayed for other requests, ")

    def fully_capturable(self, rows: Sequence[Row]) -> tuple[Bench, list[Row]]:
        """Return a bench of those of `rows` that may be captured in full, and these rows."""
        bench = self.bench(rows)
        some = [row for place, row in zip(bench.places, rows, strict=True) if bench.sampler.fully_capturable(np.array([place]))]
        if not some:
            raise Untried("cuda_graph_full", f"fully_capturable() says no to every row on {self.place}")
        return self.bench(some), some


def _asking(rows: Sequence[Row], logprobs: int | None) -> list[Row]:
    return [replace(row, sampling=replace(row.sampling, logprobs=logprobs)) for row in rows]


def _require_same(rows: Sequence[Row], captured: SampledTokens, sampled: SampledTokens, when: str = "") -> None:
    """Require the same token of each row, and equal log-probabilities, as many as the row requests."""
    tokens, expected = captured.token_ids[: len(rows)].tolist(), sampled.token_ids.tolist()
    require(tokens == expected, f"{when}sample() gave {expected}, sample_fully_captured() {tokens}")
    for place, row in enumerate(rows):
        if row.sampling.logprobs is None:
            continue
        ours, theirs = captured.logprobs, sampled.logprobs
        require(ours is not None and theirs is not None, f"{when}{said(row.sampling)}: no log-probabilities came")
        columns = slice(1 + min(row.sampling.logprobs, VOCAB))
        same = (
            ours.token_ids[place, columns].tolist() == theirs.token_ids[place, columns].tolist()  # type: ignore[union-attr]
            and ours.ranks[place] == theirs.ranks[place]  # type: ignore[union-attr]
            and near(ours.logprobs[place, columns].cpu(), theirs.logprobs[place, columns].double().cpu())  # type: ignore[union-attr]
        )
        require(same, f"{when}{said(row.sampling)}: the log-probabilities of sample_fully_captured() aren't those of sample()")
