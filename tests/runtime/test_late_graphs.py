"""Sizes that are recorded while serving: steps have the same tokens, whenever theirs is recorded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.testing.recording import Recording
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors.runtime import graphs as graphs_module
from dovetail_executors.runtime.graphs import Agree, Graphs
from dovetail_executors.runtime.model_io import DECODE, MIXED, MODEL
from dovetail_executors.runtime.recorded_steps import decode_builders, mixed_builders
from dovetail_executors.runtime.recording import ALONE, LayerSplitter
from tests.runtime.fakes import Bench, generate
from tests.runtime.recorded import GraphOnCpu, WatchedGraphs, play_graphs_on_the_cpu
from tests.runtime.test_decode_graphs import PROMPTS, CapturableGreedy, begin
from tests.support import examples

MAX_ROWS = 7  # recorded: 1, 2, 4, 7


@pytest.fixture
def on_cpu() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        patch.setattr(graphs_module, "MOST_FIRST", 1)
        yield patch


def late(max_rows: int = MAX_ROWS, agree: Agree | None = None) -> tuple[Bench, WatchedGraphs]:
    """A bench whose graphs have recorded the first sizes only. `agree`: as one of several ranks."""
    bench = Bench(max_rows=max_rows, num_blocks=60)
    bench.sampler.__class__ = CapturableGreedy
    parts = bench.runner.parts
    graphs = WatchedGraphs(
        [*mixed_builders(parts, LayerSplitter(), 96), *decode_builders(parts, max_rows)],
        bench,
        agree,
    )
    bench.backend.prepare(max_rows, 96, 64)
    graphs.capture(all_sizes=False)
    bench.runner.graphs = graphs
    return bench, graphs


def test_the_largest_size_of_each_key_and_the_smallest_of_the_first_steps_are_recorded_at_once(
    on_cpu: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []
    bench = Bench(max_rows=MAX_ROWS, num_blocks=60)
    bench.sampler.__class__ = CapturableGreedy
    parts = bench.runner.parts
    graphs = Graphs(
        [*mixed_builders(parts, LayerSplitter(), 96), *decode_builders(parts, MAX_ROWS)], parts
    )
    bench.backend.prepare(MAX_ROWS, 96, 64)
    graphs.capture(lambda what, done, total: told.append((done, total)), all_sizes=False)
    recorded = {str(key): list(sizes) for key, sizes in graphs.recorded}
    assert recorded == {"mixed": [96], "decode": [1, 7], "model": [7], "sampling": [1, 7]}
    assert told == [(done, 6) for done in range(1, 7)]


@examples(quick=8, full=200)
@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=5))
def test_steps_of_sizes_that_are_recorded_late_have_the_same_tokens(steps: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        patch.setattr(graphs_module, "MOST_FIRST", 0)
        bench, graphs = late()
        tokens = begin(bench, PROMPTS)
        for rows in steps:
            result = bench.run(dict.fromkeys(sorted(rows), 1))
            assert result.failed == {}
            for row, token in zip(sorted(rows), result.token_ids.tolist(), strict=True):
                tokens[row].append(token)
    assert tokens == [
        generate(prompt, len(told)) for prompt, told in zip(PROMPTS, tokens, strict=True)
    ]
    sizes = {0: 0, 1: 1, 2: 2, 3: 4, 4: 4}
    assert [each for each in graphs.replayed if each[0] == "decode"] == [
        ("decode", sizes[len(rows)]) for rows in steps
    ]


def test_a_step_records_its_own_size_alone(on_cpu: pytest.MonkeyPatch) -> None:
    bench, graphs = late()
    begin(bench, PROMPTS[:2])
    bench.run({0: 1, 1: 1})
    assert {str(key): list(sizes) for key, sizes in graphs.recorded} == {
        "mixed": [32, 96],
        "decode": [1, 2, 7],
        "model": [7],
        "sampling": [1, 2, 7],
    }


def test_all_sizes_are_recorded_one_by_one_by_who_has_the_time(on_cpu: pytest.MonkeyPatch) -> None:
    bench, graphs = late()
    begin(bench, PROMPTS[:2])
    recorded = [sum(len(sizes) for _, sizes in graphs.recorded)]
    while graphs.record_next():
        recorded.append(sum(len(sizes) for _, sizes in graphs.recorded))
    assert recorded == list(range(recorded[0], recorded[0] + len(recorded)))
    assert dict(graphs.recorded) == dict(graphs.keys)
    assert not graphs.record_next()
    assert [int(token) for token in bench.run({0: 1, 1: 1}).token_ids] == [
        generate(prompt, 2)[-1] for prompt in PROMPTS[:2]
    ]
    assert graphs.find(MODEL, 1) is not graphs.find(DECODE, 1) is not None


def test_without_the_memory_to_record_a_size_its_steps_are_launched(
    on_cpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench, graphs = late()
    tried: list[None] = []

    def fails(*_: object) -> None:
        tried.append(None)
        raise torch.OutOfMemoryError("no memory")

    on_cpu.setattr(graphs_module, "record", fails)
    tokens = begin(bench, PROMPTS[:2])
    with caplog.at_level(logging.WARNING, "dovetail"):
        for _ in range(2):
            told = bench.run({0: 1, 1: 1})
            for row, token in enumerate(told.token_ids.tolist()):
                tokens[row].append(token)
    assert tokens == [generate(prompt, 3) for prompt in PROMPTS[:2]]
    assert graphs.replayed == []
    assert "steps of kind decode and size 2 aren't recorded: OutOfMemoryError" in caplog.text
    assert graphs.find(MIXED, 32) is None
    assert len(tried) == 2 * 3, "each of three sizes was tried again with a cache that is free"


def test_memory_that_the_cache_had_is_enough_for_another_try(on_cpu: pytest.MonkeyPatch) -> None:
    _, graphs = late()
    record = graphs_module.record
    freed: list[None] = []

    def fails_at_first(*args: object) -> object:
        if not freed:
            raise torch.OutOfMemoryError("no memory")
        return record(*args)  # type: ignore[arg-type]

    on_cpu.setattr(graphs_module, "record", fails_at_first)
    on_cpu.setattr(torch.cuda, "empty_cache", lambda: freed.append(None))
    assert graphs.find(DECODE, 2) is not None
    assert freed


def test_a_late_size_is_run_first_only_if_it_can_not_be_recorded_at_once(
    on_cpu: pytest.MonkeyPatch,
) -> None:
    """As where a backend tunes a kernel when a size first runs."""
    _, graphs = late()
    record = graphs_module.record
    warm_ups: list[int] = []

    def tunes(run: object, pool: object, stream: object, times: int, *more: object) -> object:
        warm_ups.append(times)
        if len(warm_ups) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(run, pool, stream, times, *more)  # type: ignore[arg-type]

    on_cpu.setattr(graphs_module, "record", tunes)
    assert graphs.find(DECODE, 2) is not None
    assert graphs.find(DECODE, 4) is not None
    assert warm_ups == [0, 0, 1]


def test_a_capture_that_cannot_end_leaves_its_pool_to_no_other(on_cpu: pytest.MonkeyPatch) -> None:
    """torch refuses the pool from then on."""
    _, graphs = late()
    pools: list[object] = []
    handles = count()

    class Refusing(GraphOnCpu):
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            if pool in pools:
                raise RuntimeError("already recording to mempool_id")
            super().capture_begin(pool, capture_error_mode)
            self.of = pool

        def capture_end(self) -> None:
            super().capture_end()
            if not pools:
                pools.append(self.of)
                raise RuntimeError("the capture was ended by another thread")

    on_cpu.setattr(torch.cuda, "CUDAGraph", Refusing)
    on_cpu.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    assert graphs.find(DECODE, 2) is not None
    assert graphs.find(DECODE, 4) is not None
    assert len(pools) == 1


class Breaking(Recording):  # type: ignore[misc]
    """A capture that another thread breaks after some operations."""

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.operations) == 5:
            raise RuntimeError("operation failed due to a previous error during capture")
        return super().__torch_dispatch__(func, *args, **kwargs)


class Broken(GraphOnCpu):
    """A CUDA graph whose capture was broken, which raises when the capture ends, too."""

    def __init__(self) -> None:
        self._recording = Breaking()

    def capture_end(self) -> None:
        super().capture_end()
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_goes_on_if_another_thread_breaks_the_capture_of_a_step(
    on_cpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """A program breaks a capture if it synchronizes the device meanwhile. If that happens once, the
    size is recorded after all; if twice, its steps are computed without, and other sizes are
    recorded as before."""
    bench, graphs = late()
    tokens = begin(bench, PROMPTS)
    captures = count()

    def graph() -> GraphOnCpu:
        return Broken() if next(captures) < times else GraphOnCpu()

    on_cpu.setattr(torch.cuda, "CUDAGraph", graph)
    with caplog.at_level(logging.WARNING, "dovetail"):
        for rows in ((0, 1), (0, 1), (0, 1, 2)):
            told = bench.run(dict.fromkeys(rows, 1))
            assert told.failed == {}
            for row, token in zip(rows, told.token_ids.tolist(), strict=True):
                tokens[row].append(token)
    assert tokens == [
        generate(prompt, len(each)) for prompt, each in zip(PROMPTS, tokens, strict=True)
    ]
    assert [each for each in graphs.replayed if each[0] == "decode"] == [
        *([] if times == 2 else [("decode", 2), ("decode", 2)]),
        ("decode", 4),
    ]
    said = "steps of kind decode and size 2 aren't recorded: RuntimeError"
    assert [record.message.startswith(said) for record in caplog.records] == [True] * (times == 2)


def test_nothing_is_recorded_late_while_another_engine_starts(on_cpu: pytest.MonkeyPatch) -> None:
    bench, graphs = late()
    tokens = begin(bench, PROMPTS[:2])
    before = dict(graphs.recorded)
    on_cpu.setattr(graphs_module, "IDLE_S", 0.0)
    starting, ended = threading.Event(), threading.Event()

    def start() -> None:
        with ALONE:
            starting.set()
            ended.wait()

    with ThreadPoolExecutor(1) as other:
        other.submit(start)
        starting.wait()
        try:
            told = bench.run({0: 1, 1: 1})
            assert graphs.record_next()
            assert dict(graphs.recorded) == before
        finally:
            ended.set()
    for row, token in enumerate(told.token_ids.tolist()):
        tokens[row].append(token)
    assert tokens == [generate(prompt, 2) for prompt in PROMPTS[:2]]
    while graphs.record_next():
        pass
    assert dict(graphs.recorded) == dict(graphs.keys)


@pytest.mark.parametrize("failures", [0, 1, 2])
@pytest.mark.parametrize(("error", "warm_up"), [(torch.OutOfMemoryError, 0), (RuntimeError, 1)])
def test_ranks_record_a_size_together_or_not_at_all(
    on_cpu: pytest.MonkeyPatch, failures: int, error: type[RuntimeError], warm_up: int
) -> None:
    """A rank that replays waits for as many programs of the others as its recording has, and one
    that runs a step for those of a rank that may lack the memory."""
    votes: list[dict[int, bool]] = []
    meet = threading.Barrier(2, lambda: votes.append({}), timeout=60)

    def agree_as(rank: int) -> Agree:
        def agree(fine: bool) -> bool:
            meet.wait()  # the next vote is open
            vote = votes[-1]
            vote[rank] = fine
            meet.wait()
            return all(vote.values())

        return agree

    record = graphs_module.record
    warm_ups: list[tuple[int, object]] = []
    found: dict[int, object] = {}

    def fails_on_one(*args: Any) -> object:
        rank = int(threading.current_thread().name)
        if rank in found:
            warm_ups.append((rank, args[3]))
            if rank == 1 and sum(one == rank for one, _ in warm_ups) <= failures:
                raise error("no memory")
        return record(*args)

    def serve(rank: int) -> None:
        _, graphs = late(agree=agree_as(rank))
        found[rank] = None
        found[rank] = graphs.find(DECODE, 2)

    on_cpu.setattr(graphs_module, "record", fails_on_one)
    unlocked = SimpleNamespace(acquire=lambda timeout: True, release=lambda: None)
    on_cpu.setattr(graphs_module, "ALONE", unlocked)  # other ranks are other processes
    threads = [threading.Thread(target=serve, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[rank] is not None for rank in (0, 1)] == [failures < 2] * 2
    tried = [0] if failures == 0 else [0, warm_up]
    assert sorted(warm_ups) == [(rank, times) for rank in (0, 1) for times in tried]


def test_ranks_record_nothing_while_another_engine_starts_in_the_process_of_one(
    on_cpu: pytest.MonkeyPatch,
) -> None:
    votes: list[bool] = []  # of the other ranks; at the start they agree
    _, graphs = late(agree=lambda fine: fine and (not votes or votes.pop(0)))
    votes.append(False)
    before = dict(graphs.recorded)
    assert graphs.find(DECODE, 2) is None
    assert dict(graphs.recorded) == before
    assert graphs.find(DECODE, 2) is not None


def test_an_engine_of_one_row_records_what_it_needs(on_cpu: pytest.MonkeyPatch) -> None:
    """A single row shares its prefix with no other."""
    may = replace(TorchAttention.capabilities, shared_prefix=True)
    on_cpu.setattr(TorchAttention, "capabilities", may)
    _, graphs = late(max_rows=1)
    assert {str(key): list(sizes) for key, sizes in graphs.recorded} == {
        "mixed": [96],
        "decode": [1],
        "model": [1],
        "sampling": [1],
    }
