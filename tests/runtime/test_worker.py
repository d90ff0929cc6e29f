"""One rank: what it loads and refuses, the pool that it is told to make, and what becomes of a step
that fails."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.api.executor import Capacity
from dovetail.api.graphs import GraphSupport
from dovetail.api.state import StateSpec, StateTensor
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.nn.parallel import SINGLE, SingleGroup
from dovetail_executors.runtime import loading, transfers
from dovetail_executors.runtime import worker as worker_module
from dovetail_executors.runtime.attention_choice import ChosenAttention, choose_attention
from dovetail_executors.runtime.kv_pool import KVPool
from dovetail_executors.runtime.loading import ModelPlan, load_model
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.worker import Worker
from dovetail_samplers.default import DefaultSampler
from tests.runtime.demo import BLOCK_BYTES, DEMO, DRAFT, context, decode, prefill

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 200, 31, 8, 90, 12, 44, 7, 7, 301], [9, 12], [400, 3, 77]]


def worker(**changes: Any) -> Worker:
    return Worker(context(**changes), SINGLE, "ours")


def loaded(**changes: Any) -> tuple[Worker, Capacity]:
    rank = worker(**changes)
    capacity = rank.load(CPU, 30)
    rank.allocate(capacity.num_pages)
    return rank, capacity


def test_it_tells_how_many_blocks_fit_and_makes_as_many_as_were_agreed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, made = worker(kv_cache_memory=20 * BLOCK_BYTES), []
    assert rank.load(CPU).num_pages == 20
    assert rank.runner is not None
    allocate = rank.runner.pool.allocate
    monkeypatch.setattr(
        rank.runner.pool,
        "allocate",
        lambda num_pages: made.append(num_pages) or allocate(num_pages),
    )
    rank.allocate(8)
    assert made == [8]
    rank.stop()


@pytest.fixture
def start_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a worker does in turn on a GPU: one that is there in name, while all is made on the
    CPU."""
    steps: list[str] = []

    class Graphs:
        @classmethod
        def of(cls, *_: Any) -> Graphs:
            return cls()

        def compile_ahead(self, prepare: Callable[[], None], progress: Any) -> None:
            steps.append("compile")
            prepare()

        def capture(self, progress: Any, *, all_sizes: bool) -> None:
            steps.append("record all" if all_sizes else "record")

        def __str__(self) -> str:
            return "decode, mixed"

    def choose(candidates: Any, specs: Any, device: str, *rest: Any) -> ChosenAttention:
        chosen = choose_attention(candidates, specs, "cpu", *rest)
        chosen.backend.capabilities = replace(
            chosen.backend.capabilities, cuda_graph=GraphSupport.DECODE
        )
        return chosen

    def allocate(pool: KVPool, count: int) -> None:
        steps.append(f"pool of {count}")
        allocate_pages(pool, count)

    allocate_pages = KVPool.allocate
    monkeypatch.setattr(KVPool, "allocate", allocate)

    def make_sampling(rank: Worker, plan: ModelPlan, plans: Any, pool: KVPool, _: Any) -> Any:
        steps.append("load")
        pool.device = CPU
        return on_the_cpu(rank, plan, plans, pool, CPU)

    def make_runner(*arguments: Any, **flags: Any) -> Runner:
        runner = Runner(*arguments, **flags)
        runner.device = torch.device("cuda")
        return runner

    on_the_cpu = Worker._make_sampling
    monkeypatch.setattr(Worker, "_make_sampling", make_sampling)
    monkeypatch.setattr(worker_module, "Runner", make_runner)
    monkeypatch.setattr(worker_module, "Graphs", Graphs)
    monkeypatch.setattr(worker_module, "choose_attention", choose)
    monkeypatch.setattr(loading, "resolve_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(worker_module, "load_model", lambda *asked: load_model(*asked[:4], CPU))
    monkeypatch.setattr(
        worker_module,
        "peak_bytes",
        lambda runner, max_tokens: steps.append(f"profile {max_tokens} tokens") or 20 * BLOCK_BYTES,
    )
    monkeypatch.setattr(gc, "freeze", lambda: steps.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: steps.append("unfreeze"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=100 * BLOCK_BYTES),
    )
    return steps


def test_on_a_gpu_the_biggest_step_is_measured_once_kernels_are_compiled_and_graphs_are_recorded_in_the_real_pool(
    start_up: list[str],
) -> None:
    rank = worker(gpu_memory_utilization=0.5)
    capacity = rank.load(torch.device("cuda", 0))
    assert start_up == ["load", "freeze", "compile", "pool of 1", "pool of 1", "profile 128 tokens"]
    assert (capacity.num_pages, capacity.max_in_flight) == (30, 2)
    assert (capacity.details["device"], capacity.details["cuda_graphs"]) == (
        "cuda:0 (Imaginary)",
        "decode, mixed",
    )
    start_up.clear()
    rank.allocate(8)
    assert start_up == ["pool of 8", "record", "freeze"]
    rank.stop()
    assert start_up[3:] == ["unfreeze"]


def test_the_memory_of_transfers_is_left_free_if_the_engine_makes_any(
    start_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 0)  # six staging buffers of a page each
    monkeypatch.setattr(transfers, "FRAME_TOKENS", 1)  # a frame is a block
    rank = worker(gpu_memory_utilization=0.5, kv_transfers=True)
    assert rank.load(torch.device("cuda", 0)).num_pages == 30 - 7
    rank.stop()


def test_where_no_graphs_are_wanted_none_are_made(start_up: list[str]) -> None:
    rank = worker(cuda_graphs=False)
    assert rank.load(torch.device("cuda", 0), 30).details["cuda_graphs"] == "none"
    rank.allocate(30)
    assert start_up == ["load", "freeze", "pool of 30", "freeze"]
    rank.stop()


def test_a_rank_of_two_has_its_share_of_the_model_and_of_each_block() -> None:
    whole, half = worker(), Worker(context(), SingleGroup(rank=1, size=2), "ours")
    assert (whole.load(CPU, 30).layout.page_bytes, half.load(CPU, 30).layout.page_bytes) == (
        BLOCK_BYTES,
        BLOCK_BYTES // 2,
    )
    assert whole.runner is not None
    assert half.runner is not None
    sizes = [
        sum(weight.numel() for weight in rank.runner.model.parameters()) for rank in (whole, half)
    ]
    assert sizes[1] < sizes[0]


def test_nothing_is_allocated_before_it_is_loaded() -> None:
    with pytest.raises(DovetailError, match="executor ours isn't running"):
        worker().allocate(8)


def test_what_does_not_fit_on_the_cpu_is_told_before_the_weights_are_read() -> None:
    read: list[str] = []
    with pytest.raises(ConfigError, match="num_pages: 3 gives 3"):
        worker(progress=lambda what, done, total: read.append(what)).load(CPU, 3)
    assert not read


def test_a_step_that_fails_names_its_requests_and_ends_the_worker() -> None:
    rank, capacity = loaded()
    rank.collect(rank.submit(prefill(capacity, PROMPTS)))

    def broken(*_: Any) -> None:
        raise RuntimeError("the device caught fire")

    rank.runner.model.forward = broken  # type: ignore[union-attr]
    with pytest.raises(
        DovetailError,
        match="step 7 failed: RuntimeError: the device caught fire; requests in it: request-0, "
        "request-1",
    ):
        rank.submit(decode(2, 7))
    with pytest.raises(DovetailError, match=r"^executor ours stopped computing: step 7 failed"):
        rank.check()
    with pytest.raises(DovetailError, match="stopped computing"):
        rank.submit(decode(2, 8))
    rank.stop()


def test_an_error_that_shows_late_names_the_requests_of_its_own_step() -> None:
    """As those of a GPU do: when the step is waited for, and its rows have been given to others."""
    rank, capacity = loaded()
    first = rank.submit(prefill(capacity, PROMPTS[:2], step=1))
    others = prefill(capacity, PROMPTS[1:], step=2)
    added = tuple(replace(new, request_id=f"other-{new.row}") for new in others.added)
    rank.submit(replace(others, removed=others.rows, added=added))

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    rank.runner._wait = lost  # type: ignore[method-assign, union-attr]
    with pytest.raises(
        DovetailError,
        match=r"step 1 failed: .*device-side assert triggered; requests in it: request-0, "
        r"request-1$",
    ):
        rank.collect(first)
    rank.stop()


def test_steps_run_on_the_workers_own_gpu_whichever_thread_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, current = worker(), []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    rank.runner = SimpleNamespace(
        device=torch.device("cuda", 1), submit=lambda batch: current.append("submitted")
    )  # type: ignore[assignment]
    rank.submit(decode(1, 0))
    assert current == [torch.device("cuda", 1), "submitted"]


def test_a_model_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(DovetailError, match="1024"):
        worker(max_model_len=4096).load(CPU)


def test_a_model_that_nobody_serves_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({**config, "architectures": ["NobodyForCausalLM"]})
    )
    with pytest.raises(UnsupportedError, match="NobodyForCausalLM"):
        worker(model=str(tmp_path / "model")).load(CPU)


