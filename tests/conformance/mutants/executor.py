"""Executors with one thing wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import (
    AdapterRows,
    Batch,
    Capacity,
    ExecutorCapabilities,
    ExecutorContext,
    HostLogprobs,
    Masks,
    NewRow,
    Pooled,
    PoolingRows,
    PromptLogprobs,
    Result,
    RowChanges,
)
from dovetail.api.kv_cache import HOLE
from dovetail.api.kv_transfers import Slab, Transfer, Transferred, frame_checksum
from dovetail.api.sampler import RowSampling
from dovetail.errors import DovetailError, ModelLoadError
from dovetail.nn.linear import RowParallelLinear
from dovetail.testing import FakeExecutor, FakeExecutorOptions
from dovetail.testing.fake_executor import _Row, prefix_ids
from dovetail.testing.fake_pages import FakePages
from dovetail.testing.timed_transfers import TimedTransfers
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions
from dovetail_executors.runtime.pooler import Pooler
from dovetail_executors.runtime.sampling import LinePart, Sampling
from dovetail_executors.runtime.step import Step
from tests.conformance.mutants import mutant

# Begin and end


Carrier = TypeVar("Carrier", Batch, Result)


def with_part(carrier: Carrier, part: object) -> Carrier:
    """Replace the part of that type, or add it."""
    others = (each for each in carrier.parts if type(each) is not type(part))
    return replace(carrier, parts=(*others, part))


@mutant(caught_by="executor.capacity")
class PoolTooSmallForOneSequence(FakeExecutor):
    def start(self) -> Capacity:
        return replace(super().start(), num_pages=8)


@mutant(caught_by="executor.capacity")
class IgnoresTheLengthAskedFor(FakeExecutor):
    def start(self) -> Capacity:
        return replace(
            super().start(), max_model_len=self.options.num_pages * self.options.block_size
        )


@mutant(caught_by="executor.stop")
class StopsOnce(FakeExecutor):
    stopped = False

    def stop(self) -> None:
        if self.stopped:
            raise ValueError("I/O operation on a closed executor")
        self.stopped = True


@mutant(caught_by="executor.stop")
class StopsOnlyWhatStarted(FakeExecutor):
    def start(self) -> Capacity:
        self.runner = object()
        return super().start()

    def stop(self) -> None:
        del self.runner
        self.runner = None


@mutant(caught_by="executor.failed_start")
class LetsAMissingFileThrough(FakeExecutor):
    def start(self) -> Capacity:
        Path(self.context.config.model, "config.json").read_text()
        return super().start()


@mutant(caught_by="executor.forecast")
class ForecastsWhatIsNotThere(FakeExecutor):
    @classmethod
    def forecast(cls, context: ExecutorContext) -> str | None:
        return "a model"

    def start(self) -> Capacity:
        if not Path(self.context.config.model, "config.json").exists():
            raise ModelLoadError("there is no model")
        return super().start()


@mutant(caught_by="executor.forecast")
class ForecastsNothing(FakeExecutor):
    @classmethod
    def forecast(cls, context: ExecutorContext) -> str | None:
        return ""


@mutant(caught_by="executor.forecast")
class CrashesInAForecast(FakeExecutor):
    @classmethod
    def forecast(cls, context: ExecutorContext) -> str | None:
        return Path(context.config.model, "config.json").read_text()


@mutant(caught_by="executor.leaves_nothing")
class LeavesAThread(FakeExecutor):
    def start(self) -> Capacity:
        threading.Thread(target=threading.Event().wait, daemon=True, name="prefetch").start()
        return super().start()


@mutant(caught_by="executor.leaves_nothing")
class LeavesAFileOpen(FakeExecutor):
    opened: list[IO[str]] = []  # noqa: RUF012 - a leak lives as long as the class

    def start(self) -> Capacity:
        self.opened.append(Path(__file__).open())  # noqa: SIM115
        return super().start()


@mutant(caught_by="executor.leaves_nothing")
class LeavesATemporaryFile(FakeExecutor):
    def start(self) -> Capacity:
        with tempfile.NamedTemporaryFile(delete=False):
            return super().start()


@mutant(caught_by="executor.leaves_nothing")
class LeavesItsTensors(FakeExecutor):
    kept: list[Any] = []  # noqa: RUF012 - a leak lives as long as the class

    def start(self) -> Capacity:
        self.kept.append(torch.zeros(2**20))
        return super().start()


@mutant(caught_by="executor.failed_start")
class LeavesAThreadWhereItDidNotStart(FakeExecutor):
    def start(self) -> Capacity:
        if not Path(self.context.config.model, "config.json").exists():
            threading.Thread(target=threading.Event().wait, daemon=True, name="loader").start()
            raise ModelLoadError("there is no model")
        return super().start()


class _WithAWorker(FakeExecutor):
    """A process that does nothing, for as long as its standard input is open."""

    worker: subprocess.Popen[bytes] | None = None

    def start(self) -> Capacity:
        self.worker = subprocess.Popen(
            [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        return super().start()

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.communicate()
            self.worker = None
        super().stop()


@mutant(caught_by="executor.dead_worker")
class NeverLooksAtItsWorker(_WithAWorker): ...


@mutant(caught_by="executor.leaves_nothing")
class LeavesItsWorker(_WithAWorker):
    """Until the interpreter ends, and with it the worker's standard input."""

    left: list[Any] = []  # noqa: RUF012 - a leak lives as long as the class

    def stop(self) -> None:
        self.left.append(self.worker)


@mutant(caught_by="executor.healthy")
class TakesWorkForTrouble(FakeExecutor):
    def check(self) -> None:
        if self._pending:
            raise DovetailError("the device doesn't answer")


class _ForgetsItsTroubles(FakeExecutor):
    """Goes on after a step that failed half way."""

    def submit(self, batch: Batch) -> int:
        self._broken = None
        return super().submit(batch)


@mutant(caught_by="executor.failure")
class GoesOnWithABrokenState(_ForgetsItsTroubles):
    def check(self) -> None: ...


@mutant(caught_by="executor.failure")
class TellsOfItsTroublesOnce(FakeExecutor):
    def check(self) -> None:
        try:
            super().check()
        finally:
            self._broken = None


