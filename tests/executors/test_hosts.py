"""The executor `tensor` over several hosts: two addresses of this machine, or two network
namespaces. What is computed is what one host computes, and a host that is lost is named and leaves
nothing."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLMEngine, SamplingParams
from dovetail.errors import ConfigError, DovetailError
from dovetail.testing.suites.footprint import Footprint
from dovetail_executors.options import TensorOptions
from dovetail_executors.tensor import rank_devices
from tests.executors.hosts import (
    HERE,
    NOTICED_S,
    THERE,
    TOKEN,
    Agent,
    agent,
    environment,
    free_port,
)
from tests.executors.ranks import (
    SETTINGS,
    children_of,
    engine,
    generate,
    is_alive,
    nothing_left,
    processes_of_ranks,
    wait_until,
)

PROMPTS = [[5, 17, 200, 31, 8, 90, 12], [9, 12], [400, 3, 77]]
SEEDED = SamplingParams(
    temperature=1.0, seed=7, top_p=0.9, max_tokens=6, ignore_eos=True, detokenize=False
)
FOREVER = """
import json, sys, time
from dovetail import LLMEngine
from dovetail.errors import DovetailError
from tests.executors.ranks import generate
from tests.executors.test_hosts import PROMPTS, SEEDED, tokens

with LLMEngine.from_config(json.loads(sys.argv[1])) as engine:
    print(">", json.dumps(tokens(generate(engine, PROMPTS, SEEDED))), flush=True)
    while engine.core.dead is None:
        generate(engine, PROMPTS)
    print(">", engine.core.dead, flush=True)
