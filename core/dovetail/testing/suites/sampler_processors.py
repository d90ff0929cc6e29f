"""`SamplerProcessors`: checks of samplers that take a `process`, and of the form of
log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dovetail.api.sampler import (
    Capture,
    RowSampling,
    SampledTokens,
    SampleInputs,
    TopLogprobs,
)
from dovetail.testing.checks import check, require
from dovetail.testing.suites.sampler_bench import Bench, Row
from dovetail.testing.suites.sampler_graphs import SamplerGraphs
from dovetail.testing.suites.sampler_oracle import changed_logits
from dovetail.testing.suites.sampler_rows import VOCAB, mixed_rows, random_rows, some_tokens
from dovetail.testing.suites.sampler_subject import near, said

MANY_LINES = 150
NEVER = -1e30  # a logit below it can't be sampled
CLOSE = 1e-4
ASKED = (0, 2, None)  # log-probabilities of the rows


class Process:
    """Notes the logits of each line, and leaves only the second most likely token of each."""

    def __init__(self, lines: int) -> None:
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(lines)]
        self.wrong = ""
        self.left = [0] * lines

    def __call__(self, logits: torch.Tensor, first: int) -> None:
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            self.wrong = f"logits of {logits.dtype}, with strides {logits.stride()}"
        left = torch.topk(logits, 2).indices[:, 1:]
        for place, token in enumerate(left[:, 0].tolist(), first):
            self.seen[place].append(logits[place - first].double().cpu())
            self.left[place] = token
        kept = logits.gather(1, left)
        logits.fill_(-torch.inf).scatter_(1, left, kept)


def leave_second(logits: torch.Tensor, first: int) -> None:
    """Do as `Process` does, with operations that can be captured."""
    left = torch.topk(logits, 2).indices[:, 1:]
    kept = logits.gather(1, left)
    logits.fill_(-torch.inf).scatter_(1, left, kept)


def leave_own(logits: torch.Tensor, first: int) -> None:
    """Leave each line only the token whose id is the line's index."""
    lines = torch.arange(len(logits), device=logits.device)
    logits.fill_(-torch.inf)
    logits[lines, (first + lines) % logits.shape[1]] = 0.0


class SamplerProcessors(SamplerGraphs):
    """Checks of the logits that a `process` gets, and of sampling from the logits that it leaves."""

    @check("sampler.processed", since="1.0", capability="processors")
    def test_processed(self) -> None:
        """`process` wasn't called exactly once for each line; or its logits weren't contiguous
        float32, after rules and penalties and before temperature; or a token was sampled that it
        had left no chance. Apply rules and penalties, call it, then sample from what it left."""
        for rows in (mixed_rows(), self._ruled()):
            bench = self.bench(rows)
            process = Process(len(rows))
            tokens = _sampled(bench, process).token_ids.tolist()
            require(not process.wrong, f"process was given {process.wrong}")
            for place, row in enumerate(rows):
                _require_seen(row, process.seen[place])
                require(
                    tokens[place] == process.left[place],
                    f"{said(row.sampling)}: process left only token {process.left[place]}, and "
                    f"{tokens[place]} was sampled",
                )

    @check("sampler.processed_lines", since="1.1", capability="processors")
    def test_processed_lines(self) -> None:
        """In a batch of over a hundred lines `process` was told another index for some logits, so
        that a line was sampled from what was left for another. `first` is the index of the first
        line of the logits that it is given, in whatever parts."""
        rows = [
            Row([0.0] * MANY_LINES, RowSampling(temperature=0.0), (0,)) for _ in range(MANY_LINES)
        ]
        tokens = _sampled(self.bench(rows), leave_own).token_ids.tolist()
        for place, token in enumerate(tokens):
            require(
                token == place,
                f"of {MANY_LINES} lines, process left token {place} for line {place}, and {token} "
                f"was sampled",
            )

    @check("sampler.processed_logprobs", since="1.0", capability="processed_logprobs")
    def test_processed_logprobs(self) -> None:
        """With a `process`, log-probabilities aren't those of the logits that the model gave. Keep
        a copy before anything changes them."""
        rows = [
            replace(row, sampling=replace(row.sampling, logprobs=ASKED[index % len(ASKED)]))
            for index, row in enumerate(mixed_rows())
        ]
        bench = self.bench(rows)
        found = _sampled(bench, leave_second)
        tops = found.logprobs
        require(tops is not None, "rows request log-probabilities, and none came")
        exact = torch.log_softmax(bench.logits.double(), dim=-1).cpu()
        for place, row in enumerate(rows):
            if row.sampling.logprobs is not None:
                _require_raw(row, tops, place, exact[place], int(found.token_ids[place]))

    @check("sampler.fully_processed", since="1.0", capability="full_process")
    def test_fully_processed(self) -> None:
        """`sample` with `Capture.FULL` and a `process` returns other tokens than launched with the
        same `process`, which changes logits in place, after rules and penalties."""
        bench, rows = self.fully_capturable(mixed_rows(), "full_process")
        expected = _sampled(bench, leave_second).token_ids.tolist()
        tokens = _sampled(bench, leave_second, Capture.FULL).token_ids.tolist()
        for row, token, right in zip(rows, tokens, expected, strict=True):
            require(
                token == right,
                f"{said(row.sampling)}: with FULL and a process, token {token} was sampled, "
                f"launched {right}",
            )

    @check("sampler.logprobs_form", since="1.0", capability="logprobs")
    def test_logprobs_have_their_form(self) -> None:
        """`TopLogprobs` must be tensors of the ids' device: `token_ids` [n, 1 + k] int64,
        `logprobs` [n, 1 + k] float32, `ranks` [n] int64, where k is at least the largest number
        requested."""
        for asked in ((0, None, 0), (3, None, 1), (None, VOCAB, 0)):
            rows = [
                replace(row, sampling=replace(row.sampling, logprobs=count))
                for row, count in zip(mixed_rows(), asked, strict=False)
            ]
            tops = self.bench(rows).sample().logprobs
            require(tops is not None, f"rows request {asked} log-probabilities, and none came")
            _require_form(tops, len(rows), max(count or 0 for count in asked))

    def _ruled(self) -> list[Row]:
        return random_rows(
            lambda rng: {
                "logit_bias": tuple((token, 2.0) for token in some_tokens(rng, 3)),
                "presence_penalty": 0.5,
                "repetition_penalty": 2.0,
            },
            20,
        )


