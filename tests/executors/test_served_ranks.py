"""`dovetail serve` over several ranks: it answers, and tells at once when a rank has died, be it
asked something or not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.executors.ranks import children_of, processes_of_ranks
from tests.preloaded import Preloaded
from tests.server.test_processes import Server, begin, directory, start, until
from tests.support import FULL

__all__ = ["directory", "start"]  # fixtures
RANKS = (
    "--set",
    "executor.name=tensor",
    "--set",
    "executor.size=2",
    "--set",
    "executor.device=cpu",
)


def ranks_of(server: Server) -> list[int]:
    [engine] = server.children("engine_process")
    return processes_of_ranks(children_of(engine))


@pytest.mark.slow("starts ranks: processes that import torch")
def test_a_server_that_is_asked_nothing_ends_when_a_rank_dies_and_says_which(
    start: Callable[..., Server], preloaded: Preloaded
) -> None:
    server = start(*RANKS, preloaded=None if FULL else preloaded)
    assert server.line.startswith("dovetail serves demo on 2 ranks (2 × cpu")
    assert "; sums by gloo) at http" in server.line
    pids = server.children()
    assert begin(server, 1, max_tokens=4)[0].over.wait(60)
    [rank] = ranks_of(server)
    os.kill(rank, signal.SIGKILL)
    assert server.end() == 1
    assert f"rank 1 (cpu), process {rank}, was killed by SIGKILL" in server.told()
    until(lambda: not server.left([*pids, rank]), "nothing is left")


@pytest.mark.full
def test_clients_get_the_name_of_the_dead_rank(start: Callable[..., Server]) -> None:
    server = start(*RANKS)
    streams = begin(server, 4)
    [rank] = ranks_of(server)
    os.kill(rank, signal.SIGKILL)
    for stream in streams:
        assert stream.over.wait(60)
        assert any(
            f"process {rank}, was killed by SIGKILL" in event for event in stream.events[-2:]
        )
    assert server.end() == 1


@pytest.mark.full
def test_when_the_engines_process_is_killed_no_rank_stays(start: Callable[..., Server]) -> None:
    server = start(*RANKS)
    [rank] = ranks_of(server)
    os.kill(server.children("engine_process")[0], signal.SIGKILL)
    assert server.end() == 1
    until(lambda: not server.left([rank]), "nothing is left")
