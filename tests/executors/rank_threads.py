"""Ranks of the executor `tensor` as threads of this process, for tests of what ranks compute: a
process takes seconds to import torch.

Only the process is replaced. Jobs are pickled, messages go through the control connection and the
ring, and sums through gloo.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch

from dovetail.errors import describe
from dovetail_executors import ranks
from dovetail_executors.rank import Rank
from dovetail_executors.rank_process import Message, RankJob, context_of, run
from dovetail_executors.ring import WriterGone
from tests.forking import subprocess_with

LIMIT_S = 60
_pids = count((1 << 22) + 1)  # above all that Linux gives to processes


@contextmanager
def ranks_as_threads() -> Iterator[None]:
    """Engines that are started here have threads for ranks."""
    with patch.object(ranks, "subprocess", subprocess_with(RankThread)):
        yield


class Orders(SimpleQueue[Message | None]):
    """Messages of the engine; None: there will be no more."""

    def get(self, block: bool = True, timeout: float | None = None) -> Message:
        if (message := super().get(block, timeout)) is None:
            raise EOFError
        return message


class RankThread:
    """Behaves as `subprocess.Popen` does for `Ranks`."""

    def __init__(self, command: Sequence[str], **_: Any) -> None:
        self.pid = next(_pids)
        self.returncode: int | None = None
        output, self._output = os.pipe()
        self.stdout = os.fdopen(output, "rb", buffering=0)
        self._control: Connection[Any, Any] = Connection(os.dup(int(command[-2])))
        self._waker, self._wakes = os.pipe()
        self._jobs: SimpleQueue[RankJob | None] = SimpleQueue()
        self._rank: Rank | None = None
        self._told_to_end = threading.Event()
        self._orders = Orders()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._run, self._heed)
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the threads have ended, whatever the timeout is: they can't be killed."""
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert self.returncode is not None, "the rank's thread hangs"
        self._control.close()
        return self.returncode

    def _run(self) -> None:
        code = 1
        try:
            code = self._work()
        finally:
            os.close(self._waker)
            os.close(self._output)
            self.returncode = code

    def _work(self) -> int:
        """Return the exit code. Like a process, a rank that is told to end, or whose connection is
        closed, has not failed."""
        if (job := self._jobs.get()) is None:
            return 0
        job = replace(job, waker_fd=self._waker)
        context = context_of(job, lambda *_: None)
        self._rank = rank = Rank(
            job.rank,
            torch.device(job.device),
            job.settings,
            context,
            self._join,
            address=job.address,
        )
        try:
            run(rank, job, self._control, self._orders)
        except (WriterGone, EOFError, BrokenPipeError):
            return 0
        except Exception as error:
            if self._told_to_end.is_set():
                return 0
            with suppress(BrokenPipeError):
                self._control.send({"failed": (describe(error), rank.group.failure is not None)})
            return 1
        finally:
            rank.close()
        raise AssertionError("a rank computes until it is told to end")

    def _join(self) -> None:
        if self._told_to_end.is_set():
            raise EOFError
        self._control.send({"joining": True})

    def _heed(self) -> None:
        """Pass on what comes until the control connection is closed. A process would end then; a
        thread is told, wherever it waits."""
        with suppress(EOFError, OSError):
            job: RankJob = pickle.loads(self._control.recv()["job"])
            self._jobs.put(job)
            while True:
                for source in wait([self._control, job.waker_fd]):
                    if source is job.waker_fd:
                        os.write(self._wakes, os.read(job.waker_fd, 1 << 16))
                    else:
                        self._orders.put(self._control.recv())
        self._told_to_end.set()
        self._jobs.put(None)
        self._orders.put(None)
        if (rank := self._rank) is not None:
            rank.group.abort()
        os.close(self._wakes)
