"""Modules of transformers are replaced by our layers where these compute the same, and only
there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from dovetail import LLMEngine, SamplingParams
from dovetail.api.model import BuildContext
from dovetail.errors import UnsupportedError
from dovetail.nn.parallel import SINGLE
from dovetail_models.transformers import traced_model
from dovetail_models.transformers_layers import (
    KINDS,
    OwnBlock,
    OwnExperts,
    OwnFeedForward,
    OwnNorm,
    find_layers,
)
from tests.models.oracle import CPU, DenseAttention
from tests.models.tiny_configs import random_model, tiny

MAX_LEN = 200
TOKENS = 12


def kinds(model_type: str, max_len: int = MAX_LEN, **changes: Any) -> dict[str, str]:
    """Return the replaced modules: module -> kind."""
    config = tiny(model_type)
    for key, value in changes.items():
        setattr(config, key, value)
    traced = traced_model(config)
    layers = find_layers(traced.base, traced.calls, max_len, CPU, traced.keeps)
    return {found.name: found.kind.__name__ for found in layers.found}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3", {"OwnBlock": 2, "OwnNorm": 1}),
        ("qwen2", {"OwnBlock": 2, "OwnNorm": 1}),
        ("mixtral", {"OwnAttention": 2, "OwnExperts": 2, "OwnNorm": 5}),
        ("olmo2", {"OwnFeedForward": 2, "OwnNorm": 9, "OwnLinear": 8}),  # it norms q and k whole
        (
            "glm4",
            {"OwnLinear": 12, "OwnNorm": 9},
        ),  # it turns neighbouring pairs, of a part of a head
        ("gpt2", {}),
    ],
)
def test_what_computes_the_same_is_replaced(model_type: str, expected: dict[str, int]) -> None:
    assert Counter(kinds(model_type).values()) == expected


CAUSAL = """
    afmoe apertus arcee aria_text axk1 bailing_hybrid beam bitnet cohere cohere2 cohere2_moe cwm
    deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma
    gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba kimi_linear kolibri1 laguna
    llama mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral
    moshi olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma youtu zaya
"""
UNSERVED = ["llama4_text", "phi4_multimodal"]  # at all lengths, or as text alone
MAGNITUDES = (0.01, 1.0, 30.0)  # small inputs reveal an epsilon, large ones a clamp


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, in root mean squares."""
    return float((ours - theirs).abs().max() / theirs.square().mean().sqrt())


@torch.no_grad()
def compare_module(found: Any, theirs: Any, generator: torch.Generator) -> None:
    """Compare a norm, a feed-forward or experts with a layer of ours, with random weights."""
    for parameter in theirs.parameters():
        parameter.uniform_(-1, 1, generator=generator)
        parameter.mul_((3 / parameter.shape[-1]) ** 0.5 if parameter.ndim > 1 else 1)
    ours = found.make(
        BuildContext(
            parallel=SINGLE, dtype=torch.float32, device=CPU, make_attention=DenseAttention
        )
    )
    for rule in ours.rules(""):
        weight = theirs.get_parameter(rule.source.removeprefix("."))
        rule.parameter.load(weight.data, rule.shard_id)
    is_mixture = found.kind is OwnExperts
    size = theirs.hidden_dim if is_mixture and hasattr(theirs, "hidden_dim") else None
    size = size or (theirs.hidden_size if is_mixture else next(theirs.parameters()).shape[-1])
    for magnitude in MAGNITUDES:
        x = (torch.rand((9, size), generator=generator) * 2 - 1) * magnitude
        if is_mixture:
            count = theirs.num_experts
            ids = torch.rand((9, count), generator=generator).argsort(1)[:, :2]
            shares = torch.rand((9, 2), generator=generator)
            got, expected = ours(x, ids, shares), theirs(x, ids, shares)
        else:
            got, expected = ours(x[None]), theirs(x[None])
        assert off(got, expected) < 2e-5, found.name


def classes(base: Any, found: Any) -> set[str]:
    modules = base.get_submodule(found.name).modules()
    return {type(module).__name__ for module in modules} & set(KINDS)


def compare(model_type: str) -> set[str]:
    """Compare replaced modules of a type, but for attention and blocks. Returns the classes of all
    that are replaced."""
    traced = traced_model(tiny(model_type))
    generator = torch.Generator().manual_seed(0)
    layers = find_layers(traced.base, traced.calls, MAX_LEN, CPU, traced.keeps)
    by_kind: dict[Any, Any] = {}
    seen = set[str]()
    for found in layers.found:
        seen |= classes(traced.base, found)
        by_kind.setdefault((found.kind, type(traced.base.get_submodule(found.name))), found)
    for found in by_kind.values():
        if found.kind in (OwnNorm, OwnFeedForward, OwnExperts):
            theirs = traced.base.get_submodule(found.name).to_empty(device=CPU).float()
            compare_module(found, theirs, generator)
    return seen


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "gemma2", "olmo2"])
def test_modules_compute_what_layers_of_their_kind_do(model_type: str) -> None:
    assert compare(model_type)


