"""Samplers with one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field

from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    Lines,
    Process,
    RowHistory,
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    SamplerCapabilities,
    TopLogprobs,
)
from dovetail.nn.logprobs import top_logprobs
from dovetail.testing.checks import Untried
from dovetail_samplers.default import CAPTURED_LOGPROBS, DefaultSampler
from dovetail_samplers.table import draw_plain
from tests.conformance.mutants import mutant


def changed(
    added: Sequence[SampledRow], change: Callable[[int, RowSampling], RowSampling]
) -> list[SampledRow]:
    """Return the rows with other parameters."""
    return [replace(one, sampling=change(one.row, one.sampling)) for one in added]


def by_row(added: Sequence[SampledRow]) -> dict[int, RowSampling]:
    return {one.row: one.sampling for one in added}


class ByMode(DefaultSampler):
    """Samples in one method without a capture, in another with one."""

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        if inputs.capture is not None:
            return self.captured(inputs.logits, inputs.lines, inputs.capture)
        assert inputs.host_rows is not None
        return self.launched(inputs.logits, inputs.lines, inputs.host_rows)

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        return super().sample(SampleInputs(logits=logits, lines=lines, host_rows=host_rows))

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        return super().sample(SampleInputs(logits=logits, lines=lines, capture=capture))


class Misread(ByMode):
    """Reads a request's parameters in its own way."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return sampling

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        super().update(removed, changed(added, self.read))


class WithHistory(ByMode):
    """Sees another history than the one that there is."""

    def told(self, history: RowHistory) -> RowHistory:
        return history

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        real = self.context
        self.context = replace(real, history=self.told(real.history))
        try:
            return super().launched(logits, lines, host_rows)
        finally:
            self.context = real


# ---- what is sampled


@mutant(caught_by="sampler.output")
class SortsTheRows(ByMode):
    """Samples in the order of rows, and forgets to put the result back."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        order = np.argsort(host_rows)
        return super().launched(
            logits[order], lines.take(torch.from_numpy(order)), host_rows[order]
        )


@mutant(caught_by="sampler.output")
class ReturnsInt32(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        return replace(result, token_ids=result.token_ids.int())


@mutant(caught_by="sampler.greedy")
class DrawsAtTemperatureZero(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, temperature=sampling.temperature or 1.0)


@mutant(caught_by="sampler.ties")
class TakesTheLastOfEquals(Misread):
    """Looks at the vocabulary from the end."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits.flip(-1), lines, host_rows)
        return replace(result, token_ids=logits.shape[1] - 1 - result.token_ids)


@mutant(caught_by="sampler.temperature")
class FivePercentTooWarm(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, temperature=sampling.temperature * 1.05)


@mutant(caught_by="sampler.temperature")
class FivePercentTooCold(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, temperature=sampling.temperature / 1.05)


@mutant(caught_by="sampler.top_k")
class KeepsOneMoreThanK(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=sampling.top_k and sampling.top_k + 1)


@mutant(caught_by="sampler.top_k")
class KeepsOneLessThanK(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=max(1, sampling.top_k - 1) if sampling.top_k else 0)


@mutant(caught_by="sampler.top_k")
class KeepsNoMoreThanAHundred(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=min(sampling.top_k, 100))