def test_speculation_is_refused_where_drafts_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loaded()[1].max_lines == 0
    assert loaded(max_drafts=3)[1].max_lines == 16
    assert loaded(max_drafts=100)[1].max_lines == 128, "no more than the tokens of a step"
    plan = ModelPlan.of(context().config, context().models, SINGLE, CPU)
    with monkeypatch.context() as patch:
        patch.setattr(
            ModelPlan,
            "of",
            lambda *asked: replace(
                plan,
                states=[StateSpec(index=7, tensors=(StateTensor(rows=8, row_size=4),))],
            ),
        )
        with pytest.raises(
            UnsupportedError, match="recurrent layer 7 of the model can't check drafts"
        ):
            loaded(max_drafts=3)
    monkeypatch.setattr(
        DefaultSampler, "capabilities", replace(DefaultSampler.capabilities, drafts=False)
    )
    with pytest.raises(
        UnsupportedError,
        match=r"sampler dovetail:default can't check drafts \(SamplerCapabilities.drafts\)",
    ):
        loaded(max_drafts=3)


def test_without_a_sampler_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^executor ours needs a sampler"):
        worker(sampler=None).load(CPU)


def test_the_time_of_a_draft_is_measured() -> None:
    rank, capacity = loaded(max_drafts=3, draft_model=DRAFT)
    rows, seconds = zip(*rank.draft_costs, strict=True)
    assert rows == (1, 4)
    assert min(seconds) > 0
    assert capacity.details["draft_model"] == f"{DRAFT}, 0.1M"
    assert rank.runner is not None
    assert not rank.runner.rows.known.any(), "no row is left"
