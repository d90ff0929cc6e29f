from dovetail.testing import make_request, plan

from dovetail_lcfs.policy import LCFS


def test_the_newest_goes_first() -> None:
    waiting = [make_request("old", 20, arrival_time=0.0), make_request("new", 20, arrival_time=0.5)]
    done = plan(LCFS, waiting=waiting, token_budget=30)
    assert list(done.granted.items()) == [("new", 20), ("old", 10)]


def test_when_memory_lacks_the_oldest_makes_room() -> None:
    # each needs another block of 4
    running = [make_request("old", 8, generated=1), make_request("new", 8, generated=1, arrival_time=0.5)]
    done = plan(LCFS, running=running, free_pages=0)
    assert (done.granted, done.preempted) == ({"new": 1}, ("old",))
