"""Calls in the background: their ends and errors come where they are awaited."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest

from dovetail_grammars.background import Background


def test_the_end_of_a_call_can_be_awaited_twice() -> None:
    """As after an interrupt, when the engine stops."""
    background = Background("tests")
    done: list[int] = []
    for number in range(3):
        wait = background.run(partial(done.append, number))
        wait()
        wait()
        assert done == [*range(number + 1)]


def test_an_error_is_raised_where_the_end_is_awaited() -> None:
    background = Background("tests")

    def fail() -> None:
        raise ValueError("no mask")

    wait = background.run(fail)
    with pytest.raises(ValueError, match="no mask"):
        wait()
    background.run(lambda: None)()


def test_the_thread_ends_with_its_object() -> None:
    background = Background("tests of an end")
    background.run(lambda: None)()
    [thread] = [each for each in threading.enumerate() if each.name == "tests of an end"]
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
