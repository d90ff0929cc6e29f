"""`OpenJob`: a job whose output folder is locked and whose input has been read once: its unanswered
rows, and the place for their answers. `scan` is the first pass over the input, which counts the
rows, finds where shards begin, and rejects duplicate ids.

`runner` computes the rows in processes of this machine, `dovetail_cluster.ray_jobs` on a Ray
cluster.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from dovetail.errors import ConfigError, RequestError, shown
from dovetail_batch.answers import SUFFIXES, Answer, failure_of, output_tokens, writer_of
from dovetail_batch.job import Plan
from dovetail_batch.rows import JobRow, RowReader, id_of
from dovetail_batch.shards import (
    ANEW,
    Manifest,
    ShardStore,
    begin_anew,
    is_ours,
    locked,
    stray_answers,
)
from dovetail_batch.sources import Csv, Jsonl, OpenAIBatch, Source, unreadable

SHOWN_FAILURES = 3
# rows: a job is rejected if its first `TRIED` rows, or all if it has fewer, are invalid
TRIED = 100


def digest(source: Source) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises `ConfigError`."""
    with source.opened() as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(source.path, error) from None


def scan(source: Source, reader: RowReader, shard_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of rows and the positions at which shards begin. Holds 8 bytes per row, a
    hash of its id.

    Raises `ConfigError` if there are no rows, if the first ones are all invalid, or if an id occurs
    twice: its answers would be ambiguous.
    """
    _check_first_rows(source, reader)
    starts: list[int] = []
    hashes: array[int] = array("Q")
    position = source.first
    rows = 0
    for record, end in source.records(source.first):
        if rows % shard_rows == 0:
            starts.append(position)
        rows += 1
        position = end
        if (name := _id(source, record, rows)) is not None:
            hashes.append(_hash(name))
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
        _reject_duplicate(source, set(twice.tolist()))
    return rows, tuple(starts)


def _check_first_rows(source: Source, reader: RowReader) -> None:
    """Raise `ConfigError` if no row would be computed: then the format or the names of columns are
    wrong rather than the rows."""
    first: RequestError | None = None
    number = 0
    for number, (record, _) in enumerate(islice(source.records(source.first), TRIED), start=1):
        try:
            reader.read(number, source.convert(source.fields(record)))
            return
        except RequestError as error:
            first = first or error
    if first is None:
        raise ConfigError(f"input: {source.path}: no rows in it")
    which = (
        "its only row is wrong"
        if number == 1
        else f"its first {number} rows are all wrong, row 1 for instance"
    )
    raise ConfigError(f"input: {source.path}: {which}: {first}")


def _id(source: Source, record: object, number: int) -> str | None:
    """Return the id of a row; None if it is unreadable: such a row is reported by its number."""
    try:
        return id_of(source.fields(record), number, source.id_key)
    except RequestError:
        return None


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def _reject_duplicate(source: Source, hashes: set[int]) -> None:
    """Raise `ConfigError` for the first id that occurs twice. Different ids may have the same
    hash."""
    seen: dict[str, int] = {}
    for number, (record, _) in enumerate(source.records(source.first), start=1):
        name = _id(source, record, number)
        if name is None or _hash(name) not in hashes:
            continue
        if name in seen:
            raise ConfigError(
                f"input: {source.path}: rows {seen[name]} and {number} have the same id, "
                f"{shown(name)}"
            )
        seen[name] = number


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
        """Yield each row, or the answer with its error if it is invalid. Raises `ConfigError` if
        the input has changed."""
        records = self.source.records(self.source.first)
        position = self.source.first
        for shard, start in enumerate(self.starts):
            if shard not in self.left:
                continue
            if start != position:  # a shard was skipped
                records = self.source.records(start)
            for number, (record, end) in enumerate(
                islice(records, self.shard_rows), start=shard * self.shard_rows + 1
            ):
                position = end
                if number in self.left[shard]:
                    yield self._row(number, record)
            if self.source.stamp() != self.stamp:
                raise ConfigError(
                    f"input: {self.source.path}: it was changed while the job ran: some answers "
                    f"may be of other rows. {ANEW}"
                )

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
    """Lock a job's output folder, which has no answers of other settings. `anew`: delete the
    existing answers first.

    Yields the function that reads the input and opens the job: engines can load meanwhile. Both
    raise `ConfigError` if the job can't run as it is, this one also `MissingExtraError`, and the
    function `UnwritableOutput`.
    """
    source, directory = source_of(plan), Path(plan.job.output.path)
    writer = writer_of(plan.job.output.format, plan.configs[0].model.path)
    source.stamp()  # raises if it doesn't exist: the next line needs it
    if any(is_ours(directory, path) for path in (source.path, source.path.resolve())):
        raise ConfigError(
            f"output: {directory}: the input is in it, and has the name of a file of answers: name "
            f"another output folder"
        )

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
            raise ConfigError(
                f"output: {directory}: there is {stray} and no manifest that says what it is of: "
                f"{ANEW}"
            )
        yield open_job


def source_of(plan: Plan) -> Source:
    """Return the source of a job's rows. Raises `ConfigError` if the file can't be read in its
    format, `MissingExtraError` without pyarrow."""
    path = Path(plan.job.input.path)
    columns = dict[str, str](plan.job.input.columns.items())
    if plan.format == "parquet":
        from dovetail_batch.parquet import Parquet

        return Parquet(path, columns)
    if plan.format == "csv":
        return Csv(path, columns)
    if plan.format == "openai":
        return OpenAIBatch(path, limited="max_tokens" in plan.job.sampling)
    return Jsonl(path, columns)


class OpenJob:
    """A job under way, with a progress bar on a terminal. `summary` is current except for its
    `seconds`, which `end` sets."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        stamp: tuple[int, int, int],
        manifest: Manifest,
        store: ShardStore,
    ) -> None:
        self._plan = plan
        self._source = source
        self._stamp = stamp
        self._manifest = manifest
        self._store = store
        self.summary = Summary(manifest.rows, store.answered)
        self._begun: float | None = None
        disable = True if self.is_done else None  # None: shown on a terminal only
        self._bar = tqdm(
            total=manifest.rows,
            initial=self.summary.earlier,
            unit="row",
            disable=disable,
            dynamic_ncols=True,
        )
        self._bar.set_description("loading")

    def rows_left(self) -> RowsLeft:
        """Return the rows that are unanswered now."""
        return RowsLeft(
            self._source,
            self._stamp,
            self._plan.rows,
            self._plan.job.shard_rows,
            self._manifest.starts,
            self._store.left(),
        )

    def ready(self, seconds_ago: float = 0.0) -> None:
        """Note that an engine is ready. The first call starts the clock."""
        if self._begun is None:
            self._begun = time.perf_counter() - seconds_ago
            self._bar.set_description("rows")
            self._bar.unpause()

    def store(self, answers: Iterable[Answer]) -> int:
        """Write answers to disk, except those of answered rows. Returns the number of new ones.
        Raises `UnwritableOutput`."""
        new = self._store.add(answers)
        summary = self.summary
        summary.output_tokens += sum(map(output_tokens, new))
        for answer in new:
            if answer["error"] is not None:
                summary.failed += 1
                if len(summary.failures) < SHOWN_FAILURES:
                    summary.failures += (f"row {answer['row']}: {answer['error']}",)
        if self._begun is not None:
            self._bar.set_postfix_str(
                f"{summary.output_tokens / max(time.perf_counter() - self._begun, 1e-9):,.0f} "
                f"tok/s",
                refresh=False,
            )
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
