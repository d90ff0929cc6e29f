"""`run`: the whole of a job, from its plan to the last answer on disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dovetail.errors import ConfigError, RequestError
from dovetail_batch.answers import Answer, failure_of, output_tokens
from dovetail_batch.engine_link import EngineLink
from dovetail_batch.files import locked
from dovetail_batch.inputs import source_of
from dovetail_batch.job import Plan
from dovetail_batch.manifest import ANEW, Manifest
from dovetail_batch.rows import Row, RowReader, id_of
from dovetail_batch.scanning import digest, scan
from dovetail_batch.shards import ShardStore, begin_anew, stray_answers
from dovetail_batch.sources import Source
from dovetail_batch.writers import SUFFIXES, writer_of

ROWS_AT_ONCE = 64  # in one message to an engine's process
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


def run(plan: Plan, *, anew: bool = False) -> Summary:
    """Compute every row of the job that has no answer. `anew`: remove the answers that are there first.

    Raises `ConfigError` or `MissingExtraError` if the job can't be begun as it is, `BatchEngineFailed` or `UnwritableOutput` if it ends early.
    `KeyboardInterrupt` passes through, with what has been computed on disk.
    """
    source, directory = source_of(plan), Path(plan.job.output.path)
    writer = writer_of(plan.job.output.format, plan.configs[0].model)
    with ExitStack() as stack:
        stack.enter_context(locked(directory))
        if anew:
            begin_anew(directory)
        before = Manifest.read(directory)
        if before is not None:
            before.check_settings(directory, plan.settings)
        elif (stray := stray_answers(directory)) is not None:
            raise ConfigError(f"output: {directory}: there is {stray} and no manifest that says what it is of: {ANEW}")
        links: list[EngineLink] = []
        for place, engine in enumerate(plan.sources):  # they load while the input is read
            link = EngineLink(place, engine, plan.job.gpus[place] if plan.job.gpus else None)
            stack.callback(link.close)
            links.append(link)
        stamp, hashed = source.stamp(), digest(source)
        if before is not None:
            before.check_input(directory, hashed)
        manifest = before or _new_manifest(plan, source, hashed, directory)
        store = ShardStore(directory, manifest, writer, SUFFIXES[plan.job.output.format])
        return _Run(source, stamp, plan.rows, manifest, store, links).run()


def _new_manifest(plan: Plan, source: Source, hashed: str, directory: Path) -> Manifest:
    scanned = scan(source, plan.rows, plan.job.shard_rows)
    manifest = Manifest(hashed, plan.settings, scanned.rows, scanned.starts)
    manifest.write(directory)
    return manifest


class _Run:
    """The rows on their way."""

    def __init__(
        self, source: Source, stamp: tuple[int, int, int], reader: RowReader, manifest: Manifest, store: ShardStore, links: list[EngineLink]
    ) -> None:
        """`stamp` is the source's when it was hashed."""
        self._source, self._stamp, self._reader, self._manifest, self._store, self._links = source, stamp, reader, manifest, store, links
        self._summary = Summary(manifest.rows, store.answered)
        self._begun: float | None = None

    def run(self) -> Summary:
        summary = self._summary
        if summary.earlier == summary.rows:
            return summary
        rows = self._rows()
        with tqdm(total=summary.rows, initial=summary.earlier, unit="row", disable=None, dynamic_ncols=True) as bar:
            bar.set_description("loading")
            more = True
            while True:
                more = more and self._hand_out(rows, bar)
                if not more and not any(link.rows for link in self._links):
                    break
                self._take_answers(bar)
        summary.seconds = time.perf_counter() - self._begun if self._begun is not None else 0.0
        for link in self._links:
            link.finish()
        return summary

    def _rows(self) -> Iterator[Row | Answer]:
        """Yield each row that has no answer yet; of one that can't be a request, what is wrong with it."""
        shard_rows = int(self._manifest.settings["shard_rows"])
        records, position = self._source.records(self._source.first), self._source.first
        for shard, start in enumerate(self._manifest.starts):
            left = self._store.left(shard)
            if not left:
                continue
            if start != position:  # a shard was left out
                records = self._source.records(start)
            for number, (record, behind) in enumerate(islice(records, shard_rows), start=shard * shard_rows + 1):
                position = behind
                if number in left:
                    yield self._row(number, record)
            if self._source.stamp() != self._stamp:
                raise ConfigError(f"input: {self._source.path}: it was changed while the job ran: some answers may be of other rows. {ANEW}")

    def _row(self, number: int, record: Any) -> Row | Answer:
        name: str | None = None
        try:
            fields = self._source.fields(record)
            name = id_of(fields, number, self._source.id_key)
            return self._reader.read(number, self._source.convert(fields))
        except RequestError as error:
            return failure_of(number, name, str(error))

    def _hand_out(self, rows: Iterator[Row | Answer], bar: Any) -> bool:
        """Give rows to engines that have room, those with the most room first. Return False when there are no more rows."""
        while (link := max(self._links, key=lambda link: link.room)).room >= ROWS_AT_ONCE:
            some = list(islice(rows, ROWS_AT_ONCE))
            if not some:
                return False
            good = [row for row in some if isinstance(row, Row)]
            if good:
                link.send(good)
            self._keep([answer for answer in some if not isinstance(answer, Row)], bar)
        return True

    def _take_answers(self, bar: Any) -> None:
        """Wait until an engine says something, and keep what it has answered."""
        by_connection = {link.connection: link for link in self._links}
        for connection in wait(list(by_connection)):
            link = by_connection[connection]  # type: ignore[index]
            try:
                kind, content = link.connection.recv()
            except (EOFError, OSError):
                raise link.ended() from None
            if kind == "answers":
                link.rows -= len(content)
                self._keep(content, bar)
            elif kind == "ready":
                link.ready(content)
                if self._begun is None:
                    self._begun = time.perf_counter()
                    bar.set_description("rows")
                    bar.unpause()
            elif kind == "refused":
                raise ConfigError(f"engine: {content}")
            else:
                raise link.ended(content)

    def _keep(self, answers: Iterable[Answer], bar: Any) -> None:
        answers = list(answers)
        if not answers:
            return
        self._store.add(answers)
        summary = self._summary
        summary.output_tokens += sum(map(output_tokens, answers))
        for answer in answers:
            if answer["error"] is not None:
                summary.failed += 1
                if len(summary.failures) < SHOWN_FAILURES:
                    summary.failures += (f"row {answer['row']}: {answer['error']}",)
        if self._begun is not None:
            bar.set_postfix_str(f"{summary.output_tokens / max(time.perf_counter() - self._begun, 1e-9):,.0f} tok/s", refresh=False)
        bar.update(len(answers))
