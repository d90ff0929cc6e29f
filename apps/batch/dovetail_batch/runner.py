"""`run`: runs a whole job with engines in processes of this machine."""

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
from dovetail_batch.rows import JobRow

ROWS_AT_ONCE = 64  # in one message to an engine's process
WATCH_S = 0.25


def run(plan: Plan, *, anew: bool = False) -> Summary:
    """Compute every unanswered row of the job. `anew`: delete the existing answers first.

    Raises `ConfigError` or `MissingExtraError` if the job can't run as it is, `BatchEngineFailed` or `UnwritableOutput` if it ends early.
    `KeyboardInterrupt` propagates, with everything computed so far on disk.
    """
    with ExitStack() as stack:
        open_job = stack.enter_context(job_folder(plan, anew=anew))
        links: list[EngineLink] = []
        for index, (engine, gpus) in enumerate(zip(plan.sources, plan.gpus, strict=True)):  # they load while the input is read
            link = EngineLink(index, engine, gpus)
            stack.callback(link.close)
            links.append(link)
        stack.enter_context(_killing_stopped(links))
        job = stack.enter_context(open_job())
        if job.is_done:
            return job.end()
        rows, more = iter(job.rows_left()), True
        while True:
            more = more and _hand_out(job, links, rows)
            if not more and not any(link.rows for link in links):
                break
            _take_answers(job, links)
        summary = job.end()
        for link in links:
            link.finish()
        return summary


@contextmanager
def _killing_stopped(links: Sequence[EngineLink]) -> Iterator[None]:
    """Kill engine processes that are stopped: in a thread, since sending rows to one may block."""
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


def _hand_out(job: OpenJob, links: Sequence[EngineLink], rows: Iterator[JobRow | Answer]) -> bool:
    """Send rows to engines that have room, those with the most room first. Return False when there are no more rows."""
    while (link := max(links, key=lambda link: link.room)).room >= ROWS_AT_ONCE:
        some = list(islice(rows, ROWS_AT_ONCE))
        if not some:
            return False
        if valid := [row for row in some if isinstance(row, JobRow)]:
            link.send(valid)
        if invalid := [answer for answer in some if not isinstance(answer, JobRow)]:
            job.keep(invalid)
    return True


def _take_answers(job: OpenJob, links: Sequence[EngineLink]) -> None:
    """Wait for messages of engines and keep their answers."""
    by_connection = {link.connection: link for link in links}
    for connection in wait(list(by_connection)):
        link = by_connection[connection]  # type: ignore[index]
        try:
            kind, content = link.connection.recv()
        except (EOFError, OSError):
            raise link.ended() from None
        if kind == "answers":
            link.rows -= len(content)
            job.keep(content)
        elif kind == "ready":
            link.ready(content)
            job.ready()
        elif kind == "refused":
            raise ConfigError(f"engine: {content}")
        else:
            raise link.ended(content)
