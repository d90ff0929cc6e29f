"""Attention calls of transformers' modules: every argument is either handled or refused by name."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dovetail.errors import UnsupportedError
from dovetail.nn.fixed_shapes import fixed_shapes
from dovetail_models.transformers_attention import attention, bind, experts, specs_of, trace
from tests.models.oracle import DenseAttention
from tests.models.tiny_configs import tiny

HANDLED = {
    *("sliding_window", "s_aux", "softcap", "is_causal", "scaling"),  # layers have them
    *(
        "position_ids",
        "position_embeddings",
        "output_attentions",
        "max_length_q",
        "max_length_k",
    ),  # change no number
}


POSITIONAL = {"query", "key", "value", "attention_mask"}


def arguments_in_transformers() -> set[str]:
    """The names of the arguments of all attention calls in transformers' models."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    found: set[str] = set()
    for path in Path(spec.submodule_search_locations[0]).glob("models/*/modeling_*.py"):
        for call in re.findall(
            r"attention_interface\(\n(.*?)\n\s*\)\n", path.read_text(encoding="utf-8"), re.S
        ):
            found |= set(re.findall(r"^\s+(\w+)=", call, re.M))
    return found


class Calls(nn.Module):
    """A model that is an attention call with some arguments."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, **_: Any) -> None:
        q = torch.empty(1, 4, 3, 16, device="meta")
        attention(
            self,
            q,
            q,
            q,
            self.given.get("attention_mask"),
            **{key: one for key, one in self.given.items() if key != "attention_mask"},
        )


def problems(**given: Any) -> str:
    (call,) = trace(Calls(**given))
    return "; ".join(call.problems)


@pytest.mark.parametrize(
    "name",
    sorted(
        (arguments_in_transformers() | {"alibi", "head_mask"})
        - HANDLED
        - {"query", "key", "value", "attention_mask"}
    ),
)
def test_an_argument_that_is_not_handled_is_rejected_by_name(name: str) -> None:
    assert name in problems(**{name: 0.5 if name == "dropout" else torch.ones(1)})
    assert not problems(**{name: 0.0 if name == "dropout" else None})


def test_masks_and_attention_to_later_tokens_are_refused() -> None:
    assert "its own attention mask" in problems(attention_mask=torch.ones(1))
    assert "isn't causal" in problems(is_causal=False)


def test_a_window_without_a_token_is_refused() -> None:
    assert "sliding_window = 0 must be at least 1" in problems(sliding_window=0)


def test_sinks_that_are_no_parameter_are_refused() -> None:
    assert "sinks" in problems(s_aux=torch.ones(4))


def test_an_argument_that_only_comes_with_long_sequences_is_refused_when_it_comes() -> None:
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(UnsupportedError, match="block_indices"):
        attention(nn.Module(), q, q, q, None, block_indices=torch.zeros(1))


@pytest.mark.parametrize(
    ("name", "later"),
    [
        ("attention_mask", torch.ones(1)),
        ("is_causal", False),
        ("scaling", 0.5),
        ("sliding_window", 8),
        ("softcap", 30.0),
        ("s_aux", torch.ones(4)),
    ],
)
def test_an_argument_that_changes_after_the_trace_is_refused_when_it_does(
    name: str, later: Any
) -> None:
    model, q = Calls(), torch.zeros(1, 4, 3, 16)
    calls = trace(model)
    bind(model, calls, [DenseAttention(spec) for spec in specs_of(calls)])
    attention(model, q, q, q, None)
    with pytest.raises(UnsupportedError, match=name):
        attention(model, q, q, q, **{"attention_mask": None, name: later})


def test_experts_with_fixed_shapes_compute_a_token_alike_whatever_others_choose() -> None:
    config = tiny("mixtral")
    torch.manual_seed(0)
    module = MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(32, config.hidden_size)
    ids = torch.randint(0, 4, (32, 2))
    others = torch.cat((ids[:1], torch.randint(0, 4, (31, 2))))
    shares = torch.rand(32, 2)
    with torch.inference_mode(), fixed_shapes():
        first, second = experts(module, x, ids, shares), experts(module, x, others, shares)
    assert torch.equal(first[0], second[0])
    with torch.inference_mode():
        assert torch.allclose(experts(module, x, ids, shares), first, atol=1e-5)
