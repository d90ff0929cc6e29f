"""Transfers on streams: whatever the device runs first, within what streams and events allow, a
transfer that has ended is whole.

The streams are played on the CPU. What is enqueued is kept, and then run in a random order of the
streams, from memory that holds something else."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.api.kv_layout import CachedLayer, plan_layout
from dovetail.api.kv_transfers import frame_checksum
from dovetail.testing.recording import Recording, overwrite
from dovetail_executors.runtime import transfers
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.transfers import Copying, PageCopies, Part

PAGES = 24
SIZES = (5, 1, 1, 1, 2, 5, 1, 1, 2, 5)  # pages of each frame, in pieces of 2
ROUNDS = 30
SEED = 5


class Event:
    passed = False

    def query(self) -> bool:
        return self.passed


class Stream:
    """Stands for `transfers._Queue`: what was enqueued and hasn't run, or an event to wait for."""

    def __init__(self, player: Player, *, of_steps: bool = False) -> None:
        self.player = player
        self.work: deque[Callable[[], object] | Event] = deque()
        player.streams.append(self)
        if of_steps:
            player.current = self

    @contextmanager
    def use(self) -> Iterator[None]:
        before, self.player.current = self.player.current, self
        yield
        self.player.current = before

    def mark(self) -> Event:
        event = Event()
        self.work.append(partial(setattr, event, "passed", True))
        return event

    def wait(self, event: Event | None) -> None:
        if event is not None:
            self.work.append(event)

    def run(self) -> bool:
        """Run the first piece of work. Returns False if it has to wait."""
        first = self.work[0] if self.work else Event()
        if isinstance(first, Event):
            if first.passed:
                self.work.popleft()
            return first.passed
        self.work.popleft()
        first()
        return True


class Player(Recording):  # type: ignore[no-untyped-call]
    """Keeps each operation in the current stream, and runs it, since it must return something."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.current: Stream

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        outputs = func(*args, **given)
        self.current.work.append(lambda: overwrite(outputs, func(*args, **given)))
        return outputs


def random_bytes(rng: np.random.Generator, pages: int, page_bytes: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, (pages, page_bytes), np.uint8))


@torch.inference_mode()
def play(seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = random.Random(seed)
    layers = [CachedLayer(layer, None, lambda n: (8 * n, 24 * n)) for layer in range(2)]
    pool = KVPool(plan_layout(layers, 4, "none"), torch.device("cpu"))
    pool.allocate(PAGES)
    start = random_bytes(rng, PAGES, pool.page_bytes)
    now = start.clone()  # what the pages hold after all that was enqueued
    player = Player()
    pending: list[tuple[Copying, Callable[[], None]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "PIECE_BYTES", 2 * pool.page_bytes)
        patch.setattr(
            transfers, "_Queue", lambda device, of_steps=False: Stream(player, of_steps=of_steps)
        )
        copies = PageCopies(pool, saving=2, restoring=2)
    frames = len(SIZES)
    host = random_bytes(rng, frames * max(SIZES), pool.page_bytes).view(frames, -1)
    from_host = host.clone()
    restored: set[int] = set()

    def step() -> None:
        pages = [page for page in order.sample(range(PAGES), 6) if page not in restored]
        data = random_bytes(rng, len(pages), pool.page_bytes)
        with player:
            pool.scatter(torch.tensor(pages, dtype=torch.int64), data)
        now[pages] = data

    def parts_of(frames: Sequence[int]) -> list[Part]:
        """Return a part for each frame, of a page, or of more than fit into a piece."""
        free = [page for page in range(PAGES) if page not in restored]
        pages = iter(order.sample(free, sum(SIZES[frame] for frame in frames)))
        return [
            Part(
                [*islice(pages, SIZES[frame])],
                host[frame, : SIZES[frame] * pool.page_bytes],
                0,
                SEED + frame,
            )
            for frame in frames
        ]

    def checksums(parts: Sequence[Part], contents: Sequence[torch.Tensor]) -> list[int]:
        return [
            frame_checksum(content.numpy().tobytes(), part.seed)
            for part, content in zip(parts, contents, strict=True)
        ]

    def save(*frames: int) -> None:
        parts = parts_of(frames)
        expected = [now[[*part.pages]].clone() for part in parts]
        with player:
            copying = copies.save(parts)

        def check() -> None:
            for part, content in zip(parts, expected, strict=True):
                assert torch.equal(part.of_host, content.view(-1))
            assert copying.checksums == checksums(parts, expected)

        pending.append((copying, check))

    def restore(*frames: int) -> None:
        parts = parts_of(frames)
        expected = [
            from_host[frame, : len(part.of_host)].view(SIZES[frame], -1)
            for frame, part in zip(frames, parts, strict=True)
        ]
        for part, content in zip(parts, expected, strict=True):
            restored.update(part.pages)
            now[[*part.pages]] = content
        with player:
            copying = copies.restore(parts)

        def check() -> None:
            for part, content in zip(parts, expected, strict=True):
                found = torch.empty_like(content)
                pool.gather(torch.tensor(part.pages), found)
                assert torch.equal(found, content)
            assert copying.checksums == checksums(parts, expected)

        pending.append((copying, check))

    acts = [partial(save, *frames) for frames in ((0,), (1, 2, 3), (4, 5))]
    acts += [partial(restore, *frames) for frames in ((6, 7, 8), (9,))]
    for act in order.sample([*acts, step, step], len(acts) + 2):
        step()
        act()
    # as if nothing had run yet
    pool.scatter(torch.arange(PAGES), start)
    host.copy_(from_host)
    while any(stream.work for stream in player.streams):
        if order.random() < 0.1:  # otherwise the same streams go on ahead
            order.shuffle(player.streams)
        assert any(stream.run() for stream in player.streams), "all wait"
        for each in [each for each in pending if each[0].done]:
            pending.remove(each)
            each[1]()
    assert not pending
    after = torch.empty_like(now)
    pool.gather(torch.arange(PAGES), after)
    assert torch.equal(after, now)


@pytest.mark.slow("plays many orders of streams")
def test_transfers_are_whole_in_any_order_that_streams_allow() -> None:
    for seed in range(ROUNDS):
        play(seed)