print("> ended", flush=True)
"""

torch.set_num_threads(1)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def alone() -> list[list[int]]:
    """Return the tokens that one rank generates."""
    with LLMEngine.from_config(SETTINGS) as one:
        return tokens(generate(one, PROMPTS, SEEDED))


def failure(one: LLMEngine) -> str:
    """Return the error that stops the engine while it works."""
    while one.core.dead is None:
        generate(one, PROMPTS)
    return str(one.core.dead)


@pytest.fixture(autouse=True)
def the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_RANKS_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture
def other(tmp_path: Path, port: int) -> Iterator[Agent]:
    """The other host, which waits for an engine."""
    with agent(tmp_path, f"{HERE}:{port}", "--address", THERE) as one:
        yield one


def over_hosts(port: int, size: int = 2, **options: Any) -> LLMEngine:
    return engine(size, hosts=(HERE, THERE), port=port, **options)


@pytest.mark.slow("starts ranks: processes that import torch")
def test_two_hosts_generate_the_tokens_of_one_and_one_that_is_lost_is_named(
    other: Agent, port: int
) -> None:
    expected = alone()
    before = Footprint.now()
    threads = threading.enumerate()
    with over_hosts(port) as one:
        assert all(each.daemon for each in threading.enumerate() if each not in threads), (
            "a program that doesn't close its engine can't end"
        )
        assert tokens(generate(one, PROMPTS, SEEDED)) == expected
        details = one.capacity.details
        assert (
            details["ranks"],
            details["device"].count(f"{HERE}: "),
            details["device"].count(f"; {THERE}: "),
        ) == ("2", 1, 1)
        [rank] = other.ranks()
        other.process.kill()
        killed = time.monotonic()
        assert (
            failure(one)
            == f"executor tensor: host {THERE} was lost: its connection was closed (rank 1 (cpu of "
            f"{THERE}))"
        )
        assert time.monotonic() - killed < NOTICED_S
        with pytest.raises(DovetailError, match="was lost"):
            one.core.executor.check()
    wait_until(lambda: not is_alive(rank), "its rank is gone")
    assert not [
        each for each in before.left_behind() if not each.startswith("open file pipe:")
    ]  # torch keeps a pipe of its first group


# What is refused before anything is started


def test_hosts_are_addresses_and_the_size_is_a_multiple_of_them() -> None:
    with pytest.raises(ValueError, match="'node-2' does not appear to be an IPv4 or IPv6 address"):
        TensorOptions(hosts=(HERE, "node-2"))
    assert TensorOptions(hosts=("::1", "FD00:0::2")).hosts == ("::1", "fd00::2")
    for options in (
        TensorOptions(size=3, hosts=(HERE, THERE)),
        TensorOptions(size=4, hosts=(HERE, HERE)),
    ):
        with pytest.raises(
            ConfigError,
            match=r"can't be dealt evenly to 2 different hosts \(executor.hosts: 127.0.0.1, ",
        ):
            rank_devices(options)


def test_without_a_token_nothing_is_started(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_RANKS_TOKEN", "short")
    with (
        nothing_left(),
        pytest.raises(ConfigError, match="DOVETAIL_RANKS_TOKEN: the same 16 or more characters"),
    ):
        over_hosts(port)


def test_a_host_that_does_not_come_is_named(port: int) -> None:
    with (
        nothing_left(),
        pytest.raises(
            DovetailError,
            match=f"not started after 0.2 s .*: {THERE}, where `dovetail ranks` hasn't connected",
        ),
    ):
        over_hosts(port, start_timeout_s=0.2)


def test_an_address_of_another_machine_is_refused(port: int) -> None:
    with (
        nothing_left(),
        pytest.raises(
            DovetailError, match=r"executor.hosts: 192.0.2.1 isn't an address of this host"
        ),
    ):
        engine(2, hosts=("192.0.2.1", THERE), port=port)


@pytest.mark.full
@pytest.mark.parametrize("arguments", [("nonsense",), ("10.0.0.1:",), (":29555",)])
def test_the_command_says_what_it_expects(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with agent(tmp_path, *arguments) as one:
        assert one.process.wait(60) == 2
        assert "expected HOST:PORT, as in 10.0.0.1:29555" in one.told()


# Failures, each with an engine of its own


@pytest.mark.full
def test_an_agent_serves_one_engine_after_another_and_keeps_nothing_of_them(
    other: Agent, port: int
) -> None:
    expected, kept = alone(), set()
    for number in range(3):
        with nothing_left(), over_hosts(port, 4) as one:
            assert len(other.ranks()) == 2
            assert tokens(generate(one, PROMPTS, SEEDED)) == expected
        other.wait_until_told("the engine has ended, or was lost", number + 1)
        wait_until(lambda: not children_of(other.process.pid), "its ranks are gone")
        if number:  # the first leaves what Python keeps
            wait_until(lambda: other.threads() == 1, "its threads are gone")
        kept.add(other.open_files())
    assert len(kept) == 1, kept


@pytest.mark.full
def test_a_host_that_is_stopped_is_named(other: Agent, port: int) -> None:
    with nothing_left(), over_hosts(port) as one:
        generate(one, PROMPTS, SEEDED)
        other.process.send_signal(signal.SIGSTOP)
        for pid in other.ranks():
            os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        assert (
            failure(one)
            == f"executor tensor: host {THERE} was lost: nothing was heard from it for 4 s (rank 1 "
            f"(cpu of {THERE}))"
        )
        assert time.monotonic() - stopped < NOTICED_S
        other.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not other.ranks(), "its ranks are gone")


@pytest.mark.full
def test_a_host_that_is_lost_while_nothing_is_asked_is_found_by_check(
    other: Agent, port: int
) -> None:
    with nothing_left(), over_hosts(port) as one:
        other.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()

        def check() -> bool:
            with suppress(DovetailError):
                one.core.executor.check()
                return False
            return True

        wait_until(check, "the loss is noticed")
        assert time.monotonic() - stopped < NOTICED_S


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_of_another_host_that_is_killed_is_named_and_the_host_continues(
    other: Agent, port: int, size: int
) -> None:
    with nothing_left(), over_hosts(port, size) as one:
        victim = other.ranks()[-1]
        os.kill(victim, signal.SIGKILL)
        assert f"process {victim}, was killed by SIGKILL" in failure(one)
        assert str(one.core.dead).startswith(f"executor tensor: on {THERE}: rank ")
    other.wait_until_told("was killed by SIGKILL")
    wait_until(lambda: not other.ranks(), "its ranks are gone")
    with nothing_left(), over_hosts(port, size) as one:
        assert len(generate(one, PROMPTS, SEEDED)) == len(PROMPTS)


@pytest.mark.full
def test_a_rank_of_the_engines_host_that_is_killed_is_named(other: Agent, port: int) -> None:
    with nothing_left(), over_hosts(port, 4) as one:
        [pid] = processes_of_ranks()
        os.kill(pid, signal.SIGKILL)
        assert (
            failure(one) == f"executor tensor: rank 1 (cpu), process {pid}, was killed by SIGKILL"
        )
    wait_until(lambda: not other.ranks(), "the other host's ranks are gone")


@pytest.mark.full
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.5, 3.0, 5.0])
def test_an_engine_that_is_killed_at_any_moment_leaves_nothing_on_the_other_host(
    other: Agent, port: int, after_s: float
) -> None:
    with _engine_process(port, 4) as process:
        other.wait_until_told("computing rank 2")
        pids = wait_until(other.ranks, "its ranks are there")
        time.sleep(after_s)  # it is the moment that is tried
        process.kill()
        process.wait()
        other.wait_until_told("the engine has ended, or was lost")
        wait_until(lambda: not any(map(is_alive, pids)) and not other.ranks(), "its ranks are gone")
    assert other.process.poll() is None


@pytest.mark.full
@pytest.mark.parametrize("after_s", [0.0, 1.0, 3.0])
def test_a_host_that_is_lost_while_it_starts_is_named(
    other: Agent, port: int, after_s: float
) -> None:
    other.wait_until_told("waiting for an engine")
    with _engine_process(port, 4) as process:
        other.wait_until_told("computing rank 2")
        time.sleep(after_s)
        other.process.kill()
        assert process.stdout is not None
        told = process.stdout.read()
        process.wait(60)
    assert f"host {THERE} was lost: " in told


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_agent_that_is_told_to_end_takes_its_ranks_with_it(
    other: Agent, port: int, signum: int
) -> None:
    with nothing_left(), over_hosts(port, 4) as one:
        pids = other.ranks()
        other.process.send_signal(signum)
        assert f"host {THERE} was lost" in failure(one)
        other.process.wait(60)
        wait_until(lambda: not any(map(is_alive, pids)), "its ranks are gone")


@pytest.mark.full
def test_an_agent_with_another_token_ends_and_the_engine_logs_it(tmp_path: Path, port: int) -> None:
    with agent(
        tmp_path, f"{HERE}:{port}", "--address", THERE, token="one that is not the same"
    ) as one:
        one.wait_until_told("waiting for an engine")
        with (
            nothing_left(),
            pytest.raises(
                DovetailError,
                match=f"refused: {THERE}: the other host has another DOVETAIL_RANKS_TOKEN",
            ),
        ):
            over_hosts(port, start_timeout_s=6)
        assert one.process.wait(60) != 0
        assert "has another DOVETAIL_RANKS_TOKEN" in one.told()


@pytest.mark.full
def test_an_executor_that_is_never_closed_releases_the_other_hosts(other: Agent, port: int) -> None:
    one: Any = over_hosts(port, 4)
    one.core.executor.stop = lambda: None
    one.close()
    del one
    gc.collect()
    other.wait_until_told("the engine has ended, or was lost")
    wait_until(lambda: not other.ranks(), "its ranks are gone")


@contextmanager
def _engine_process(
    port: int, size: int, hosts: tuple[str, str] = (HERE, THERE), inside: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """An engine that generates until it dies, which it tells on stdout."""
    config = json.dumps(
        {
            **SETTINGS,
            "executor": {
                "name": "tensor",
                "size": size,
                "device": "cpu",
                "hosts": hosts,
                "port": port,
            },
        }
    )
    command = [*inside, sys.executable, "-c", FOREVER, config]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


# Network namespaces


@pytest.fixture
def network() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them, at 10.77.0.1 and 10.77.0.2."""
    names = (f"dovetail-{os.getpid()}-a", f"dovetail-{os.getpid()}-b")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                "cable",
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                names[1],
            )
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"network namespaces can't be made here (that takes root and `ip`): {error}"
            )
        yield names
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that `FOREVER` says, without what libraries and ranks write."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("> "))[2:].rstrip()


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("end", [0, 1], ids=["the engine's end", "the other end"])
def test_a_host_whose_cable_is_pulled_is_named_and_everything_ends(
    network: tuple[str, str], tmp_path: Path, size: int, end: int
) -> None:
    expected = alone()
    first, second = [("ip", "netns", "exec", name) for name in network]
    with (
        agent(tmp_path, "10.77.0.1:29555", inside=second) as other,
        _engine_process(29555, size, ("10.77.0.1", "10.77.0.2"), inside=first) as process,
    ):
        assert json.loads(_line(process)) == expected
        ranks = [*other.ranks(), *processes_of_ranks(children_of(process.pid))]
        assert len(ranks) == size - 1
        _ip("-n", network[end], "link", "set", "cable", "down")
        pulled = time.monotonic()
        named = ", ".join(f"rank {rank} (cpu of 10.77.0.2)" for rank in range(size // 2, size))
        assert (
            _line(process)
            == f"executor tensor: host 10.77.0.2 was lost: nothing was heard from it for 4 s "
            f"({named})"
        )
        assert time.monotonic() - pulled < NOTICED_S
        assert _line(process) == "ended"
        assert process.wait(60) == 0
        other.wait_until_told("the engine has ended, or was lost")
        wait_until(lambda: not any(map(is_alive, ranks)), "all ranks are gone")
        assert other.process.poll() is None


@pytest.mark.full
def test_an_engine_that_is_killed_leaves_nothing_behind_the_cable(
    network: tuple[str, str], tmp_path: Path
) -> None:
    first, second = [("ip", "netns", "exec", name) for name in network]
    with (
        agent(tmp_path, "10.77.0.1:29555", inside=second) as other,
        _engine_process(29555, 4, ("10.77.0.1", "10.77.0.2"), inside=first) as process,
    ):
        _line(process)
        ranks = [*other.ranks(), *processes_of_ranks(children_of(process.pid))]
        assert len(ranks) == 3
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, ranks)), "all ranks are gone")
        other.wait_until_told("the engine has ended, or was lost")
