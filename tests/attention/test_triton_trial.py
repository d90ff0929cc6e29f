"""On an unmeasured GPU, attention kernels are tried before an engine relies on them; on others they
aren't. `test_triton_backend.py` tests that correct kernels pass, where they can run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.compiling import GPUS

from dovetail.api.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerSpec
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.kernels import available, gpu
from dovetail_attention import triton_backend, triton_trial
from dovetail_attention.sdpa import TorchAttention, TorchLayer
from dovetail_attention.triton_backend import TritonAttention
from dovetail_executors.runtime.attention_choice import choose_attention

SPEC = LayerSpec(0, 4, 2, 16, 0.25)
WINDOWED = LayerSpec(0, 4, 2, 16, 0.25, 40)


class Forgets(TorchLayer):
    """Attention that answers short steps with the question before."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        return super().attend(q) if len(q) > 100 else super().attend(q.roll(1, 0))


class Wrong(TorchAttention):
    def make_layer(self, spec: LayerSpec) -> AttentionLayer:
        layer = super().make_layer(spec)
        layer.__class__ = Forgets  # type: ignore[assignment]
        return layer


@pytest.mark.parametrize("spec", [SPEC, WINDOWED])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_backend_that_computes_something_else_fails(spec: LayerSpec, dtype: str) -> None:
    context = AttentionContext("cpu", dtype, 16)
    triton_trial.check(TorchAttention, context, spec)
    with pytest.raises(DovetailError, match=f"heads of 16 in {dtype}: it computes wrong numbers"):
        triton_trial.check(Wrong, context, spec)


class OneDirection(TorchAttention):
    def plan(self, batch: AttentionBatch) -> None:
        super().plan(replace(batch, host_both_ways=None))


@pytest.mark.parametrize("window", [None, 40])
def test_a_backend_that_sees_no_later_tokens_fails_where_layers_attend_in_both_directions(
    window: int | None,
) -> None:
    context = AttentionContext("cpu", "float32", 16)
    spec = LayerSpec(0, 4, 2, 16, 0.25, window)
    triton_trial.check(OneDirection, context, spec)
    with pytest.raises(DovetailError, match="it computes wrong numbers"):
        triton_trial.check(OneDirection, context, replace(spec, both_ways=True))


class FakeRef:
    """A backend among those that `attention: auto` means."""

    def __init__(self, kind: Any) -> None:
        self.kind = "attention"
        self.name = kind.__name__
        self.path = f"{kind.__module__}:{kind.__qualname__}"

    def make(self, context: AttentionContext) -> Any:
        return self.name


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[LayerSpec]:
    """The layers that were tried. Triton runs kernels on the GPU, and the trial passes."""
    specs: list[LayerSpec] = []
    monkeypatch.setattr(triton_backend, "runs_kernels", lambda device: True)
    monkeypatch.setattr(triton_trial, "check", lambda backend, context, spec: specs.append(spec))
    return specs


def place(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(
        gpu, "_gpu_of", lambda device: GPUS[arch] if device.type == "cuda" else None
    )


def chosen(dtype: str = "float16") -> str:
    layers = [
        LayerSpec(index, 4, 2, 16, 0.25, window)
        for index, window in enumerate((None, 40, None, 40))
    ]
    return choose_attention(
        (FakeRef(TritonAttention), FakeRef(TorchAttention)), layers, "cuda:0", dtype, None
    ).name  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_every_kind_of_layer_is_tried_once_on_unmeasured_gpus(
    arch: int, tried: list[LayerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, arch)
    assert chosen() == "TritonAttention"
    assert sorted(tried, key=str) == ([] if arch == 90 else sorted([SPEC, WINDOWED], key=str))


@pytest.mark.parametrize(
    "error",
    [DovetailError("it computes wrong numbers"), RuntimeError("out of resource: shared memory")],
)
def test_attention_that_fails_its_trial_is_plain_with_one_warning(
    error: Exception,
    tried: list[LayerSpec],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place(monkeypatch, 89)

    def check(*asked: Any) -> None:
        raise error

    monkeypatch.setattr(triton_trial, "check", check)
    assert chosen() == "TorchAttention"
    [record] = caplog.records
    assert record.getMessage().startswith(
        "the kernel for attention on RTX 4090 (compute capability 8.9) is disabled"
    )
    assert str(error) in record.getMessage()


def test_a_named_backend_that_fails_its_trial_is_refused_with_the_reason(
    tried: list[LayerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, 89)
    monkeypatch.setattr(triton_backend, "works", lambda name, check: False)
    with pytest.raises(
        UnsupportedError, match=r"its kernels don't work on RTX 4090 \(compute capability 8.9\)"
    ):
        choose_attention((FakeRef(TritonAttention),), [SPEC], "cuda:0", "float16", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", [75, 90])
def test_where_triton_runs_no_kernel_attention_is_plain(
    arch: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On any GPU, a Hopper included: a machine without a C compiler, say."""
    place(monkeypatch, arch)
    embedding = pytest.importorskip("dovetail.nn.kernels.embedding")

    def check(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(embedding, "check", check)
    available.runs_kernels.cache_clear()
    assert (chosen(), chosen()) == ("TorchAttention", "TorchAttention")
    available.runs_kernels.cache_clear()
    assert len(caplog.records) == 1
    assert "Failed to find C compiler" in caplog.text