def _sampled(bench: Bench, process: object, capture: Capture | None = None) -> SampledTokens:
    return bench.sampler.sample(
        SampleInputs(
            logits=bench.logits.clone(),
            lines=bench.lines,
            host_rows=bench.host_rows if capture is None else None,
            process=process,  # type: ignore[arg-type]
            capture=capture,
        )
    )


def _require_seen(row: Row, seen: list[torch.Tensor]) -> None:
    what = said(row.sampling)
    require(len(seen) == 1, f"{what}: process was called {len(seen)} times for its line")
    right = changed_logits(row.logits, row.sampling, row.prompt, (*row.output, *row.drafts))
    found = seen[0].numpy()
    open_ = right > NEVER
    same = ((found > NEVER) == open_).all() and np.allclose(
        found[open_], right[open_], rtol=CLOSE, atol=CLOSE
    )
    require(
        same,
        f"{what}: process was given {np.round(found[:8], 3).tolist()} …, but the logits after "
        f"rules and penalties are {np.round(right[:8], 3).tolist()} …",
    )


def _require_raw(
    row: Row, tops: TopLogprobs | None, place: int, exact: torch.Tensor, token: int
) -> None:
    assert tops is not None
    columns = slice(1 + min(row.sampling.logprobs or 0, VOCAB))
    ids = tops.token_ids[place, columns].cpu()
    what = f"{said(row.sampling)}, with a process: "
    require(int(ids[0]) == token, f"{what}column 0 is of token {int(ids[0])}, not of {token}")
    require(
        near(tops.logprobs[place, columns].cpu(), exact[ids]),
        f"{what}the log-probabilities of {ids.tolist()} are "
        f"{tops.logprobs[place, columns].tolist()}; of the model's logits, {exact[ids].tolist()}",
    )


def _require_form(tops: TopLogprobs | None, count: int, most: int) -> None:
    assert tops is not None
    forms = {
        "token_ids": (tops.token_ids, torch.int64),
        "logprobs": (tops.logprobs, torch.float32),
    }
    for name, (tensor, dtype) in forms.items():
        wide = tensor.dim() == 2 and tensor.shape[1] > most
        require(
            tensor.dtype == dtype and len(tensor) == count and wide,
            f"{name} is {tensor.dtype} {list(tensor.shape)} for {count} lines and {most} requested",
        )
    require(
        tops.ranks.dtype == torch.int64 and list(tops.ranks.shape) == [count],
        f"ranks is {tops.ranks.dtype} {list(tops.ranks.shape)} for {count} lines",
    )