@mutant(caught_by="executor.failure")
class TellsOfItsTroublesAndGoesOn(_ForgetsItsTroubles): ...


# Results


@mutant(caught_by="executor.order")
class ReturnsTheNewest(FakeExecutor):
    def collect(self, handle: int) -> Result:
        self._pending.reverse()
        result = super().collect(self._pending[0][0])
        self._pending.reverse()
        return result


@mutant(caught_by="executor.order")
class SharesOneResultBuffer(FakeExecutor):
    """A step in flight is overwritten by the next one."""

    def submit(self, batch: Batch) -> int:
        step = super().submit(batch)
        for index, (older, tokens, *rest) in enumerate(self._pending):
            newest = [token for token in self._pending[-1][1] if token >= 0]
            kept = [
                newest[i % len(newest)] if token >= 0 and newest else token
                for i, token in enumerate(tokens)
            ]
            self._pending[index] = (older, kept, *rest)  # type: ignore[assignment]
        return step


@mutant(caught_by="executor.results")
class ZeroWhereNothingWasSampled(FakeExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, token_ids=result.token_ids.clip(0))


@mutant(caught_by="executor.batch_untouched")
class SortsTheBatchInPlace(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        order = np.argsort(batch.rows)
        for array in (batch.rows, batch.num_tokens, batch.yields_token):
            array[:] = array[order]
        return super().submit(batch)


@mutant(caught_by="executor.times")
class TellsDurationsForTimes(FakeExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, started=0.0, ended=result.ended - result.started)


@mutant(caught_by="executor.durations")
class TellsMilliseconds(FakeExecutor):
    """Of durations: they are a thousandth of what they should be."""

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, started=result.ended - (result.ended - result.started) / 1000)


@mutant(caught_by="executor.durations")
class BeginsWhenItEnds(FakeExecutor):
    """Looks at the clock once."""

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, started=result.ended)


@mutant(caught_by="executor.results")
class IdsIn32Bits(FakeExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, token_ids=result.token_ids.astype(np.int32))


@mutant(caught_by="executor.results")
class TimesOfTheDevicesLibrary(FakeExecutor):
    """Its numbers are numpy's."""

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, started=np.float32(result.started), ended=np.float64(result.ended))


@mutant(caught_by="executor.ownership")
class ReturnsOneArrayAgainAndAgain(FakeExecutor):
    def start(self) -> Capacity:
        self.ids = np.zeros(self.context.config.max_num_seqs, np.int64)
        return super().start()

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        ids = self.ids[: len(result.token_ids)]
        ids[:] = result.token_ids
        return replace(result, token_ids=ids)


@mutant(caught_by="executor.ownership")
class KeepsTheArraysOfABatch(FakeExecutor):
    """Takes a row's block tables as they were given, for good."""

    def _change_rows(self, batch: Batch) -> None:
        super()._change_rows(batch)
        for new in batch.added:
            self._rows[new.row].tables = [*new.pages]  # type: ignore[list-item]


class _OnARealClock(LocalExecutor):
    """The demo model on the CPU, by other parameters than it is given."""

    def read(self, sampling: RowSampling) -> RowSampling:
        return sampling

    def submit(self, batch: Batch) -> Step:
        return super().submit(
            replace(
                batch,
                added=tuple(replace(new, sampling=self.read(new.sampling)) for new in batch.added),
            )
        )


@mutant(caught_by="executor.sampling")
class SamplesGreedilyForAll(_OnARealClock):
    def read(self, sampling: RowSampling) -> RowSampling:
        return RowSampling(temperature=0.0)


@mutant(caught_by="executor.sampling")
class KnowsNoRules(_OnARealClock):
    """Passes on temperature, filters and seed."""

    def read(self, sampling: RowSampling) -> RowSampling:
        return replace(
            RowSampling(),
            **{
                name: getattr(sampling, name)
                for name in ("temperature", "top_k", "top_p", "min_p", "seed")
            },
        )


@mutant(caught_by="executor.deterministic")
class ComputesDeterministicRowsLikeOthers(_OnARealClock):
    def read(self, sampling: RowSampling) -> RowSampling:
        return replace(sampling, deterministic=False)


@mutant(caught_by="executor.deterministic")
class SamplesDeterministicRowsWithOthers(_OnARealClock):
    """Their states have the same bits; their logits are computed with those of others."""

    def submit(self, batch: Batch) -> Step:
        parts = Sampling.parts_of_lines
        Sampling.parts_of_lines = (  # type: ignore[method-assign]
            lambda _, step, __: [LinePart(np.arange(len(step.lines.rows)), len(step.lines.rows))]
        )
        try:
            return super().submit(batch)
        finally:
            Sampling.parts_of_lines = parts  # type: ignore[method-assign]


class _ChangesRows(LocalExecutor):
    """The demo model on the CPU, with other changes of rows than it is given."""

    def read(self, changes: RowChanges) -> RowChanges:
        raise NotImplementedError

    def submit(self, batch: Batch) -> Step:
        changes = batch.changes
        return super().submit(
            batch if changes is None else replace(batch, changes=self.read(changes))
        )


@mutant(caught_by="executor.row_changes")
class SamplesChangedRowsAsBefore(_ChangesRows):
    def read(self, changes: RowChanges) -> RowChanges:
        before = tuple(RowSampling(temperature=1.1, seed=one.seed) for one in changes.samplings)
        marks = [one.deterministic for one in changes.samplings]
        return changes if any(marks) else replace(changes, samplings=before)


@mutant(caught_by="executor.row_changes")
class KeepsTheTokensThatChangedRowsForget(LocalExecutor):
    def submit(self, batch: Batch) -> Step:
        changes = batch.changes
        if changes is not None:
            state = self.worker._running().rows
            kept = [
                state.token_ids[row, start : start + count].numpy()
                for row, start, count in zip(
                    changes.rows, changes.known, changes.counts, strict=True
                )
            ]
            token_ids = np.concatenate(kept).astype(np.int32)
            batch = replace(batch, changes=replace(changes, token_ids=token_ids))
        return super().submit(batch)


