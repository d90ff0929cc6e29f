"""The facts about a GPU that kernels and dtypes follow, for one GPU of each architecture that is
served."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dovetail.api.attention import AttentionContext, LayerSpec
from dovetail.nn.kernels import available, gpu
from dovetail.nn.kernels.gpu import GPU, gpu_of
from dovetail_attention.triton_backend import TritonAttention

SERVED = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
CUDA = torch.device("cuda", 0)


def gpu_with(*capability: int) -> GPU:
    return GPU("some GPU", (capability[0], capability[1]), 99 << 10, 100 << 10, 82)


def test_what_torch_says_of_a_device_is_what_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"name": "NVIDIA T4", "major": 7, "minor": 5, "multi_processor_count": 40}
    shared = {
        "shared_memory_per_block_optin": 65_536,
        "shared_memory_per_multiprocessor": 65_536,
        "shared_memory_per_block": 49_152,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told, **shared)
    )
    known = gpu._gpu_of.__wrapped__(CUDA)
    assert known == GPU("NVIDIA T4", (7, 5), 65_536, 65_536, 40)
    assert str(known) == "NVIDIA T4 (compute capability 7.5)"


def test_a_cpu_is_no_gpu() -> None:
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_nor_is_a_gpu_that_is_not_there() -> None:
    assert gpu_of(torch.device("cuda")) is None
    assert (
        TritonAttention.reasons_against(
            AttentionContext("cuda", "float16", 16), [LayerSpec(0, 2, 1, 64, 1.0)]
        )
        == []
    )


@pytest.mark.parametrize(
    ("fact", "of"),
    [
        ("is_hopper", [(9, 0)]),
        ("has_bfloat16", SERVED[1:]),
        ("has_matrix_units", SERVED[1:]),
        ("has_pdl", SERVED[4:]),
    ],
)
def test_each_architecture_has_what_came_with_it_or_before(
    fact: str, of: list[tuple[int, int]]
) -> None:
    assert [capability for capability in SERVED if getattr(gpu_with(*capability), fact)] == of


@pytest.mark.parametrize("capability", SERVED)
def test_launches_are_dependent_where_the_gpu_can(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = pytest.importorskip("dovetail.nn.kernels.dependent_launch")
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: gpu_with(*capability))
    assert launch.pdl_options(CUDA) == (
        {"PDL": True, "launch_pdl": True} if capability >= (9, 0) else {"PDL": False}
    )


@pytest.mark.parametrize(("computes", "why"), [(True, ""), (False, "no C compiler")])
def test_a_device_on_which_no_kernel_runs_uses_none_after_one_warning(
    computes: bool, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = pytest.importorskip("dovetail.nn.kernels.embedding")

    def check(device: torch.device) -> None:
        if why:
            raise RuntimeError(why)

    monkeypatch.setattr(embedding, "check", check)
    available.runs_kernels.cache_clear()
    assert [available.runs_kernels(CUDA) for _ in range(3)] == [computes] * 3
    available.runs_kernels.cache_clear()
    assert [record.levelname for record in caplog.records] == ([] if computes else ["WARNING"])
    assert why in caplog.text
    assert not available.runs_kernels(torch.device("cpu"))