class CutsProbabilities(ByMode):
    """Does the filters by itself, on sorted probabilities."""

    def kept(self, probabilities: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        """probabilities [vocab], descending -> bool [vocab]."""
        raise NotImplementedError

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        self.asked: dict[int, RowSampling] = {**getattr(self, "asked", {}), **by_row(added)}
        super().update(removed, changed(added, lambda row, s: replace(s, top_p=1.0, min_p=0.0)))

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        cut = logits.clone()
        for place, row in enumerate(host_rows.tolist()):
            sampling = self.asked[row]
            if sampling.temperature > 0:
                ordered, order = (
                    (logits[place] / sampling.temperature)
                    .softmax(-1)
                    .sort(descending=True, stable=True)
                )
                cut[place, order[~self.kept(ordered, sampling)]] = -torch.inf
        return super().launched(cut, lines, host_rows)


@mutant(caught_by="sampler.top_p")
class LeavesOutTheTokenThatCrossesP(CutsProbabilities):
    def kept(self, probabilities: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        kept = probabilities.cumsum(-1) < sampling.top_p
        kept[0] = True
        return kept | (sampling.top_p == 1)


@mutant(caught_by="sampler.top_p")
class RoundsPToBfloat16(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_p=float(torch.tensor(sampling.top_p).bfloat16()))


@mutant(caught_by="sampler.min_p")
class TakesMinPAsAProbability(CutsProbabilities):
    """Keeps what has the probability p at least, instead of p times the likeliest's."""

    def kept(self, probabilities: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        kept = probabilities >= sampling.min_p
        kept[0] = True
        return kept


@mutant(caught_by="sampler.min_p")
class KeepsTheWrongSideOfMinP(CutsProbabilities):
    def kept(self, probabilities: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        kept = (
            probabilities <= sampling.min_p * probabilities[0]
            if sampling.min_p
            else torch.ones_like(probabilities, dtype=torch.bool)
        )
        kept[0] = True
        return kept


@mutant(caught_by="sampler.filter_order")
class FiltersBeforeTemperature(DefaultSampler):
    """Top-p and min-p look at the probabilities of temperature 1."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        super().update(removed, added)
        self.temperatures = {
            **getattr(self, "temperatures", {}),
            **{one.row: one.sampling.temperature for one in added},
        }

    def _kept(
        self, way: Any, scores: torch.Tensor, weights: torch.Tensor, host_rows: Any
    ) -> torch.Tensor:
        warmed = (
            scores * torch.tensor([self.temperatures[row] for row in host_rows.tolist()])[:, None]
        )
        return super()._kept(way, warmed, warmed.exp(), host_rows)


@mutant(caught_by="sampler.large_vocabulary")
class NoiseInHalfPrecision(DefaultSampler):
    """Uniform noise of 11 bits: among many tokens, ties."""

    def _race(self, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(keys.sum()) % 2**31)
        uniform = (torch.rand(weights.shape, generator=generator) * 2048).floor().add(0.5) / 2048
        return (weights / -torch.log1p(-uniform)).argmax(-1)


@mutant(caught_by="sampler.large_vocabulary")
class NoiseBeginsAgain(DefaultSampler):
    """Ids are cut to 16 bits where noise is made."""

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        hashes = self._device_rows.hashes
        self._device_rows.hashes = hashes[torch.arange(len(hashes)) % 2**16]


@mutant(caught_by="sampler.extremes")
class ForbidsByALargeNumber(ByMode):
    """-inf becomes -100, which a high temperature makes as likely as anything."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        return super().launched(logits.clamp(min=-100), lines, host_rows)


@mutant(caught_by="sampler.extremes")
class SpreadsNaN(ByMode):
    """Subtracts the batch's largest logit instead of the row's."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        return super().launched(logits - logits.max() if len(logits) else logits, lines, host_rows)


@mutant(caught_by="sampler.dtypes")
class NormalisesInHalfPrecision(ByMode):
    """Makes log-probabilities in the dtype that logits come in, and samples from these."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        return super().launched(logits.log_softmax(-1), lines, host_rows)


# ---- rules and penalties


@mutant(caught_by="sampler.logit_bias")
class GivesABiasToTheNextToken(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling,
            logit_bias=tuple(((token + 1) % 12, value) for token, value in sampling.logit_bias),
        )


@mutant(caught_by="sampler.logit_bias")
class KeepsEightBiases(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, logit_bias=sampling.logit_bias[:8])


@mutant(caught_by="sampler.allowed_token_ids")
class ForgetsTheLastAllowedToken(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        allowed = sampling.allowed_token_ids
        return replace(sampling, allowed_token_ids=allowed and (allowed[:-1] or allowed))


@mutant(caught_by="sampler.allowed_token_ids")
class KeepsSixteenAllowedTokens(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        allowed = sampling.allowed_token_ids
        return sampling if allowed is None else replace(sampling, allowed_token_ids=allowed[:16])


@mutant(caught_by="sampler.bad_words")
class BansTheLastTokenAlways(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, bad_words=tuple(word[-1:] for word in sampling.bad_words))


@mutant(caught_by="sampler.bad_words")
class KeepsFourBadWords(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, bad_words=sampling.bad_words[:4])


@mutant(caught_by="sampler.bad_words")
class LooksAtThreeTokensOfAWord(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, bad_words=tuple(word[-3:] for word in sampling.bad_words))


@mutant(caught_by="sampler.min_tokens")
class StopsOneTokenEarly(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, min_tokens=max(0, sampling.min_tokens - 1))


@mutant(caught_by="sampler.min_tokens")
class CountsThePromptTowardsMinTokens(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, prompt_lens=torch.zeros_like(history.prompt_lens))


@mutant(caught_by="sampler.min_tokens")
class KeepsFourStopTokens(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, stop_token_ids=sampling.stop_token_ids[:4])


@mutant(caught_by="sampler.bans_lifted")
class ForgetsTheWishWhenBansAreLifted(Misread):
    """Where bad words forbid all that is allowed, everything is allowed."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        banned = {word[0] for word in sampling.bad_words if len(word) == 1}
        return (
            replace(sampling, allowed_token_ids=None)
            if banned >= set(sampling.allowed_token_ids or ())
            else sampling
        )


@mutant(caught_by="sampler.repetition_penalty")
class PenalisesTheOutputAlone(DefaultSampler):
    def _penalise_repetition(self, logits: torch.Tensor, lines: Lines, host_rows: Any) -> None:
        history = self.context.history
        prompts, ends = (
            history.prompt_lens[lines.rows].tolist(),
            history.num_tokens[lines.rows].tolist(),
        )
        for place, (row, start, end) in enumerate(
            zip(lines.rows.tolist(), prompts, ends, strict=True)
        ):
            tokens = history.token_ids[row, start:end].long().unique()
            penalty = float(self._table.repetition[row])
            logits[place, tokens] = torch.where(
                logits[place, tokens] > 0,
                logits[place, tokens] / penalty,
                logits[place, tokens] * penalty,
            )


@mutant(caught_by="sampler.repetition_penalty")
class DividesNegativeLogitsToo(DefaultSampler):
    def _penalise_repetition(self, logits: torch.Tensor, lines: Lines, host_rows: Any) -> None:
        before = logits.clone()
        super()._penalise_repetition(logits, lines, host_rows)
        penalty = self._table.send(self._table.repetition, host_rows)[:, None]
        logits.copy_(torch.where((logits != before) & (before < 0), before / penalty, logits))


@mutant(caught_by="sampler.presence_penalty")
class CountsPresence(Misread):
    """Presence and frequency mixed up."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling,
            presence_penalty=sampling.frequency_penalty,
            frequency_penalty=sampling.presence_penalty,
        )


@mutant(caught_by="sampler.presence_penalty")
class LooksBackEightTokens(WithHistory):
    """Penalties forget what was generated longer ago."""

    def told(self, history: RowHistory) -> RowHistory:
        return replace(
            history, prompt_lens=torch.maximum(history.prompt_lens, history.num_tokens - 8)
        )


@mutant(caught_by="sampler.frequency_penalty")
class CountsThePromptAsGenerated(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, prompt_lens=torch.zeros_like(history.prompt_lens))


@mutant(caught_by="sampler.rules_together")
class PenaltiesBeforeBias(DefaultSampler):
    def _change_logits(
        self, logits: torch.Tensor, lines: Lines, host_rows: Any, needs: Any
    ) -> None:
        rules = needs & 16
        super()._change_logits(logits, lines, host_rows, needs - rules)
        super()._change_logits(logits, lines, host_rows, rules)


@mutant(caught_by="sampler.stale_history")
class ReadsBehindTheTokens(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, num_tokens=history.num_tokens + 1)


# ---- seeds, rows and batches


@mutant(caught_by="sampler.seed")
class CutsSeedsTo32Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=sampling.seed & 0xFFFFFFFF)


@mutant(caught_by="sampler.seed")
class SharesNoiseAcrossPositions(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, prompt_lens=history.num_tokens)


@mutant(caught_by="sampler.seed")
class CountsPositionsFromThePrompt(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, prompt_lens=torch.zeros_like(history.prompt_lens))


@mutant(caught_by="sampler.seed")
class TakesSeedsForFloats(Misread):
    """Large neighbouring seeds become one."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=int(float(sampling.seed)))


@mutant(caught_by="sampler.seed")
class DropsTheSign(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=sampling.seed % 2**63)


@mutant(caught_by="sampler.seed")
class PositionsBeginAgain(WithHistory):
    """The noise of the 1,024th token is that of the first."""

    def told(self, history: RowHistory) -> RowHistory:
        positions = (history.num_tokens - history.prompt_lens) % 1024
        return replace(history, num_tokens=history.prompt_lens + positions)


@mutant(caught_by="sampler.row")
class SeedDependsOnTheRow(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=sampling.seed + row)


@mutant(caught_by="sampler.batch")
class SeedDependsOnTheBatch(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        states = self._table.seed_states.copy()
        self._table.seed_states += len(host_rows)
        try:
            return super().launched(logits, lines, host_rows)
        finally:
            self._table.seed_states[:] = states


@mutant(caught_by="sampler.batch")
class OneGeneratorForTheBatch(DefaultSampler):
    """Noise from a stateful generator, seeded by the first row."""

    def _race(self, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(keys[0, 0]) % 2**31)
        return (weights / torch.empty_like(weights).exponential_(generator=generator)).argmax(-1)


@mutant(caught_by="sampler.preemption")
class CountsStepsInsteadOfTokens(WithHistory):
    """The output position is counted since the row was added."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        super().update(removed, added)
        self.begun = {
            **getattr(self, "begun", {}),
            **{one.row: int(self.context.history.num_tokens[one.row]) for one in added},
        }

    def told(self, history: RowHistory) -> RowHistory:
        lens = history.prompt_lens.clone()
        for row, begun in self.begun.items():
            lens[row] = begun
        return replace(history, prompt_lens=lens)


@mutant(caught_by="sampler.reused_rows")
class KeepsTheRulesOfTheRequestBefore(DefaultSampler):
    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        known: dict[int, RowSampling] = self.__dict__.setdefault("known", {})
        mixed = changed(
            added,
            lambda row, s: replace(s, bad_words=known.get(row, s).bad_words + s.bad_words),
        )
        known |= by_row(added)
        super().update([], mixed)


# ---- lines


@mutant(caught_by="sampler.lines")
class IgnoresDrafts(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        return super().launched(
            logits, replace(lines, ahead=torch.zeros_like(lines.ahead)), host_rows
        )


@mutant(caught_by="sampler.lines")
class PenalisesKnownTokensAlone(DefaultSampler):
    """Drafts count for the output position only."""

    def _change_logits(
        self, logits: torch.Tensor, lines: Lines, host_rows: Any, needs: Any
    ) -> None:
        super()._change_logits(
            logits, replace(lines, ahead=torch.zeros_like(lines.ahead)), host_rows, needs
        )


@mutant(caught_by="sampler.lines_apart")
class LeavesOutWhatComesAfterAMiss(ByMode):
    """Lines after one that differs from its draft get any token: they won't count anyway."""

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result, history = super().launched(logits, lines, host_rows), self.context.history
        token_ids, missed = result.token_ids.clone(), False
        for index, (row, ahead) in enumerate(
            zip(lines.rows.tolist(), lines.ahead.tolist(), strict=True)
        ):
            missed = missed and ahead > 0
            token = int(token_ids[index])
            token_ids[index] = 0 if missed else token
            missed = missed or token != int(
                history.token_ids[row, int(history.num_tokens[row]) + ahead]
            )
        return replace(result, token_ids=token_ids)


# ---- logprobs and graphs


@mutant(caught_by="sampler.logprobs")
class LogprobsAfterPenalties(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        changed = logits.float().clone()
        self._change_logits(changed, lines, host_rows, self._table.needs[host_rows])
        result = super().launched(logits.clone(), lines, host_rows)
        return replace(result, logprobs=result.logprobs and self.of(changed, result.logprobs))

    @staticmethod
    def of(logits: torch.Tensor, asked: TopLogprobs) -> TopLogprobs:
        return replace(asked, logprobs=logits.log_softmax(-1).gather(1, asked.token_ids))


@mutant(caught_by="sampler.logprobs")
class LogprobsAfterTemperature(LogprobsAfterPenalties):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        scaled = logits.float() / torch.from_numpy(self._table.temperature[host_rows])[:, None]
        inputs = SampleInputs(logits=logits.clone(), lines=lines, host_rows=host_rows)
        result = DefaultSampler.sample(self, inputs)
        return replace(result, logprobs=result.logprobs and self.of(scaled, result.logprobs))


@mutant(caught_by="sampler.logprobs")
class RanksFromZero(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        return replace(
            result,
            logprobs=result.logprobs and replace(result.logprobs, ranks=result.logprobs.ranks - 1),
        )


@mutant(caught_by="sampler.logprobs")
class RanksBehindItsEquals(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        if result.logprobs is None:
            return result
        ranks = (logits >= logits.gather(1, result.token_ids[:, None])).sum(-1)
        return replace(result, logprobs=replace(result.logprobs, ranks=ranks))


@mutant(caught_by="sampler.logprobs")
class NeverMoreThanFiveLogprobs(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        if result.logprobs is None:
            return result
        ids, logprobs = result.logprobs.token_ids[:, :6], result.logprobs.logprobs[:, :6]
        return replace(result, logprobs=replace(result.logprobs, token_ids=ids, logprobs=logprobs))


@mutant(caught_by="sampler.logprobs")
class LogprobsOfWhatTopKLeft(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        cut = logits.clone()
        for place, top_k in enumerate(self._table.top_k[host_rows].tolist()):
            if top_k < logits.shape[1]:
                cut[place][logits[place] < logits[place].topk(top_k).values[-1]] = -torch.inf
        result = super().launched(logits, lines, host_rows)
        if result.logprobs is None:
            return result
        return SampledTokens(
            result.token_ids,
            top_logprobs(cut, result.token_ids, result.logprobs.token_ids.shape[1] - 1),
        )


@mutant(caught_by="sampler.logprobs_harmless")
class LogprobsUseUpTheSeed(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=sampling.seed + (sampling.logprobs is not None))


class Capturing(ByMode):
    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.DECODE, logprobs=True)


@mutant(caught_by="sampler.captured")
class CapturedRowsShareTheirSeed(Capturing):
    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        first = lines.rows[:1].expand(len(lines.rows))
        return super().captured(logits, replace(lines, rows=first), capture)


@mutant(caught_by="sampler.captured")
class PaddingGetsNoToken(Capturing):
    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        token_ids = super().captured(logits, lines, capture).token_ids
        return SampledTokens(
            token_ids.masked_fill(lines.rows >= len(self.context.history.num_tokens) - 1, -1)
        )


@mutant(caught_by="sampler.capturable")
class CapturesWhateverComes(Capturing):
    def capture_for(self, host_rows: np.ndarray) -> Capture:
        return Capture.TOKENS


@mutant(caught_by="sampler.capturable")
class LooksAtTheFirstRowAlone(Capturing):
    def capture_for(self, host_rows: np.ndarray) -> Capture | None:
        return super().capture_for(host_rows[:1])


@mutant(caught_by="sampler.graph", error=AssertionError if torch.cuda.is_available() else Untried)
class CapturesItsParameters(Capturing):
    """The parameters of the rows that were captured are used for all that come after."""

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        rows_of = self._device_rows
        self.first = getattr(self, "first", None) or rows_of.parameters(lines.rows)
        return SampledTokens(
            draw_plain(logits, lines, self.first, self.context.history, rows_of.hashes)
        )


class CapturingInFull(ByMode):
    """As `sample` does it, also where there are no kernels for it: what isn't recorded may ask the
    host."""

    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, logprobs=True)

    def capture_for(self, host_rows: np.ndarray) -> Capture | None:
        few = int(self._table.logprobs[host_rows].max()) <= CAPTURED_LOGPROBS
        return super().capture_for(host_rows) or (Capture.FULL if few else None)

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        if capture is Capture.TOKENS:
            return super().captured(logits, lines, capture)
        own = lines.rows < len(self.context.history.num_tokens) - 1
        sampled = self.launched(logits[own], lines.take(own), lines.rows[own].cpu().numpy())

        def spread(values: torch.Tensor) -> torch.Tensor:
            """Put zeros where there is padding."""
            return values.new_zeros(len(lines.rows), *values.shape[1:]).masked_scatter(
                own.view(-1, *[1] * (values.dim() - 1)), values
            )

        of = sampled.logprobs
        logprobs = (
            None
            if of is None
            else TopLogprobs(spread(of.token_ids), spread(of.logprobs), spread(of.ranks))
        )
        return SampledTokens(spread(sampled.token_ids), logprobs)


@mutant(caught_by="sampler.fully_captured")
class CapturesNoPenalties(CapturingInFull):
    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        tokens = super().captured(logits, lines, Capture.TOKENS)
        return (
            tokens
            if capture is Capture.TOKENS
            else replace(super().captured(logits, lines, capture), token_ids=tokens.token_ids)
        )


@mutant(caught_by="sampler.fully_captured")
class CapturesWhoeverAsksForManyLogprobs(CapturingInFull):
    """Graphs have room for some alone."""

    def capture_for(self, host_rows: np.ndarray) -> Capture:
        return super().capture_for(host_rows) or Capture.FULL

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        sampled = super().captured(logits, lines, capture)
        if sampled.logprobs is None:
            return sampled
        ids, logprobs = (
            columns[:, : 1 + CAPTURED_LOGPROBS]
            for columns in (sampled.logprobs.token_ids, sampled.logprobs.logprobs)
        )
        return replace(sampled, logprobs=TopLogprobs(ids, logprobs, sampled.logprobs.ranks))


@mutant(
    caught_by="sampler.full_graph", error=AssertionError if torch.cuda.is_available() else Untried
)
class CapturesItsPenalties(ByMode):
    """The rules and penalties of the rows that were captured are used for all that come after."""

    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, logprobs=True)

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        if capture is Capture.TOKENS:
            return super().captured(logits, lines, capture)
        if not hasattr(self, "first"):
            self.first = copy(self._changes)
            self.first._records = self._changes._records.clone()
        now, self._changes = self._changes, self.first
        try:
            return super().captured(logits, lines, capture)
        finally:
            self._changes = now


# ---- extra_args


class Warmer(Misread):
    """Multiplies the temperature by what a request gives."""

    capabilities = SamplerCapabilities(extra_args=("warmth",))


@mutant(caught_by="sampler.extra_args")
class RaisesForText(Warmer):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling, temperature=sampling.temperature * sampling.extra_args.get("warmth", 1.0)
        )


class AnyWarmth(BaseModel):
    warmth: Any = 1.0


@mutant(caught_by="sampler.extra_args")
class TakesNonsenseForTheDefault(Warmer):
    capabilities = SamplerCapabilities(extra_args_model=AnyWarmth)

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        warmth = sampling.extra_args.get("warmth", 1.0)
        return replace(
            sampling, temperature=warmth if type(warmth) is float and 0 < warmth < 9 else 1.0
        )


class AnyNumber(BaseModel):
    warmth: int = Field(1, strict=True)


@mutant(caught_by="sampler.extra_args")
class TakesNumbersThatItCannotHold(Warmer):
    capabilities = SamplerCapabilities(extra_args_model=AnyNumber)

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=int(np.int64(sampling.extra_args.get("warmth", 0))))


class Digit(BaseModel):
    warmth: int = Field(1, ge=0, le=9, strict=True)


@mutant(caught_by="sampler.extra_args")
class RaisesWhenItSamples(Warmer):
    capabilities = SamplerCapabilities(extra_args_model=Digit)

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        self.given = [1] * max_rows

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        self.given[row] = sampling.extra_args.get("warmth", 1)
        return sampling

    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        shares = [1 / self.given[row] for row in host_rows.tolist()]
        return super().launched(logits * torch.tensor(shares)[:, None], lines, host_rows)


@mutant(caught_by="sampler.extra_args")
class SharesWhatOneGives(Warmer):
    """Adds it to the seed of every row that begins with it."""

    capabilities = SamplerCapabilities(extra_args_model=Digit)

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        given = sum(
            1 + one.sampling.extra_args["warmth"] for one in added if one.sampling.extra_args
        )
        super().update(removed, changed(added, lambda row, s: replace(s, seed=s.seed + given)))


# ---- what escaped once


@mutant(caught_by="sampler.reused_rows")
class ForgetsARuleWithTheRow(DefaultSampler):
    """A row that is removed and added in one update has no rules."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        gone = set(removed)
        super().update(
            removed, changed(added, lambda row, s: replace(s, bad_words=()) if row in gone else s)
        )


@mutant(caught_by="sampler.rules_before_temperature")
class BiasesWarmRowsAfterwards(Misread):
    """Adds a bias to what was divided by the temperature: right where that is 0 or 1."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        warmth = sampling.temperature or 1.0
        return replace(
            sampling,
            logit_bias=tuple((token, bias * warmth) for token, bias in sampling.logit_bias),
        )


@mutant(caught_by="sampler.rules_before_temperature")
class PenalisesWarmRowsAfterwards(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling, presence_penalty=sampling.presence_penalty * (sampling.temperature or 1.0)
        )


@mutant(caught_by="sampler.temperature")
class TakesColdForGreedy(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, temperature=sampling.temperature * (sampling.temperature >= 0.05))


@mutant(caught_by="sampler.temperature")
class NoTemperatureBelowAHundredth(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling,
            temperature=max(sampling.temperature, 0.01)
            if sampling.temperature > 1e-6
            else sampling.temperature,
        )


@mutant(caught_by="sampler.read_only")
class AppendsToTheHistory(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result, history = super().launched(logits, lines, host_rows), self.context.history
        history.token_ids[lines.rows, history.num_tokens[lines.rows].long()] = (
            result.token_ids.int()
        )
        return result


@mutant(caught_by="sampler.top_k")
class KeepsAllWhereKIsLarge(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=sampling.top_k if sampling.top_k <= 1024 else 0)


@mutant(caught_by="sampler.allowed_token_ids")
class AllowsTheFirstOfALongList(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling,
            allowed_token_ids=sampling.allowed_token_ids and sampling.allowed_token_ids[:512],
        )


@mutant(caught_by="sampler.bad_words")
class KnowsNoLongWords(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling, bad_words=tuple(word for word in sampling.bad_words if len(word) <= 16)
        )


@mutant(caught_by="sampler.temperature")
class NoTemperatureAboveFive(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, temperature=min(sampling.temperature, 5.0))


@mutant(caught_by="sampler.frequency_penalty")
class RemembersTheBeginning(WithHistory):
    """Penalises by the first 128 tokens."""

    def told(self, history: RowHistory) -> RowHistory:
        return replace(
            history,
            token_ids=history.token_ids[:, :128],
            num_tokens=history.num_tokens.clamp(max=128),
        )


@mutant(caught_by="sampler.presence_penalty")
class TakesLongPromptsForOutput(WithHistory):
    """Beyond 64 tokens, once something was generated."""

    def told(self, history: RowHistory) -> RowHistory:
        begun = history.num_tokens > history.prompt_lens
        return replace(
            history,
            prompt_lens=torch.where(begun, history.prompt_lens.clamp(max=64), history.prompt_lens),
        )


@mutant(caught_by="sampler.min_tokens")
class BansStopTokensForEver(Misread):
    """Where a request asks for many tokens."""

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(
            sampling, min_tokens=sampling.min_tokens if sampling.min_tokens < 32 else 10**6
        )


@mutant(caught_by="sampler.logprobs")
class HasThirtyTwoColumns(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, logprobs=sampling.logprobs and min(sampling.logprobs, 32))


# ---- wrong at an edge


@mutant(caught_by="sampler.captured_again")
class CapturesTheFirstParameters(Capturing):
    """Uses the parameters that rows had when they were first captured."""

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        if not hasattr(self, "first"):
            self.first = {}
        key, rows_of = tuple(lines.rows.tolist()), self._device_rows
        self.first.setdefault(key, rows_of.parameters(lines.rows))
        return SampledTokens(
            draw_plain(logits, lines, self.first[key], self.context.history, rows_of.hashes)
        )


@mutant(caught_by="sampler.fully_captured_again")
class CapturesTheFirstRules(CapturingInFull):
    """Returns what it returned before to rows that were captured in full before."""

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        if not hasattr(self, "kept"):
            self.kept: dict[tuple[int, ...], SampledTokens] = {}
        if capture is Capture.TOKENS:
            return super().captured(logits, lines, capture)
        key = tuple(lines.rows.tolist())
        if key not in self.kept:
            self.kept[key] = super().captured(logits, lines, capture)
        return self.kept[key]


@mutant(caught_by="sampler.capturable")
class LooksAtTheFirstAndLastRow(Capturing):
    def capture_for(self, host_rows: np.ndarray) -> Capture | None:
        return super().capture_for(host_rows[[0, -1]])


@mutant(caught_by="sampler.extra_args")
class KeepsWhatTheRowWasGiven(Warmer):
    capabilities = SamplerCapabilities(extra_args_model=Digit)

    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        if not hasattr(self, "given"):
            self.given: dict[int, int] = {}
        if sampling.extra_args:
            self.given[row] = 1 + sampling.extra_args["warmth"]
        return replace(sampling, seed=sampling.seed + self.given.get(row, 0))


@mutant(caught_by="sampler.read_only")
class SortsHostRows(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        host_rows.sort()
        return result


@mutant(caught_by="sampler.read_only")
class SortsHostRowsToCapture(DefaultSampler):
    def capture_for(self, host_rows: np.ndarray) -> Capture | None:
        host_rows.sort()
        return super().capture_for(host_rows)


@mutant(caught_by="sampler.bad_words")
class KeepsOneWordOfEachBeginning(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        long = {word[:-1]: word for word in sampling.bad_words if len(word) > 2}
        return replace(
            sampling,
            bad_words=(*(word for word in sampling.bad_words if len(word) <= 2), *long.values()),
        )


@mutant(caught_by="sampler.logprobs")
class NoLogprobsForZero(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        return (
            result
            if (self._table.logprobs[host_rows] > 0).any()
            else SampledTokens(result.token_ids)
        )


@mutant(caught_by="sampler.top_k")
class WrapsKAt32Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, top_k=sampling.top_k % 2**32)


@mutant(caught_by="sampler.allowed_token_ids")
class TakesABiasOfMinus100ForABan(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        banned = {token for token, bias in sampling.logit_bias if bias <= -100}
        return replace(
            sampling,
            allowed_token_ids=tuple(
                token for token in sampling.allowed_token_ids or () if token not in banned
            )
            or None,
        )


@mutant(caught_by="sampler.fully_captured_again")
class CapturesLongWordsAsTheyWere(CapturingInFull):
    """Compares words of 3 and more tokens with the history at the row's first capture."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        super().update(removed, added)
        self.samplings: dict[int, RowSampling] = {**getattr(self, "samplings", {}), **by_row(added)}
        self.seen: dict[int, tuple[int, ...]] = {
            row: seen for row, seen in getattr(self, "seen", {}).items() if row not in by_row(added)
        }

    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        history, told = self.context.history, []
        for row in lines.rows[lines.rows < len(history.num_tokens) - 1].tolist():
            seen = self.seen.setdefault(
                row, tuple(history.token_ids[row, : history.num_tokens[row]].tolist())
            )
            sampling = self.samplings[row]
            words = [
                word[-1:] if len(word) > 2 else word
                for word in sampling.bad_words
                if len(word) < 3 or seen[1 - len(word) :] == word[:-1]
            ]
            seen_now = replace(sampling, bad_words=tuple(words))
            told.append(SampledRow(row=row, sampling=seen_now))
        DefaultSampler.update(self, [], told)
        try:
            return super().captured(logits, lines, capture)
        finally:
            own = changed(told, lambda row, _: self.samplings[row])
            DefaultSampler.update(self, [], own)


@mutant(caught_by="sampler.captured")
class CountsOnPaddingAtTheEnd(Capturing):
    def captured(self, logits: torch.Tensor, lines: Lines, capture: Capture) -> SampledTokens:
        own = int((lines.rows < len(self.context.history.num_tokens) - 1).sum())
        ids = super().captured(logits[:own], lines.take(slice(own)), capture).token_ids
        return SampledTokens(torch.cat((ids, ids.new_zeros(len(lines.rows) - own))))


@mutant(caught_by="sampler.logprobs")
class HasALeastLogprob(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        if result.logprobs is None:
            return result
        return replace(
            result,
            logprobs=replace(result.logprobs, logprobs=result.logprobs.logprobs.clamp(min=-50)),
        )


class Processing(DefaultSampler):
    """Treats a `process` in its own way."""

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        if inputs.process is None:
            return self.plain(inputs)
        return self.processed(inputs, inputs.process)

    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        return self.plain(inputs)

    def plain(self, inputs: SampleInputs) -> SampledTokens:
        return super().sample(inputs)


@mutant(caught_by="sampler.processed")
class IgnoresProcessors(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        return self.plain(replace(inputs, process=None))


@mutant(caught_by="sampler.processed")
class ProcessesTwice(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        def twice(logits: torch.Tensor, first: int) -> None:
            process(logits.clone(), first)
            process(logits, first)

        return self.plain(replace(inputs, process=twice))


@mutant(caught_by="sampler.processed")
class ProcessesBeforeRules(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        logits = inputs.logits.float().contiguous()
        process(logits, 0)
        return self.plain(replace(inputs, logits=logits, process=None))


@mutant(caught_by="sampler.processed")
class ProcessesHalvedLogits(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        def halved(logits: torch.Tensor, first: int) -> None:
            logits.mul_(0.5)
            process(logits, first)

        return self.plain(replace(inputs, process=halved))


@mutant(caught_by="sampler.processed")
class CountsEachPartFromZero(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        def from_zero(logits: torch.Tensor, first: int) -> None:
            half = len(logits) // 2
            process(logits[:half], 0)
            process(logits[half:], 0)

        return self.plain(replace(inputs, process=from_zero))


@mutant(caught_by="sampler.processed_logprobs")
class LogprobsAfterProcessors(Processing):
    def processed(self, inputs: SampleInputs, process: Process) -> SampledTokens:
        found = self.plain(inputs)
        if found.logprobs is None:
            return found
        logits = inputs.logits.float()
        process(logits, 0)
        k = found.logprobs.token_ids.shape[1] - 1
        return SampledTokens(found.token_ids, top_logprobs(logits, found.token_ids, k))


class ProcessingInFull(CapturingInFull):
    """As `CapturingInFull`, with a `process`."""

    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, processors=True)

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        if inputs.process is None:
            return super().sample(inputs)
        host_rows = inputs.lines.rows.cpu().numpy()
        return DefaultSampler.sample(self, replace(inputs, host_rows=host_rows, capture=None))


@mutant(caught_by="sampler.fully_processed")
class CapturesWithoutProcessors(ProcessingInFull):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        return super().sample(inputs if inputs.capture is None else replace(inputs, process=None))


@mutant(caught_by="sampler.logprobs_form")
class LogprobsOfDoubles(DefaultSampler):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        found = super().sample(inputs)
        of = found.logprobs
        return (
            found
            if of is None
            else replace(found, logprobs=replace(of, logprobs=of.logprobs.double()))
        )


@mutant(caught_by="sampler.logprobs_form")
class RanksOfFloats(DefaultSampler):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        found = super().sample(inputs)
        of = found.logprobs
        return found if of is None else replace(found, logprobs=replace(of, ranks=of.ranks.float()))


# ---- rows that come again, many calls, large ids


@mutant(caught_by="sampler.other_rows")
class ForgetsTheRulesOfAll(DefaultSampler):
    """Makes its rules anew in each update that begins a row, of those that begin."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        known: dict[int, RowSampling] = self.__dict__.setdefault("known", {})
        fresh = by_row(added)
        if fresh:
            plain = [
                SampledRow(row=row, sampling=replace(sampling, logit_bias=(), bad_words=()))
                for row, sampling in known.items()
                if row not in fresh
            ]
            super().update([], plain)
        known |= fresh
        super().update(removed, added)


@mutant(caught_by="sampler.other_rows")
class SkipsWhatItKnows(DefaultSampler):
    """A row that begins with the parameters that it had is taken for known."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        known: dict[int, RowSampling] = self.__dict__.setdefault("known", {})
        news = [one for one in added if known.get(one.row) != one.sampling]
        super().update([], [SampledRow(row=row, sampling=RowSampling()) for row in removed])
        known |= by_row(added)
        super().update([], news)


@mutant(caught_by="sampler.other_rows")
class RemovesTheNextRowToo(DefaultSampler):
    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        begun = self.__dict__.setdefault("begun", set())
        super().update(
            [],
            [
                SampledRow(row=row + 1, sampling=RowSampling(temperature=0.0))
                for row in removed
                if row + 1 in begun
            ],
        )
        begun |= set(by_row(added))
        super().update(removed, added)


@mutant(caught_by="sampler.many_calls", soon=True)
class NoiseAgesWithCalls(DefaultSampler):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 600:
            self._table.seed_states += 1
        return super().sample(inputs)


@mutant(caught_by="sampler.many_calls")
class HasRoomForFiveHundredRequests(DefaultSampler):
    """Requests that come later have no rules."""

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        self.begun = getattr(self, "begun", 0) + len(added)
        late = self.begun > 500
        super().update(
            removed, changed(added, lambda _, s: replace(s, logit_bias=()) if late else s)
        )


def in_16_bits(token: int) -> int:
    return token % 2**16


@mutant(caught_by="sampler.large_ids")
class BiasesIdsOf16Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        biases = tuple((in_16_bits(token), bias) for token, bias in sampling.logit_bias)
        return replace(sampling, logit_bias=biases)


@mutant(caught_by="sampler.large_ids")
class AllowsIdsOf16Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        allowed = sampling.allowed_token_ids
        return replace(sampling, allowed_token_ids=allowed and tuple(map(in_16_bits, allowed)))


@mutant(caught_by="sampler.large_ids")
class ComparesWordsIn16Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        words = tuple((*map(in_16_bits, word[:-1]), word[-1]) for word in sampling.bad_words)
        return replace(sampling, bad_words=words)


@mutant(caught_by="sampler.large_ids")
class StopsAtIdsOf16Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, stop_token_ids=tuple(map(in_16_bits, sampling.stop_token_ids)))


@mutant(caught_by="sampler.large_ids")
class CountsTokensIn16Bits(WithHistory):
    def told(self, history: RowHistory) -> RowHistory:
        return replace(history, token_ids=history.token_ids % 2**16)


@mutant(caught_by="sampler.large_ids")
class ReturnsIdsOf17Bits(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        return replace(result, token_ids=result.token_ids % 2**17)


@mutant(caught_by="sampler.large_ids")
class LogprobsOfIdsOf16Bits(ByMode):
    def launched(self, logits: torch.Tensor, lines: Lines, host_rows: np.ndarray) -> SampledTokens:
        result = super().launched(logits, lines, host_rows)
        top = result.logprobs
        ids = top and torch.cat((top.token_ids[:, :1], top.token_ids[:, 1:] % 2**16), 1)
        return replace(result, logprobs=top and replace(top, token_ids=ids))


# ---- drafts, and filters, with each rule


class MisreadingDrafts(DefaultSampler):
    """Applies one kind of changes as if there were other drafts."""

    def ahead(self, lines: Lines) -> torch.Tensor:
        return torch.zeros_like(lines.ahead)


@mutant(caught_by="sampler.draft_rules")
class RulesIgnoreDrafts(MisreadingDrafts):
    def _apply_rules(self, logits: torch.Tensor, lines: Lines, host_rows: Any) -> None:
        super()._apply_rules(logits, replace(lines, ahead=self.ahead(lines)), host_rows)


@mutant(caught_by="sampler.draft_rules")
class RepetitionIgnoresDrafts(MisreadingDrafts):
    def _penalise_repetition(self, logits: torch.Tensor, lines: Lines, host_rows: Any) -> None:
        super()._penalise_repetition(logits, replace(lines, ahead=self.ahead(lines)), host_rows)


@mutant(caught_by="sampler.draft_rules")
class FrequencyIgnoresDrafts(MisreadingDrafts):
    def _penalise_output(self, logits: torch.Tensor, lines: Lines, host_rows: Any) -> None:
        super()._penalise_output(logits, replace(lines, ahead=self.ahead(lines)), host_rows)


@mutant(caught_by="sampler.draft_rules")
class KnowsEightDrafts(DefaultSampler):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        lines = replace(inputs.lines, ahead=inputs.lines.ahead.clamp(max=8))
        return super().sample(replace(inputs, lines=lines))


@mutant(caught_by="sampler.lines_apart")
class RanksOfTheRowsFirstLine(DefaultSampler):
    def sample(self, inputs: SampleInputs) -> SampledTokens:
        result = super().sample(inputs)
        top = result.logprobs
        if top is None:
            return result
        ranks = top.ranks.clone()
        for index in range(1, len(ranks)):
            if inputs.lines.rows[index] == inputs.lines.rows[index - 1]:
                ranks[index] = ranks[index - 1]
        return replace(result, logprobs=replace(top, ranks=ranks))


@mutant(caught_by="sampler.rules_before_filters")
class FiltersBeforeRules(CutsProbabilities):
    """Top-p and min-p look at the logits that are given."""

    def kept(self, probabilities: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
        kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
        return kept & (probabilities >= sampling.min_p * probabilities[0])


@mutant(caught_by="sampler.rules_before_filters")
class KeepsTheTopKOfWhatIsGiven(DefaultSampler):
    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        self.most: dict[int, int] = {
            **getattr(self, "most", {}),
            **{one.row: one.sampling.top_k for one in added},
        }
        super().update(removed, changed(added, lambda _, s: replace(s, top_k=0)))

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        rows = inputs.lines.rows.tolist()
        logits = inputs.logits.clone()
        for place, row in enumerate(rows):
            if 0 < self.most.get(row, 0) < logits.shape[1]:
                last = inputs.logits[place].topk(self.most[row]).values[-1]
                logits[place, inputs.logits[place] < last] = -torch.inf
        return super().sample(replace(inputs, logits=logits))


@mutant(caught_by="sampler.not_for_it")
class ReturnsLogprobsOfThePrompt(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, logprobs=sampling.logprobs or sampling.prompt_logprobs)


@mutant(caught_by="sampler.not_for_it")
class NeverStops(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, min_tokens=max(sampling.min_tokens, 1))


@mutant(caught_by="sampler.min_tokens")
class CountsLeastTokensIn16Bits(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        return replace(sampling, min_tokens=in_16_bits(sampling.min_tokens))


@mutant(caught_by="sampler.forgets")
class KeepsAllSeeds(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        self.__dict__.setdefault("seeds", set()).add(sampling.seed)
        return sampling


@mutant(caught_by="sampler.forgets")
class CachesRulesByTheirValues(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        cached: dict[object, RowSampling] = self.__dict__.setdefault("cached", {})
        return cached.setdefault((sampling.seed, sampling.logit_bias), sampling)


@mutant(caught_by="sampler.process_untouched")
class SeedsTorch(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        torch.manual_seed(row)
        return sampling


@mutant(caught_by="sampler.process_untouched", soon=True)
class PrintsArraysShort(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        np.set_printoptions(threshold=10 + row)
        return sampling


@mutant(caught_by="sampler.first_use")
class LowersThePrecisionOfAllProducts(Misread):
    def read(self, row: int, sampling: RowSampling) -> RowSampling:
        torch.set_float32_matmul_precision("high")
        return sampling


@mutant(caught_by="sampler.many_repeats")
class CountsInBytes(WithHistory):
    """A token generated 256 times counts as one generated never."""

    def told(self, history: RowHistory) -> RowHistory:
        return replace(
            history,
            num_tokens=history.prompt_lens + (history.num_tokens - history.prompt_lens) % 256,
        )


@mutant(caught_by="sampler.processed_lines")
class NumbersPartsOfLines(DefaultSampler):
    """`process` is told the number of the part, of 32 lines each."""

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        process = inputs.process
        if process is None:
            return super().sample(inputs)

        def in_parts(logits: torch.Tensor, first: int) -> None:
            for number, part in enumerate(logits.split(32)):
                process(part, first + number)

        return super().sample(replace(inputs, process=in_parts))
