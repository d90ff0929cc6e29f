"""A rank that dies or hangs ends its engine, which says whose fault it was and leaves nothing; and
no rank outlives its engine."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, SamplingParams
from dovetail.api import process_watch
from dovetail.errors import DovetailError
from dovetail_executors import ranks
from tests.executors.rank_threads import ranks_as_threads
from tests.executors.ranks import (
    LONG,
    SETTINGS,
    engine,
    generate,
    is_alive,
    nothing_left,
    processes_of_ranks,
    wait_until,
)
from tests.support import FULL, PROFILE

PROMPTS = [[5, 17, 200, 31], [9, 12]]
# two seconds where the processors are free
NOTICED_S = 10.0 if FULL else 60.0
KILLS = 50 if FULL else 1
STOPPED_S = process_watch.STOPPED_S if FULL else 1.0
PARENT = """
import json, sys
from dovetail import LLMEngine
from tests.executors.ranks import generate, processes_of_ranks

with LLMEngine.from_config(json.loads(sys.argv[1])) as engine:
    print(*processes_of_ranks(), flush=True)
    while True:
        generate(engine, [[1, 2, 3]])
"""
CARELESS = """
import json, sys
from dovetail import LLMEngine
from tests.executors.ranks import processes_of_ranks

engine = LLMEngine.from_config(json.loads(sys.argv[1]))
print(*processes_of_ranks(), flush=True)
"""

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def what_the_first_start_makes() -> None:
    if PROFILE == "quick":
        return  # the one test there starts no engine to its end
    with nullcontext() if FULL else ranks_as_threads(), engine(2) as one:
        generate(one, PROMPTS, SamplingParams(max_tokens=2, detokenize=False))


@pytest.mark.slow("starts ranks: processes that import torch")
def test_a_rank_that_is_killed_amidst_steps_is_named_to_the_requests_that_wait() -> None:
    with nothing_left(), engine(2) as one:
        [pid] = processes_of_ranks()
        for index, prompt in enumerate(PROMPTS):
            one.add_request(str(index), prompt, LONG)
        for _ in range(3):
            one.step()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        outputs: dict[str, Any] = {}
        while one.has_unfinished_requests():
            outputs |= {output.request_id: output for output in one.step()}
        assert time.monotonic() - killed < NOTICED_S + 1
        assert [outputs[name].outputs[0].finish_reason for name in ("0", "1")] == ["error", "error"]
        assert (
            str(one.core.dead)
            == f"executor tensor: rank 1 (cpu), process {pid}, was killed by SIGKILL"
        )
        with pytest.raises(DovetailError, match="was killed by SIGKILL"):
            one.core.executor.check()


@pytest.mark.full  # test_served_ranks.py has a server find it
def test_a_rank_that_dies_while_nothing_is_asked_is_found_by_check() -> None:
    with nothing_left(), engine(2) as one:
        [pid] = processes_of_ranks()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _error(one.core.executor.check), "the death is noticed")
        assert not is_alive(pid)


@pytest.mark.slow("starts ranks: processes that import torch")
def test_a_rank_that_hangs_is_named_once_its_step_is_too_slow() -> None:
    with nothing_left(), engine(2, step_timeout_s=1.0) as one:
        [pid] = processes_of_ranks()
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        generate(one, PROMPTS)
        assert time.monotonic() - begun < 1.0 + NOTICED_S
        assert str(one.core.dead) == (
            "executor tensor: step 0 wasn't done after 1 s (executor.step_timeout_s); not through "
            "with it: "
            f"rank 1 (cpu), process {pid}, which is stopped"
        )


@pytest.mark.slow("starts ranks: processes that import torch")
def test_a_rank_that_is_stopped_is_named_long_before_its_step_is_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (process_watch, ranks):
        monkeypatch.setattr(module, "STOPPED_S", STOPPED_S)
    with nothing_left(), engine(2) as one:
        [pid] = processes_of_ranks()
        os.kill(pid, signal.SIGSTOP)
        generate(one, PROMPTS)
        assert (
            str(one.core.dead)
            == f"executor tensor: rank 1 (cpu), process {pid}, had been stopped (SIGSTOP) for "
            f"{STOPPED_S:g} s"
        )


@pytest.mark.full
def test_of_several_ranks_the_one_is_named_that_died_first() -> None:
    with nothing_left(), engine(4) as one:
        pids = processes_of_ranks()
        assert len(pids) == 3
        one.add_request("a", PROMPTS[0], LONG)
        for _ in range(3):
            one.step()
        os.kill(pids[1], signal.SIGKILL)
        while one.has_unfinished_requests():
            one.step()
        assert f"process {pids[1]}, was killed by SIGKILL" in str(one.core.dead)


def test_a_rank_that_cannot_start_in_time_is_named() -> None:
    with (
        nothing_left(),
        pytest.raises(
            DovetailError,
            match=r"not started after 0.2 s \(executor.start_timeout_s\): rank 1 \(cpu\), .* "
            r"haven't loaded the model$",
        ),
    ):
        engine(2, start_timeout_s=0.2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_any_moment_leaves_nothing(seed: int) -> None:
    """While it starts, loads, connects, computes its first steps, in the midst of work, or while
    all ends."""
    chance = random.Random(seed)
    size, after_s = chance.choice([2, 2, 4]), chance.uniform(0, 8)
    with nothing_left(), _killing(chance, after_s) as killed:
        error = _error(lambda: _work_until(killed, size))
        assert "was killed by SIGKILL" in str(error)


def _work_until(killed: threading.Event, size: int) -> None:
    """Raises what an engine says of a rank that was killed."""
    with engine(size) as one:
        while not killed.is_set():
            generate(one, PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False))
        raise wait_until(lambda: _error(one.core.executor.check), "the death is noticed")


@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_no_rank_outlives_its_engines_process(signum: int) -> None:
    with _parent() as parent:
        pids = [int(pid) for pid in _line(parent).split()]
        assert len(pids) == 1
        parent.send_signal(signum)
        parent.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)), "the rank is gone")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_a_start_that_is_interrupted_leaves_nothing(seed: int) -> None:
    with _parent() as parent:
        [pid] = wait_until(lambda: _ranks_of(parent.pid), "the rank's process is there")
        threading.Event().wait(random.Random(seed).uniform(0, 4))
        parent.send_signal(signal.SIGINT)
        assert parent.wait(60) != 0
        wait_until(lambda: not is_alive(pid), "the rank is gone")


@pytest.mark.full
def test_ranks_live_on_when_the_thread_that_started_them_ends() -> None:
    started: list[LLMEngine] = []
    thread = threading.Thread(target=lambda: started.append(engine(2)))
    thread.start()
    thread.join()
    with started[0] as one:
        assert len(generate(one, PROMPTS)) == 2


@pytest.mark.full
def test_an_engine_that_is_never_closed_ends_its_ranks() -> None:
    with _parent(CARELESS) as parent:
        pids = [int(pid) for pid in _line(parent).split()]
        assert parent.wait(60) == 0
        wait_until(lambda: not any(map(is_alive, pids)), "the rank is gone")


def _error(call: Callable[[], None]) -> DovetailError | None:
    try:
        call()
    except DovetailError as error:
        return error
    return None


@contextmanager
def _killing(chance: random.Random, after_s: float) -> Iterator[threading.Event]:
    """Kill one of this process's ranks, this many seconds after the first has started."""
    killed, over = threading.Event(), threading.Event()

    def run() -> None:
        while not processes_of_ranks() and not over.wait(0.01):
            pass
        over.wait(after_s)
        if pids := processes_of_ranks():
            os.kill(chance.choice(pids), signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@contextmanager
def _parent(code: str = PARENT) -> Iterator[subprocess.Popen[str]]:
    config = json.dumps({**SETTINGS, "executor": {"name": "tensor", "size": 2, "device": "cpu"}})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, config],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        yield parent
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def _line(parent: subprocess.Popen[str]) -> str:
    """Its first line, which it may be too late to write."""
    output = parent.stdout
    assert output is not None
    wait_until(lambda: select.select([output], [], [], 0)[0], "it has said its ranks")
    return output.readline()


def _ranks_of(pid: int) -> list[int]:
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return processes_of_ranks([int(child) for child in children])
