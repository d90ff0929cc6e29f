"""Transfers of the simulated executor: the size of a page, and how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.kv_transfers import Transfer
from dovetail.errors import ConfigError
from dovetail.testing.suites.executor_subject import context_of
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.simulated_options import SimulatedOptions
from tests.lab.runs import LINEAR

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def simulated(**options: Any) -> SimulatedExecutor:
    given = {"step_time": LINEAR, "num_pages": 10, **options}
    context = context_of("none", VirtualClock(1.0), Path("none"))
    return SimulatedExecutor(SimulatedOptions(**given), context)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"page_bytes": 4096}, 4096), ({"model": LLAMA}, 3 * 2 * 16 * 2 * 16 * 2)],
)
def test_a_page_of_known_size_takes_its_time(options: dict[str, Any], size: int) -> None:
    executor = simulated(transfer_gbps=2.0, **options)
    own = executor.transfers()
    assert own is not None
    assert own.page_bytes == size
    own.restore(Transfer(1, own.allocate(1 << 20).number, 0, (1, 2, 3), 0))
    executor.clock.wait_until(1.0 + 2.9 * size / 2e9)
    assert not own.finished()
    executor.clock.wait_until(1.0 + 3 * size / 2e9)
    assert [each.id for each in own.finished()] == [1]


def test_without_a_rate_there_are_none_and_without_a_size_that_is_said() -> None:
    assert simulated().transfers() is None
    with pytest.raises(ConfigError, match=r"set executor\.page_bytes"):
        simulated(transfer_gbps=2.0).transfers()
