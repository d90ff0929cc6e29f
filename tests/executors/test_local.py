"""The executor `local`: what it chooses and says, what it refuses and why, and that it computes what the model's reference computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from dovetail.api.attention import AttentionCapabilities, LayerSpec
from dovetail.api.executor import Capacity, Target
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError
from dovetail.runtime.row_state import RowState
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors import pool
from dovetail_executors.local import LocalExecutor, biggest_batch, choose_attention, choose_device
from dovetail_executors.options import LocalOptions
from tests.executors.helpers import DEMO, decode, executor, prefill

PROMPTS = [[5, 17, 200, 31, 8, 90, 12, 44, 7, 7, 301], [9, 12], [400, 3, 77]]
SPECS = [LayerSpec(0, 8, 4, 32, 0.2), LayerSpec(1, 8, 4, 32, 0.2, window=16)]


class WholeBlocks(TorchAttention):
    """Stands for a backend that can do little."""

    capabilities = AttentionCapabilities(devices=("cuda",), dtypes=("bfloat16",), block_sizes=(64,), head_sizes=(128,), window=False)


class BigBlocks(TorchAttention):
    capabilities = AttentionCapabilities(block_size_multiple=32)


def target(backend: type[TorchAttention]) -> Target:
    return Target("attention", f"test:{backend.__name__}", f"{__name__}:{backend.__name__}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[LocalExecutor, Capacity]]:
    local = executor({"num_blocks": 30, "max_in_flight": 3})
    yield local, local.start()
    local.stop()


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int], int], list[int]]:
    """Greedy generation by transformers."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = torch.tensor([prompt])
        for _ in range(count):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        found: list[int] = tokens[0, len(prompt) :].tolist()
        return found

    return generate


def test_it_generates_what_transformers_does_with_steps_in_flight(
    started: tuple[LocalExecutor, Capacity], reference: Callable[[list[int], int], list[int]]
) -> None:
    local, capacity = started
    handles = [local.submit(prefill(capacity, PROMPTS)), local.submit(decode(3, 1)), local.submit(decode(3, 2))]
    results = [local.collect(handle) for handle in handles]
    assert [result.step for result in results] == [0, 1, 2]
    for row, prompt in enumerate(PROMPTS):
        assert [int(result.token_ids[row]) for result in results] == reference(prompt, 3)


def test_it_says_what_it_chose(started: tuple[LocalExecutor, Capacity]) -> None:
    capacity = started[1]
    assert capacity.num_blocks == 30
    assert capacity.max_in_flight == 3
    assert capacity.max_model_len == 64
    assert capacity.vocab_size == 1024
    assert capacity.layout.block_size == 16
    assert capacity.layout.bytes_per_block == 6 * 2 * 16 * 4 * 32 * 4
    details = dict(capacity.details)
    assert details["attention"] == "dovetail:torch"
    assert details["dtype"] == "float32"
    assert details["model"] == "Qwen3ForCausalLM"
    assert details["device"].startswith("cpu")
    assert details["parameters"].endswith("M")


def test_on_the_cpu_one_step_is_in_flight_unless_more_are_asked() -> None:
    local = executor()
    assert local.start().max_in_flight == 1
    local.stop()


def test_stop_is_fine_twice_and_after_a_failed_start_and_before_any() -> None:
    local = executor(model="no/such/place")
    local.stop()
    with pytest.raises(ModelLoadError):
        local.start()
    local.stop()
    local.stop()
    with pytest.raises(DovetailError, match="isn't running"):
        local.submit(decode(1, 0))


def test_a_step_that_fails_names_its_requests_and_ends_the_executor() -> None:
    local = executor({"num_blocks": 30})
    capacity = local.start()
    local.collect(local.submit(prefill(capacity, PROMPTS)))

    def broken(*_: Any) -> None:
        raise RuntimeError("the device caught fire")

    local._runner.model.forward = broken  # type: ignore[union-attr]
    with pytest.raises(DovetailError, match="step 7 failed: RuntimeError: the device caught fire; requests in it: request-0, request-1"):
        local.submit(decode(2, 7))
    with pytest.raises(DovetailError, match=r"stopped computing: step 7 failed"):
        local.check()
    with pytest.raises(DovetailError, match="stopped computing"):
        local.submit(decode(2, 8))
    local.stop()


