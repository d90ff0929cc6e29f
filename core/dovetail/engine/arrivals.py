"""`Arrivals`: requests that arrive later, by time, of which some are aborted before."""

from __future__ import annotations

import heapq
import math

from dovetail.engine.live_request import LiveRequest, Status


class Arrivals:
    """Queue of requests by `arrival_time`, then `order`.

    Aborted requests stay in it until they are first, or half of it: amortized O(log n).
    """

    def __init__(self) -> None:
        self.next_time = math.inf  # when the next request arrives; infinity: none is known
        self._heap: list[tuple[float, int, LiveRequest]] = []
        self._aborted = 0  # how many of these have finished

    def __len__(self) -> int:
        """Return the number of requests, with aborted ones that are still kept."""
        return len(self._heap)

    def add(self, request: LiveRequest) -> None:
        heapq.heappush(self._heap, (request.arrival_time, request.order, request))
        self.next_time = self._heap[0][0]

    def pop(self) -> LiveRequest:
        """Remove and return the request that arrives at `next_time`, which must be finite."""
        request = heapq.heappop(self._heap)[2]
        if self._aborted:
            self._drop_aborted()
        self.next_time = self._heap[0][0] if self._heap else math.inf
        return request

    def aborted(self) -> None:
        """Note that one of the requests has finished."""
        self._aborted += 1
        self._drop_aborted()
        self.next_time = self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        self._heap.clear()
        self._aborted = 0
        self.next_time = math.inf

    def _drop_aborted(self) -> None:
        """Drop those that have finished from the top, and all of them if they are half."""
        while self._heap and self._heap[0][2].status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._aborted -= 1
        if self._aborted and 2 * self._aborted >= len(self._heap):
            self._heap = [
                arrival for arrival in self._heap if arrival[2].status is not Status.FINISHED
            ]
            heapq.heapify(self._heap)
            self._aborted = 0
