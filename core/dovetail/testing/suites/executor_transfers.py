"""`ExecutorTransfers`: the checks of pages that are saved to host memory, and restored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain, count
from random import Random
from typing import Any

from dovetail.api.clock import VirtualClock
from dovetail.api.kv_cache import HOLE
from dovetail.api.kv_transfers import WORD, Slab, Transfer, frame_checksum
from dovetail.errors import describe
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import ExecutorSubject, require_same
from dovetail.testing.suites.other_thread import in_thread

SEED = 0xC0FFEE00DDBA5E17
ENDS_S = 30.0  # a transfer of some pages must have ended within this time
LOOK_S = 1e-3  # between looks
AROUND = 2 * WORD  # bytes of a slab before a frame, and behind it, that stay as they are
FILLING = 0xA5
FLIPS = 16


class Frames:
    """A frame at a time in host memory, and its transfers. Any error of a valid call fails the
    check."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._ids = count()
        self._transfers: Any = bench.transfers()
        size = self._transfers.page_bytes
        require(
            type(size) is int and size > 0 and size % WORD == 0,
            f"page_bytes is {size!r}, expected a multiple of {WORD}",
        )
        self._page_bytes = size
        self.slab = self.allocate(bench.capacity.num_pages * size + 2 * AROUND)

    def allocate(self, size: int) -> Slab:
        """From another thread than that of all other calls, as the core does."""
        slab: Slab = in_thread(lambda: self._call("allocate", size))
        data = slab.data
        told = f"allocate({size}) returned a slab of {data.nbytes} bytes, format {data.format!r}"
        require(data.nbytes == size and data.format == "B" and not data.readonly, told)
        return slab

    def start(self, method: str, pages: Sequence[int], seed: int = SEED) -> int:
        """Enqueue a save or restore, and return its id."""
        id = next(self._ids)
        self._call(method, Transfer(id, self.slab.number, AROUND, tuple(pages), seed))
        return id

    def end(self, id: int) -> int:
        """Wait until the transfer, the only one, has ended, and return its checksum."""
        clock = self._bench.executor.context.clock
        until = time.monotonic() + ENDS_S
        while not (done := self._call("finished")):
            require(time.monotonic() < until, f"a transfer hadn't ended after {ENDS_S:g} s: {id}")
            if isinstance(clock, VirtualClock):
                clock.wait_until(clock.now() + LOOK_S)
            else:
                time.sleep(LOOK_S)
        ids = [each.id for each in done]
        require(ids == [id], f"finished returned transfers {ids}, and {id} was the only one")
        require(not self._call("finished"), f"finished returned transfer {id} once more")
        checksum: int = done[0].checksum
        return checksum

    def save(self, pages: Sequence[int], seed: int = SEED) -> bytes:
        """Save, and return the bytes. Fails if the checksum isn't theirs, or others changed."""
        self.slab.data[:] = bytes([FILLING]) * self.slab.data.nbytes
        checksum = self.end(self.start("save", pages, seed))
        data = self.bytes_of(pages)
        _require_checksum(checksum, data, seed, "saved")
        size = AROUND + len(data)
        around = bytes(self.slab.data[:AROUND]) + bytes(self.slab.data[size:])
        require(
            around == bytes([FILLING]) * len(around),
            "a save changed bytes of the slab before or behind its own",
        )
        return data

    def restore(self, pages: Sequence[int]) -> None:
        """Restore, and fail if the checksum isn't that of the bytes."""
        checksum = self.end(self.start("restore", pages))
        _require_checksum(checksum, self.bytes_of(pages), SEED, "restored")

    def bytes_of(self, pages: Sequence[int]) -> bytes:
        return bytes(self.slab.data[AROUND : AROUND + len(pages) * self._page_bytes])

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._transfers, method)(*arguments)
        except Exception as error:
            fail(f"{method} of the transfers raised {describe(error)}", error)


