"""Logits processors with one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import (
    ArgumentContext,
    LogitsProcessor,
    LogitsProcessorCapabilities,
    LogitsProcessorContext,
    ProcessedRow,
)
from dovetail.api.sampler import Lines, RowSampling
from dovetail.testing.checks import Untried
from tests.conformance.mutants import mutant


class Penalty(BaseModel):
    model_config = ConfigDict(extra="forbid")
    amount: float = Field(2.0, ge=0, le=100, allow_inf_nan=False, strict=True)


class Penalising(LogitsProcessor):
    """Right in itself: lowers the logit of the last token, by an amount that depends on the seed
    and the length."""

    Arguments = Penalty
    capabilities = LogitsProcessorCapabilities(cuda_graph=GraphSupport.ALL)

    def prepare(self, max_rows: int) -> None:
        self.amount, self.seed = (
            torch.zeros(max_rows + 1, device=self.context.device) for _ in range(2)
        )

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.amount[row] = 0
        for one in added:
            self.amount[one.row] = self.told(one.row, one.arguments)
            self.seed[one.row] = self.seeded(one.row, one.sampling)

    def told(self, row: int, arguments: Any) -> float:
        return float(arguments.amount)

    def seeded(self, row: int, sampling: RowSampling) -> int:
        return sampling.seed % 7

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        asks = self.amount[lines.rows, None] > 0
        logits.copy_(torch.where(asks, self.changed(logits, lines), logits))

    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return logits - self.penalties(logits, lines)

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        lengths = self.lengths(lines)
        last = self.last(lines)
        amount = self.amount[lines.rows] * (1 + (self.seed[lines.rows] + lengths) % 7)
        return torch.where(
            torch.arange(logits.shape[1], device=logits.device) == last[:, None],
            amount[:, None],
            0.0,
        )

    def last(self, lines: Lines) -> torch.Tensor:
        return self.context.history.token_ids[lines.rows, (self.lengths(lines) - 1).clamp(min=0)]

    def lengths(self, lines: Lines) -> torch.Tensor:
        return self.context.history.lengths(lines)


class LaxPenalty(Penalty):
    model_config = ConfigDict(extra="ignore")


@mutant(caught_by="logits_processor.arguments")
class TakesUnknownArguments(Penalising):
    Arguments = LaxPenalty


class EncodedTwice(Penalty):
    spared: tuple[int, ...] = ()

    @field_validator("amount")
    @classmethod
    def doubled(cls, amount: float) -> float:
        return min(2 * amount, 100.0)


@mutant(caught_by="logits_processor.arguments")
class DoublesItsArgumentsOnEachRank(Penalising):
    Arguments = EncodedTwice


class NeedsItsTokenizer(Penalty):
    spared: list[Any] = Field([], validate_default=True)

    @field_validator("spared")
    @classmethod
    def encoded(cls, spared: list[Any], info: ValidationInfo) -> list[Any]:
        if ArgumentContext.of(info).encode is None:
            raise ValueError("no tokenizer")
        return spared


@mutant(caught_by="logits_processor.arguments")
class NeedsTheTokenizerOnTheRanks(Penalising):
    Arguments = NeedsItsTokenizer


@mutant(caught_by="logits_processor.arguments")
class DescribesItsArgumentsInADict(Penalising):
    Arguments: Any = {"amount": 2.0}  # noqa: RUF012


class AnyPenalty(BaseModel, extra="forbid"):
    amount: float = 2.0


@mutant(caught_by="logits_processor.bad_arguments")
class TakesInfinity(Penalising):
    Arguments = AnyPenalty


class Whole(BaseModel, extra="forbid"):
    amount: int = Field(2, strict=True)


@mutant(caught_by="logits_processor.bad_arguments")
class TakesNumbersThatItCannotHold(Penalising):
    Arguments = Whole

    def told(self, row: int, arguments: Any) -> float:
        torch.tensor(arguments.amount)
        return float(max(0, min(100, arguments.amount)))


class RaisesTypeErrors(Penalty):
    @field_validator("amount", mode="before")
    @classmethod
    def positive(cls, amount: Any) -> Any:
        return amount + 0


@mutant(caught_by="logits_processor.bad_arguments")
class RaisesNoValueError(Penalising):
    Arguments = RaisesTypeErrors


class AnythingAtAll(BaseModel, extra="forbid"):
    amount: Any = 2.0


@mutant(caught_by="logits_processor.bad_arguments", soon=True)
class TakesNonsenseForTheDefault(Penalising):
    Arguments = AnythingAtAll

    def told(self, row: int, arguments: Any) -> float:
        return 2.0


@mutant(caught_by="logits_processor.examples")
class ChangesNothing(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return logits


@mutant(caught_by="logits_processor.examples")
class ReturnsItsResult(Penalising):
    def apply(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:  # type: ignore[override]
        return self.changed(logits, lines)


@mutant(caught_by="logits_processor.examples")
class LeavesNoToken(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)


@mutant(caught_by="logits_processor.examples")
class MultipliesInfinity(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return logits - 0 * logits


@mutant(caught_by="logits_processor.banned")
class SetsAValue(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return torch.where(self.penalties(logits, lines) > 0, -5.0, logits)


@mutant(caught_by="logits_processor.others")
class AddsZero(Penalising):
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        logits += 0.0 - self.penalties(logits, lines)


@mutant(caught_by="logits_processor.others")
class TakesPaddingForTheLastRow(Penalising):
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        super().apply(logits, replace(lines, rows=lines.rows.clamp(max=len(self.amount) - 2)))


@mutant(caught_by="logits_processor.batch")
class CentresTheBatch(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return super().changed(logits, lines) - logits.amax()


@mutant(caught_by="logits_processor.batch")
class ReadsTheFirstLine(Penalising):
    def lengths(self, lines: Lines) -> torch.Tensor:
        return super().lengths(lines)[:1].expand(len(lines.rows))


@mutant(caught_by="logits_processor.row")
class SeedDependsOnTheRow(Penalising):
    def seeded(self, row: int, sampling: RowSampling) -> int:
        return sampling.seed % 7 + row


@mutant(caught_by="logits_processor.lines")
class IgnoresDrafts(Penalising):
    def lengths(self, lines: Lines) -> torch.Tensor:
        return self.context.history.num_tokens[lines.rows]


@mutant(caught_by="logits_processor.lines")
class CountsFromTheDrafts(Penalising):
    """Its noise is that of the row's first line."""

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        right = super().penalties(logits, lines)
        return torch.where(lines.ahead[:, None] > 0, right.clamp(max=1), right)