@mutant(caught_by="executor.deterministic")
class DropsTheMarkOfChangedRows(_ChangesRows):
    def read(self, changes: RowChanges) -> RowChanges:
        samplings = tuple(replace(one, deterministic=False) for one in changes.samplings)
        return replace(changes, samplings=samplings)


@mutant(caught_by="executor.sampling")
class KnowsNoPenalties(_OnARealClock):
    def read(self, sampling: RowSampling) -> RowSampling:
        return replace(sampling, presence_penalty=0.0)


@mutant(caught_by="executor.virtual_clock")
class MovesTheClockAtSubmit(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        step = super().submit(batch)
        self.context.clock.wait_until(self.context.clock.now() + self._pending[-1][2])
        return step


# A request's tokens depend on nothing else


@mutant(caught_by="executor.neighbours")
class DependsOnTheSizeOfTheBatch(FakeExecutor):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        ids = result.token_ids
        return replace(
            result, token_ids=np.where(ids < 0, ids, (ids + len(ids)) % self.options.vocab_size)
        )


@mutant(caught_by="executor.neighbours")
class SeedsByRow(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        super()._change_rows(batch)
        for new in batch.added:
            self._rows[new.row].seed += new.row


@mutant(caught_by="executor.ids_stay")
class FeedsBackAnotherToken(FakeExecutor):
    def _sample(self, row: _Row, words: NDArray[np.uint32] | None = None) -> int:
        token = super()._sample(row, words)
        row.tokens[-1] = (token + 1) % self.options.vocab_size
        return token


@mutant(caught_by="executor.chunks")
class ForgetsTheChunksBefore(FakeExecutor):
    """The sampled token is a function of the last chunk of more than one token."""

    def _read(self, row: _Row, count: int) -> None:
        row.seed += row.computed - count if count > 1 else 0
        super()._read(row, count)


@mutant(caught_by="executor.idle")
class KeepsOnlyRowsThatRun(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        step = super().submit(batch)
        self._rows = {row: self._rows[row] for row in batch.rows.tolist()}
        return step


@mutant(caught_by="executor.row_reuse")
class RemovesAfterItHasAdded(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        for new in batch.added:
            self._rows.pop(new.row, None)
        super()._change_rows(replace(batch, removed=batch.removed[:0]))
        for row in batch.removed.tolist():
            del self._rows[row]


@mutant(caught_by="executor.row_reuse")
class KeepsTheSeedOfTheRow(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        seeds = {row: state.seed for row, state in self._rows.items()}
        super()._change_rows(batch)
        for new in batch.added:
            self._rows[new.row].seed = seeds.get(new.row, self._rows[new.row].seed)


# Blocks


@mutant(caught_by="executor.new_blocks")
class AppendsTheLastFirst(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        super()._change_rows(replace(batch, new_pages=batch.new_pages[::-1]))


@mutant(caught_by="executor.cached")
class ReadsBeforeOthersWrite(FakeExecutor):
    """Row by row."""

    def _write(self, row: _Row, count: int) -> None:
        values = prefix_ids(row.tokens)
        for position in range(row.computed):
            (page,), offset = self._block(row, 0, position)
            self._require(
                self._memory.get((page, offset)) == (0, 0, values[position]),
                "read before it was written",
            )
        super()._write(row, count)


@mutant(caught_by="executor.cached")
class ComputesFromTheBeginning(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        super()._change_rows(batch)
        for new in batch.added:
            self._rows[new.row].computed = 0


@mutant(caught_by="executor.shared_prefix")
class SharesABlockTooMany(FakeExecutor):
    def _read(self, row: _Row, count: int) -> None:
        first = next(iter(self._rows.values()))
        tables, row.tables = (
            row.tables,
            [[*first.tables[0][: self.shared], *row.tables[0][self.shared :]]],
        )
        try:
            super()._read(row, count)
        finally:
            row.tables = tables

    def submit(self, batch: Batch) -> int:
        self.shared = batch.shared_prefix_blocks + 1 if batch.shared_prefix_blocks else 0
        return super().submit(batch)


@mutant(caught_by="executor.copies")
class IgnoresCopies(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        return super().submit(replace(batch, copies=()))


@mutant(caught_by="executor.copies")
class CopiesAllAtOnce(FakeExecutor):
    """Each reads what was there before any."""

    def submit(self, batch: Batch) -> int:
        before, places = dict(self._memory), range(self.options.block_size)
        for copy in batch.copies:
            self._memory |= {
                (copy.dst, offset): before[copy.src, offset]
                for offset in places
                if (copy.src, offset) in before
            }
        return super().submit(replace(batch, copies=()))


@mutant(caught_by="executor.copies")
class CopiesABlockOnce(FakeExecutor):
    """A second copy of the same block is taken for a mistake."""

    def submit(self, batch: Batch) -> int:
        first = {copy.src: copy for copy in reversed(batch.copies)}
        return super().submit(
            replace(batch, copies=tuple(copy for copy in batch.copies if first[copy.src] is copy))
        )


# Logprobs


class _WithLogprobs(FakeExecutor):
    """Every token that it samples has half of all probability, the one after it a quarter, …"""

    capabilities = ExecutorCapabilities(virtual_clock=True, logprobs=True)

    def __init__(self, options: FakeExecutorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._wanted: dict[int, tuple[int | None, int | None]] = {}
        self._logprobs: dict[int, tuple[HostLogprobs | None, Mapping[int, HostLogprobs]]] = {}

    def submit(self, batch: Batch) -> int:
        self._wanted |= {
            new.row: (new.sampling.logprobs, new.sampling.prompt_logprobs)
            for new in batch.added
            if new.sampling is not None
        }
        step, rows = super().submit(batch), batch.rows.tolist()
        most = max((self._wanted[row][0] or 0 for row in rows), default=0)
        sampled = [token for token in self._pending[-1][1] if token >= 0]
        prompts = {
            index: self.after(self._rows[row], count) for index, row, count in self._asking(batch)
        }
        tops = {
            index: self.top(tokens, self._wanted[rows[index]][1] or 0)
            for index, tokens in prompts.items()
            if tokens
        }
        self._logprobs[step] = self.top(sampled, most) if most else None, tops
        return step

    def collect(self, handle: int) -> Result:
        logprobs, prompt_logprobs = self._logprobs.pop(handle)
        result = replace(super().collect(handle), logprobs=logprobs)
        return with_part(result, PromptLogprobs(prompt_logprobs))

    def after(self, row: _Row, count: int) -> list[int]:
        """The known tokens after the last `count` ones computed; the last known one was just
        sampled, if there is one."""
        return row.tokens[row.computed - count + 1 : min(row.computed + 1, self.prompt_len(row))]

    def prompt_len(self, row: _Row) -> int:
        return len(row.tokens) - (row.computed < len(row.tokens))

    def top(self, tokens: list[int], k: int) -> HostLogprobs:
        ids = [
            [token, *((token + rank) % self.options.vocab_size for rank in range(k))]
            for token in tokens
        ]
        values = [[log(0.5), *(log(0.5) * (rank + 1) for rank in range(k))] for _ in tokens]
        return HostLogprobs(
            np.array(ids, np.int64), np.array(values, np.float32), np.ones(len(tokens), np.int64)
        )

    def _asking(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        for index, (row, count) in enumerate(
            zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        ):
            if self._wanted[row][1] is not None:
                yield index, row, count


@mutant(caught_by="executor.masked_logprobs")
class TellsOfTheMaskedDistribution(_WithLogprobs):
    capabilities = ExecutorCapabilities(virtual_clock=True, logprobs=True, masks=True)

    def sample(self, handle: int, masks: Masks) -> None:
        super().sample(handle, masks)
        self._logprobs[handle] = (
            self.top([token for token in self._pending[0][1] if token >= 0], 3),
            {},
        )


@mutant(caught_by="executor.logprobs")
class RanksFromZero(_WithLogprobs):
    def top(self, tokens: list[int], k: int) -> HostLogprobs:
        top = super().top(tokens, k)
        return replace(top, ranks=top.ranks - 1)


@mutant(caught_by="executor.logprobs")
class LogprobsOfRowsThatAskAlone(_WithLogprobs):
    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        some = result.logprobs
        return (
            result
            if some is None
            else replace(
                result, logprobs=HostLogprobs(some.token_ids[:1], some.logprobs[:1], some.ranks[:1])
            )
        )


@mutant(caught_by="executor.prompt_logprobs")
class PromptLogprobsOfOneRow(_WithLogprobs):
    """Of the first that asks."""

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        found = result.values(PromptLogprobs)
        return with_part(result, PromptLogprobs(dict([*found.items()][:1])))


@mutant(caught_by="executor.logprobs")
class AsManyColumnsAsTheLeastAsksFor(_WithLogprobs):
    def submit(self, batch: Batch) -> int:
        step = super().submit(batch)
        least = min(filter(None, (self._wanted[row][0] for row in batch.rows.tolist())), default=0)
        sampled, prompts = self._logprobs[step]
        if sampled is not None:
            columns = slice(1 + least)
            sampled = HostLogprobs(
                sampled.token_ids[:, columns], sampled.logprobs[:, columns], sampled.ranks
            )
        self._logprobs[step] = sampled, prompts
        return step


@mutant(caught_by="executor.prompt_logprobs")
class PromptLogprobsByRow(_WithLogprobs):
    """Tells them by the row, not by its place in the batch."""

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        rows, found = self.batches_rows[handle], result.values(PromptLogprobs)
        by_row = {rows[place]: top for place, top in found.items()}
        return with_part(result, PromptLogprobs(by_row))

    def submit(self, batch: Batch) -> int:
        self.batches_rows = {**getattr(self, "batches_rows", {}), batch.step: batch.rows.tolist()}
        return super().submit(batch)


@mutant(caught_by="executor.logprobs")
class LogprobsInDoublePrecision(_WithLogprobs):
    def top(self, tokens: list[int], k: int) -> HostLogprobs:
        top = super().top(tokens, k)
        return replace(top, logprobs=top.logprobs.astype(np.float64))


@mutant(caught_by="executor.prompt_logprobs")
class PromptLogprobsOfTheTokenItself(_WithLogprobs):
    def after(self, row: _Row, count: int) -> list[int]:
        return row.tokens[row.computed - count : row.computed][: len(super().after(row, count))]


# Added rows and limits


@mutant(caught_by="executor.row_reuse")
class MovesTheLastRowIntoTheGap(FakeExecutor):
    """So that its rows lie together, and nobody is told."""

    def _change_rows(self, batch: Batch) -> None:
        super()._change_rows(batch)
        for row in batch.removed.tolist():
            if row not in self._rows and row < max(self._rows, default=0):
                self._rows[row] = self._rows.pop(max(self._rows))


@mutant(caught_by="executor.row_reuse")
class ForgetsWhoCameAfterTheRemoved(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        for row, state in self._rows.items():
            if len(batch.removed) and row > batch.removed.min():
                state.tokens[-1] = 0
        super()._change_rows(batch)


@mutant(caught_by="executor.limits", options={"num_pages": 128})
class BufferForATokenLess(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        if batch.num_tokens.sum() >= self.context.config.max_num_batched_tokens:
            raise ValueError("index out of range")
        return super().submit(batch)


@mutant(caught_by="executor.limits")
class BufferForARowLess(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        if len(batch.rows) >= self.context.config.max_num_seqs:
            raise ValueError("index out of range")
        return super().submit(batch)


@mutant(caught_by="executor.limits")
class LastPositionIsTheFirst(FakeExecutor):
    """Positions begin again one too early."""

    last_count = 0

    def _read(self, row: _Row, count: int) -> None:
        super()._read(row, count)
        self.last_count = count

    def _sample(self, row: _Row, words: NDArray[np.uint32] | None = None) -> int:
        token = super()._sample(row, words)
        if self.last_count == 1 and row.computed == self.options.max_model_len - 1:
            row.tokens[-1] = token = (token + 1) % self.options.vocab_size
        return token


# Late sampling


@mutant(caught_by="executor.late")
class SamplesALateStepAtOnceAndAgain(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        handle = super().submit(replace(batch, late=False))
        if batch.late:
            self._unsampled = (
                batch.step,
                [self._rows[row] for row in batch.rows.tolist()],
                batch.yields_token.tolist(),
            )
            self._pending[-1][1].clear()
        return handle


@mutant(caught_by="executor.masks")
class IgnoresMasks(FakeExecutor):
    def sample(self, handle: int, masks: Masks) -> None:
        super().sample(handle, Masks(masks.lines[:0], masks.words[:0]))


@mutant(caught_by="executor.masks")
class MasksTheFirstRows(FakeExecutor):
    """Takes the place in the masks for the place in the batch."""

    def sample(self, handle: int, masks: Masks) -> None:
        yielding = np.flatnonzero(self._unsampled[2] if self._unsampled else [])[: len(masks.lines)]
        super().sample(handle, Masks(yielding.astype(np.int32), masks.words))


@mutant(caught_by="executor.masks")
class ReadsTheMemoryThatItGave(FakeExecutor):
    def mask_words(self, count: int, width: int) -> NDArray[np.uint32]:
        self.given = super().mask_words(count, width)
        return self.given

    def sample(self, handle: int, masks: Masks) -> None:
        same = len(masks.lines) and self.given.shape == masks.words.shape
        super().sample(handle, Masks(masks.lines, self.given) if same else masks)


@mutant(caught_by="executor.masks")
class KeepsTheMaskOfARow(FakeExecutor):
    """Until the row has another."""

    def sample(self, handle: int, masks: Masks) -> None:
        _, rows, yields_token = self._unsampled or (0, [], [])
        words = {
            index: row.kept
            for index, row in enumerate(rows)
            if yields_token[index] and hasattr(row, "kept")
        }
        for index, line in zip(masks.lines.tolist(), masks.words, strict=True):
            words[index] = rows[index].kept = line.copy()  # type: ignore[attr-defined]
        lines = [words[index] for index in sorted(words)]
        super().sample(
            handle,
            Masks(np.array(sorted(words), np.int32), np.array(lines, np.uint32))
            if words
            else masks,
        )


# Drafts


@mutant(caught_by="executor.drafts")
class TakesDraftsForTokens(LocalExecutor):
    """Returns the drafts of a row that has got other tokens."""

    def collect(self, handle: Step) -> Result:
        result, drafts = super().collect(handle), handle.batch.drafts
        if drafts is None or result.counts is None:
            return result
        token_ids, ends, own = (
            result.token_ids.copy(),
            result.counts.cumsum(),
            drafts.counts.cumsum(),
        )
        for end, count, of, drafted in zip(ends, result.counts, own, drafts.counts, strict=True):
            taken = min(count, drafted)
            token_ids[end - count : end - count + taken] = drafts.token_ids[
                of - drafted : of - drafted + taken
            ]
        return replace(result, token_ids=token_ids)


@mutant(caught_by="executor.drafts")
class ForgetsTheTokenAfterDrafts(LocalExecutor):
    """A row whose drafts are all right gets these only."""

    def collect(self, handle: Step) -> Result:
        result, drafts = super().collect(handle), handle.batch.drafts
        if drafts is None or result.counts is None:
            return result
        lost = (result.counts == 1 + drafts.counts) & (drafts.counts > 0)
        return replace(
            result,
            token_ids=np.delete(result.token_ids, result.counts.cumsum()[lost] - 1),
            counts=result.counts - lost,
        )


@mutant(caught_by="executor.drafts_beside")
class CountsInTheOrderOfRows(LocalExecutor):
    """`Result.counts` isn't in the order of the batch."""

    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        return (
            result
            if result.counts is None
            else replace(result, counts=result.counts[np.argsort(handle.rows)])
        )


@mutant(caught_by="executor.drafts_sampling")
class PenalisesKnownTokensAlone(LocalExecutor):
    """Drafts count for noise, but not for penalties and rules."""

    def start(self) -> Capacity:
        capacity = super().start()
        sampler: Any = self.worker.runner.sampling.sampler  # type: ignore[union-attr]
        change = sampler._change_logits
        sampler._change_logits = lambda logits, lines, *rest: change(
            logits, replace(lines, ahead=torch.zeros_like(lines.ahead)), *rest
        )
        return capacity


@mutant(caught_by="executor.drafts_logprobs")
class LogprobsOfAllLines(LocalExecutor):
    def collect(self, handle: Step) -> Result:
        return replace(super().collect(handle), logprobs=handle.host_logprobs())


@mutant(caught_by="executor.drafts_masks")
class MasksTheFirstLineOfARow(LocalExecutor):
    def sample(self, handle: Step, masks: Masks) -> None:
        first = masks.lines - handle.lines.ahead[masks.lines] if len(masks.lines) else masks.lines
        super().sample(handle, Masks(first, masks.words))


@mutant(caught_by="executor.drafts_limits")
class DeclaresTooManyLines(LocalExecutor):
    def start(self) -> Capacity:
        capacity = super().start()
        rows = self.worker.runner.rows if self.worker.runner else None
        if rows is not None and capacity.max_lines:
            rows.max_lines -= 1
        return capacity


# Pooling


def pooler_of(executor: LocalExecutor) -> Pooler:
    runner = executor.worker.runner
    assert runner is not None
    (pooler,) = (each for each in runner.features if isinstance(each, Pooler))
    return pooler


@mutant(caught_by="executor.pooled")
class PoolsInFloat64(LocalExecutor):
    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        found = result.values(Pooled)
        wide = {index: value.astype(np.float64) for index, value in found.items()}
        return with_part(result, Pooled(wide))


@mutant(caught_by="executor.pooled")
class PoolsByRow(LocalExecutor):
    """`Pooled.values` has the row's number instead of its index in the batch."""

    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        found = result.values(Pooled)
        by_row = {int(handle.rows[index]): value for index, value in found.items()}
        return with_part(result, Pooled(by_row))


@mutant(caught_by="executor.pooled_beside")
class PoolsTheLastChunk(LocalExecutor):
    """Takes the mean of the states of a prompt's last step, divided by all of its tokens."""

    def start(self) -> Capacity:
        capacity = super().start()
        pooler: Any = pooler_of(self)
        gathered = pooler._gathered
        pooler._gathered = lambda members, *rest: gathered(
            [replace(member, begins=True) for member in members], *rest
        )
        return capacity


@mutant(caught_by="executor.pooled_beside")
class SamplesOtherwiseBesideRowsThatPool(LocalExecutor):
    """What generates beside them gets other tokens."""

    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        shift = int(handle.batch.part(PoolingRows) is not None)
        return replace(
            result,
            token_ids=np.where(result.token_ids < 0, result.token_ids, result.token_ids + shift),
        )


@mutant(caught_by="executor.pooled_again")
class AddsToWhatWasThere(LocalExecutor):
    """A row that begins anew adds to the states of its first attempt."""

    def start(self) -> Capacity:
        capacity = super().start()
        pooler: Any = pooler_of(self)
        gathered, unfinished = pooler._gathered, set[int]()

        def added(members: Any, *rest: Any) -> Any:
            known = [
                replace(member, begins=member.begins and member.number not in unfinished)
                for member in members
            ]
            for member in members:
                (unfinished.discard if member.due else unfinished.add)(member.number)
            return gathered(known, *rest)

        pooler._gathered = added
        return capacity


@mutant(caught_by="executor.pooled_settings")
class WantsWhatTheFirstRowWants(LocalExecutor):
    """Treats all rows of a step alike."""

    def submit(self, batch: Batch) -> Step:
        part = batch.part(PoolingRows)
        if part is not None and part.added:
            first = next(iter(part.added.values()))
            batch = with_part(batch, replace(part, added=dict.fromkeys(part.added, first)))
        return super().submit(batch)


@mutant(caught_by="executor.pooled_failed")
class PoolsNan(LocalExecutor):
    def collect(self, handle: Step) -> Result:
        note = handle.notes[pooler_of(self)]
        pooled = {index: result.value() for index, result in note.results.items()}
        return with_part(replace(super().collect(handle), failed={}), Pooled(pooled))


@mutant(caught_by="executor.failed_row")
class NamesTheRowThatFailed(LocalExecutor):
    """`Result.failed` is keyed by the row's number instead of its index in the batch."""

    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        return replace(
            result, failed={int(handle.rows[index]): why for index, why in result.failed.items()}
        )


@mutant(caught_by="executor.failed_row")
class FailsWithARow(LocalExecutor):
    def collect(self, handle: Step) -> Result:
        result = super().collect(handle)
        if result.failed:
            raise DovetailError(f"step {result.step} failed")
        return result


@mutant(caught_by="executor.masked_draws")
class SamplesTheFirstThatIsAllowed(LocalExecutor):
    def sample(self, handle: Step, masks: Masks) -> None:
        for line in masks.words:
            (word, *_) = np.flatnonzero(line)
            lowest = int(line[word]) & -int(line[word])
            line[:] = 0
            line[word] = lowest
        super().sample(handle, masks)


@mutant(caught_by="executor.times")
class TellsNoTimesOfLateSteps(FakeExecutor):
    late = False

    def submit(self, batch: Batch) -> int:
        self.late = batch.late
        return super().submit(batch)

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        return replace(result, started=0.0, ended=0.0) if self.late else result


@mutant(caught_by="executor.late_overlap")
class ForgetsTheLateTokenOfAStepBehindAnother(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        self.behind = batch.late and len(self._pending) > 0
        return super().submit(batch)

    def sample(self, handle: int, masks: Masks) -> None:
        rows = self._unsampled[1] if self._unsampled else []
        super().sample(handle, masks)
        if self.behind:
            for row in rows:
                row.tokens[-1] = 0


# Adapters


@mutant(caught_by="executor.adapters")
class IgnoresAdapters(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        part = batch.part(AdapterRows)
        without = batch if part is None else with_part(batch, replace(part, slots={}))
        super()._change_rows(without)


@mutant(caught_by="executor.adapters")
class GivesAllRowsTheAdapterOfTheFirst(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        part = batch.part(AdapterRows)
        if part is not None:
            slots = [part.slots.get(new.row, 0) for new in batch.added]
            same = {new.row: slots[0] for new in batch.added}
            batch = with_part(batch, replace(part, slots=same))
        super()._change_rows(batch)


@mutant(caught_by="executor.adapter_slots")
class KeepsTheFirstAdapterOfASlot(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        part = batch.part(AdapterRows)
        if part is not None:
            fresh = tuple(load for load in part.loads if load.slot not in self._adapters)
            batch = with_part(batch, replace(part, loads=fresh))
        super()._change_rows(batch)


@mutant(caught_by="executor.adapter_slots")
class ChangesASlotUnderTheStepInFlight(FakeExecutor):
    def _change_rows(self, batch: Batch) -> None:
        part = batch.part(AdapterRows)
        for _, tokens, *_ in self._pending if part is not None and part.loads else ():
            tokens[:] = [(token + 1) % self.options.vocab_size for token in tokens]
        super()._change_rows(batch)


@mutant(caught_by="executor.adapter_merged")
class AdaptsSomeModulesOnly(LocalExecutor):
    def start(self) -> Capacity:
        capacity = super().start()
        assert self.worker.runner is not None
        for layer in self.worker.runner.model.modules():
            if isinstance(layer, RowParallelLinear):
                layer.adapters = None
        return capacity


@mutant(caught_by="executor.processors")
class MakesNoProcessors(LocalExecutor):
    """Declares them, and ignores what rows ask for."""

    def submit(self, batch: Batch) -> Any:
        return super().submit(replace(batch, added=tuple(map(without_processors, batch.added))))


@mutant(caught_by="executor.processors")
class AppliesProcessorsInAnotherOrder(LocalExecutor):
    def __init__(self, options: Any, context: ExecutorContext) -> None:
        refs = context.logits_processors[::-1]
        super().__init__(options, replace(context, logits_processors=refs))


@mutant(caught_by="executor.draft_model")
class DraftsTheFirstToken(LocalExecutor):
    """Declares a draft model, and proposes the token 0 whatever it would."""

    def submit(self, batch: Batch) -> Any:
        if batch.drafts is None:
            return super().submit(batch)
        ids = np.maximum(batch.drafts.token_ids, 0)
        return super().submit(replace(batch, drafts=replace(batch.drafts, token_ids=ids)))


@mutant(caught_by="executor.settings")
class IgnoresTheDtypeOfItsCache(LocalExecutor):
    def __init__(self, options: Any, context: ExecutorContext) -> None:
        config = replace(context.config, kv_cache_dtype="auto")
        super().__init__(options, replace(context, config=config))


@mutant(caught_by="executor.settings")
class IgnoresQuantization(LocalExecutor):
    def __init__(self, options: Any, context: ExecutorContext) -> None:
        config = replace(context.config, quantization=None)
        super().__init__(options, replace(context, config=config))


class _WithOtherSettings(LocalExecutor):
    """Reads only some of its settings."""

    ignored: Mapping[str, Any] = {}

    def __init__(self, options: Any, context: ExecutorContext) -> None:
        config = replace(context.config, **self.ignored)
        super().__init__(options, replace(context, config=config))


@mutant(caught_by="executor.settings")
class IgnoresTheLoadFormat(_WithOtherSettings):
    ignored: Mapping[str, Any] = {"load_format": "auto"}


@mutant(caught_by="executor.settings")
class IgnoresTheDtypeOfStates(_WithOtherSettings):
    ignored: Mapping[str, Any] = {"state_dtype": "float32"}


@mutant(caught_by="executor.settings")
class TakesUnknownScalesForNone(LocalExecutor):
    def __init__(self, options: Any, context: ExecutorContext) -> None:
        scales = context.config.kv_cache_scales
        scales = scales if scales == "calibrate" else "auto"
        config = replace(context.config, kv_cache_scales=scales)
        super().__init__(options, replace(context, config=config))


@mutant(caught_by="executor.settings")
class NamesNoSetting(LocalExecutor):
    def start(self) -> Capacity:
        try:
            return super().start()
        except DovetailError:
            raise DovetailError("the configuration isn't supported") from None


@mutant(caught_by="executor.settings_used")
class IgnoresTheSizeOfBlocks(_WithOtherSettings):
    ignored: Mapping[str, Any] = {"block_size": None}


@mutant(caught_by="executor.settings_used")
class RandomWeightsOfOneSeed(_WithOtherSettings):
    ignored: Mapping[str, Any] = {"seed": 0}


@mutant(caught_by="executor.settings_used")
class HasTheUsualRank(_WithOtherSettings):
    ignored: Mapping[str, Any] = {"max_adapter_rank": 16}


@mutant(caught_by="executor.seed")
class SeedsOf32Bits(_OnARealClock):
    def read(self, sampling: RowSampling) -> RowSampling:
        return replace(sampling, seed=sampling.seed & 0xFFFF_FFFF)


class _ChangesRowsThatReturn(LocalExecutor):
    """Reads a row whose request has generated tokens in another way."""

    def read(self, row: NewRow) -> NewRow:
        raise NotImplementedError

    def submit(self, batch: Batch) -> Any:
        added = (
            self.read(row) if len(row.token_ids) > row.prompt_len else row for row in batch.added
        )
        return super().submit(replace(batch, added=tuple(added)))


@mutant(caught_by="executor.processors")
class LosesTheProcessorsOfRowsThatReturn(_ChangesRowsThatReturn):
    def read(self, row: NewRow) -> NewRow:
        return without_processors(row)


@mutant(caught_by="executor.returned_rows")
class TakesAllKnownTokensForThePrompt(_ChangesRowsThatReturn):
    def read(self, row: NewRow) -> NewRow:
        return replace(row, prompt_len=len(row.token_ids))


@mutant(caught_by="executor.returned_rows")
class LosesTheRulesOfRowsThatReturn(_ChangesRowsThatReturn):
    def read(self, row: NewRow) -> NewRow:
        assert row.sampling is not None
        return replace(row, sampling=replace(row.sampling, bad_words=()))


@mutant(caught_by="executor.drafts_processors")
class ProcessesNoRowsWithDrafts(LocalExecutor):
    """Applies no logits processor in a step with drafts."""

    def submit(self, batch: Batch) -> Any:
        assert self.worker.runner is not None
        processors: Any = self.worker.runner.sampling.processors
        if batch.drafts is not None:
            processors.asked_by = lambda rows: None
        try:
            return super().submit(batch)
        finally:
            vars(processors).pop("asked_by", None)


@mutant(caught_by="executor.long_use")
class KeepsAllBatches(FakeExecutor):
    def submit(self, batch: Batch) -> int:
        self.__dict__.setdefault("log", []).append(batch)
        return super().submit(batch)


@mutant(caught_by="executor.long_use")
class TakesOtherTokensWithTime(FakeExecutor):
    """From the sixtieth on."""

    seen = 0

    def submit(self, batch: Batch) -> int:
        self.seen += len(batch.added)
        if self.seen > 60:
            batch = replace(batch, added=tuple(map(self.other, batch.added)))
        return super().submit(batch)

    def other(self, row: NewRow) -> NewRow:
        return replace(row, token_ids=np.append(row.token_ids[:-1], 0).astype(np.int32))


@mutant(caught_by="executor.impossible_step")
class FailsAllRowsOfAStepThatRaised(FakeExecutor):
    def submit(self, batch: Batch) -> Any:
        try:
            return super().submit(batch)
        except DovetailError as error:
            return batch, str(error)

    def collect(self, handle: Any) -> Result:
        if not isinstance(handle, tuple):
            return super().collect(handle)
        batch, reason = handle
        now = self.context.clock.now()
        failed = dict.fromkeys(range(len(batch.rows)), reason)
        return Result(batch.step, np.full(len(batch.rows), -1), now, now, failed=failed)


@mutant(caught_by="executor.kept_results", soon=True)
class HasOneDictOfFailures(FakeExecutor):
    failures: dict[int, str] = {}  # noqa: RUF012

    def collect(self, handle: int) -> Result:
        result = super().collect(handle)
        self.failures.clear()
        self.failures.update(result.failed)
        return replace(result, failed=self.failures)


@mutant(caught_by="executor.kept_results")
class HasBuffersForLogprobs(LocalExecutor):
    buffers: dict[tuple[int, ...], HostLogprobs] = {}  # noqa: RUF012

    def collect(self, handle: Any) -> Result:
        result = super().collect(handle)
        if result.logprobs is None:
            return result
        kept = self.buffers.setdefault(result.logprobs.token_ids.shape, result.logprobs)
        for name in ("token_ids", "logprobs", "ranks"):
            getattr(kept, name)[...] = getattr(result.logprobs, name)
        return replace(result, logprobs=kept)


class _ReadsSampling(LocalExecutor):
    """Samples by something other than a row's `sampling`."""

    def read(self, sampling: RowSampling) -> RowSampling:
        return sampling

    def submit(self, batch: Batch) -> Any:
        added = tuple(
            new if new.sampling is None else replace(new, sampling=self.read(new.sampling))
            for new in batch.added
        )
        return super().submit(replace(batch, added=added))


@mutant(caught_by="executor.sampling_lists")
class BansFourWords(_ReadsSampling):
    def read(self, sampling: RowSampling) -> RowSampling:
        return replace(sampling, bad_words=sampling.bad_words[:4])


@mutant(caught_by="executor.sampling_lists")
class AllowsSixtyFourTokens(_ReadsSampling):
    def read(self, sampling: RowSampling) -> RowSampling:
        allowed = sampling.allowed_token_ids
        return replace(sampling, allowed_token_ids=allowed and allowed[:64])


@mutant(caught_by="executor.memory")
class TakesAllTheMemoryItLikes(LocalExecutor):
    def __init__(self, options: LocalOptions, context: ExecutorContext) -> None:
        config = replace(context.config, kv_cache_memory=32 << 20)
        super().__init__(options, replace(context, config=config))


@mutant(caught_by="executor.unstarted")
class OpensAPipeBeforeStart(FakeExecutor):
    started = False

    def __init__(self, options: FakeExecutorOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self.pipe = os.pipe()

    def start(self) -> Capacity:
        self.started = True
        return super().start()

    def stop(self) -> None:
        if self.started:
            self.started = False
            for end in self.pipe:
                os.close(end)


@mutant(caught_by="executor.any_thread")
class LogsStepsInADatabase(FakeExecutor):
    """A connection of sqlite3 belongs to the thread that opened it."""

    database: sqlite3.Connection | None = None

    def start(self) -> Capacity:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table steps (step integer)")
        return super().start()

    def submit(self, batch: Batch) -> int:
        assert self.database is not None
        self.database.execute("insert into steps values (?)", (batch.step,))
        return super().submit(batch)


def without_processors(row: NewRow) -> NewRow:
    if row.sampling is None:
        return row
    return replace(row, sampling=replace(row.sampling, logits_processors={}))


# Transfers


Broken = TypeVar("Broken", bound="type[TimedTransfers]")


def transfers_of(check: str) -> Callable[[Broken], Broken]:
    """Register a fake executor with these broken transfers."""

    def register(kind: Broken) -> Broken:
        def transfers(self: FakeExecutor) -> TimedTransfers:
            own = FakeExecutor.transfers(self)
            own.__class__ = kind
            own.executor = self  # type: ignore[attr-defined]
            return own

        name = kind.__name__.removeprefix("_")
        mutant(caught_by=f"executor.{check}")(type(name, (FakeExecutor,), {"transfers": transfers}))
        return kind

    return register


class _Transfers(TimedTransfers):
    executor: FakeExecutor
    _content: FakePages


@transfers_of("transfers")
class _RestoresInAscendingOrder(_Transfers):
    def restore(self, transfer: Transfer) -> None:
        super().restore(replace(transfer, pages=tuple(sorted(transfer.pages))))


@transfers_of("transfers")
class _LeavesOutTheLastPage(_Transfers):
    def restore(self, transfer: Transfer) -> None:
        super().restore(replace(transfer, pages=(*transfer.pages[:-1], HOLE)))


@transfers_of("transfers_order")
class _ReadsPagesWhenTheCopyEnds(_Transfers):
    def finished(self) -> Sequence[Transferred]:
        self._copies = [
            copy
            if copy.saved is None
            else replace(copy, saved=self._content.read(copy.transfer.pages))
            for copy in self._copies
        ]
        return super().finished()


@transfers_of("transfers_order")
class _StepsInFlightWriteAfterARestore(_Transfers):
    def restore(self, transfer: Transfer) -> None:
        if self.executor._pending:
            transfer = replace(transfer, pages=(HOLE,) * len(transfer.pages))
        super().restore(transfer)


@transfers_of("transfers_bytes")
class _ForgetsTheSeed(_Transfers):
    def save(self, transfer: Transfer) -> None:
        super().save(replace(transfer, seed=0))


@transfers_of("transfers_bytes")
class _SumsTheFirstPage(_Transfers):
    def _end(self, copy: Any) -> int:
        super()._end(copy)
        data = self._slabs[copy.transfer.slab][copy.transfer.offset :]
        return frame_checksum(data[: self.page_bytes], copy.transfer.seed)


@transfers_of("transfers_bytes")
class _RepeatsTheChecksumThatWasSaved(_Transfers):
    def _end(self, copy: Any) -> int:
        checksum = super()._end(copy)
        if copy.saved is not None:
            self.executor.batches = checksum
        return self.executor.batches


@transfers_of("transfers_bytes")
class _WritesAWordTooMuch(_Transfers):
    def _end(self, copy: Any) -> int:
        transfer = copy.transfer
        end = transfer.offset + len(transfer.pages) * self.page_bytes
        self._slabs[transfer.slab][end : end + 8] = bytes(8)
        return super()._end(copy)


@transfers_of("transfers_pages")
class _WritesWhatIsLeftOutToTheLastPage(_Transfers):
    def restore(self, transfer: Transfer) -> None:
        last = self.executor.options.num_pages - 1
        pages = (last if page == HOLE else page for page in transfer.pages)
        super().restore(replace(transfer, pages=tuple(pages)))


@transfers_of("transfers_pages")
class _WritesTheNextPageToo(_Transfers):
    def _end(self, copy: Any) -> int:
        checksum = super()._end(copy)
        if copy.saved is None:
            page = copy.transfer.pages[0]
            self._content.copy(page, page + 1)
        return checksum


@transfers_of("transfers_slabs")
class _NumbersAllSlabsAlike(_Transfers):
    def allocate(self, size: int) -> Slab:
        return replace(super().allocate(size), number=0)


@transfers_of("transfers_slabs")
class _SavesToTheFirstSlab(_Transfers):
    def save(self, transfer: Transfer) -> None:
        super().save(replace(transfer, slab=0))
