"""Routers: what each chooses, from loads and prompts made here."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail_lab.routers import Arrival, LeastLoaded, LeastTokens, PrefixAware, ReplicaLoad
from tests.support import examples

prompts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=30)


def arrival(prompt: list[int]) -> Arrival:
    return Arrival("0", None, 0, 0.0, np.array(prompt, np.int32), 1)


def test_least_tokens_counts_what_was_sent_since_the_report() -> None:
    loads = [
        ReplicaLoad(0, 1, 90, sent=1, sent_tokens=20),
        ReplicaLoad(3, 4, 100),
        ReplicaLoad(0, 1, 100),
    ]
    assert LeastTokens().choose(arrival([1]), loads) == 1


def test_vllm_counts_waiting_four_times_and_what_was_sent_as_waiting() -> None:
    assert (
        LeastLoaded().choose(
            arrival([1]), [ReplicaLoad(0, 5, 0), ReplicaLoad(1, 0, 0), ReplicaLoad(0, 5, 0)]
        )
        == 1
    )
    assert (
        LeastLoaded().choose(
            arrival([1]), [ReplicaLoad(0, 5, 0), ReplicaLoad(1, 0, 0, sent=1), ReplicaLoad(0, 5, 0)]
        )
        == 0
    )
    assert LeastLoaded().reports_at(0.37) == 0.1 * 3


@examples(quick=30, full=500)
@given(prompts=prompts, block=st.integers(1, 3))
def test_prefix_aware_finds_the_replica_that_was_sent_most_of_the_prompt(
    prompts: list[list[int]], block: int
) -> None:
    router, sent = PrefixAware(block_tokens=block, least_match=0), [[[0]], [[0]], [[0]]]

    def shared(replica: int, prompt: list[int]) -> int:
        """Return the whole blocks of the prompt with which one that was sent there begins."""
        return max(
            sum(other[:end] == prompt[:end] for end in range(block, len(prompt) + 1, block))
            for other in sent[replica]
        )

    for prompt in prompts:
        loads = [ReplicaLoad(0, 0, sum(map(len, own))) for own in sent]
        best = max(range(3), key=lambda replica: (shared(replica, prompt), -loads[replica].tokens))
        assert router.choose(arrival(prompt), loads) == best
        sent[best].append(prompt)


def test_prefix_aware_leaves_an_overloaded_replica() -> None:
    router, prompt = PrefixAware(block_tokens=1, least_match=0), arrival([1, 2, 3])
    assert router.choose(prompt, [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 0)]) == 0
    assert router.choose(prompt, [ReplicaLoad(0, 64, 640), ReplicaLoad(0, 0, 0)]) == 0
    assert router.choose(prompt, [ReplicaLoad(0, 65, 650), ReplicaLoad(0, 0, 0)]) == 1


def test_prefix_aware_forgets_what_was_used_least_lately() -> None:
    router, even = (
        PrefixAware(blocks=2, block_tokens=1, least_match=0),
        [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 0)],
    )
    other_is_free = [ReplicaLoad(0, 0, 1), ReplicaLoad(0, 0, 0)]
    assert router.choose(arrival([1, 2]), even) == 0
    assert router.choose(arrival([1, 2]), other_is_free) == 0
    router.choose(arrival([3, 4]), even)  # in its place
    assert router.choose(arrival([1, 2]), other_is_free) == 1


def test_prefix_aware_forgets_the_end_of_a_prompt_before_its_beginning() -> None:
    router = PrefixAware(blocks=2, block_tokens=1, least_match=0)
    assert router.choose(arrival([1, 2, 3]), [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 0)]) == 0
    assert router.choose(arrival([1, 2]), [ReplicaLoad(0, 0, 1), ReplicaLoad(0, 0, 0)]) == 0


def test_prefix_aware_does_not_follow_a_small_match() -> None:
    other_is_free = [ReplicaLoad(0, 0, 1), ReplicaLoad(0, 0, 0)]
    for least, expected in ((0.4, 0), (0.5, 1)):
        router = PrefixAware(block_tokens=1, least_match=least)
        router.choose(arrival([1, 2]), [ReplicaLoad(0, 0, 0), ReplicaLoad(0, 0, 0)])
        assert router.choose(arrival([1, 3]), other_is_free) == expected