@mutant(caught_by="logits_processor.stale_history")
class ReadsTheWholeRow(Penalising):
    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        tokens = self.context.history.token_ids[lines.rows].long().clamp(max=logits.shape[1] - 1)
        return torch.zeros_like(logits).scatter_(1, tokens, 1.0) * self.amount[lines.rows, None]


@mutant(caught_by="logits_processor.stale_history")
class ReadsOneTokenTooFar(Penalising):
    def lengths(self, lines: Lines) -> torch.Tensor:
        return (super().lengths(lines) + 1).clamp(max=self.context.history.token_ids.shape[1])


@mutant(caught_by="logits_processor.stateless")
class DrawsAnew(Penalising):
    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return super().penalties(logits, lines) * torch.rand((), device=logits.device)


@mutant(caught_by="logits_processor.stateless")
class CountsItsCalls(Penalising):
    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.calls = 0

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        self.calls += 1
        return super().penalties(logits, lines) * self.calls


@mutant(caught_by="logits_processor.stateless")
class PenalisesWhatItSawBefore(Penalising):
    """Keeps the last tokens that it saw of a row, rejected drafts included."""

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        self.seen = torch.zeros((max_rows + 1, self.context.vocab_size), device=self.context.device)

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        now = super().penalties(logits, lines)
        self.seen[lines.rows] = torch.maximum(self.seen[lines.rows], now)
        return now.maximum(self.seen[lines.rows])


@mutant(caught_by="logits_processor.preemption")
class CountsRequests(Penalising):
    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.requests = 0

    def seeded(self, row: int, sampling: RowSampling) -> int:
        self.requests += 1
        return self.requests


@mutant(caught_by="logits_processor.preemption")
class NeverForgets(Penalising):
    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        super().update([], added)


@mutant(caught_by="logits_processor.reused_rows")
class RemovesAfterAdding(Penalising):
    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        super().update([], added)
        super().update(removed, [])


@mutant(caught_by="logits_processor.reused_rows")
class AddsUpArguments(Penalising):
    def told(self, row: int, arguments: Any) -> float:
        return float(self.amount[row]) + float(arguments.amount)


@mutant(caught_by="logits_processor.reused_rows", error=KeyError)
class RaisesForUnknownRows(Penalising):
    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.known: set[int] = set()

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        for row in removed:
            self.known.remove(row)
        self.known |= {row.row for row in added}
        super().update(removed, added)


