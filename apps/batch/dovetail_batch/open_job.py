"""`OpenJob`: a job whose folder is locked and whose input is known: its rows that have no answer, and the place for answers.

Whoever computes them, processes of this machine (`runner`) or others, does it between `JobFolder.open` and the end of `job_folder`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dovetail.errors import ConfigError, RequestError
from dovetail_batch.answers import Answer, failure_of, output_tokens
from dovetail_batch.files import locked
from dovetail_batch.inputs import source_of
from dovetail_batch.job import Plan
from dovetail_batch.manifest import ANEW, Manifest
from dovetail_batch.rows import Row, RowReader, id_of
from dovetail_batch.scanning import digest, scan
from dovetail_batch.shards import ShardStore, begin_anew, is_ours, stray_answers
from dovetail_batch.sources import Source
from dovetail_batch.writers import SUFFIXES, Writer, writer_of

SHOWN_FAILURES = 3


@dataclass(slots=True)
class Summary:
    """The result of a run of a job. `seconds` are those from the moment at which the first engine was ready."""

    rows: int  # of the job
    earlier: int  # rows that had an answer before
    failed: int = 0  # rows of this run
    failures: tuple[str, ...] = ()  # the first of them in words
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class RowsLeft:
    """The rows of a job that have no answer, read from the input as one goes. With a `left` that can be pickled, other processes can do it."""

    source: Source
    stamp: tuple[int, int, int]  # the source's when it was hashed
    reader: RowReader
    shard_rows: int
    starts: Sequence[int]  # positions in the input at which shards begin
    left: Callable[[int], Collection[int]]  # the numbers of a shard's rows that have no answer

    def __iter__(self) -> Iterator[Row | Answer]:
        """Yield each row; of one that can't be a request, what is wrong with it. Raises `ConfigError` if the input has been changed."""
        records, position = self.source.records(self.source.first), self.source.first
        for shard, start in enumerate(self.starts):
            left = self.left(shard)
            if not left:
                continue
            if start != position:  # a shard was left out
                records = self.source.records(start)
            for number, (record, behind) in enumerate(islice(records, self.shard_rows), start=shard * self.shard_rows + 1):
                position = behind
                if number in left:
                    yield self._row(number, record)
            if self.source.stamp() != self.stamp:
                raise ConfigError(f"input: {self.source.path}: it was changed while the job ran: some answers may be of other rows. {ANEW}")

    def _row(self, number: int, record: Any) -> Row | Answer:
        name: str | None = None
        try:
            fields = self.source.fields(record)
            name = id_of(fields, number, self.source.id_key)
            return self.reader.read(number, self.source.convert(fields))
        except RequestError as error:
            return failure_of(number, name, str(error))


class JobFolder:
    """The locked output folder of a job, which has no answers of other settings. `job_folder` makes it."""

    def __init__(self, plan: Plan, source: Source, writer: Writer, before: Manifest | None) -> None:
        """`before` is the manifest of an earlier run."""
        self._plan, self._source, self._writer, self._before = plan, source, writer, before
        self._directory = Path(plan.job.output.path)

    def open(self) -> OpenJob:
        """Read the input for its hash and, the first time, its ids. Raises `ConfigError` if it is another one than before or can't be used, and
        `UnwritableOutput`."""
        stamp, hashed = self._source.stamp(), digest(self._source)
        if self._before is not None:
            self._before.check_input(self._directory, hashed)
        manifest = self._before or self._new_manifest(hashed)
        store = ShardStore(self._directory, manifest, self._writer, SUFFIXES[self._plan.job.output.format])
        return OpenJob(RowsLeft(self._source, stamp, self._plan.rows, self._plan.job.shard_rows, manifest.starts, store.left), manifest.rows, store)

    def _new_manifest(self, hashed: str) -> Manifest:
        scanned = scan(self._source, self._plan.rows, self._plan.job.shard_rows)
        manifest = Manifest(hashed, self._plan.settings, scanned.rows, scanned.starts)
        manifest.write(self._directory)
        return manifest


@contextmanager
def job_folder(plan: Plan, *, anew: bool = False) -> Iterator[JobFolder]:
    """Keep a job's output folder for this process. `anew`: remove the answers that are there first.

    Raises `ConfigError` or `MissingExtraError` if the job can't be begun as it is.
    """
    source, directory = source_of(plan), Path(plan.job.output.path)
    writer = writer_of(plan.job.output.format, plan.configs[0].model.path)
    source.stamp()  # it is there, and so can be compared with the folder
    if any(is_ours(directory, path) for path in (source.path, source.path.resolve())):
        raise ConfigError(f"output: {directory}: the input is in it, and has the name of a file of answers: name another output folder")
    with locked(directory):
        if anew:
            begin_anew(directory)
        before = Manifest.read(directory)
        if before is not None:
            before.check_settings(directory, plan.settings)
        elif (stray := stray_answers(directory)) is not None:
            raise ConfigError(f"output: {directory}: there is {stray} and no manifest that says what it is of: {ANEW}")
        yield JobFolder(plan, source, writer, before)


class OpenJob:
    """The rows on their way, with a bar on a terminal. `summary` is up to date at any moment but for its `seconds`, which `end` sets."""

    def __init__(self, rows_left: RowsLeft, rows: int, store: ShardStore) -> None:
        self.rows_left = rows_left  # as the store sees it: a row may be read before the one before has its answer, and then is read once
        self._store = store
        self.summary = Summary(rows, store.answered)
        self._begun: float | None = None
        nothing_to_do = True if self.is_done else None  # None: on a terminal there is a bar
        self._bar = tqdm(total=rows, initial=self.summary.earlier, unit="row", disable=nothing_to_do, dynamic_ncols=True)
        self._bar.set_description("loading")

    def snapshot(self) -> RowsLeft:
        """Return the rows that have no answer now, for another process to read: an absolute path, and no store behind it."""
        source = copy(self.rows_left.source)
        source.path = source.path.resolve()
        return replace(self.rows_left, source=source, left=self._store.snapshot())

    def ready(self, seconds_ago: float = 0.0) -> None:
        """Take notice that an engine is ready. From the first on time counts."""
        if self._begun is None:
            self._begun = time.perf_counter() - seconds_ago
            self._bar.set_description("rows")
            self._bar.unpause()

    def keep_new(self, answers: Iterable[Answer]) -> int:
        """Put answers on disk as `keep` does, but for those of rows that have one. Return how many were new."""
        new = {answer["row"]: answer for answer in answers if self._store.lacks(answer["row"])}
        self.keep(new.values())
        return len(new)

    def keep(self, answers: Iterable[Answer]) -> None:
        """Put answers of rows that have none on disk. Raises `UnwritableOutput`."""
        answers = list(answers)
        if not answers:
            return
        self._store.add(answers)
        summary = self.summary
        summary.output_tokens += sum(map(output_tokens, answers))
        for answer in answers:
            if answer["error"] is not None:
                summary.failed += 1
                if len(summary.failures) < SHOWN_FAILURES:
                    summary.failures += (f"row {answer['row']}: {answer['error']}",)
        if self._begun is not None:
            self._bar.set_postfix_str(f"{summary.output_tokens / max(time.perf_counter() - self._begun, 1e-9):,.0f} tok/s", refresh=False)
        self._bar.update(len(answers))

    @property
    def is_done(self) -> bool:
        """True if every row has its answer."""
        return self._store.answered == self.summary.rows

    def end(self) -> Summary:
        """Stop the time, and return what was done."""
        self.summary.seconds = time.perf_counter() - self._begun if self._begun is not None else 0.0
        return self.summary

    def __enter__(self) -> OpenJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
