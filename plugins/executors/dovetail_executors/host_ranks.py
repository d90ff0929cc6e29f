"""The ranks of one host: their processes (`ranks`), and the ring and the pipes through which they get batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from dovetail_executors.rank_process import Job
from dovetail_executors.ranks import RankJob, Ranks
from dovetail_executors.ring import Ring, RingWriter


class HostRanks:
    """Processes for `jobs`, none included, all on this host. `ranks` watches them, `writer` sends to them once they are loaded."""

    def __init__(self, jobs: Sequence[Job], names: Sequence[str], executor: str, more_fds: Sequence[int] = ()) -> None:
        """`names`: of the ranks, for people. `more_fds`: further descriptors that the processes inherit; who made them closes them. Nothing is
        started yet."""
        self.ring = Ring.make(max(1, len(jobs)))
        self._fds = [self.ring.fd]
        wakers, rank_jobs = [], []
        for reader, (job, name) in enumerate(zip(jobs, names, strict=True)):
            read, write = os.pipe()
            os.set_blocking(write, False)
            self._fds += [read, write]
            wakers.append(write)
            threads = job.settings.threads
            here = replace(
                job,
                path=list(sys.path),
                ring_fd=self.ring.fd,
                ring_words=len(self.ring.words),
                readers=len(jobs),
                reader=reader,
                waker_fd=read,
            )
            environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
            rank_jobs.append(RankJob(job.rank, here.pickled(), (self.ring.fd, read, *more_fds), name, environment))
        self.ranks = Ranks(rank_jobs, executor)
        self.writer = RingWriter(self.ring, wakers, self.ranks.check) if jobs else None

    def stop(self) -> None:
        """End the processes, and let go of everything. Twice is as good as once; in a fork of the process that started them it does nothing."""
        if self.ranks.is_forked():
            return
        self.ranks.stop()
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())
        self.ring.close()
