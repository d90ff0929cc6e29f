"""`run`: the whole of a job, from its plan to the last answer on disk, with the engines in processes of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing.connection import wait

from dovetail.errors import ConfigError
from dovetail.process_watch import STOPPED_S, ProcessWatch
from dovetail_batch.answers import Answer
from dovetail_batch.engine_link import EngineLink
from dovetail_batch.job import Plan
from dovetail_batch.open_job import OpenJob, Summary, job_folder
from dovetail_batch.rows import Row

ROWS_AT_ONCE = 64  # in one message to an engine's process
WATCH_S = 0.25


def run(plan: Plan, *, anew: bool = False) -> Summary:
    """Compute every row of the job that has no answer. `anew`: remove the answers that are there first.

    Raises `ConfigError` or `MissingExtraError` if the job can't be begun as it is, `BatchEngineFailed` or `UnwritableOutput` if it ends early.
    `KeyboardInterrupt` passes through, with what has been computed on disk.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(job_folder(plan, anew=anew))
        links: list[EngineLink] = []
        for place, (engine, gpus) in enumerate(zip(plan.sources, plan.gpus, strict=True)):  # they load while the input is read
            link = EngineLink(place, engine, gpus)
            stack.callback(link.close)
            links.append(link)
        stack.enter_context(_stopped_ones_killed(links))
        return _Run(stack.enter_context(folder.open()), links).run()


@contextmanager
def _stopped_ones_killed(links: Sequence[EngineLink]) -> Iterator[None]:
    """Meanwhile kill engines' processes that are stopped: in a thread, since sending one its rows may block."""
    over = threading.Event()

    def watch() -> None:
        clock = ProcessWatch()
        while not over.wait(WATCH_S):
            clock.turn()
            for link in links:
                if clock.is_stopped(link.pid):
                    link.give_up(f"it had been stopped (SIGSTOP) for {STOPPED_S:g} s")

    thread = threading.Thread(target=watch, name="dovetail-batch-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Run:
    """The rows on their way."""

    def __init__(self, job: OpenJob, links: Sequence[EngineLink]) -> None:
        self._job, self._links = job, links

    def run(self) -> Summary:
        if self._job.is_done:
            return self._job.end()
        rows, more = iter(self._job.rows_left), True
        while True:
            more = more and self._hand_out(rows)
            if not more and not any(link.rows for link in self._links):
                break
            self._take_answers()
        summary = self._job.end()
        for link in self._links:
            link.finish()
        return summary

    def _hand_out(self, rows: Iterator[Row | Answer]) -> bool:
        """Give rows to engines that have room, those with the most room first. Return False when there are no more rows."""
        while (link := max(self._links, key=lambda link: link.room)).room >= ROWS_AT_ONCE:
            some = list(islice(rows, ROWS_AT_ONCE))
            if not some:
                return False
            good = [row for row in some if isinstance(row, Row)]
            if good:
                link.send(good)
            self._job.keep(answer for answer in some if not isinstance(answer, Row))
        return True

    def _take_answers(self) -> None:
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
                self._job.keep(content)
            elif kind == "ready":
                link.ready(content)
                self._job.ready()
            elif kind == "refused":
                raise ConfigError(f"engine: {content}")
            else:
                raise link.ended(content)
