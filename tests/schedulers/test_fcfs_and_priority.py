"""First come, first served; and the most important first."""

from __future__ import annotations

from dovetail.api.scheduler import Refusal, SchedulerCapabilities, SchedulerContext
from dovetail.testing import make_request, plan
from dovetail_schedulers.fcfs import FCFS
from dovetail_schedulers.priority import Priority, PriorityOptions


def test_fcfs_admits_strictly_in_order_of_arrival() -> None:
    waiting = [
        make_request("second", 40, arrival_time=0.2),
        make_request("first", 8, arrival_time=0.1),
        make_request("third", 4, arrival_time=0.3),
    ]
    done = plan(FCFS, waiting=waiting, free_pages=6)
    assert done.granted == {"first": 8}
    assert done.refused == {"second": Refusal.MEMORY}


def test_fcfs_makes_the_youngest_give_way() -> None:
    # each needs a block more
    running = [make_request(f"r{i}", 8, generated=1, arrival_time=i) for i in range(3)]
    done = plan(FCFS, running=running, free_pages=0)
    assert done.preempted == ("r2",)
    assert done.granted == {"r0": 1, "r1": 1}


def test_fcfs_never_evicts_an_older_one() -> None:
    running = [
        make_request("old", 7, generated=1),
        make_request("young", 8, generated=1, arrival_time=0.5),
    ]
    done = plan(FCFS, running=running, free_pages=0)
    assert done.preempted == ()
    assert done.granted == {"old": 1}


def test_the_most_important_comes_first_and_equals_by_arrival() -> None:
    waiting = [
        make_request("late", 8, arrival_time=0.2),
        make_request("least", 8, priority=1),
        make_request("early", 8, arrival_time=0.1),
    ]
    waiting.append(make_request("most", 8, priority=-1, arrival_time=0.9))
    done = plan(Priority, options=PriorityOptions(), waiting=waiting, token_budget=27)
    assert list(done.granted.items()) == [("most", 8), ("early", 8), ("late", 8), ("least", 3)]


def test_an_important_arrival_pushes_out_the_least_important() -> None:
    running = [
        make_request("low", 8, generated=1, priority=2),
        make_request("mid", 7, generated=1, priority=1),
    ]
    done = plan(
        Priority,
        options=PriorityOptions(),
        running=running,
        waiting=[make_request("high", 8, priority=0, arrival_time=0.5)],
        free_pages=0,
    )
    assert done.preempted == ("low",)
    assert done.granted == {"high": 8, "mid": 1}


def test_no_request_is_evicted_for_one_less_or_equally_important() -> None:
    running = [make_request("mid", 7, generated=1, priority=1)]
    waiting = [
        make_request("low", 8, priority=2),
        make_request("same", 8, priority=1, arrival_time=0.5),
    ]
    done = plan(Priority, options=PriorityOptions(), running=running, waiting=waiting, free_pages=0)
    assert done.preempted == ()
    assert done.granted == {"mid": 1}


def test_the_small_do_not_pass_the_large_that_is_more_important() -> None:
    running = [make_request("runs", 8, generated=1, priority=-1)]
    waiting = [make_request("large", 40, priority=0), make_request("small", 4, priority=1)]
    done = plan(Priority, options=PriorityOptions(), running=running, waiting=waiting, free_pages=4)
    assert done.granted == {"runs": 1}


def test_with_aging_the_old_pass_the_important() -> None:
    waiting = [
        make_request("old", 8, priority=1),
        make_request("important", 8, priority=0, arrival_time=5.0),
    ]
    assert list(
        plan(
            Priority, options=PriorityOptions(aging_s=4.0), waiting=waiting, now=5.0, token_budget=8
        ).granted
    ) == ["old"]
    waiting = [
        make_request("old", 8, priority=1),
        make_request("important", 8, priority=0, arrival_time=5.0),
    ]
    assert list(
        plan(
            Priority, options=PriorityOptions(aging_s=6.0), waiting=waiting, now=5.0, token_budget=8
        ).granted
    ) == ["important"]


def test_with_aging_neither_the_order_nor_starving_is_claimed() -> None:
    context = SchedulerContext(
        token_budget=64, max_num_seqs=8, total_pages=64, block_size=4, seed=0
    )
    assert Priority(PriorityOptions(), context).capabilities == SchedulerCapabilities(
        order="priority", starves=True
    )
    assert Priority(PriorityOptions(aging_s=1.0), context).capabilities == SchedulerCapabilities()
