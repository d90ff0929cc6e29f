"""`OpenJob`: a job whose output folder is locked and whose input has been read once: its unanswered rows, and the place for their answers.

`runner` computes the rows in processes of this machine, `dovetail_cluster.ray_jobs` on a Ray cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dovetail.errors import ConfigError, RequestError
from dovetail_batch.answers import SUFFIXES, Answer, failure_of, output_tokens, writer_of
from dovetail_batch.folder import ANEW, Manifest, locked
from dovetail_batch.job import Plan
from dovetail_batch.rows import JobRow, RowReader, id_of
from dovetail_batch.scanning import digest, scan
from dovetail_batch.shards import ShardStore, begin_anew, is_ours, stray_answers
from dovetail_batch.sources import Csv, Jsonl, Source

SHOWN_FAILURES = 3


@dataclass(slots=True)
class Summary:
    """The result of a run. `seconds` count from the moment the first engine was ready."""

    rows: int  # of the job
    earlier: int  # rows answered by earlier runs
    failed: int = 0  # rows of this run
    failures: tuple[str, ...] = ()  # the first of them in words
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class RowsLeft:
    """The unanswered rows of a job, streamed from the input. Picklable."""

    source: Source
    stamp: tuple[int, int, int]  # the source's when it was hashed
    reader: RowReader
    shard_rows: int
    starts: Sequence[int]  # input positions of the shards
    left: Mapping[int, Collection[int]]  # the numbers of the unanswered rows, by shard

    def __iter__(self) -> Iterator[JobRow | Answer]:
        """Yield each row, or the answer with its error if it is invalid. Raises `ConfigError` if the input has changed."""
        records, position = self.source.records(self.source.first), self.source.first
        for shard, start in enumerate(self.starts):
            if shard not in self.left:
                continue
            if start != position:  # a shard was skipped
                records = self.source.records(start)
            for number, (record, end) in enumerate(islice(records, self.shard_rows), start=shard * self.shard_rows + 1):
                position = end
                if number in self.left[shard]:
                    yield self._row(number, record)
            if self.source.stamp() != self.stamp:
                raise ConfigError(f"input: {self.source.path}: it was changed while the job ran: some answers may be of other rows. {ANEW}")

    def _row(self, number: int, record: Any) -> JobRow | Answer:
        name: str | None = None
        try:
            fields = self.source.fields(record)
            name = id_of(fields, number, self.source.id_key)
            return self.reader.read(number, self.source.convert(fields))
        except RequestError as error:
            return failure_of(number, name, str(error))


@contextmanager
def job_folder(plan: Plan, *, anew: bool = False) -> Iterator[Callable[[], OpenJob]]:
    """Lock a job's output folder, which has no answers of other settings. `anew`: delete the existing answers first.

    Yields the function that reads the input and opens the job: engines can load meanwhile. Both raise `ConfigError` if the job can't run as it is,
    this one also `MissingExtraError`, and the function `UnwritableOutput`.
    """
    source, directory = source_of(plan), Path(plan.job.output.path)
    writer = writer_of(plan.job.output.format, plan.configs[0].model.path)
    source.stamp()  # raises if it doesn't exist: the next line needs it
    if any(is_ours(directory, path) for path in (source.path, source.path.resolve())):
        raise ConfigError(f"output: {directory}: the input is in it, and has the name of a file of answers: name another output folder")

    def open_job() -> OpenJob:
        stamp, sha256 = source.stamp(), digest(source)
        if before is None:
            rows, starts = scan(source, plan.rows, plan.job.shard_rows)
            manifest = Manifest(sha256, plan.settings, rows, starts)
            manifest.write(directory)
        else:
            before.check_input(directory, sha256)
            manifest = before
        store = ShardStore(directory, manifest, writer, SUFFIXES[plan.job.output.format])
        return OpenJob(plan, source, stamp, manifest, store)

    with locked(directory):
        if anew:
            begin_anew(directory)
        before = Manifest.read(directory)
        if before is not None:
            before.check_settings(directory, plan.settings)
        elif (stray := stray_answers(directory)) is not None:
            raise ConfigError(f"output: {directory}: there is {stray} and no manifest that says what it is of: {ANEW}")
        yield open_job


def source_of(plan: Plan) -> Source:
    """Return the source of a job's rows. Raises `ConfigError` if the file can't be read in its format, `MissingExtraError` without pyarrow."""
    path, columns = Path(plan.job.input.path), dict[str, str](plan.job.input.columns.items())
    if plan.format == "parquet":
        from dovetail_batch.parquet import Parquet

        return Parquet(path, columns)
    if plan.format == "csv":
        return Csv(path, columns)
    if plan.format == "openai":
        from dovetail_batch.openai_format import OpenAIBatch

        return OpenAIBatch(path, limited="max_tokens" in plan.job.sampling)
    return Jsonl(path, columns)


class OpenJob:
    """A job under way, with a progress bar on a terminal. `summary` is current except for its `seconds`, which `end` sets."""

    def __init__(self, plan: Plan, source: Source, stamp: tuple[int, int, int], manifest: Manifest, store: ShardStore) -> None:
        self._plan, self._source, self._stamp, self._manifest, self._store = plan, source, stamp, manifest, store
        self.summary = Summary(manifest.rows, store.answered)
        self._begun: float | None = None
        disable = True if self.is_done else None  # None: shown on a terminal only
        self._bar = tqdm(total=manifest.rows, initial=self.summary.earlier, unit="row", disable=disable, dynamic_ncols=True)
        self._bar.set_description("loading")

    def rows_left(self) -> RowsLeft:
        """Return the rows that are unanswered now."""
        return RowsLeft(self._source, self._stamp, self._plan.rows, self._plan.job.shard_rows, self._manifest.starts, self._store.left())

    def ready(self, seconds_ago: float = 0.0) -> None:
        """Note that an engine is ready. The first call starts the clock."""
        if self._begun is None:
            self._begun = time.perf_counter() - seconds_ago
            self._bar.set_description("rows")
            self._bar.unpause()

    def keep(self, answers: Iterable[Answer]) -> int:
        """Write answers to disk, except those of answered rows. Returns the number of new ones. Raises `UnwritableOutput`."""
        new = self._store.add(answers)
        summary = self.summary
        summary.output_tokens += sum(map(output_tokens, new))
        for answer in new:
            if answer["error"] is not None:
                summary.failed += 1
                if len(summary.failures) < SHOWN_FAILURES:
                    summary.failures += (f"row {answer['row']}: {answer['error']}",)
        if self._begun is not None:
            self._bar.set_postfix_str(f"{summary.output_tokens / max(time.perf_counter() - self._begun, 1e-9):,.0f} tok/s", refresh=False)
        self._bar.update(len(new))
        return len(new)

    @property
    def is_done(self) -> bool:
        """True if every row is answered."""
        return self._store.answered == self.summary.rows

    def end(self) -> Summary:
        """Stop the clock and return the result."""
        self.summary.seconds = time.perf_counter() - self._begun if self._begun is not None else 0.0
        return self.summary

    def __enter__(self) -> OpenJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
