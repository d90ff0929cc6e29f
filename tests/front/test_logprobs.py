"""Log-probabilities as a user reads them: made when they are read, the same as if each had been
made at once."""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import HostLogprobs
from dovetail.front.logprobs import MOST_STEPS, LogprobLog, TokenLogprobs
from dovetail.request.outputs import Logprob, TokenLogprobMap
from tests.support import examples


def step(seed: int, rows: int = 3, columns: int = 4) -> HostLogprobs:
    """Ids repeat now and then, so that a token is among the likeliest."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(6)[:columns] for _ in range(rows)])
    ids[:, 0] = random.integers(0, 6, rows)
    return HostLogprobs(
        ids, -random.random((rows, columns)).astype(np.float32), random.integers(1, 7, rows)
    )


def plain(hosts: HostLogprobs, position: int, asked: int) -> TokenLogprobMap:
    """The definition: the token itself, then the requested number of most likely other tokens."""
    ids, values = hosts.token_ids[position].tolist(), hosts.logprobs[position].tolist()
    alternatives = {
        ids[place]: Logprob(values[place], place)
        for place in range(1, 1 + asked)
        if ids[place] != ids[0]
    }
    return {ids[0]: Logprob(values[0], int(hosts.ranks[position])), **alternatives}


@examples(quick=40, full=500)
@given(
    st.lists(st.sampled_from(["add", "add", "add", "many", "read", "drain"]), max_size=12),
    st.integers(0, 3),
)
def test_a_log_gives_what_came_since_it_was_drained(acts: list[str], asked: int) -> None:
    log, model, total = LogprobLog(asked, None), [], 0.0
    for number, act in enumerate(acts):
        for count in range({"add": 1, "many": MOST_STEPS + 3}.get(act, 0)):
            hosts = step(100 * number + count)
            log.add(hosts, number % 3)
            model.append(plain(hosts, number % 3, asked))
            total += float(hosts.logprobs[number % 3, 0])
        if act == "read":
            assert log.read() == model
            assert [list(entries) for entries in log.read()] == [
                list(entries) for entries in model
            ], "in this order"
        elif act == "drain":
            assert list(log.drain()) == model
            model = []
    assert log.read() == model
    assert log.cumulative == pytest.approx(total)


def test_they_read_like_a_list() -> None:
    hosts = step(0, rows=5)
    read = TokenLogprobs.of_steps([(hosts, position) for position in range(5)], 3, None)
    model = [plain(hosts, position, 3) for position in range(5)]
    assert (read[2], read[-1], list(read[1:4]), len(read), list(reversed(read))) == (
        model[2],
        model[-1],
        model[1:4],
        5,
        model[::-1],
    )
    assert read == model
    assert model == read
    assert read != model[:4]
    assert repr(read) == repr(model)
    assert pickle.loads(pickle.dumps(read)) == model
    with pytest.raises(IndexError):
        read[5]


def test_a_log_keeps_few_steps_with_the_rows_of_others() -> None:
    log, steps = LogprobLog(1, None), []
    for number in range(5 * MOST_STEPS):
        hosts = step(number, rows=50)
        steps.append(weakref.ref(hosts.token_ids))
        log.add(hosts, 0)
        del hosts
    gc.collect()
    assert sum(made() is not None for made in steps) < MOST_STEPS
    assert len(log.read()) == 5 * MOST_STEPS
