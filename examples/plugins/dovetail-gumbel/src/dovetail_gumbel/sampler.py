"""The sampler `gumbel`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from dovetail.api.sampler import (
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    SamplerCapabilities,
)
from dovetail.nn.logprobs import top_logprobs
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from dovetail_gumbel.noise import gumbel
from dovetail_gumbel.rules import LEAST, NEVER, Seen, has_rules, ruled

Rows = NDArray[np.int64]

RANK = "gumbel_rank"
PARAMETERS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),  # the vocabulary's size: all
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("rank", np.int64),
    ]
)


class GumbelArgs(BaseModel):
    """The `extra_args` of a request."""

    gumbel_rank: int = Field(0, ge=0, lt=2**31, strict=True)
    """Which of the samples without replacement the request takes, from 0. Beyond the last token
    that the filters leave, it is the last."""


class GumbelSampler(Sampler):
    capabilities = SamplerCapabilities(logprobs=True, extra_args_model=GumbelArgs, drafts=True)

    def prepare(self, max_rows: int) -> None:
        self._parameters = np.zeros(max_rows, PARAMETERS)
        self._logprobs = np.full(max_rows, -1)  # how many a row asks for; -1: none
        self._ruled: dict[int, RowSampling] = {}  # rows that have rules

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        for row in removed:
            self._ruled.pop(row, None)
        for one in added:
            row, sampling = one.row, one.sampling
            top_k = sampling.top_k or self.context.vocab_size
            rank = sampling.extra_args.get(RANK, 0)
            self._parameters[row] = (sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed % 2**64, rank)
            self._logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
            if has_rules(sampling):
                self._ruled[row] = sampling

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        logits, lines, host_rows = inputs.logits, inputs.lines, inputs.host_rows
        assert host_rows is not None  # without `cuda_graph` nothing is captured
        lengths = self.context.history.lengths(lines)  # [n] tokens before each line
        scores = logits.double()  # [n, vocab]
        for index, row in enumerate(host_rows.tolist()):
            if row in self._ruled:
                scores[index] = ruled(scores[index], self._ruled[row], self._seen(row, int(lengths[index])))
        token_ids = self._draw(scores, lengths - self.context.history.prompt_lens[lines.rows], self._parameters[host_rows])
        most = max(self._logprobs[host_rows].tolist(), default=-1)
        return SampledTokens(token_ids, None if most < 0 else top_logprobs(logits, token_ids, most))

    def _draw(self, scores: torch.Tensor, positions: torch.Tensor, parameters: NDArray[np.void]) -> torch.Tensor:
        """scores [n, vocab], output positions [n] -> token ids [n]."""
        scores = scores.nan_to_num(nan=NEVER, posinf=-LEAST, neginf=NEVER)
        temperature = self._column(parameters, "temperature")
        scaled = (scores - scores.amax(1, keepdim=True).clamp(min=LEAST)) / temperature.where(temperature > 0, 1.0).clamp(min=1e-300)
        kept = self._kept(scaled, parameters)
        perturbed = (scaled + self._noise(positions, parameters)).masked_fill_(~kept, NEVER)
        rank = torch.minimum(self._column(parameters, "rank"), kept.sum(1, keepdim=True) - 1)
        drawn = perturbed.topk(int(rank.max()) + 1, dim=1).indices.gather(1, rank) if len(rank) else rank
        return drawn.where(temperature > 0, scaled.argmax(1, keepdim=True)).squeeze(1)

    def _kept(self, scaled: torch.Tensor, parameters: NDArray[np.void]) -> torch.Tensor:
        """scaled [n, vocab], 0 at most -> which pass top-k, top-p and min-p, each over what the one
        before left. The likeliest always does."""
        if not ((parameters["top_k"] < scaled.shape[1]) | (parameters["top_p"] < 1) | (parameters["min_p"] > 0)).any():
            return torch.ones_like(scaled, dtype=torch.bool)
        # of equals the lowest id first
        scaled, tokens = scaled.sort(dim=1, descending=True, stable=True)
        weights = scaled.exp()
        kept = torch.arange(scaled.shape[1], device=scaled.device) < self._column(parameters, "top_k")
        shares = weights * kept
        top_p = self._column(parameters, "top_p")
        kept &= (shares.cumsum(1) - shares < top_p * shares.sum(1, keepdim=True)) | (top_p >= 1)
        kept &= weights >= self._column(parameters, "min_p")
        kept[:, 0] = True
        return torch.zeros_like(kept).scatter_(1, tokens, kept)

    def _noise(self, positions: torch.Tensor, parameters: NDArray[np.void]) -> torch.Tensor:
        """[n, vocab] for output positions [n]."""
        noise = gumbel(parameters["seed"], positions.cpu().numpy().astype(np.uint64), self.context.vocab_size)
        return torch.from_numpy(noise).to(positions.device)

    def _column(self, parameters: NDArray[np.void], name: str) -> torch.Tensor:
        """[n, 1]."""
        return torch.from_numpy(parameters[name].copy()).to(self.context.device)[:, None]

    def _seen(self, row: int, length: int) -> Seen:
        history = self.context.history
        tokens = history.token_ids[row, :length].tolist()
        prompt = int(history.prompt_lens[row])
        return Seen(tokens[:prompt], tokens[prompt:])
