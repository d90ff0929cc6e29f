"""Requests with images: whatever a policy does, each placeholder reads the row of its own picture,
and a step encodes no more than it may."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import Batch, Capacity
from dovetail.api.media import MediaCapacity, MediaRows
from dovetail.api.scheduler import Refusal, Scheduler, Step
from dovetail.request.media import MediaItem
from dovetail.testing.fake_executor import expected_tokens
from tests.engine.policies import FCFS, Backwards, Chaos, Regrets, RoundRobin, always
from tests.engine.world import RecordingExecutor, Shape, Spec, World
from tests.support import examples

PAD = 7  # the placeholder's id
CACHE_ROWS = 12
STEP_ROWS = 8


def picture(kind: int, at: int) -> MediaItem:
    """An item of a kind that starts at a token: the kind says how many rows it has. Runs of the last
    two are computed whole."""
    digest = bytes([kind]) * 32
    divided = ((at, 3), (at + 4, 2))
    runs = {0: ((at, 1),), 1: ((at, 5),), 2: divided, 3: ((at, 10),), 4: divided}[kind]
    return MediaItem(kind="image", digest=digest, runs=runs, tensors={}, whole=kind >= 3)


def places(item: MediaItem) -> list[int]:
    return [first + index for first, count in item.runs for index in range(count)]


@st.composite
def specs(draw: st.DrawFn, id: str = "r", kinds: int = 3) -> Spec:
    """A prompt of text, which may have the placeholder's id, and pictures."""
    tokens = draw(st.lists(st.sampled_from([1, 2, PAD]), min_size=1, max_size=6))
    items = []
    for _ in range(draw(st.integers(0, 3))):
        item = picture(draw(st.integers(0, kinds - 1)), len(tokens))
        items.append(item)
        span = item.span
        own = {*places(item)}
        tokens += [PAD if place in own else 3 for place in range(span.start, span.stop)]
        tokens += draw(st.lists(st.sampled_from([1, PAD]), max_size=3))
    return Spec(id, tuple(tokens), max_tokens=draw(st.integers(1, 6)), items=tuple(items))


def contents(spec_tokens: tuple[int, ...], items: tuple[MediaItem, ...]) -> list[int]:
    """The prompt with a number for each row, as the model sees it."""
    seen = [*spec_tokens]
    for item in items:
        for row, place in enumerate(places(item)):
            seen[place] = _row(item.digest, row)
    return seen


def _row(digest: bytes, row: int) -> int:
    return zlib.crc32(digest + bytes([row]))


