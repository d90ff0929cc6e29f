"""`Preparing`: threads that decode bodies, tokenize texts, render conversations and wait for images,
shared fairly by all clients. For `Exchange`."""

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

from dovetail.serving import IMAGES_AT_ONCE
from dovetail_server.admission import busy
from dovetail_server.settings import ServerSettings

T = TypeVar("T")

SIZES = (2**14, 2**17, 2**20, inf)  # largest task of each thread, in bytes
# one thread decodes: a parser holds the interpreter's lock, and the event loop gets it in between
DECODED_SIZES = (inf,)
# the same for threads that render chat templates of requests, which may take seconds
GIVEN_SIZES = (
    inf,
    inf,
)
# the same for requests with images, which processes decode
IMAGE_SIZES = (inf,) * IMAGES_AT_ONCE


class Share:
    """Bytes of each client's pending requests, and the most that one client may have."""

    def __init__(self, most: int, setting: str) -> None:
        """`setting`: says in errors where `most` comes from."""
        self._most = most
        self._setting = setting
        self._bytes: Counter[Hashable] = Counter()

    @contextmanager
    def admitted(self, client: Hashable, size: int) -> Iterator[None]:
        """Account for a request of `size` bytes. Raises `HttpError` 429 if the client has too much
        pending. Small requests aren't counted, and a client's only request is admitted whatever its
        size."""
        if size <= SIZES[0]:
            yield
            return
        if (others := self._bytes[client]) and others + size > self._most:
            raise busy(
                f"{others} bytes of this client's requests are pending, and the limit is "
                f"{self._most} ({self._setting})"
            )
        self._bytes[client] += size
        try:
            yield
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]


class Preparing:
    """Prepares prompts in threads, and limits each client's pending bytes. Methods are called in
    the event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self._texts = Share(settings.max_body_bytes, "max_body_bytes")
        self._images = Share(settings.max_received_bytes // 2, "half of max_received_bytes")
        self._decoding = FairThreads(DECODED_SIZES)
        self._own = FairThreads(SIZES)
        self._given = FairThreads(GIVEN_SIZES)
        self._with_images = FairThreads(IMAGE_SIZES)

    @contextmanager
    def admitted(self, client: Hashable, size: int, image_size: int = 0) -> Iterator[None]:
        """Count `size` bytes of text and `image_size` bytes of images as pending for the client.
        Raises `HttpError` 429 if either exceeds the client's limit."""
        with self._texts.admitted(client, size), self._images.admitted(client, image_size):
            yield

    async def decode(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which decodes a body of `size` bytes, in a thread, and return its result. One
        body is decoded at a time."""
        return await self._decoding.run(client, size, work)

    async def run(
        self, client: Hashable, size: int, work: Callable[[], T], *, given_template: bool = False
    ) -> T:
        """Run `work` in a thread, and return its result. `given_template`: it renders a chat
        template from the request."""
        return await (self._given if given_template else self._own).run(client, size, work)

    async def with_images(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which waits for processes that prepare images, in a thread, and return its
        result."""
        return await self._with_images.run(client, size, work)


@dataclass(order=True)
class _Task:
    start: float  # virtual time
    number: int
    client: Hashable = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)


@dataclass(slots=True)
class _Account:
    """State of a client with unfinished tasks."""

    charged: float = 0.0  # virtual finish time of its latest task
    tasks: int = 0


class FairThreads:
    """Thread pool shared fairly between clients. Each thread has its own size limit, so that small
    tasks never wait for large ones only. Among the tasks of a thread, clients get equal shares in
    bytes: start-time fair queuing (Goyal, Vin and Cheng, 1996)."""

    def __init__(self, sizes: Sequence[float]) -> None:
        """`sizes`: largest task of each thread, in bytes, ascending."""
        self._sizes = sizes
        self._threads = ThreadPoolExecutor(len(sizes), "dovetail-prompts")
        self._free = list(range(len(sizes)))  # indices of `sizes`, ascending
        self._waiting: list[list[_Task]] = [[] for _ in sizes]  # a heap for each size
        self._accounts: dict[Hashable, _Account] = {}
        self._virtual_time = 0.0  # latest start tag of a running task
        self._numbers = count()

    async def run(self, client: Hashable, size: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread, and return its result. If cancelled while queued, `work` isn't
        called."""
        account = self._accounts.setdefault(client, _Account())
        start = max(self._virtual_time, account.charged)
        account.charged = start + size
        account.tasks += 1
        task = _Task(
            start, next(self._numbers), client, work, asyncio.get_running_loop().create_future()
        )
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
        """Assign each free thread its next task."""
        for place in self._free.copy():
            if queues := [queue for queue in self._waiting[: place + 1] if queue]:
                task = heappop(min(queues, key=lambda queue: queue[0]))
                self._free.remove(place)
                self._virtual_time = max(self._virtual_time, task.start)
                try:
                    running = self._threads.submit(task.work)
                except RuntimeError as error:  # the system has no thread left
                    running = Future()
                    running.set_exception(error)
                running.add_done_callback(partial(self._end_soon, task, place))

    def _end_soon(self, task: _Task, place: int, done: Future[Any]) -> None:
        """Runs in the thread."""
        with suppress(RuntimeError):  # the loop is closed
            task.result.get_loop().call_soon_threadsafe(self._end, task, place, done)

    def _end(self, task: _Task, place: int, done: Future[Any]) -> None:
        self._free = sorted([*self._free, place])
        self._forget(task)
        if task.result.done():  # cancelled meanwhile
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
