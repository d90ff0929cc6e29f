"""`RequestQueue`: requests in the order that policies see them: by arrival time, then by the order in which they were added. The core has one
queue of waiting and one of running requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from dovetail.engine.live_request import LiveRequest


class RequestQueue:
    """A sorted list of requests. Adding and removing cost O(log n) and a memmove; the tuple for policies is made anew only after a change."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._requests: list[LiveRequest] = []
        self._tuple: tuple[LiveRequest, ...] | None = ()

    def add(self, request: LiveRequest) -> None:
        key = (request.arrival_time, request.order)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)
        self._tuple = None

    def remove(self, request: LiveRequest) -> None:
        """Remove `request`. Raises `ValueError` if it isn't there."""
        at = bisect_left(self._keys, (request.arrival_time, request.order))
        if at == len(self._requests) or self._requests[at] is not request:
            raise ValueError(f"{request!r} is not in the queue")
        del self._keys[at]
        del self._requests[at]
        self._tuple = None

    def as_tuple(self) -> tuple[LiveRequest, ...]:
        if self._tuple is None:
            self._tuple = tuple(self._requests)
        return self._tuple

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests)
