"""`Preparing`: the threads in which texts are tokenized and conversations rendered, which all clients share. For `Exchange`."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, TypeVar

from dovetail_server.admission import busy

T = TypeVar("T")

SIZES = (2**14, 2**17, 2**20, inf)  # bytes of the largest work that each thread takes
GIVEN_SIZES = (inf, inf)  # the same of threads for chat templates that came with requests, which may take seconds each


class Preparing:
    """Makes prompts in threads, and bounds how much each client has under way. Its methods are called in the event loop."""

    def __init__(self, max_client_bytes: int) -> None:
        self._max_client_bytes = max_client_bytes
        self._bytes: Counter[Hashable] = Counter()  # under way, by client
        self._own, self._given = FairThreads(SIZES), FairThreads(GIVEN_SIZES)

    @contextmanager
    def admitted(self, client: Hashable, size: int) -> Iterator[None]:
        """Count a request of this many bytes as under way. Raises `HttpError` 429 if the client has too much under way. Requests that the
        smallest thread takes aren't counted, and one is let in whatever its size."""
        if size <= SIZES[0]:
            yield
            return
        if (others := self._bytes[client]) and others + size > self._max_client_bytes:
            raise busy(f"{others} bytes of this client's requests wait to be tokenized, and at most {self._max_client_bytes} (max_body_bytes) may")
        self._bytes[client] += size
        try:
            yield
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]

    async def run(self, client: Hashable, size: int, work: Callable[[], T], *, given_template: bool = False) -> T:
        """Return what `work` returns, called in a thread. `given_template`: it renders a chat template that came with the request."""
        return await (self._given if given_template else self._own).run(client, size, work)


@dataclass(order=True)
class _Task:
    start: float  # virtual time
    number: int
    client: Hashable = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)


@dataclass(slots=True)
class _Account:
    """A client with unfinished tasks."""

    charged: float = 0.0  # virtual time at which what it has asked for is paid off
    tasks: int = 0


class FairThreads:
    """Threads that clients share fairly. Each takes work up to a size of its own, so that small work never waits for large work only. Of the work
    that fits a thread, clients get equal shares in bytes: start-time fair queuing (Goyal, Vin and Cheng, 1996)."""

    def __init__(self, sizes: Sequence[float]) -> None:
        """`sizes`: the largest work that each thread takes, in bytes, ascending."""
        self._sizes = sizes
        self._threads = ThreadPoolExecutor(len(sizes), "dovetail-prompts")
        self._free = list(range(len(sizes)))  # indices of `sizes`, ascending
        self._waiting: list[list[_Task]] = [[] for _ in sizes]  # a heap for each size
        self._accounts: dict[Hashable, _Account] = {}
        self._virtual_time = 0.0  # the latest start of a task that has begun
        self._numbers = count()

    async def run(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Return what `work` returns. Cancelled while it waits for a thread, it is never called."""
        account = self._accounts.setdefault(client, _Account())
        start = max(self._virtual_time, account.charged)
        account.charged, account.tasks = start + size, account.tasks + 1
        task = _Task(start, next(self._numbers), client, work, asyncio.get_running_loop().create_future())
        queue = self._waiting[bisect_left(self._sizes, size)]
        heappush(queue, task)
        self._begin()
        try:
            result: T = await task.result
        except asyncio.CancelledError:
            if task in queue:
                queue.remove(task)
                heapify(queue)
                self._forget(task)
            raise
        return result

    def _begin(self) -> None:
        """Give each free thread the next task that it takes."""
        for place in self._free.copy():
            if queues := [queue for queue in self._waiting[: place + 1] if queue]:
                task = heappop(min(queues, key=lambda queue: queue[0]))
                self._free.remove(place)
                self._virtual_time = max(self._virtual_time, task.start)
                self._threads.submit(task.work).add_done_callback(partial(self._end_soon, task, place))

    def _end_soon(self, task: _Task, place: int, done: Future[Any]) -> None:
        """Called in the thread."""
        with suppress(RuntimeError):  # the loop is closed
            task.result.get_loop().call_soon_threadsafe(self._end, task, place, done)

    def _end(self, task: _Task, place: int, done: Future[Any]) -> None:
        self._free = sorted([*self._free, place])
        self._forget(task)
        if task.result.done():  # it was cancelled meanwhile
            pass
        elif (error := done.exception()) is not None:
            task.result.set_exception(error)
        else:
            task.result.set_result(done.result())
        self._begin()

    def _forget(self, task: _Task) -> None:
        account = self._accounts[task.client]
        account.tasks -= 1
        if not account.tasks:
            del self._accounts[task.client]
