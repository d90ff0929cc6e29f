"""`batches` has this done on a cluster's machines: `groups_of` reads rows, and a `BatchEngine` computes them. Nothing here imports Ray.

Ray Data sees one column of bytes: a group of rows, or what an engine says of it. That leaves rows, their ids and parameters as they are.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import islice
from typing import Any, Literal

import numpy as np

from dovetail.errors import DovetailError
from dovetail_batch.answers import Answer
from dovetail_batch.engine_process import EngineWorker, start_engine
from dovetail_batch.rows import Row

COLUMN = "pickled"
MOST_IN_GROUP = 64  # rows

Batch = Mapping[str, Any]


def rows_in_group(max_num_seqs: int) -> int:
    """Return how many rows are computed and answered together: a fourth of a full step, so that engines are full while others are on their way."""
    return max(1, min(MOST_IN_GROUP, max_num_seqs // 4))


def packed(content: Any) -> dict[str, Any]:
    """Return something as a batch of Ray Data with one row."""
    column = np.empty(1, dtype=object)
    column[0] = pickle.dumps(content)
    return {COLUMN: column}


def groups_of(batch: Batch, group: int) -> Iterator[dict[str, Any]]:
    """Yield the rows that a `RowsLeft` stands for in groups. Run again, it yields the same ones, which Ray relies on."""
    rows = iter(pickle.loads(batch[COLUMN][0]))
    try:
        while some := list(islice(rows, group)):
            yield packed(some)
    except DovetailError as error:  # the input was changed
        yield packed(str(error))


class BatchEngine:
    """An engine in an actor. Several threads call it, each with a group of rows; all of them are in the same steps.

    A call returns what happened as (kind, content, seconds since the engine was ready): ("answers", list of `Answer`, …), ("refused", why, …) if
    there can be no engine or no rows, ("dead", why, …) if the engine has failed.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Start the engine. Whatever is wrong with it is told by the first call."""
        self._rows: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
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
        group: list[Row | Answer] | str = pickle.loads(batch[COLUMN][0])
        if isinstance(group, str):
            return packed(("refused", group, 0.0))
        rows = [row for row in group if isinstance(row, Row)]
        answers = [answer for answer in group if not isinstance(answer, Row)]
        with self._lock:
            if self._failure is not None:
                return packed((*self._failure, 0.0))
            new = [row for row in rows if row.number not in self._waiting]  # Ray may ask for a group again while it is under way
            self._waiting.update((row.number, Future()) for row in new)
            futures = [self._waiting[row.number] for row in rows]
            self._rows.put(new)
        try:
            answers += [future.result() for future in futures]
        except DovetailError:
            assert self._failure is not None
            return packed((*self._failure, 0.0))
        return packed(("answers", answers, time.monotonic() - self._ready))

    def send(self, message: tuple[Literal["answers"], list[Answer]], /) -> None:
        """Take answers from the engine's thread, as a connection to another process would."""
        for answer in message[1]:
            with self._lock:
                future = self._waiting.pop(answer["row"])
            future.set_result(answer)

    def _run(self) -> None:
        why: BaseException
        try:
            EngineWorker(self._engine, self._rows, self).run()
            return
        except BaseException as error:  # whatever it is, those who wait must hear of it
            why = error
        with self._lock:
            self._failure = "dead", str(why) or type(why).__name__
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(DovetailError(self._failure[1]))
