"""Models without memory for parameters, while other threads build theirs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from torch import nn

from dovetail.nn.skeletons import skeleton


def test_parameters_of_enough_dimensions_have_no_memory() -> None:
    made = skeleton(lambda: nn.Linear(3, 2), least_dims=2)
    assert made.weight.is_meta
    assert not made.bias.is_meta
    assert skeleton(lambda: nn.Linear(3, 2)).bias.is_meta
    assert not nn.Linear(3, 2).weight.is_meta


def test_modules_of_other_threads_have_their_memory() -> None:
    with ThreadPoolExecutor(1) as other:

        def build() -> nn.Module:
            assert not other.submit(lambda: nn.Linear(3, 2)).result().weight.is_meta
            return nn.Linear(3, 2)

        assert skeleton(build).weight.is_meta


def test_one_thread_at_a_time_builds() -> None:
    inside = threading.Semaphore(1)

    def build() -> nn.Module:
        assert inside.acquire(blocking=False)
        made = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
        inside.release()
        return made

    with ThreadPoolExecutor(4) as threads:
        for made in [threads.submit(skeleton, build) for _ in range(20)]:
            made.result()
