"""The sampler: it turns logits into token ids, each row by its own parameters. It uses float64 and plain torch, so that it is easy to change."""

from collections.abc import Collection, Sequence

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

NEVER = -torch.inf
LEAST = torch.finfo(torch.float64).min
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class AcmeSampler(Sampler):
    """A sampler with all parameters of `RowSampling`, in the order given there. It draws the token with the largest sum of log-probability and Gumbel
    noise."""

    capabilities = SamplerCapabilities(logprobs=True, drafts=True)

    def prepare(self, max_rows: int) -> None:
        self._sampling = [RowSampling()] * max_rows

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        for one in added:
            self._sampling[one.row] = one.sampling

    @torch.inference_mode()
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        logits, lines, host_rows = inputs.logits, inputs.lines, inputs.host_rows
        assert host_rows is not None  # without `cuda_graph` nothing is captured
        samplings = [self._sampling[row] for row in host_rows.tolist()]
        lengths = self.context.history.lengths(lines)  # [n] tokens before each line
        scores = logits.double()  # [n, vocab]
        for index, row in enumerate(host_rows.tolist()):
            if has_rules(samplings[index]):
                scores[index] = ruled(scores[index], samplings[index], *self._tokens(row, int(lengths[index])))
        token_ids = self._draw(scores, lengths - self.context.history.prompt_lens[lines.rows], samplings)
        most = max((s.logprobs for s in samplings if s.logprobs is not None), default=None)
        return SampledTokens(token_ids, None if most is None else top_logprobs(logits, token_ids, most))

    def _draw(self, scores: torch.Tensor, positions: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
        """Draw token ids [n] for output positions [n] from scores [n, vocab]."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=scores.device)[:, None]  # [n, 1]

        scores = scores.nan_to_num(nan=NEVER, posinf=-LEAST, neginf=NEVER)
        temperature = column([s.temperature for s in samplings])
        scaled = (scores - scores.amax(1, keepdim=True).clamp(min=LEAST)) / temperature.where(temperature > 0, 1.0).clamp(min=1e-300)
        perturbed = scaled + self._noise(positions, samplings)
        if any(s.top_k or s.top_p < 1 or s.min_p for s in samplings):
            top_k = column([s.top_k or scores.shape[1] for s in samplings])
            kept = passing(scaled, top_k, column([s.top_p for s in samplings]), column([s.min_p for s in samplings]))
            perturbed.masked_fill_(~kept, NEVER)
        return torch.where(temperature > 0, perturbed, scaled).argmax(1)  # of equal ones the first

    def _noise(self, positions: torch.Tensor, samplings: Sequence[RowSampling]) -> torch.Tensor:
        """Return noise [n, vocab] for output positions [n]."""
        seeds = np.array([s.seed % 2**64 for s in samplings], np.uint64)
        return torch.from_numpy(gumbel(seeds, positions.cpu().numpy().astype(np.uint64), self.context.vocab_size)).to(positions.device)

    def _tokens(self, row: int, length: int) -> tuple[list[int], list[int]]:
        """Return the first `length` tokens of the row, by prompt and output."""
        history = self.context.history
        known = history.token_ids[row, :length].tolist()
        prompt_len = int(history.prompt_lens[row])
        return known[:prompt_len], known[prompt_len:]


def passing(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return which tokens of scaled [n, vocab], at most 0, pass the filters [n, 1], each applied to those that the one before kept. The likeliest
    always passes."""
    scaled, tokens = scaled.sort(dim=1, descending=True, stable=True)  # of equal ones the lowest id first
    weights = scaled.exp()
    kept = torch.arange(scaled.shape[1], device=scaled.device) < top_k
    shares = weights * kept
    kept &= (shares.cumsum(1) - shares < top_p * shares.sum(1, keepdim=True)) | (top_p >= 1)
    kept &= weights >= min_p
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, tokens, kept)


def has_rules(sampling: RowSampling) -> bool:
    """Return True if `ruled` would change anything."""
    restricts = sampling.logit_bias or sampling.allowed_token_ids is not None or sampling.bad_words or sampling.min_tokens
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return bool(restricts) or penalties != (1, 0, 0)


def ruled(logits: torch.Tensor, sampling: RowSampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return logits [vocab] of one row with biases, restrictions and penalties applied; at least one token can always be sampled."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias:
        if token < len(logits):
            logits[token] += bias
    if sampling.allowed_token_ids is not None:
        allowed = index(sampling.allowed_token_ids, logits)
        kept = logits[allowed].clamp(min=LEAST)
        logits = torch.full_like(logits, NEVER).index_put((allowed,), kept)
    before = (*prompt, *output)
    words = [word for word in sampling.bad_words if 0 < len(word) <= len(before) + 1]
    bans = [word[-1] for word in words if before[len(before) - len(word) + 1 :] == word[:-1]]
    if len(output) < sampling.min_tokens:
        bans += sampling.stop_token_ids
    banned = logits.index_fill(0, index(bans, logits), NEVER)
    logits = logits if bool((banned == NEVER).all()) else banned
    return penalised(logits, sampling, {*before}, output)


def penalised(logits: torch.Tensor, sampling: RowSampling, seen: set[int], output: list[int]) -> torch.Tensor:
    """Lower the logits of earlier tokens: those in prompt and output (repetition), those in the output (presence), by their counts (frequency)."""
    known = index(seen, logits)
    values, penalty = logits[known], sampling.repetition_penalty
    logits[known] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.bincount(index(output, logits), minlength=len(logits))
    return logits - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[np.uint64], vocab_size: int) -> NDArray[np.float64]:
    """Return noise [n, vocab_size], each number a hash of seed [n], output position [n] and token id: batches and preemptions change no tokens."""
    streams = mixed(mixed(seeds + GOLDEN) + positions * GOLDEN)  # [n]
    ids = mixed(np.arange(1, vocab_size + 1, dtype=np.uint64) * GOLDEN)  # [vocab]
    bits = mixed(streams[:, None] ^ ids) >> np.uint64(11)  # [n, vocab], 53 bits
    negative = np.log1p(-(bits * 2.0**-53 + 2.0**-54))  # exact near 0, which gives the large noise
    noise: NDArray[np.float64] = -np.log(-negative)
    return noise


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return x through the mixing function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


def index(token_ids: Collection[int], logits: torch.Tensor) -> torch.Tensor:
    """Return token ids as an index, [n] int64, without ids past the vocabulary."""
    return torch.tensor([token for token in token_ids if token < len(logits)], dtype=torch.int64, device=logits.device)