class MediaDevice(RecordingExecutor):
    """Keeps a cache of rows as the loop says, and looks whether each placeholder finds its own."""

    cache_rows = CACHE_ROWS
    step_runs = 1

    def start(self) -> Capacity:
        self.cache: dict[int, int] = {}  # slot -> row
        self.rows: dict[int, tuple[str, int]] = {}  # row -> request and its computed tokens
        self.items: dict[str, tuple[MediaItem, ...]] = {}  # of requests, set by the test
        self.encoded: list[int] = []  # rows, by step
        return replace(
            super().start(), media=MediaCapacity(self.cache_rows, STEP_ROWS, self.step_runs)
        )

    def submit(self, batch: Batch) -> int:
        part = batch.part(MediaRows) or MediaRows((), np.zeros(0, int), np.zeros(0, int))
        for one in part.encode:
            assert len({*one.slots.tolist()}) == one.item.rows
            for row, slot in enumerate(one.slots.tolist()):
                assert 0 <= slot < self.cache_rows
                self.cache[slot] = _row(one.item.digest, row)
        sizes = [one.item.rows for one in part.encode]
        assert sum(sizes) <= STEP_ROWS or len(sizes) == 1 or self.items_at_once
        self.encoded.append(sum(sizes))
        for new in batch.added:
            self.rows[new.row] = new.request_id, new.computed
        found = {
            token: self.cache[slot]
            for token, slot in zip(part.tokens.tolist(), part.slots.tolist(), strict=True)
        }
        assert [*found] == sorted(found)
        assert found == self._expected(batch)
        seen = tuple(
            replace(new, token_ids=self._seen(new.request_id, new.token_ids)) for new in batch.added
        )
        return super().submit(replace(batch, added=seen, parts=()))

    items_at_once = False

    def _expected(self, batch: Batch) -> dict[int, int]:
        expected = {}
        token = 0
        whole_runs = 0
        for row, count in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
            id, computed = self.rows[row]
            self.rows[row] = id, computed + count
            whole_runs += self._whole_runs(id, computed, computed + count)
            rows = {
                place: _row(item.digest, number)
                for item in self.items[id]
                for number, place in enumerate(places(item))
            }
            for place in range(computed, computed + count):
                if place in rows:
                    expected[token] = rows[place]
                token += 1
        assert whole_runs <= self.step_runs
        return expected

    def _whole_runs(self, id: str, start: int, end: int) -> int:
        """Count the runs of a step that are computed whole. Their first tokens may be from the prefix
        cache."""
        runs = [
            first + count
            for item in self.items[id]
            for first, count in item.runs
            if item.whole and first < end and start < first + count
        ]
        assert all(stop <= end for stop in runs)
        return len(runs)

    def _seen(self, id: str, token_ids: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return np.array(contents(tuple(token_ids.tolist()), self.items[id]), np.int64)


class MediaWorld(World):
    """Its requests see pictures."""

    def __init__(
        self,
        policy: type[Scheduler] = FCFS,
        shape: Shape | None = None,
        device: type[MediaDevice] = MediaDevice,
    ) -> None:
        super().__init__(policy, shape or Shape(), executor=device)
        assert isinstance(self.executor, MediaDevice)
        self.device = self.executor

    def see(self, spec: Spec) -> None:
        for index in range(spec.n):
            name = spec.id if spec.n == 1 else f"{spec.id}#{index}"
            self.device.items[name] = spec.items
        self.add(spec)

    def expected(self, id: str) -> tuple[list[int], str]:
        request = self.requests[id]
        seen = contents(request.prompt_token_ids, self.device.items[id])
        vocabulary = self.shape.vocab_size
        return expected_tokens(seen, request.max_tokens, self.seeds[id], vocabulary), "length"


class SmallDevice(MediaDevice):
    """Hasn't room for two of the larger pictures at once."""

    cache_rows = 7


POLICIES = [FCFS, Chaos, Regrets, Backwards, RoundRobin]


@given(st.lists(specs(), min_size=1, max_size=5), st.data())
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
@examples(20, 300)
def test_each_placeholder_reads_its_own_row(
    policy: type[Scheduler], wanted: list[Spec], data: st.DataObject
) -> None:
    shape = Shape(
        num_pages=data.draw(st.sampled_from([10, 14, 64])),
        overlap=data.draw(st.booleans()),
        token_budget=data.draw(st.sampled_from([8, 64])),
        seed=data.draw(st.integers(0, 9)),
    )
    world = MediaWorld(policy, shape, data.draw(st.sampled_from([MediaDevice, SmallDevice])))
    world.device.items_at_once = policy is Chaos  # it asks for 7 tokens or none
    for index, spec in enumerate(wanted):
        many = data.draw(st.sampled_from([1, 1, 3]))
        world.see(
            replace(spec, id=f"r{index}", n=many, delay=data.draw(st.sampled_from([0.0, 0.03])))
        )
    world.drain(check=True)


class Cautious(FCFS):
    """Grants few tokens at a time."""

    def schedule(self, step: Step) -> None:
        for request in (*step.running, *step.waiting):
            step.grant(request, 3)


class Greedy(FCFS):
    """Grants whole steps, or whole prompts."""

    def schedule(self, step: Step) -> None:
        for request in (*step.running, *step.waiting):
            step.grant(request, min_tokens=self.context.token_budget)


@given(st.lists(specs(kinds=5), min_size=1, max_size=5), st.data())
@pytest.mark.parametrize("policy", [*POLICIES, Cautious, Greedy], ids=lambda each: each.__name__)
@examples(20, 300)
def test_runs_that_are_computed_whole_are_never_divided(
    policy: type[Scheduler], wanted: list[Spec], data: st.DataObject
) -> None:
    """By no policy, limit or budget; and no request waits forever for that."""
    shape = Shape(
        num_pages=data.draw(st.sampled_from([14, 20, 64])),
        overlap=data.draw(st.booleans()),
        token_budget=data.draw(st.sampled_from([10, 13, 64])),
        prefill_limit=data.draw(st.sampled_from([None, 0.1])),
        prompt_rate=data.draw(st.sampled_from([None, 20.0])),
        seed=data.draw(st.integers(0, 9)),
    )
    world = MediaWorld(policy, shape)
    world.device.items_at_once = True  # `Chaos` asks for 7 tokens or none, `Greedy` for all
    for index, spec in enumerate(wanted):
        many = data.draw(st.sampled_from([1, 1, 3]))
        delay = data.draw(st.sampled_from([0.0, 0.03]))
        world.see(replace(spec, id=f"r{index}", n=many, delay=delay))
    world.drain(check=True)


def test_a_hit_may_end_within_a_run_that_is_computed_whole() -> None:
    world = MediaWorld(shape=Shape(block_size=4))
    spec = Spec("first", (1, 1, 1, *[PAD] * 10, 2, 2), items=(picture(3, 3),))
    world.see(spec)
    world.drain(check=True)
    world.see(replace(spec, id="again", prompt=(*spec.prompt[:13], 3, 3)))
    world.drain(check=True)
    assert world.requests["again"].cached_tokens == 12


def test_the_same_picture_is_encoded_once() -> None:
    world = MediaWorld()
    first = Spec("first", (1, *[PAD] * 5, 2), items=(picture(1, 1),))
    world.see(first)
    world.see(replace(first, id="beside"))
    world.drain(check=True)
    world.see(Spec("later", (3, 4, *[PAD] * 5, 2), items=(picture(1, 2),)))
    world.drain(check=True)
    assert sum(world.device.encoded) == 5


def test_another_salt_encodes_the_picture_again() -> None:
    world = MediaWorld()
    spec = Spec("first", (1, *[PAD] * 5, 2), items=(picture(1, 1),))
    world.see(spec)
    world.see(replace(spec, id="other", cache_keys=("salt:a",)))
    world.drain(check=True)
    assert sum(world.device.encoded) == 10


def test_a_hit_that_covers_a_picture_encodes_nothing() -> None:
    world = MediaWorld(shape=Shape(block_size=4))
    spec = Spec("first", (1, 1, 1, *[PAD] * 5, 2, 2, 2), items=(picture(1, 3),))
    world.see(spec)
    world.drain(check=True)
    before = sum(world.device.encoded)
    world.see(replace(spec, id="again"))
    world.drain(check=True)
    assert world.requests["again"].cached_tokens == 8
    assert sum(world.device.encoded) == before


def test_a_grant_ends_before_a_picture_that_the_step_may_not_encode() -> None:
    tokens = (1, *[PAD] * 5, 2, *[PAD] * 5, 2)
    spec = Spec("one", tokens, items=(picture(1, 1), picture(2, 7)))
    world = MediaWorld(shape=Shape(overlap=False))
    world.see(spec)
    world.drain(check=True)
    prompt_steps = [int(batch.num_tokens[0]) for batch in world.device.sent[:2]]
    assert prompt_steps == [7, len(tokens) - 7]
    assert world.device.encoded[:2] == [5, 5]


@pytest.mark.parametrize("held_first", [True, False])
def test_a_picture_that_is_held_is_not_evicted_for_another_of_the_same_step(
    held_first: bool,
) -> None:
    items = (picture(1, 1), picture(2, 7)) if held_first else (picture(2, 1), picture(1, 7))
    world = MediaWorld(shape=Shape(overlap=False), device=SmallDevice)
    world.see(Spec("before", (1, *[PAD] * 5, 2), items=(picture(1, 1),)))
    world.drain(check=True)
    world.see(Spec("both", (PAD,) * 14, items=items))
    world.drain(check=True)
    assert sum(world.device.encoded) == (10 if held_first else 15)


def test_a_policy_that_wants_a_whole_prompt_gets_it_alone() -> None:
    """It would wait forever otherwise."""

    def whole(step: Step) -> None:
        for request in (*step.running, *step.waiting):
            step.grant(request, min_tokens=max(1, request.prefill_left))

    tokens = (1, *[PAD] * 5, 2, *[PAD] * 5, 2)
    world = MediaWorld(always(whole), Shape(overlap=False))
    world.device.items_at_once = True
    world.see(Spec("one", tokens, items=(picture(1, 1), picture(2, 7))))
    world.drain(check=True)
    assert world.device.encoded[0] == 10


def test_a_refusal_says_that_pictures_are_why() -> None:
    refused = []

    def look(step: Step) -> None:
        for request in (*step.running, *step.waiting):
            refused.append(step.grant(request).refused)

    world = MediaWorld(always(look), Shape(overlap=False))
    world.see(Spec("one", (*[PAD] * 5, 2), items=(picture(1, 0),)))
    world.see(Spec("two", (*[PAD] * 3, 3, PAD, PAD, 2), items=(picture(2, 0),)))
    world.drain(check=True)
    assert refused[:2] == [None, Refusal.MEDIA]
