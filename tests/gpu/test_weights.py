"""Weights are the same bits on a GPU as on a CPU, however they are cut into pieces."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from dovetail.api.model import ParallelGroup
from dovetail.nn import staging
from dovetail.nn.parallel import SINGLE
from dovetail.nn.parameter import whole
from dovetail.nn.transfer import PinnedRing
from dovetail.nn.weights import load_weights
from tests.gpu.device import on_a_gpu, save
from tests.models.oracle import FakeGroup, arch_of, context

pytestmark = on_a_gpu

CONFIG = {  # odd sizes, and a vocabulary that two ranks pad
    "vocab_size": 997,
    "hidden_size": 88,
    "intermediate_size": 150,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 22,
    "attention_bias": True,
    "mlp_bias": True,
}


def config(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(**CONFIG, tie_word_embeddings=tied)


def model_on(device: str, dtype: torch.dtype, group: ParallelGroup, *, tied: bool) -> Any:
    made = replace(context(parallel=group), device=torch.device(device), dtype=dtype)
    return arch_of(config(tied=tied)).build(config(tied=tied), made)


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> list[PinnedRing]:
    """Cut into small pieces everything that can be; gives the rings that copy them."""
    made: list[PinnedRing] = []

    class Listed(PinnedRing):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    monkeypatch.setattr(staging, "LEAST_BYTES", 1)
    monkeypatch.setattr(staging, "PinnedRing", Listed)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [SINGLE, FakeGroup(0, 2), FakeGroup(1, 2)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_gpu_gets_the_bits_that_a_cpu_gets(
    tmp_path: Path,
    rings: list[PinnedRing],
    dtype: torch.dtype,
    group: ParallelGroup,
    stored: torch.dtype,
    *,
    tied: bool,
) -> None:
    save(config(tied=tied), stored, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if tied:  # both, of which one is compared
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, file)
    on_cpu = model_on("cpu", dtype, group, tied=tied)
    load_weights(on_cpu, tmp_path)
    assert not rings
    on_gpu = model_on("cuda", dtype, group, tied=tied)
    load_weights(on_gpu, tmp_path)
    assert bool(rings) == (dtype == stored)
    assert_equal(on_gpu, on_cpu)


def assert_equal(on_gpu: Any, on_cpu: Any) -> None:
    theirs = dict(on_cpu.named_parameters())
    for name, parameter in on_gpu.named_parameters():
        assert parameter.is_cuda, name
        bits = parameter.data.cpu().view(torch.uint8)
        assert torch.equal(bits, theirs[name].data.view(torch.uint8)), name


def test_pieces_of_the_default_size_are_the_same_bits(tmp_path: Path) -> None:
    """The default piece size also cuts a matrix right whose rows don't end where pieces do."""
    rows = 2 * staging.PIECE_BYTES // (4 * 1001) + staging.PIECE_BYTES // (8 * 1001)
    values = torch.randn(rows, 1001)
    weight = whole((rows, 1001), replace(context(), device=torch.device("cuda")))
    with staging.Copies.to(weight.device, ranks=1) as copies:
        weight.load(values, copy=copies.copy)
    assert torch.equal(weight.cpu(), values)


def test_weights_load_while_another_thread_records_a_graph(
    tmp_path: Path, rings: list[PinnedRing]
) -> None:
    save(config(tied=False), torch.bfloat16, tmp_path)
    on_cpu, on_gpu = (
        model_on(device, torch.bfloat16, SINGLE, tied=False) for device in ("cpu", "cuda")
    )
    load_weights(on_cpu, tmp_path)
    x, recording = torch.ones(8, device="cuda"), threading.Event()
    failed: list[BaseException] = []

    def load() -> None:
        recording.wait(60)
        try:
            load_weights(on_gpu, tmp_path)
        except BaseException as error:
            failed.append(error)

    reading = threading.Thread(target=load)
    reading.start()
    y = x + 1  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recording.set()
        y = x + 1
        reading.join(60)
    assert not failed
    graph.replay()
    assert y.tolist() == [2.0] * 8
    assert_equal(on_gpu, on_cpu)