def test_an_error_that_shows_late_names_the_requests_of_its_own_step() -> None:
    """As those of a GPU do: when the step is waited for, and its rows have been given to others."""
    local = executor({"num_blocks": 30, "max_in_flight": 2})
    capacity = local.start()
    first = local.submit(prefill(capacity, PROMPTS[:2], step=1))
    others = prefill(capacity, PROMPTS[1:], step=2)
    added = tuple(replace(new, request_id=f"other-{new.row}") for new in others.added)
    local.submit(replace(others, removed=others.rows, added=added))

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    local._runner._wait = lost  # type: ignore[method-assign, union-attr]
    with pytest.raises(DovetailError, match=r"step 1 failed: .*device-side assert triggered; requests in it: request-0, request-1$"):
        local.collect(first)
    local.stop()


def test_steps_run_on_the_executors_own_gpu_whichever_thread_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    local, current = executor(), []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    local._runner = SimpleNamespace(device=torch.device("cuda", 1), submit=lambda batch: current.append("submitted"))  # type: ignore[assignment]
    local.submit(decode(1, 0))
    assert current == [torch.device("cuda", 1), "submitted"]


def test_the_first_backend_with_no_reason_against_it_is_taken() -> None:
    chosen = choose_attention((target(WholeBlocks), target(BigBlocks), target(TorchAttention)), SPECS, "cpu", "float32", None)
    assert chosen.name == "test:BigBlocks"
    assert chosen.backend.context.block_size == 32


def test_a_block_size_that_was_asked_for_passes_over_backends_that_lack_it() -> None:
    assert choose_attention((target(BigBlocks), target(TorchAttention)), SPECS, "cpu", "float32", 8).name == "test:TorchAttention"


def test_when_no_backend_will_do_every_reason_of_each_is_told() -> None:
    with pytest.raises(UnsupportedError) as caught:
        choose_attention((target(WholeBlocks), target(BigBlocks)), SPECS, "cpu", "float32", 24)
    assert str(caught.value).splitlines() == [
        "no attention backend can serve this model on cpu in float32 with block_size: 24:",
        "  - test:WholeBlocks: device cpu is not among cuda",
        "  - test:WholeBlocks: dtype float32 is not among bfloat16",
        "  - test:WholeBlocks: head size 32 is not among 128",
        "  - test:WholeBlocks: block size 24 is not among 64",
        "  - test:WholeBlocks: it has no sliding window",
        "  - test:BigBlocks: block size 24 is not among multiples of 32",
    ]


def test_a_backend_that_cannot_be_imported_is_a_reason_too() -> None:
    missing = Target("attention", "test:flash", "no_such_package.flash:Flash")
    assert choose_attention((missing, target(TorchAttention)), SPECS, "cpu", "float32", None).name == "test:TorchAttention"
    with pytest.raises(UnsupportedError, match="test:flash: it can't be imported: No module named 'no_such_package'"):
        choose_attention((missing,), SPECS, "cpu", "float32", None)


def test_layers_are_grouped_by_how_far_they_look() -> None:
    backend = choose_attention((target(TorchAttention),), SPECS, "cpu", "float32", 8).backend
    layout = pool.kv_layout(backend, [*SPECS, replace(SPECS[0], index=2)], 8, "float32")
    per_layer = 2 * 8 * 4 * 32 * 4
    assert [(group.layers, group.window, group.bytes_per_block) for group in layout.groups] == [((0, 2), None, 2 * per_layer), ((1,), 16, per_layer)]


