"""Checkpoints that other libraries wrote give the tokens that those libraries' own dequantized
weights give, on one rank and on two.

In `quantized/` there is a small Qwen3 for each published `quantization_config`. `expected.json`
says which library packed its weights, and what transformers' model writes, in float32, with the
weights that this library makes of them again.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dovetail.api.model import ModelInputs
from dovetail.nn.moe import Experts
from dovetail.nn.parallel import SINGLE
from dovetail.nn.weights import DRAWN_EXPERTS
from dovetail.testing.suites.model_configs import tiny
from dovetail_executors.runtime.loading import ModelPlan, load_model
from tests.models.checkpoint_formats import (
    FORMATS,
    PAGE,
    QUANTIZATIONS,
    Format,
    is_exact,
    table,
)
from tests.models.oracle import CPU, MODELS, DenseAttention, executor_config

ALL = sorted(path.parent for path in (Path(__file__).parent / "quantized").glob("*/config.json"))


def loaded(directory: Path, group: Any = SINGLE, **settings: Any) -> Any:
    config = executor_config(directory, dtype="float32", **settings)
    return load_model(
        ModelPlan.of(config, MODELS, group, CPU, QUANTIZATIONS), config, DenseAttention, group, CPU
    )


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    for block in model.blocks:
        block.attention.attn = DenseAttention(block.attention.attn.spec)
    ids = list(prompt)
    fresh = ids
    while len(ids) < len(prompt) + count:
        positions = torch.arange(len(ids) - len(fresh), len(ids))
        inputs = ModelInputs(token_ids=torch.tensor(fresh), positions=positions)
        fresh = [int(model.logits(model(inputs)[-1:]).argmax())]
        ids += fresh
    return ids[len(prompt) :]


@pytest.mark.parametrize("directory", ALL, ids=lambda path: path.name)
def test_a_quantized_checkpoint_writes_what_its_dequantized_weights_do(directory: Path) -> None:
    model = loaded(directory)
    for expected in json.loads((directory / "expected.json").read_text())["greedy"]:
        assert greedy(model, expected["prompt"], len(expected["tokens"])) == expected["tokens"]


@pytest.mark.parametrize("directory", ALL, ids=lambda path: path.name)
def test_weights_take_no_more_room_than_in_the_checkpoint(directory: Path) -> None:
    """Tensors that other libraries keep in 16 bits are in float32 here; nothing else of a layer may
    grow."""
    tensors = load_file(directory / "model.safetensors")
    model = loaded(directory)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert any(f"{name}." in key for key in tensors)
    stored = sum(
        tensor.nbytes
        for key, tensor in tensors.items()
        if "_proj.weight" in key or "_proj.qweight" in key
    )
    ours = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if name.endswith("proj.weight")
    )
    assert ours <= stored


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_random_weights_repeat_the_first_experts_of_each_layer(
    tmp_path: Path, architecture: str, quantization: str | None
) -> None:
    count = DRAWN_EXPERTS + 3
    config = tiny(architecture, num_experts=count, num_local_experts=count)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    module = loaded(tmp_path, load_format="dummy", quantization=quantization)
    layers = [part for part in module.modules() if isinstance(part, Experts)]
    assert len(layers) > 1
    for weights in (getattr(part, name) for part in layers for name in ("gate_up", "down")):
        values = [weight.data.float() for weight in weights]
        assert len(values) == count
        for index, weight in enumerate(weights):
            first = weights[index % DRAWN_EXPERTS]
            assert torch.equal(values[index], values[index % DRAWN_EXPERTS])
            if quantization is not None:
                assert torch.equal(weight.scales, first.scales)
        assert not any(torch.equal(*pair) for pair in combinations(values[:DRAWN_EXPERTS], 2))
    first, second = (layer.gate_up[0].data.float() for layer in layers[:2])
    assert not torch.equal(first, second)


def test_the_page_lists_the_formats() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


# of which `quantized/` has no checkpoint that a library wrote
SOME = (
    "GPTQ INT3",
    "GPTQ INT4, inputs in any order",
    "compressed-tensors W8A16, inputs in any order",
    "AutoRound INT2",
    "bitsandbytes NF4, stored as bfloat16",
    "ModelOpt MXFP8",
    "ModelOpt FP8, blocks",
    "ModelOpt, formats of single layers",
    "Quark FP8, K and V in FP8",
    "Quark MXFP4",
    "AQLM, two codebooks",
)


@pytest.mark.slow("makes an engine for each format")
@pytest.mark.parametrize("name", SOME)
def test_a_published_format_gives_what_its_definition_does(name: str) -> None:
    assert is_exact(next(form for form in FORMATS if form.name == name))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_published_format_gives_what_its_definition_does(form: Format) -> None:
    assert is_exact(form)