class ExecutorTransfers(ExecutorSubject):
    """Pages that leave the device and come back, perhaps to other places."""

    @check("executor.transfers", since="1.1", capability="transfers")
    def test_a_row_may_begin_on_blocks_that_were_restored(self) -> None:
        """A request started on blocks that were saved, lost and restored to other pages, and
        generated other tokens than by itself. A page's bytes are all that the executor needs of it,
        in all layers; the i-th page that is restored gets the bytes of the i-th that was saved."""
        with self._shared_bench() as bench:
            frames = _frames(bench)
            shared = 2 * bench.block_size
            prompt = bench.prompt(shared + 3)
            expected = bench.alone("a", prompt, 3)
            first = bench.add("first", bench.prompt(shared))
            bench.prefill("first")
            blocks = first.blocks[:2]
            frames.save(_pages(bench, blocks))
            bench.remove("first")
            bench.add("other", bench.prompt(shared, variant=1), blocks=blocks)
            bench.prefill("other")
            target = bench.take_blocks(2)
            frames.restore(_pages(bench, target))
            _require_tokens(bench, prompt, expected, target, "to other blocks")

    @check("executor.transfers_order", since="1.1", capability="transfers")
    def test_transfers_keep_their_place_among_the_steps(self) -> None:
        """A save that was enqueued behind a step, and before one that wrote to the same pages, or a
        restore behind a step that wrote to its pages, changed tokens. A save reads what the steps
        submitted before it have written, and a restore writes after them, whether their results
        were collected or not."""
        with self._shared_bench() as bench:
            frames = _frames(bench)
            shared = 2 * bench.block_size
            prompt = bench.prompt(shared + 3)
            expected = bench.alone("a", prompt, 3)
            other = bench.prompt(shared, variant=1)
            blocks, target = bench.take_blocks(3), bench.take_blocks(3)
            bench.add("first", prompt[:shared], blocks=blocks)
            bench.add("second", other, blocks=blocks)
            bench.add("third", other, blocks=target)
            bench.submit({"first": shared})
            saved = frames.start("save", _pages(bench, blocks[:2]))
            if bench.capacity.max_in_flight < 2:
                bench.collect()
            bench.submit({"second": shared})
            while bench.sent:
                bench.collect()
            frames.end(saved)
            bench.submit({"third": shared})
            restored = frames.start("restore", _pages(bench, target[:2]))
            bench.collect()
            frames.end(restored)
            _require_tokens(
                bench, prompt, expected, target[:2], "to blocks that the step before it wrote"
            )

    @check("executor.transfers_bytes", since="1.1", capability="transfers")
    def test_checksums_are_those_of_the_bytes(self) -> None:
        """A checksum wasn't `frame_checksum` of the transfer's bytes in the slab, with its seed:
        of a save, of a restore, or after a bit was flipped in host memory; or bytes beside a save's
        own were written; or pages that were restored, saved again, had other bytes. Compute it from
        what the device holds, over all words."""
        with self._shared_bench() as bench:
            frames = _frames(bench)
            pages = _filled(bench, "first", 0)
            target = _pages(bench, bench.take_blocks(2))
            data = frames.save(pages)
            frames.save(pages, seed=1)
            frames.restore(target)
            require(frames.save(target) == data, "pages that were restored have other bytes")
            random = Random(0)
            for _ in range(FLIPS):
                bit = random.randrange(8 * len(data))
                frames.slab.data[AROUND + bit // 8] ^= 1 << bit % 8
                frames.restore(target)
                frames.slab.data[AROUND + bit // 8] ^= 1 << bit % 8
            frames.restore(target)

    @check("executor.transfers_pages", since="1.1", capability="transfers")
    def test_a_restore_writes_its_pages_and_no_others(self) -> None:
        """A restore changed other pages than its own, or one that it leaves out (`HOLE`), or didn't
        write those beside it. The bytes of a page that is left out count for the checksum, and are
        written nowhere."""
        with self._shared_bench() as bench:
            frames = _frames(bench)
            pages = _filled(bench, "first", 0)
            target = _filled(bench, "second", 1)
            left_out = [HOLE if place % 3 == 1 else page for place, page in enumerate(target)]
            wanted = [page for page in left_out if page != HOLE]
            others = sorted({*range(bench.capacity.num_pages)} - {*wanted})
            before = frames.save(others)
            frames.save(pages)
            frames.restore(left_out)
            require(frames.save(others) == before, "a restore changed pages that aren't its own")
            sources = [page for page, to in zip(pages, left_out, strict=True) if to != HOLE]
            require(
                frames.save(sources) == frames.save(wanted),
                "pages beside those that were left out have other bytes than those saved",
            )

    @check("executor.transfers_slabs", since="1.1", capability="transfers")
    def test_slabs_are_numbered_and_any_may_be_used(self) -> None:
        """A slab had another number than the next, or a save to it arrived in another one; or
        `name` or `save_capacity` weren't a name and a number of bytes."""
        with self._shared_bench() as bench:
            frames = _frames(bench)
            transfers = bench.transfers()
            name, capacity = transfers.name, transfers.save_capacity()
            require(isinstance(name, str) and name, f"name is {name!r}, expected words")
            require(
                type(capacity) is int and capacity >= 0, f"save_capacity() returned {capacity!r}"
            )
            pages = _filled(bench, "first", 0)
            data = frames.save(pages)
            first = frames.slab.number
            try:
                for number in (first + 1, first + 2):
                    frames.slab = frames.allocate(len(data) + 2 * AROUND)
                    require(
                        frames.slab.number == number,
                        f"allocate returned slab {frames.slab.number} after {number - 1}",
                    )
                    require(frames.save(pages) == data, "the same pages have other bytes")
            finally:
                bench.frames = None  # the next check starts with a new slab


def _frames(bench: Bench) -> Frames:
    if bench.frames is None:
        bench.frames = Frames(bench)
    frames: Frames = bench.frames
    return frames


def _pages(bench: Bench, blocks: Sequence[int]) -> list[int]:
    return [*chain.from_iterable(bench.pages(blocks))]


def _filled(bench: Bench, name: str, variant: int) -> list[int]:
    """Return the pages of two blocks, which a request has filled."""
    request = bench.add(name, bench.prompt(2 * bench.block_size, variant=variant))
    bench.prefill(name)
    return _pages(bench, request.blocks[:2])


def _require_tokens(
    bench: Bench, prompt: list[int], expected: list[int], blocks: list[int], how: str
) -> None:
    room = bench.take_blocks(-(-11 // bench.block_size))
    shared = len(blocks) * bench.block_size
    bench.add("a", prompt, computed=shared, blocks=[*blocks, *room])
    bench.run({"a": len(prompt) - shared})
    bench.decode("a", steps=len(expected) - 1)
    require_same(bench, "a", expected, f"on blocks that were restored {how}")


def _require_checksum(checksum: int, data: bytes, seed: int, done: str) -> None:
    expected = frame_checksum(data, seed)
    require(
        checksum == expected,
        f"the checksum of {len(data)} bytes that were {done} is {checksum!r}, expected {expected}",
    )
