"""The executor `tensor` on CPUs: what it computes is what one rank computes, and what it says of
itself."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.api.executor import Capacity
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail_executors.options import TensorOptions
from dovetail_executors.rank import Rank
from dovetail_executors.runtime.worker import Worker
from dovetail_executors.tensor import rank_devices
from tests.executors.rank_threads import ranks_as_threads
from tests.executors.ranks import SETTINGS, engine, generate, nothing_left, processes_of_ranks
from tests.rounding import rounded, roundings_of_demo

PROMPTS = [[5, 17, 200, 31, 8, 90, 12, 44, 7, 7, 301], [9, 12], [400, 3, 77], [9] * 40]
SAMPLED = [
    SamplingParams(
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        logprobs=3,
        prompt_logprobs=2,
    ),
    SamplingParams(
        temperature=1.0, seed=7, top_p=0.9, max_tokens=8, ignore_eos=True, detokenize=False, n=2
    ),
    SamplingParams(
        temperature=0.7,
        seed=9,
        repetition_penalty=1.3,
        logit_bias={11: 2.0},
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
    ),
]

PROCESSES = pytest.mark.slow("starts ranks: processes that import torch")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def two() -> Iterator[LLMEngine]:
    with engine(2) as one:
        yield one


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> Iterator[LLMEngine]:
    with LLMEngine.from_config(SETTINGS) as one:
        yield one


@pytest.mark.parametrize("params", SAMPLED, ids=["greedy", "seeded", "penalties"])
def test_two_ranks_generate_the_tokens_of_one(
    two: LLMEngine, alone: LLMEngine, params: SamplingParams
) -> None:
    expected = generate(alone, PROMPTS, params)
    found = generate(two, PROMPTS, params)
    assert tokens(found) == tokens(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (sample.logprobs is None) == (other.logprobs is None)
            for one, its in zip(sample.logprobs or (), other.logprobs or (), strict=True):
                assert one.keys() == its.keys()
                assert all(
                    one[token].logprob == rounded(its[token].logprob, roundings_of_demo())
                    for token in one
                )


def test_it_shows_its_ranks(two: LLMEngine) -> None:
    details = two.capacity.details
    assert (details["ranks"], details["all_reduce"]) == ("2", "gloo")
    assert details["device"].startswith("2 × cpu")
    assert "ranks='2'" in repr(two)
    parallel = two.get_parallel_config()
    assert (parallel.tensor_parallel_size, parallel.world_size) == (2, 2)


def test_ranks_finish_their_start_together(two: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs nothing is left; rank 1 is asked all the same."""
    executor = two.core.executor
    assert not executor.finish_start()
    monkeypatch.setattr(Worker, "has_finished_start", False)
    assert not executor.finish_start()
    assert len(generate(two, PROMPTS, SAMPLED[0])) == len(PROMPTS)


def test_each_rank_but_the_first_is_a_process(two: LLMEngine) -> None:
    assert len(processes_of_ranks()) == 1
    two.core.executor.check()


@pytest.fixture(scope="module")
def other(two: LLMEngine) -> Iterator[LLM]:
    """Another engine of two ranks in the same process, started with vLLM's argument in a program
    that sets a default socket timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(600.0)
    with LLM(tensor_parallel_size=2, **{**SETTINGS, "device": "cpu"}) as llm:
        yield llm
    socket.setdefaulttimeout(before)


@pytest.mark.slow("starts ranks of its own")
def test_vllms_argument_means_the_same(other: LLM) -> None:
    assert other.engine.capacity.details["ranks"] == "2"


@pytest.mark.slow("starts ranks of its own")
def test_ranks_start_and_compute_where_the_program_gives_all_sockets_a_time_limit(
    other: LLM,
) -> None:
    assert socket.getdefaulttimeout() is not None
    assert (
        len(generate(other.engine, PROMPTS[:1], SAMPLED[0])[0].outputs[0].token_ids)
        == SAMPLED[0].max_tokens
    )


@PROCESSES
def test_two_engines_are_in_one_process_at_once_and_one_outlives_the_other(
    two: LLMEngine, other: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store in which the other's ranks meet outlasts their group: threads of torch's look into
    it until the group is closed."""
    expected = tokens(generate(two, PROMPTS[:2], SAMPLED[1]))
    assert len(processes_of_ranks()) == 2
    assert tokens(generate(other.engine, PROMPTS[:2], SAMPLED[1])) == expected
    assert tokens(generate(two, PROMPTS[:2], SAMPLED[1])) == expected
    there, close, before = [], Rank.close, _stores()

    def note_and_close(rank: Rank) -> None:
        there.append(_stores())
        close(rank)

    monkeypatch.setattr(Rank, "close", note_and_close)
    other.close()
    assert there == [before]
    assert _stores() == before - 1
    assert tokens(generate(two, PROMPTS[:2], SAMPLED[1])) == expected


def _stores() -> int:
    """Return how many stores this process has open."""
    files = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return sum("dovetail-ranks" in os.readlink(file) for file in files if file.is_symlink())


# What is refused


@pytest.mark.parametrize(
    "around",
    [ranks_as_threads, pytest.param(nothing_left, marks=PROCESSES)],
    ids=["threads", "processes"],
)
def test_a_model_that_cannot_be_split_is_refused_with_the_numbers(
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    with (
        around(),
        pytest.raises(
            UnsupportedError, match=r"num_attention_heads \(8\) can't be split evenly over 3 ranks"
        ),
    ):
        engine(3)


def test_ranks_end_when_the_first_one_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks end, whether or not they have loaded their part when the first one fails."""
    load = Rank.load

    def fail_as_first(rank: Rank) -> Capacity:
        if rank.group.rank == 0:
            raise DovetailError("the first one can't")
        return load(rank)

    monkeypatch.setattr(Rank, "load", fail_as_first)
    before = set(threading.enumerate())
    with ranks_as_threads(), pytest.raises(DovetailError, match="the first one can't"):
        engine(3)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "options",
    [
        {"devices": (0,)},
        {"devices": (0, 0)},
        {"devices": (0, 1, 2)},
        {"devices": (0, 1), "device": "cpu"},
    ],
    ids=str,
)
def test_devices_that_do_not_go_with_the_size_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, DovetailError, ValueError), match="devices"):
        rank_devices(TensorOptions(**options))


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        UnsupportedError,
        match=r"executor.size: 2 ranks need as many CUDA devices, and torch .* sees 1",
    ):
        rank_devices(TensorOptions(size=2))
