"""Right samplers and logits processors in styles that a suite might take for wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import LogitsProcessor, LogitsProcessorContext, ProcessedRow
from dovetail.api.sampler import (
    Lines,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    SamplerCapabilities,
)
from dovetail.nn.logprobs import top_logprobs
from dovetail_samplers.default import DefaultSampler

Scores = NDArray[np.float64]  # [vocab_size]
Rule = Callable[[Scores, Sequence[int], int], Scores]  # of scores, history and length of the prompt
LEAST = np.finfo(np.float64).min


class OneBuffer(DefaultSampler):
    """Returns views of one array, which the next call overwrites, and ruins the logits."""

    capabilities = replace(DefaultSampler.capabilities, cuda_graph=GraphSupport.NONE)

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        self.buffer = np.empty((max_rows * (1 + self.context.max_drafts), 2), np.int64)

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        result = super().sample(inputs)
        ids = self.buffer[: len(result.token_ids), 1]
        ids[:] = result.token_ids.cpu().numpy()
        inputs.logits.fill_(torch.nan)
        return replace(result, token_ids=torch.from_numpy(ids).to(result.token_ids.device))


class InClosures(Sampler):
    """Keeps the rules of a row in closures, works line by line with numpy, and makes a new
    generator of noise for each token."""

    capabilities = SamplerCapabilities(logprobs=True, drafts=True)

    def prepare(self, max_rows: int) -> None:
        self.draws = [drawing(RowSampling())] * max_rows
        self.logprobs: dict[int, int] = {}

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        for row in removed:
            self.logprobs.pop(row, None)
        for one in added:
            self.draws[one.row] = drawing(one.sampling)
            self.logprobs.pop(one.row, None)
            if one.sampling.logprobs is not None:
                self.logprobs[one.row] = one.sampling.logprobs

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        rows = [] if inputs.host_rows is None else inputs.host_rows.tolist()
        history = self.context.history
        lengths = history.lengths(inputs.lines).tolist()
        ids = [
            self.draws[row](
                logits.double().cpu().numpy(),
                history.token_ids[row, :length].tolist(),
                int(history.prompt_lens[row]),
            )
            for row, length, logits in zip(rows, lengths, inputs.logits, strict=True)
        ]
        tokens = torch.tensor(ids, dtype=torch.int64, device=inputs.logits.device)
        most = max((self.logprobs.get(row, -1) for row in rows), default=-1)
        return SampledTokens(
            tokens, None if most < 0 else top_logprobs(inputs.logits, tokens, most)
        )


def drawing(sampling: RowSampling) -> Callable[[Scores, Sequence[int], int], int]:
    """Return a function that draws a token from logits, a history and the length of its prompt."""
    rules = list(rules_of(sampling))

    @np.errstate(all="ignore")
    def draw(scores: Scores, tokens: Sequence[int], prompt: int) -> int:
        for rule in rules:
            scores = rule(scores, tokens, prompt)
        scores = np.where(np.isnan(scores), -np.inf, np.minimum(scores, -LEAST))
        if not sampling.temperature:
            return int(scores.argmax())
        scaled = (scores - max(scores.max(), LEAST)) / max(sampling.temperature, 1e-300)
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order])
        weights[sampling.top_k or len(weights) :] = 0
        if sampling.top_p < 1:
            before = weights.cumsum() - weights
            weights[before >= sampling.top_p * weights.sum()] = 0
        kept = (weights > 0) & (weights >= sampling.min_p)
        kept[0] = True
        key = np.array([sampling.seed % 2**64, len(tokens) - prompt], np.uint64)
        noise = np.random.Generator(np.random.Philox(key=key)).gumbel(size=len(scores))
        return int(order[np.where(kept, scaled[order] + noise[order], -np.inf).argmax()])

    return draw


def rules_of(sampling: RowSampling) -> Iterator[Rule]:
    """Yield the rules of a request, in the order in which they are applied."""

    def bias(scores: Scores, tokens: Sequence[int], prompt: int) -> Scores:
        for token, value in sampling.logit_bias:
            scores[token : token + 1] += value
        return scores

    def allow(scores: Scores, tokens: Sequence[int], prompt: int) -> Scores:
        allowed = [id for id in sampling.allowed_token_ids or () if id < len(scores)]
        only = np.full_like(scores, -np.inf)
        only[allowed] = np.maximum(scores[allowed], LEAST)
        return only

    def ban(scores: Scores, tokens: Sequence[int], prompt: int) -> Scores:
        left = scores.copy()
        for *first, last in sampling.bad_words:
            if list(tokens[max(0, len(tokens) - len(first)) :]) == first or not first:
                left[last : last + 1] = -np.inf
        if len(tokens) - prompt < sampling.min_tokens:
            for token in sampling.stop_token_ids:
                left[token : token + 1] = -np.inf
        return scores if (left == -np.inf).all() else left

    def penalise(scores: Scores, tokens: Sequence[int], prompt: int) -> Scores:
        known = [id for id in {*tokens} if id < len(scores)]
        values = scores[known]
        penalty = sampling.repetition_penalty
        scores[known] = np.where(values > 0, values / penalty, values * penalty)
        output = [id for id in tokens[prompt:] if id < len(scores)]
        counts = np.bincount(np.array(output, np.int64), minlength=len(scores))
        scores -= counts * sampling.frequency_penalty
        return scores - (counts > 0) * sampling.presence_penalty

    if sampling.logit_bias:
        yield bias
    if sampling.allowed_token_ids is not None:
        yield allow
    if sampling.bad_words or sampling.min_tokens:
        yield ban
    penalties = (
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    if penalties != (1, 0, 0):
        yield penalise


class Lowering(BaseModel):
    """Arguments of the processors here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, strict=True)


class Slotted(LogitsProcessor):
    """Has slots, keeps numpy's numbers in a dict by row, and changes the logits number by
    number. Lowers the last token."""

    __slots__ = ("amounts",)
    Arguments = Lowering

    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.amounts = dict[np.int64, np.float32]()

    def prepare(self, max_rows: int) -> None:
        self.amounts.clear()

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.amounts.pop(np.int64(row), None)
        for one in added:
            arguments: Any = one.arguments
            self.amounts[np.int64(one.row)] = np.float32(arguments.by)

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        lengths = self.context.history.lengths(lines).cpu().numpy()
        for line, row in enumerate(lines.rows.cpu().numpy()):
            if row in self.amounts:
                last = int(self.context.history.token_ids[row, lengths[line] - 1])
                if last < logits.shape[1]:
                    logits[line, last] -= float(self.amounts[row])


class OnTheHost(Slotted):
    """Computes on a copy in the host's memory, and writes back the lines that ask."""

    __slots__ = ()

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        asking = [at for at, row in enumerate(lines.rows.tolist()) if row in self.amounts]
        index = torch.tensor(asking, dtype=torch.int64, device=logits.device)
        copy = logits.index_select(0, index).cpu().clone()
        super().apply(copy, lines.take(index))
        logits.index_copy_(0, index, copy.to(logits.device))
