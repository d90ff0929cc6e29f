"""The small books: requests in the order of arrival, and the executor's rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engine.books import RequestQueue, RowAllocator
from dovetail.engine.live_request import LiveRequest
from dovetail.request.sampling_params import SamplingParams
from tests.engine.world import Spec, World
from tests.support import examples


def request(order: int, arrival_time: float = 0.0) -> LiveRequest:
    made = LiveRequest(f"r{order}", [1], SamplingParams(), max_tokens=1, arrival_time=arrival_time)
    made.order = order
    return made


@examples(quick=50, full=1_000)
@given(st.lists(st.floats(0, 2, allow_nan=False), max_size=20), st.data())
def test_a_queue_is_a_list_sorted_by_arrival_and_order(
    times: list[float], data: st.DataObject
) -> None:
    requests = [request(order, time) for order, time in enumerate(times)]
    queue, model = RequestQueue(), []
    for one in data.draw(st.permutations(requests)):
        queue.add(one)
        model.append(one)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(model))
            before = queue.as_tuple()
            queue.remove(gone)
            model.remove(gone)
            assert gone in before, "a tuple given out before isn't changed"
        assert (
            list(queue)
            == list(queue.as_tuple())
            == sorted(model, key=lambda r: (r.arrival_time, r.order))
        )
        assert len(queue) == len(model)
        assert queue.as_tuple() is queue.as_tuple(), "made anew only after a change"


def test_removing_who_is_not_in_the_queue_is_an_error() -> None:
    queue = RequestQueue()
    queue.add(request(0))
    for stranger in (request(0), request(1)):
        with pytest.raises(ValueError, match="not in the queue"):
            queue.remove(stranger)


@examples(quick=50, full=1_000)
@given(st.integers(1, 4), st.data())
def test_rows_are_given_to_one_request_each_and_taken_from_who_does_not_run(
    num_rows: int, data: st.DataObject
) -> None:
    table = RowAllocator(num_rows)
    executor: set[int] = set()  # the rows that it has in use
    requests = [request(order) for order in range(7)]
    for step in range(12):
        for gone in data.draw(st.lists(st.sampled_from(requests), max_size=2)):
            table.release(gone)
        running = data.draw(st.lists(st.sampled_from(requests), max_size=num_rows, unique=True))
        for one in running:
            one.granted, one.decided_in = 1, step
        newcomers = [one for one in running if one.row < 0]
        for one in newcomers:
            table.assign(one)
        removed = table.take_removed()
        assert {*removed} <= executor, "only rows in use are given up"
        executor -= {*removed}
        assert not executor & {one.row for one in newcomers}, (
            "a row is given up before it is taken again"
        )
        executor |= {one.row for one in newcomers}
        assert all(one.row >= 0 for one in running)
        held = [one.row for one in requests if one.row >= 0]
        assert len(held) == len({*held})
        assert executor == {*held}
        assert table.take_removed() == []
        for one in running:
            one.granted = 0


def test_who_ran_longest_ago_and_has_nothing_in_flight_loses_its_row() -> None:
    table = RowAllocator(3)
    old, older_in_flight, recent, new = (request(order) for order in range(4))
    for one, (touched, in_flight) in zip(
        (old, older_in_flight, recent), [(1, 0), (0, 1), (2, 0)], strict=True
    ):
        table.assign(one)
        one.decided_in, one.in_flight = touched, in_flight
    new.granted = 1
    table.assign(new)
    assert old.row == -1
    assert min(older_in_flight.row, recent.row, new.row) >= 0


@pytest.mark.parametrize(
    ("prompts", "blocks"),
    [
        ([(1,) * 8 + (2,), (1,) * 8 + (3, 4)], 2),
        ([(1,) * 8 + (2,), (1,) * 8 + (3, 4), (1,) * 4 + (5,) * 5], 1),
        ([(1,) * 8 + (2,), (1,) * 8 + (3, 4), (5,) * 9], 0),
        ([(1,) * 9], 0),
    ],
)
def test_a_batch_says_with_how_many_blocks_all_its_requests_begin(
    prompts: list[tuple[int, ...]], blocks: int
) -> None:
    world = World()
    for number, prompt in enumerate(prompts):
        world.add(Spec(str(number), prompt, max_tokens=3))
    world.drain()
    full = [
        batch.shared_prefix_blocks
        for batch in world.executor.sent
        if len(batch.rows) == len(prompts)
    ]
    assert full
    assert set(full) == {blocks}
