"""The part of `ray_jobs` that runs in Ray's workers: `groups_of` reads rows, `BatchEngine` computes
them. Imports no Ray.

Ray Data sees one column of pickled bytes, a group of rows or a message of an engine, so that it
converts no value.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Any

import numpy as np

from dovetail.errors import DovetailError
from dovetail_batch.answers import Answer
from dovetail_batch.engine_process import EngineWorker, start_engine
from dovetail_batch.rows import JobRow

COLUMN = "pickled"
MOST_IN_GROUP = 64  # rows

Batch = Mapping[str, Any]


def rows_in_group(max_num_seqs: int) -> int:
    """Return the number of rows in a group: a fourth of a full step, so that an engine stays full
    while other groups are in transit."""
    return max(1, min(MOST_IN_GROUP, max_num_seqs // 4))


def packed(content: Any) -> dict[str, Any]:
    """Pickle a value into a Ray Data batch of one row."""
    column = np.empty(1, dtype=object)
    column[0] = pickle.dumps(content)
    return {COLUMN: column}


def groups_of(batch: Batch, group: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a pickled `RowsLeft` in groups. Deterministic, as Ray requires for
    retries."""
    rows = iter(pickle.loads(batch[COLUMN][0]))
    try:
        while some := list(islice(rows, group)):
            yield packed(some)
    except DovetailError as error:  # the input was changed
        yield packed(str(error))


class BatchEngine:
    """An engine in an actor. Several threads call it, each with a group of rows, which share the
    engine's steps.

    A call returns (kind, content, seconds since the engine was ready), pickled: ("answers", list of
    `Answer`, …), ("refused", reason, …) if the engine can't start or the rows can't be read,
    ("dead", reason, …) if the engine has failed.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Start the engine. Calls report its errors."""
        self._rows: queue.SimpleQueue[list[JobRow] | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Answer]] = {}  # by row number
        self._lock = threading.Lock()
        self._failure: tuple[str, str] | None = None
        try:
            self._engine = start_engine(dict(config))
        except DovetailError as error:
            self._failure = "refused", f"engine: {error}"
            return
        self._ready = time.monotonic()
        threading.Thread(target=self._run, name="dovetail-batch-engine", daemon=True).start()

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Compute a group. Any thread may call it."""
        group: list[JobRow | Answer] | str = pickle.loads(batch[COLUMN][0])
        if isinstance(group, str):
            return packed(("refused", group, 0.0))
        rows = [row for row in group if isinstance(row, JobRow)]
        answers = [answer for answer in group if not isinstance(answer, JobRow)]
        with self._lock:
            if self._failure is not None:
                return packed((*self._failure, 0.0))
            # Ray may retry a group that is under way
            new = [row for row in rows if row.number not in self._waiting]
            self._waiting.update((row.number, Future()) for row in new)
            futures = [self._waiting[row.number] for row in rows]
            self._rows.put(new)
        try:
            answers += [future.result() for future in futures]
        except DovetailError:
            assert self._failure is not None
            return packed((*self._failure, 0.0))
        return packed(("answers", answers, time.monotonic() - self._ready))

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            with self._lock:
                future = self._waiting.pop(answer["row"])
            future.set_result(answer)

    def _run(self) -> None:
        try:
            EngineWorker(self._engine, self._rows, self._answer).run()
        except BaseException as error:  # callers must get it, whatever it is
            with self._lock:
                self._failure = "dead", str(error) or type(error).__name__
                waiting = self._waiting
                self._waiting = {}
            for future in waiting.values():
                future.set_exception(DovetailError(self._failure[1]))
