"""Admission every few steps, for as many as memory will hold to the end."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.scheduler import Step
from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail.testing.planning import Plan
from dovetail_schedulers.lightllm import LightLLM, LightLLMOptions
from dovetail_schedulers.peak_memory import Size, peak_tokens, size_of
from tests.engine.world import Shape, Spec, World
from tests.support import examples


def admits(waiting: list[Request], pool_tokens: int, **options: Any) -> Plan:
    """Return what is admitted on an idle engine with blocks of one token."""
    return plan(
        LightLLM,
        options=LightLLMOptions(**options),
        waiting=waiting,
        free_pages=pool_tokens,
        block_size=1,
    )


def peak_by_running(sizes: list[Size]) -> float:
    """Run them all, and look."""
    moments = range(max(size.left for size in sizes) + 1)
    return max(
        sum(size.held + size.growth * moment for size in sizes if moment <= size.left)
        for moment in moments
    )


@examples(quick=100, full=2000)
@given(
    sizes=st.lists(
        st.builds(Size, st.integers(1, 50), st.integers(0, 30), st.sampled_from([0, 0.25, 1])),
        min_size=1,
        max_size=8,
    )
)
def test_the_peak_is_that_of_a_run(sizes: list[Size]) -> None:
    assert peak_tokens(sizes) == peak_by_running(sizes)


class Pages:
    """A step that knows the pages of requests."""

    def __init__(self, *groups: CacheGroup) -> None:
        self.layout = KVLayout(groups, 1, "none")

    def pages_at(self, request: Request, tokens: int) -> int:
        return self.layout.visible_pages(tokens)

    def size(self, tokens: int, left: int) -> Size:
        return size_of(cast(Step, self), make_request("r"), tokens, left, self.layout.block_size)


@examples(quick=50, full=1000)
@given(tokens=st.integers(1, 200), left=st.integers(0, 100), block_size=st.sampled_from([1, 4, 16]))
def test_without_windows_a_size_is_its_tokens_with_a_full_last_block(
    tokens: int, left: int, block_size: int
) -> None:
    assert Pages(CacheGroup((0,), block_size)).size(tokens, left) == Size(
        tokens + block_size - 1, left, 1
    )


@examples(quick=100, full=3000)
@given(
    windows=st.lists(
        st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=3, unique=True
    ),
    pages=st.integers(1, 6),
    block_size=st.sampled_from([1, 4, 16]),
    tokens=st.integers(1, 300),
    left=st.integers(0, 300),
)
def test_with_windows_a_size_covers_what_is_held_and_is_exact_once_they_are_full(
    windows: list[int | None], pages: int, block_size: int, tokens: int, left: int
) -> None:
    step = Pages(
        *(CacheGroup((index,), block_size, window, pages) for index, window in enumerate(windows))
    )
    size = step.size(tokens, left)
    full = max((window or 0) for window in windows)
    for moment in {0, left // 2, left}:
        spare = (
            size.held
            + size.growth * moment
            - block_size * step.layout.visible_pages(tokens + moment)
        )
        assert spare > -1e-6
        if (
            tokens > full
        ):  # at most the rest of a last block, and a block that leaves a window while it is begun
            assert spare < 2 * pages * len(windows) * block_size


def test_an_answer_that_slides_past_its_window_takes_no_more_than_the_window() -> None:
    sliding, full = Pages(CacheGroup((0,), 16, 128)), Pages(CacheGroup((0,), 16))
    assert peak_tokens([sliding.size(1000, 4000)] * 10) == 10 * 9 * 16
    assert peak_tokens([full.size(1000, 4000)] * 10) == 10 * 5015


def test_an_empty_batch_holds_nothing() -> None:
    assert peak_tokens([]) == 0


def test_prompts_are_admitted_while_the_pool_is_larger_than_the_batch_will_ever_be() -> None:
    waiting = [make_request(f"r{i}", 10, max_tokens=10) for i in range(4)]
    assert len(admits(waiting, 61).granted) == 3  # each will hold 20
    waiting = [make_request(f"r{i}", 10, max_tokens=10) for i in range(4)]
    assert len(admits(waiting, 60).granted) == 2


def test_requests_that_end_at_different_times_share_what_they_never_hold_together() -> None:
    def waiting() -> list[Request]:
        return [make_request("short", 40, max_tokens=2), make_request("long", 5, max_tokens=40)]

    assert len(admits(waiting(), 51).granted) == 2  # 42 + 7, then 45 alone: not 42 + 45
    assert len(admits(waiting(), 49).granted) == 1


def test_the_reservation_may_read_predictions() -> None:
    def waiting() -> list[Request]:
        return [make_request(f"r{i}", 10, max_tokens=100, predicted_tokens=10) for i in range(3)]

    assert len(admits(waiting(), 120, reserve="predicted").granted) == 3
    assert len(admits(waiting(), 120, reserve="max_tokens").granted) == 1


def test_the_cap_on_a_batch_s_prompt_tokens_holds_but_not_for_one_alone() -> None:
    assert list(
        admits([make_request("a", 20), make_request("b", 20)], 999, batch_max_tokens=39).granted
    ) == ["a"]
    assert list(
        admits([make_request("a", 60), make_request("b", 1)], 999, batch_max_tokens=39).granted
    ) == ["a"]


def test_a_prompt_longer_than_the_cap_joins_others_if_memory_is_there() -> None:
    def joined(free_pages: int) -> list[str]:
        options, room = (
            LightLLMOptions(every=1, batch_max_tokens=39),
            {"free_pages": free_pages, "block_size": 1},
        )
        policy = plan(
            LightLLM, options=options, running=[make_request("answer", 10, generated=2)], **room
        ).policy
        running = [make_request("answer", 10, generated=2, max_tokens=20)]
        return list(
            plan(
                policy, running=running, waiting=[make_request("long", 60, max_tokens=9)], **room
            ).granted
        )

    assert joined(200) == ["long"]
    assert joined(62) == ["answer"], "both together would not fit to their end"


def test_each_client_of_the_batch_takes_its_share_of_the_pool() -> None:
    def waiting(*clients: str) -> list[Request]:
        return [
            make_request(f"r{i}", 10, max_tokens=10, client=client)
            for i, client in enumerate(clients)
        ]

    assert len(admits(waiting("a", "a", "a"), 66, client_tokens=5).granted) == 3
    assert len(admits(waiting("a", "a", "b"), 66, client_tokens=5).granted) == 2


def test_prompts_are_admitted_every_few_decode_steps_and_never_with_answers() -> None:
    policy = plan(
        LightLLM, options=LightLLMOptions(every=3), waiting=[make_request("first", 4)]
    ).policy
    granted = []
    for step in range(5):
        running, waiting = (
            [make_request(f"answer{step}", generated=2)],
            [make_request(f"prompt{step}", 4)],
        )
        granted.append(
            [
                id.rstrip("0123456789")
                for id in plan(policy, running=running, waiting=waiting).granted
            ]
        )
    assert granted == [["answer"], ["answer"], ["answer"], ["prompt"], ["answer"]]


@pytest.mark.parametrize(
    ("order", "admitted"), [("arrival", "a2 a3 b1"), ("vtc", "a2 b1 a3"), ("lcf", "b1 a2 a3")]
)
def test_who_is_admitted_first_is_the_order_s_to_say(order: str, admitted: str) -> None:
    policy = plan(
        LightLLM, options=LightLLMOptions(order=order), waiting=[make_request("a1", 8, client="a")]
    ).policy
    waiting = [make_request(id, 8, client=id[0]) for id in ("a2", "a3", "b1")]
    assert list(plan(policy, waiting=waiting, free_pages=100).granted) == admitted.split()


GROUPS = ((4, None, 1), (4, 8, 3))


@pytest.mark.parametrize("order", ["arrival", "vtc", "lcf"])
@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "with a window"])
def test_no_request_is_preempted_since_memory_was_reserved(
    order: str, groups: tuple[tuple[int, int | None, int], ...]
) -> None:
    shape = Shape(
        num_pages=60, block_size=1, groups=groups, token_budget=12, max_model_len=32, overlap=False
    )
    world = World(LightLLM, shape, LightLLMOptions(every=2, order=order))
    for i in range(20):
        world.add(
            Spec(
                f"r{i}",
                tuple(range(i, i + 3 + i % 9)),
                max_tokens=4 + i % 13,
                delay=i * 0.02,
                client="abc"[i % 3],
            )
        )
    world.drain()
    assert world.core.update_stats().preemptions == 0
