"""`run`: runs a whole job with engines in processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from dovetail.api.process_watch import STOPPED_S, ProcessWatch, how_ended
from dovetail.errors import ConfigError
from dovetail_batch.answers import Answer
from dovetail_batch.job import Plan
from dovetail_batch.open_job import OpenJob, Summary, job_folder
from dovetail_batch.rows import JobRow
from dovetail_batch.shards import GO_ON, BatchEngineFailed

ROWS_AT_ONCE = 64  # in one message to an engine's process
CHARS_AT_ONCE = 2**24  # of these rows, unless one row has more
# characters of rows that are sent to an engine's process and not yet answered, beyond which it gets
# no more: rows with images are large
MOST_CHARS = 2**28
WATCH_S = 0.25
# queued in an engine's process beyond two full steps, to be computed while the command writes a
# file
SPARE_ROWS = 1024
ENDS_S = 30.0  # how long the process may take to end after its last row


class SentRows:
    """The rows that an engine has, and the characters of all of them."""

    def __init__(self) -> None:
        self.chars = 0
        self._sizes: dict[int, int] = {}  # by the row's number

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, rows: Sequence[JobRow]) -> None:
        for row in rows:
            self._sizes[row.number] = row.size
            self.chars += row.size

    def remove(self, answers: Sequence[Answer]) -> None:
        """Forget the rows that are answered."""
        for answer in answers:
            self.chars -= self._sizes.pop(answer["row"])


class EngineLink:
    """An engine's process (`engine_process`), the number of its rows, and the command's end of its
    connection."""

    def __init__(self, index: int, source: str | Mapping[str, Any], gpus: str | None) -> None:
        """Start the process, which then loads its model. `gpus`: its CUDA_VISIBLE_DEVICES; None:
        inherited."""
        self._index = index
        self.connection, theirs = Pipe()
        environment = os.environ if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dovetail_batch.engine_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C comes to the command alone
                env=environment,
            )
        self._send(source)
        self._window = 0  # upper bound of the number of sent rows; 0 until it is ready
        self.sent = SentRows()
        self._ended_in_order = False
        self._given_up: str | None = None  # why it was killed, if it was

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def room(self) -> int:
        """The number of rows to send now."""
        return 0 if self.sent.chars > MOST_CHARS else self._window - len(self.sent)

    def ready(self, max_num_seqs: int) -> None:
        """Note that the engine is ready."""
        self._window = 2 * max_num_seqs + SPARE_ROWS

    def send(self, rows: Sequence[JobRow]) -> None:
        """Send rows."""
        self.sent.add(rows)
        self._send(rows)

    def finish(self) -> None:
        """Announce that there are no more rows, and wait up to `ENDS_S` for the process to end."""
        self._send(None)
        with suppress(subprocess.TimeoutExpired):
            self._ended_in_order = self._process.wait(ENDS_S) == 0

    def ended(self, why: str | None = None) -> BatchEngineFailed:
        """Return the error of a process that ended early; `why`: the reason that it sent."""
        if why is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)
            code = self._process.returncode
            why = self._given_up or (
                "it sends nothing more" if code is None else f"it {how_ended(code)}"
            )
        return BatchEngineFailed(f"engine {self._index} has failed: {why}; {GO_ON}")

    def give_up(self, why: str) -> None:
        """Kill a hung process; `ended` gives the reason. Any thread may call it."""
        self._given_up = why
        self._kill()

    def close(self) -> None:
        """Kill the process and its children. Idempotent."""
        self.connection.close()
        if self._ended_in_order:
            return  # its id may be reused
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self.ended() from None


def run(plan: Plan, *, anew: bool = False) -> Summary:
    """Compute every unanswered row of the job. `anew`: delete the existing answers first.

    Raises `ConfigError` or `MissingExtraError` if the job can't run as it is, `BatchEngineFailed`
    or `UnwritableOutput` if it ends early. `KeyboardInterrupt` propagates, with everything computed
    so far on disk.
    """
    with ExitStack() as stack:
        open_job = stack.enter_context(job_folder(plan, anew=anew))
        links: list[EngineLink] = []
        for index, (engine, gpus) in enumerate(
            zip(plan.sources, plan.gpus, strict=True)
        ):  # they load while the input is read
            link = EngineLink(index, engine, gpus)
            stack.callback(link.close)
            links.append(link)
        stack.enter_context(_killing_stopped(links))
        job = stack.enter_context(open_job())
        if job.is_done:
            return job.end()
        rows = iter(job.rows_left())
        more = True
        while True:
            more = more and _hand_out(job, links, rows)
            if not more and not any(len(link.sent) for link in links):
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
    """Send rows to engines that have room, those with the most room first. Return False when there
    are no more rows."""
    while (link := max(links, key=lambda link: link.room)).room >= ROWS_AT_ONCE:
        some = _next_of(rows)
        if not some:
            return False
        if valid := [row for row in some if isinstance(row, JobRow)]:
            link.send(valid)
        if invalid := [answer for answer in some if not isinstance(answer, JobRow)]:
            job.store(invalid)
    return True


def _next_of(rows: Iterator[JobRow | Answer]) -> list[JobRow | Answer]:
    """Return the next rows that one message has."""
    some: list[JobRow | Answer] = []
    chars = 0
    while len(some) < ROWS_AT_ONCE and chars < CHARS_AT_ONCE:
        if (row := next(rows, None)) is None:
            break
        some.append(row)
        chars += row.size if isinstance(row, JobRow) else 0
    return some


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
            link.sent.remove(content)
            job.store(content)
        elif kind == "ready":
            link.ready(content)
            job.ready()
        elif kind == "refused":
            raise ConfigError(f"engine: {content}")
        else:
            raise link.ended(content)