@mutant(caught_by="logits_processor.read_only")
class WritesToTheHistory(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        self.context.history.token_ids[lines.rows, -1] = 0
        return super().changed(logits, lines)


@mutant(caught_by="logits_processor.read_only")
class CountsDown(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        lines.ahead.clamp_(max=0)
        return super().changed(logits, lines)


@mutant(caught_by="logits_processor.sizes", error=RuntimeError)
class NeedsFourTokens(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return (
            super()
            .changed(logits, lines)
            .masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf)
        )


@mutant(caught_by="logits_processor.sizes", error=IndexError)
class NeedsALine(Penalising):
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        if lines.rows[0] >= 0:
            super().apply(logits, lines)


@mutant(caught_by="logits_processor.sizes", error=IndexError)
class NeedsTwoTokens(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        before = [
            self.context.history.token_ids[row, :length].tolist()[-2]
            for row, length in zip(lines.rows, self.lengths(lines), strict=True)
        ]
        return super().changed(logits, lines) - torch.tensor(before)[:, None] % 2


@mutant(caught_by="logits_processor.extremes")
class CleansTheBatch(Penalising):
    """Penalises by the batch's largest number, where that is one."""

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return super().penalties(logits, lines) * logits.isfinite().any(-1).all()


@mutant(caught_by="logits_processor.extremes", error=ValueError)
class RaisesForNaN(Penalising):
    def changed(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        if logits.isnan().any():
            raise ValueError("NaN")
        return super().changed(logits, lines)


@mutant(caught_by="logits_processor.replayed")
class KnowsArgumentsOnTheHost(Penalising):
    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        super().update(removed, added)
        self.amounts = self.amount.tolist()

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        amounts = torch.tensor(
            [self.amounts[row] for row in lines.rows.tolist()], device=logits.device
        )
        return super().penalties(logits, lines).clamp(max=amounts[:, None])


class Replacing(Penalising):
    """Makes other buffers in each update."""

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        self.amount, self.seed = self.amount.clone(), self.seed.clone()
        super().update(removed, added)


@mutant(caught_by="logits_processor.replayed")
class MakesOtherBuffers(Replacing):
    pass


@mutant(caught_by="logits_processor.replayed", soon=True)
class AsksForAMask(Penalising):
    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        asks = self.amount[lines.rows] > 0
        logits[asks] = self.changed(logits, lines)[asks]


@mutant(
    caught_by="logits_processor.graph",
    error=AssertionError if torch.cuda.is_available() else Untried,
)
class CapturesItsBuffers(Replacing):
    pass


@mutant(caught_by="logits_processor.large_ids")
class KeepsIdsIn16Bits(Penalising):
    def last(self, lines: Lines) -> torch.Tensor:
        return super().last(lines) & 0xFFFF


@mutant(caught_by="logits_processor.large_ids")
class KeepsIdsAsBfloat16(Penalising):
    def last(self, lines: Lines) -> torch.Tensor:
        last = super().last(lines)
        return torch.where(last < 2**9, last, last.bfloat16().int())


@mutant(caught_by="logits_processor.seed")
class TakesHalfOfTheSeed(Penalising):
    def seeded(self, row: int, sampling: RowSampling) -> int:
        return (sampling.seed & 0xFFFF_FFFF) % 7


class Choice(Penalty):
    token: int = Field(b"a"[0], ge=0, lt=2**31, strict=True)
    tokens: list[int] = Field([], max_length=100)


@mutant(caught_by="logits_processor.argument_ids")
class KeepsAnArgumentIn16Bits(Penalising):
    Arguments = Choice

    def told(self, row: int, arguments: Any) -> float:
        return float(1 + arguments.amount * (arguments.token & 0xFFFF))


@mutant(caught_by="logits_processor.argument_ids")
class KeepsTheBeginningOfAList(Penalising):
    Arguments = Choice

    def told(self, row: int, arguments: Any) -> float:
        return float(arguments.amount * (1 + sum(arguments.tokens[:16])))


@mutant(caught_by="logits_processor.long_use")
class PenalisesLessWithTime(Penalising):
    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.rows = 0

    def told(self, row: int, arguments: Any) -> float:
        self.rows += 1
        return float(arguments.amount) / (1 + self.rows // 300)


@mutant(caught_by="logits_processor.long_use")
class KeepsAllSeeds(Penalising):
    def __init__(self, options: BaseModel, context: LogitsProcessorContext) -> None:
        super().__init__(options, context)
        self.seeds: set[int] = set()

    def seeded(self, row: int, sampling: RowSampling) -> int:
        self.seeds.add(sampling.seed)
        return super().seeded(row, sampling)


@mutant(caught_by="logits_processor.process_untouched")
class SeedsTorch(Penalising):
    def seeded(self, row: int, sampling: RowSampling) -> int:
        torch.manual_seed(sampling.seed)
        return super().seeded(row, sampling)


@mutant(caught_by="logits_processor.first_use")
class LowersThePrecisionOfAllProducts(Penalising):
    def prepare(self, max_rows: int) -> None:
        torch.set_float32_matmul_precision("high")
        super().prepare(max_rows)


@mutant(caught_by="logits_processor.many_drafts")
class CountsFourDrafts(Penalising):
    def lengths(self, lines: Lines) -> torch.Tensor:
        return self.context.history.num_tokens[lines.rows] + lines.ahead.clamp(max=4)


class PenaltyOfIds(Penalty):
    tokens: tuple[int, ...] = ()


@mutant(caught_by="logits_processor.ids_outside")
class TakesIdsOutsideForTheLast(Penalising):
    Arguments = PenaltyOfIds

    def prepare(self, max_rows: int) -> None:
        super().prepare(max_rows)
        self.chosen = torch.zeros((max_rows + 1, self.context.vocab_size))

    def update(self, removed: Sequence[int], added: Sequence[ProcessedRow]) -> None:
        super().update(removed, added)
        for one in added:
            self.chosen[one.row] = 0.0
            for token in one.arguments.tokens:
                self.chosen[one.row, min(token, self.context.vocab_size - 1)] = 1.0

    def penalties(self, logits: torch.Tensor, lines: Lines) -> torch.Tensor:
        return super().penalties(logits, lines) + self.chosen[lines.rows]
