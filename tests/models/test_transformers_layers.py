"""Modules of transformers are replaced by our layers where these compute the same, and only there."""

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
from dovetail.errors import UnsupportedError
from dovetail_models.transformers import full_float32, traced_model
from dovetail_models.transformers_layers import OwnBlock, find_layers
from tests.models.tiny_configs import random_model, tiny

MAX_LEN = 200
TOKENS = 12


def kinds(model_type: str = "qwen3", **changes: Any) -> dict[str, str]:
    """Return the replaced modules: module -> kind."""
    config = tiny(model_type)
    for key, value in changes.items():
        setattr(config, key, value)
    traced = traced_model(config)
    with full_float32():
        layers = find_layers(
            traced.base, traced.calls, traced.seen, MAX_LEN, torch.device("cpu"), traced.keeps
        )
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


def clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.down_proj(
        self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x)
    )
    return result


def swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.down_proj(self.gate_proj(x) * self.up_proj(x).tanh())
    return result


def centred(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x = hidden_states - hidden_states.mean(-1, keepdim=True)
    result: torch.Tensor = (
        self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )
    return result


def one_plus(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (
        (1 + self.weight)
        * hidden_states
        * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    )
    return result


@pytest.mark.parametrize(
    ("module", "forward", "kind"),
    [
        ("Qwen3MLP", clamped, "OwnFeedForward"),
        ("Qwen3MLP", swapped, "OwnFeedForward"),
        ("Qwen3RMSNorm", centred, "OwnNorm"),
        ("Qwen3RMSNorm", one_plus, "OwnNorm"),
    ],
)
def test_what_only_looks_the_same_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, module: str, forward: Callable[..., Any], kind: str
) -> None:
    monkeypatch.setattr(getattr(qwen3, module), "forward", forward)
    assert not {kind, "OwnBlock"} & set(kinds().values())


@pytest.mark.parametrize("at", [100, MAX_LEN - 1])
def test_attention_that_scales_by_position_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    own = qwen3.Qwen3Attention.forward

    def scaled(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        position_ids: Any = None,
        **others: Any,
    ) -> Any:
        hidden_states = torch.where(position_ids[..., None] >= at, 2 * hidden_states, hidden_states)
        return own(self, hidden_states, position_embeddings, attention_mask, **others)

    monkeypatch.setattr(qwen3.Qwen3Attention, "forward", scaled)
    assert not {"OwnAttention", "OwnBlock"} & set(kinds().values())


def test_a_layer_that_differs_by_its_index_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = qwen3.Qwen3Attention.forward

    def second_is_halved(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = own(self, *args, **kwargs)
        return (out / 2 if self.layer_idx == 1 else out), weights

    monkeypatch.setattr(qwen3.Qwen3Attention, "forward", second_is_halved)
    found = kinds()
    assert found["layers.0"] == "OwnBlock"
    assert "layers.1" not in found
    assert "layers.1.self_attn" not in found


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
    directory: Path, component: str, prompts: Sequence[list[int]] = PROMPTS, **keys: Any
) -> list[list[int]]:
    config = {
        "model": {"path": str(directory), "component": component},
        "dtype": "float32",
        "executor": {"name": "local", "num_blocks": 64},
        **keys,
    }
    with LLMEngine.from_config(config) as engine:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
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


def test_a_model_is_served_as_it_is_where_replaced_layers_fail(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens_of(checkpoint, "qwen3")
    own = OwnBlock.forward
    proof = [
        True
    ]  # the first two calls, of a block at the beginning and of another, prove that it may replace

    def wrong_later(self: OwnBlock, hidden: torch.Tensor, **others: Any) -> torch.Tensor:
        proof.append(True)
        return own(self, hidden) * (1 if len(proof) <= 3 else 2)

    monkeypatch.setattr(OwnBlock, "forward", wrong_later)
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