@pytest.mark.slow("traces all types")
def test_each_class_of_the_table_computes_what_its_layer_does() -> None:
    seen = set[str]()
    for model_type in (*CAUSAL.split(), *UNSERVED):
        seen |= compare(model_type)
    assert seen == set(KINDS)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(one, marks=pytest.mark.slow("loads all types")) for one in CAUSAL.split()],
)
def test_a_type_is_served_with_its_layers(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention and blocks, too, compute the same: the check at load finds no difference."""
    random_model(tiny(model_type)).save_pretrained(tmp_path)
    tokens_of(tmp_path, "transformers", [[5, 6, 7]], max_tokens=2, max_model_len=64)
    assert "none of its layers is replaced" not in caplog.text


def clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.down_proj(
        self.act_fn(self.gate_proj(x)).clamp(max=0.01) * self.up_proj(x)
    )
    return result


def one_plus(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (
        (1 + self.weight)
        * hidden_states
        * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )
    return result


@pytest.mark.parametrize(("module", "forward"), [("Qwen3MLP", clamped), ("Qwen3RMSNorm", one_plus)])
def test_a_class_that_has_changed_since_is_noticed_at_load(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    module: str,
    forward: Callable[..., Any],
) -> None:
    monkeypatch.setattr(getattr(qwen3, module), "forward", forward)
    model = random_model(tiny("qwen3"))
    model.save_pretrained(tmp_path)
    [prompt] = PROMPTS[:1]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    assert tokens_of(tmp_path, "transformers", [prompt]) == [expected[0, len(prompt) :].tolist()]
    assert "none of its layers is replaced" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("olmo", {"clip_qkv": 8.0}),
        ("smollm3", {"no_rope_layers": [0, 0]}),
        ("ministral3", {"max_position_embeddings": 1 << 16}),
    ],
)
def test_attention_that_does_more_than_rotate_is_left_alone(
    model_type: str, changes: dict[str, Any]
) -> None:
    assert {"OwnAttention", "OwnBlock"} & set(kinds(model_type).values())
    longest = changes.get("max_position_embeddings", MAX_LEN)
    changed = kinds(model_type, max_len=longest, **changes)
    assert not {"OwnAttention", "OwnBlock"} & set(changed.values())


def test_a_block_that_scales_what_it_adds_is_left_alone() -> None:
    assert "OwnBlock" in kinds("granite", residual_multiplier=1.0).values()
    assert "OwnBlock" not in kinds("granite", residual_multiplier=0.5).values()


@pytest.mark.parametrize(
    "sync", [lambda x: x.sum().item(), lambda x: bool((x > 0).all()), lambda x: x.nonzero()]
)
def test_code_that_waits_for_the_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sync: Callable[[torch.Tensor], Any]
) -> None:
    own = qwen3.Qwen3MLP.forward

    def waiting(self: Any, x: torch.Tensor) -> torch.Tensor:
        sync(x)
        return own(self, x)

    random_model(tiny("qwen3")).save_pretrained(tmp_path)
    monkeypatch.setattr(qwen3.Qwen3MLP, "forward", waiting)
    with pytest.raises(UnsupportedError, match="can't be traced"):
        tokens_of(tmp_path, "transformers")


PROMPTS = ([5, 6, 7], list(range(3, 43)), [9])


def tokens_of(
    directory: Path,
    component: str,
    prompts: Sequence[list[int]] = PROMPTS,
    max_tokens: int = TOKENS,
    **keys: Any,
) -> list[list[int]]:
    config = {
        "model": {"path": str(directory), "component": component},
        "dtype": "float32",
        "executor": {"name": "local", "num_pages": 64},
        **keys,
    }
    with LLMEngine.from_config(config) as engine:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        got: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            got |= {
                output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
            }
    return [got[key] for key in sorted(got)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    random_model(tiny("qwen3")).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"load_format": "dummy", "seed": 5},
        {"dtype": "bfloat16", "load_format": "dummy"},
        {"quantization": "fp8"},
    ],
)
def test_tokens_are_those_of_the_native_model(checkpoint: Path, keys: dict[str, Any]) -> None:
    assert tokens_of(checkpoint, "transformers", **keys) == tokens_of(checkpoint, "qwen3", **keys)


@pytest.mark.slow("makes several engines")
def test_a_model_is_served_as_it_is_where_replaced_layers_fail(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(checkpoint, "qwen3")
    own = OwnBlock.forward

    def wrong(self: OwnBlock, hidden: torch.Tensor, **others: Any) -> torch.Tensor:
        return own(self, hidden) * 2

    monkeypatch.setattr(OwnBlock, "forward", wrong)
    assert tokens_of(checkpoint, "transformers") == expected
    assert "none of its layers is replaced" in caplog.text


QUANTIZED = sorted(
    path.parent for path in (Path(__file__).parent / "quantized").glob("*/expected.json")
)


@pytest.mark.parametrize("directory", QUANTIZED, ids=lambda path: path.name)
def test_quantized_checkpoints_write_what_their_dequantized_weights_do(directory: Path) -> None:
    expected = json.loads((directory / "expected.json").read_text())["greedy"]
    tokens = tokens_of(directory, "transformers", [case["prompt"] for case in expected])
    assert tokens == [case["tokens"][:TOKENS] for case in expected]
