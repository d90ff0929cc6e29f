"""`KeptBlocks`: the blocks of ended requests, kept until their frames are saved.

A step saves few frames, so a request whose answer is short ends before those of its prompt are all
saved. It then goes on holding its blocks in the manager, as if it still ran, until they are, or
until other requests might lack pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from dovetail.api.kv_cache import KVCacheManager
from dovetail.engine.live_request import LiveRequest

MOST_KEPT = 64  # requests at a time: a step looks at each
SPARE = 1 / 16  # of all pages, which policies may want to see available


class KeptBlocks:
    """The ended requests of one engine that hold blocks, in the order in which they ended."""

    def __init__(self, kv: KVCacheManager, growth: int) -> None:
        """`growth`: tokens for which every request shall have room besides its known ones."""
        self._kv = kv
        self._requests: dict[str, LiveRequest] = {}  # by id
        layout = kv.context.layout
        self._pages_per_token = sum(
            group.pages_per_block / group.block_tokens
            for group in layout.groups
            if not group.recurrent
        )
        # of each request: its growth, a partial block of each group, and a state or checkpoint
        blocks = sum(group.pages_per_block for group in layout.groups)
        self._pages_per_request = growth * self._pages_per_token + blocks + layout.state_pages
        self._spare = SPARE * kv.context.num_pages

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter([*self._requests.values()])

    def __contains__(self, request: LiveRequest) -> bool:
        return self._requests.get(request.id) is request

    def find(self, id: str) -> LiveRequest | None:
        """Return the request of this id, which a new one may have, too."""
        return self._requests.get(id)

    def add(self, request: LiveRequest) -> bool:
        """Keep the blocks of a request that ends. Return False if there are too many."""
        if len(self._requests) >= MOST_KEPT:
            return False
        self._requests[request.id] = request
        return True

    def free(self, request: LiveRequest) -> None:
        """Free the blocks of a request in it."""
        del self._requests[request.id]
        self._kv.free(request)
        request.capacity = 0
        request.num_computed = 0

    def pages_wanted(self, running: Iterable[LiveRequest], waiting: Iterable[LiveRequest]) -> float:
        """Return how many pages must be available so that all of these requests can run on, or
        begin, whatever the policy does. Those in it want none."""
        pages = self._spare
        for request in chain(running, waiting):
            if request not in self:
                tokens = max(0, request.num_tokens + request.in_flight - request.capacity)
                pages += tokens * self._pages_per_token + self._pages_per_request
                if pages > self._kv.context.num_pages:
                    break
        return pages
