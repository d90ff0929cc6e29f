"""The fakes catch what they are there to catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.component import NoOptions
from dovetail.api.executor import (
    AdapterLoad,
    AdapterRows,
    Batch,
    ExecutorConfig,
    ExecutorContext,
    NewRow,
    Pooled,
    PoolingCapacity,
    PoolingRows,
    RowPooling,
)
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout, PageCopy
from dovetail.api.sampler import RowSampling
from dovetail.errors import DovetailError
from dovetail.testing import FakeExecutor, FakeExecutorOptions, FakeKVCache, make_request
from dovetail.testing.fake_executor import expected_pooled, expected_tokens

PROMPT = [3, 1, 4, 1, 5]


def executor(max_adapters: int = 0, **options: Any) -> FakeExecutor:
    config = ExecutorConfig(
        "", "auto", "dummy", None, 4, 64, 0.9, None, None, False, True, 0, max_adapters=max_adapters
    )
    made = FakeExecutor(FakeExecutorOptions(**options), ExecutorContext(config, VirtualClock()))
    made.start()
    return made


def row(
    row: int = 0, tokens: list[int] = PROMPT, computed: int = 0, blocks: tuple[int, ...] = (0, 1)
) -> NewRow:
    return NewRow(
        row,
        f"r{row}",
        np.array(tokens, np.int32),
        len(tokens),
        computed,
        (np.array(blocks, np.int32),),
        RowSampling(),
    )


def adapters(slots: dict[int, int], *loads: AdapterLoad) -> tuple[AdapterRows]:
    return (AdapterRows(loads, slots),)


def batch(
    step: int,
    rows: list[int],
    num_tokens: list[int],
    yields_token: list[bool] | None = None,
    **fields: Any,
) -> Batch:
    empty = np.array([], np.int32)
    given = {
        "removed": empty,
        "added": (),
        "new_pages": empty.reshape(0, 3),
        "copies": (),
        **fields,
    }
    return Batch(
        step,
        rows=np.array(rows),
        num_tokens=np.array(num_tokens),
        yields_token=np.array(yields_token or [True] * len(rows)),
        **given,
    )


def test_tokens_are_a_function_of_what_came_before() -> None:
    fake, tokens = executor(), []
    fake.submit(batch(0, [0], [5], added=(row(),)))
    for step in range(3):
        tokens += fake.collect(step).token_ids.tolist()
        fake.submit(batch(step + 1, [0], [1]))
    assert tokens == expected_tokens(PROMPT, 3)


def test_tokens_depend_on_the_adapter_in_the_row_s_slot() -> None:
    fake, tokens = executor(max_adapters=2), []
    loads = (AdapterLoad(1, "", "one"), AdapterLoad(2, "", "other"))
    fake.submit(batch(0, [0], [5], added=(row(),), parts=adapters({0: 2}, *loads)))
    for step in range(3):
        tokens += fake.collect(step).token_ids.tolist()
        fake.submit(batch(step + 1, [0], [1]))
    assert tokens == expected_tokens(PROMPT, 3, digest="other") != expected_tokens(PROMPT, 3)


@pytest.mark.parametrize(
    ("slot", "loaded", "rule"), [(1, 2, "holds none"), (3, 3, "which there isn't")]
)
def test_wrong_use_of_slots_is_refused(slot: int, loaded: int, rule: str) -> None:
    with pytest.raises(DovetailError, match=rule):
        executor(max_adapters=2).submit(
            batch(
                0,
                [0],
                [5],
                added=(row(),),
                parts=adapters({0: slot}, AdapterLoad(loaded, "", "one")),
            ),
        )


def test_a_slot_keeps_its_adapter_while_a_row_uses_it() -> None:
    fake = executor(max_adapters=2)
    fake.submit(
        batch(0, [0], [5], added=(row(),), parts=adapters({0: 1}, AdapterLoad(1, "", "one")))
    )
    with pytest.raises(DovetailError, match="keeps its adapter"):
        fake.submit(batch(1, [0], [1], parts=adapters({}, AdapterLoad(1, "", "other"))))


def test_another_adapter_s_keys_and_values_are_never_read() -> None:
    fake = executor(max_adapters=2)
    loads = (AdapterLoad(1, "", "one"), AdapterLoad(2, "", "other"))
    fake.submit(batch(0, [0], [5], added=(row(),), parts=adapters({0: 1}, *loads)))
    with pytest.raises(DovetailError, match="another sequence's K and V"):
        fake.submit(batch(1, [1], [1], added=(row(1, computed=4),), parts=adapters({1: 2})))


def test_time_passes_as_on_a_device() -> None:
    """The next step begins when the one before has ended, or when it is submitted, if that is
    later."""
    fake = executor(seconds_per_step=1.0, seconds_per_token=0.0)
    fake.submit(batch(0, [0], [5], added=(row(),)))
    fake.context.clock.wait_until(0.7)
    fake.submit(batch(1, [0], [1]))
    results = [fake.collect(0), fake.collect(1)]
    assert [(result.started, result.ended) for result in results] == [(0.0, 1.0), (1.0, 2.0)]
    fake.context.clock.wait_until(5.0)
    fake.submit(batch(2, [0], [1]))
    assert fake.collect(2).started == 5.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (batch(0, [1], [5], added=(row(1),)), "steps must be submitted in order"),
        (batch(2, [0, 0], [1, 1]), "a row occurs twice"),
        (batch(2, [0], [2]), "more tokens to compute than are known"),
        (batch(2, [0], [1], added=(row(),)), "row 0 was added but is in use"),
        (batch(2, [0], [1], removed=np.array([1])), "row 1 was removed but not in use"),
        (batch(2, [1], [5], added=(row(1, blocks=(2,)),)), "token 4 of 5 has no block"),
        (batch(2, [1], [1], added=(row(1, computed=5),)), "no token left to compute"),
        (batch(2, [1], [3], added=(row(1),)), "samples before its last token"),
        (batch(2, [1], [1], added=(row(1, [3, 1, 4, 1, 6], computed=4),)), None),
        (
            batch(2, [1], [1], added=(row(1, [2, 1, 4, 1, 5], computed=4),)),
            "would read another sequence's K and V",
        ),
        (
            batch(2, [1], [1], added=(row(1, computed=4, blocks=(7, 8)),)),
            "would read another sequence's K and V",
        ),
        (
            batch(2, [1, 0], [5, 1], added=(row(1, [9, 9, 9, 9, 9]),)),
            "would read another sequence's K and V",
        ),
        (
            batch(
                2, [1], [1], added=(row(1, computed=4, blocks=(7, 8)),), copies=(PageCopy(0, 7),)
            ),
            None,
        ),
    ],
)
def test_a_breach_of_the_contract_is_caught_at_once(wrong: Batch, words: str | None) -> None:
    fake = executor(block_size=4)
    fake.submit(batch(1, [0], [5], added=(row(),)))
    if words is None:
        fake.submit(wrong)
    else:
        with pytest.raises(DovetailError, match=words):
            fake.submit(wrong)


def test_more_steps_in_flight_than_it_takes_are_refused() -> None:
    fake = executor(max_in_flight=1)
    fake.submit(batch(0, [0], [5], added=(row(),)))
    with pytest.raises(DovetailError, match="max_in_flight"):
        fake.submit(batch(1, [0], [1]))


def test_results_must_be_collected_in_order() -> None:
    fake = executor()
    fake.submit(batch(0, [0], [5], added=(row(),)))
    fake.submit(batch(1, [0], [1]))
    with pytest.raises(DovetailError, match="order"):
        fake.collect(1)


def test_a_window_is_looked_back_from_each_token_of_a_chunk() -> None:
    fake = executor(window=2, block_size=1)
    fake.submit(batch(0, [0], [3], [False], added=(row(blocks=(0, 1, 2, 3, 4)),)))
    fake.submit(
        batch(
            1,
            [1],
            [1],
            [False],
            removed=np.array([0]),
            added=(row(1, [9] * 5, blocks=(1, 6, 7, 8, 9)),),
        )
    )
    fake.collect(0)
    # position 3 looks at 2, position 4 at 3
    fake.submit(batch(2, [2], [2], added=(row(2, computed=3, blocks=(0, 1, 2, 3, 4)),)))
    fake.collect(1)
    with pytest.raises(DovetailError, match="position 1 of 5 would read"):
        fake.submit(batch(3, [3], [3], added=(row(3, computed=2, blocks=(0, 1, 2, 3, 4)),)))


def test_the_fake_manager_loses_no_block() -> None:
    kv = FakeKVCache(NoOptions(), KVContext(KVLayout((CacheGroup((0,), 4),), 1, "none"), 6))
    a, b = make_request("a", 20), make_request("b", 20)
    assert kv.allocate(a, 17) is not None
    assert kv.allocate(b, 9) is None
    assert kv.pages_needed(b, 4) == 1
    assert (kv.counts.empty, kv.counts.held) == (1, 5)
    kv.check_integrity()
    kv.free(a)
    kv.free(b)
    assert kv.available_pages == 6
    kv._free.append(0)
    with pytest.raises(DovetailError, match="twice"):
        kv.check_integrity()


MEAN = PoolingCapacity(("embed", "token_embed", "classify"), "mean", size=3, labels=("no", "yes"))
EMBED = RowPooling("embed")


def pooling_row(**fields: Any) -> NewRow:
    return replace(row(**fields), sampling=None)


def pools(*due: int, new: RowPooling | None = EMBED) -> tuple[PoolingRows]:
    """Row 0 is new and pools, unless `new` is None."""
    return (PoolingRows({} if new is None else {0: new}, np.array(due, np.int32)),)


@pytest.mark.parametrize(
    ("pooling", "shape"),
    [
        (EMBED, (3,)),
        (RowPooling("embed", 2, activate=False), (2,)),
        (RowPooling("classify"), (2,)),
        (RowPooling("token_embed"), (5, 3)),
    ],
)
def test_a_row_pools_at_the_end_of_its_prompt(pooling: RowPooling, shape: tuple[int, ...]) -> None:
    fake, other = executor(pooling=MEAN), row(1, blocks=(2, 3))
    fake.submit(batch(0, [0], [3], [False], added=(pooling_row(),), parts=pools(new=pooling)))
    due = pools(0, new=None)
    fake.submit(batch(1, [0, 1], [2, 5], [False, True], added=(other,), parts=due))
    assert not fake.collect(0).parts
    result = fake.collect(1)
    ((index, found),) = result.values(Pooled).items()
    assert (index, found.shape) == (0, shape)
    np.testing.assert_array_equal(found, expected_pooled(PROMPT, pooling, MEAN))
    assert result.token_ids.tolist() == [-1, *expected_tokens(PROMPT, 1)]


@pytest.mark.parametrize(
    ("capacity", "wrong", "words"),
    [
        (
            None,
            batch(0, [0], [5], [False], added=(pooling_row(),), parts=pools(0)),
            "a task that the model can serve",
        ),
        (
            MEAN,
            batch(
                0,
                [0],
                [5],
                [False],
                added=(pooling_row(),),
                parts=pools(0, new=RowPooling("token_classify")),
            ),
            "a task that the model can serve",
        ),
        (MEAN, batch(0, [0], [5], added=(pooling_row(),), parts=pools(0)), "yields no token"),
        (
            MEAN,
            batch(0, [0], [5], [False], added=(pooling_row(),), parts=pools()),
            "exactly when they end",
        ),
        (
            MEAN,
            batch(0, [0], [4], [False], added=(pooling_row(),), parts=pools(0)),
            "exactly when they end",
        ),
        (
            MEAN,
            batch(0, [0], [1], [False], added=(pooling_row(computed=4),), parts=pools(0)),
            "starts without computed tokens",
        ),
        (
            replace(MEAN, indivisible=True),
            batch(0, [0], [4], [False], added=(pooling_row(),), parts=pools()),
            "computed in one step",
        ),
        (replace(MEAN, generates=False), batch(0, [0], [5], added=(row(),)), "generates nothing"),
    ],
)
def test_a_breach_of_the_contract_of_pooling_is_caught_at_once(
    capacity: PoolingCapacity | None, wrong: Batch, words: str
) -> None:
    with pytest.raises(DovetailError, match=words):
        executor(pooling=capacity).submit(wrong)