def test_a_pool_of_no_block_gives_no_advice_to_lower_the_length_to_nothing() -> None:
    with pytest.raises(ConfigError, match=r"1000 B gives 0\. Raise kv_cache_memory to 384\.0 KiB\.$"):
        executor({}, kv_cache_memory=1000).start()


def test_threads_that_no_machine_has_are_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1024"):
        LocalOptions(threads=10**9)


BLOCK_BYTES = 6 * 2 * 16 * 4 * 32 * 4  # of the demo model, 16 tokens


@pytest.mark.parametrize(
    ("options", "changes", "there_is", "remedy"),
    [
        ({"num_blocks": 3}, {}, "num_blocks: 3 gives 3", "raise num_blocks to 4"),
        ({}, {"kv_cache_memory": 3 * BLOCK_BYTES}, "kv_cache_memory: 288.0 KiB gives 3", "raise kv_cache_memory to 384.0 KiB"),
    ],
)
def test_a_pool_too_small_for_one_sequence_says_what_was_asked_what_there_is_and_what_to_change(
    options: dict[str, Any], changes: dict[str, Any], there_is: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        executor(options, **changes).start()
    asked = "64 tokens need 4 blocks of 16 (96.0 KiB each)"
    assert f"{asked}, and {there_is}. Lower max_model_len to 48 or less, or {remedy}." in str(caught.value)


@pytest.mark.parametrize(
    ("free_bytes", "max_num_seqs", "blocks"),
    [
        (1 << 40, 4, 4),  # plenty: every row a quarter of max_model_len
        (1 << 40, 100, 100),
        (100 * BLOCK_BYTES, 100, 25),  # a quarter of the free RAM
        (8 * BLOCK_BYTES, 100, 4),  # half of it, so that one sequence fits
    ],
)
def test_without_a_size_the_pool_on_the_cpu_takes_a_share_of_the_free_ram(
    free_bytes: int, max_num_seqs: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_ram_bytes", lambda: free_bytes)
    local = executor(max_num_seqs=max_num_seqs)
    assert local.start().num_blocks == blocks
    local.stop()


def test_too_little_ram_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available_ram_bytes", lambda: 6 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"one part in 2 of 576.0 KiB free RAM gives 3.*set kv_cache_memory to 384.0 KiB"):
        executor().start()


def test_a_model_length_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(DovetailError, match="1024"):
        executor(max_model_len=4096).start()


def test_a_model_that_nobody_serves_is_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(UnsupportedError, match="NobodyForCausalLM"):
        executor(model=str(tmp_path / "model")).start()


def test_without_a_sampler_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a sampler"):
        executor(sampler=None).start()


def test_threads_are_set() -> None:
    before = torch.get_num_threads()
    try:
        local = executor({"threads": 2})
        assert local.start().details["device"] == "cpu (2 threads)"
        local.stop()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpu", ConfigError, "'gpu' is no device; expected auto, cpu, cuda"),
        ("cuda:99", UnsupportedError, "cuda:99 isn't there"),
        ("meta", UnsupportedError, "meta is neither the CPU nor a CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_device(name)


@pytest.mark.parametrize("options", [{"devise": "cpu"}, {"num_blocks": 0}, {"max_in_flight": 0}, {"threads": 0}])
def test_unknown_and_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LocalOptions(**options)


@pytest.mark.parametrize(("max_rows", "max_len", "max_tokens"), [(4, 64, 128), (4, 8, 128), (200, 64, 128), (4, 64, 3)])
def test_the_batch_that_is_profiled_is_within_all_limits_and_as_big_as_they_allow(max_rows: int, max_len: int, max_tokens: int) -> None:
    rows = RowState(max_rows, max_len, 16, torch.device("cpu"))
    batch = biggest_batch(rows, max_tokens)
    rows.update(batch)
    rows.check(batch)
    assert len(batch.rows) == min(max_rows, max_tokens)
    assert int(batch.num_tokens.sum()) == min(max_tokens // len(batch.rows), max_len) * len(batch.rows)
