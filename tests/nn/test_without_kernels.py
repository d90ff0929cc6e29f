"""With kernels unavailable on a GPU, every function that has one computes what its twin does."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

pytest.importorskip("triton")

from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.api.model import BuildContext, ModelInputs
from dovetail.api.sampler import Capture, Lines, RowHistory, RowSampling
from dovetail.errors import UnsupportedError
from dovetail.nn.kernels import available, launch
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.norm import RMSNorm
from dovetail.nn.parallel import SINGLE
from dovetail.nn.residual import Residual
from dovetail.nn.weights import dummy_weights
from dovetail_executors.runtime import sampling
from dovetail_executors.runtime.row_state import RowState
from dovetail_samplers.table import DeviceRows
from tests.kernels import INTERPRETED
from tests.models.oracle import CPU, arch_of
from tests.runtime.fakes import layout
from tests.samplers.helpers import Row, ready, sample

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels can always be had")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Record requests for unavailable kernels from here on: all that would be launched on a Hopper
    GPU."""
    names: set[str] = set()

    def fail(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> NoReturn:
        names.add(f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}")
        raise KernelUnavailable("unavailable")

    monkeypatch.setattr(launch, "_launch", fail)
    for module in [
        module
        for name, module in sys.modules.items()
        if name.startswith("dovetail") and module is not available
    ]:
        for name in ("use_kernels", "has_many_rows"):
            if name in vars(module):  # not `hasattr`: modules that look names up may raise
                monkeypatch.setattr(module, name, lambda *asked: True)
    return names


class Echo(AttentionLayer):
    """Attention that returns its queries, and records what was written."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.written: list[torch.Tensor] = []

    def bind(self, cache: LayerCache) -> None:
        """It has no cache."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.written.append(k + v)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        return q


def decoder(make: Any) -> tuple[Any, list[Echo]]:
    """Return a decoder of sizes that every kernel for linear layers supports, and its attention
    layers."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    config = make(num_attention_heads=4, num_key_value_heads=2, head_dim=64, **sizes)
    layers: list[Echo] = []

    def make_attention(spec: LayerSpec) -> Echo:
        layers.append(Echo(spec))
        return layers[-1]

    model = arch_of(config).build(
        config,
        BuildContext(
            parallel=SINGLE, dtype=torch.bfloat16, device=CPU, make_attention=make_attention
        ),
    )
    dummy_weights(model, 0)
    for parameter in model.parameters():
        parameter.mul_(10)  # 0.2, not 0.02: what is lost shows
    return model, layers


@pytest.mark.parametrize("make", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize(("tokens", "linear"), [(1, "one_row"), (5, "few_rows"), (20, "many_rows")])
@torch.inference_mode()
def test_a_decoder_whose_kernels_cannot_be_had_computes_the_same(
    make: Any, tokens: int, linear: str, request: pytest.FixtureRequest
) -> None:
    def computed() -> list[torch.Tensor]:
        model, layers = decoder(make)
        inputs = ModelInputs(token_ids=torch.arange(tokens), positions=torch.arange(tokens))
        hidden = model(inputs)
        return [hidden, model.logits(hidden), *(part for layer in layers for part in layer.written)]

    expected = computed()
    asked = request.getfixturevalue("asked")
    for ours, plain in zip(computed(), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert asked >= {
        "embedding._embed",
        "rms_norm._rms_norm",
        "gate._silu_mul",
        "qkv._norm_turn_write",
        f"{linear}._linear",
    }


def test_sums_in_parts_are_added_without_the_kernel(asked: set[str]) -> None:
    norm = RMSNorm(
        8, 1e-6, BuildContext(parallel=SINGLE, dtype=torch.float32, device=CPU, make_attention=Echo)
    )
    torch.nn.init.ones_(norm.weight)
    stream, parts = Residual(torch.arange(16.0).view(2, 8)), torch.ones(3, 2, 8)
    stream.add_parts(parts)
    assert torch.equal(stream.normed(norm), norm(torch.arange(16.0).view(2, 8) + 3))
    assert torch.equal(stream.summed(), torch.arange(16.0).view(2, 8) + 3)
    assert asked == {"rms_norm._rms_norm"}


def test_rows_are_drawn_and_grow_without_kernels(request: pytest.FixtureRequest) -> None:
    def computed() -> list[torch.Tensor]:
        state, lines = (
            RowState(3, 8, layout(4), CPU),
            Lines(rows=torch.arange(3), ahead=torch.zeros(3, dtype=torch.int32)),
        )
        state.num_tokens[:3] = torch.tensor([2, 3, 1])
        state.token_ids[:3, :4] = torch.arange(12).view(3, 4)
        drawn = DeviceRows(3, 50, CPU)
        logits = torch.linspace(0, 1, 150).view(3, 50)
        ids = drawn.draw(
            logits, lines, RowHistory(state.token_ids, state.num_tokens, state.prompt_lens)
        )
        ends, positions = sampling.last_tokens(state, lines)
        outputs = sampling.append(state, lines, positions, ids, torch.zeros(3, 4))
        likeliest = top_logprobs(logits, ids, 4)
        return [
            ids,
            ends,
            positions,
            outputs,
            state.token_ids,
            state.num_tokens,
            likeliest.logprobs,
            likeliest.ranks,
        ]

    expected = computed()
    asked = request.getfixturevalue("asked")
    for ours, plain in zip(computed(), expected, strict=True):
        assert torch.equal(ours, plain)
    assert asked >= {
        "fused._survey",
        "decode_rows_kernels._last_tokens",
        "decode_rows_kernels._append",
        "logprobs._survey",
    }


def test_rows_that_ask_for_more_than_a_draw_are_sampled_without_kernels(
    request: pytest.FixtureRequest,
) -> None:
    ways: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 3},
        {"logit_bias": ((3, 2.0),), "bad_words": ((4,), (1, 2))},
        {"allowed_token_ids": (5, 6, 7), "min_tokens": 9, "stop_token_ids": (5,), "logprobs": 0},
        {},
    ]
    rows = [
        Row(torch.linspace(0, 3, 20).tolist(), RowSampling(seed=5, **way), (1, 19), (18, 18, 1))
        for way in ways
    ]

    def computed() -> list[torch.Tensor]:
        sampled = sample(rows)
        assert sampled.logprobs is not None
        return [
            sampled.token_ids,
            sampled.logprobs.token_ids,
            sampled.logprobs.logprobs,
            sampled.logprobs.ranks,
        ]

    expected = computed()
    asked = request.getfixturevalue("asked")
    for ours, plain in zip(computed(), expected, strict=True):
        assert torch.equal(ours, plain)
    assert asked == {"changes_kernels._widen", "logprobs._survey"}
    r = ready(rows)
    with pytest.raises(
        UnsupportedError, match="unavailable"
    ):  # the runtime then records no such steps
        r.captured(Capture.FULL)
