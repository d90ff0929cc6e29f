"""Checkpoints of other types than transformers knows, whose code computes what one of these does, are
served as it, and refused where they may differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.errors import DovetailError
from dovetail.nn.model_aliases import SAME
from dovetail.nn.model_files import read_config
from tests.models.alias_configs import ALIASES, GATED, save_alias
from tests.models.model_types import PROMPTS, greedy, served_tokens


@pytest.mark.slow("makes an engine in each case")
@pytest.mark.parametrize("name", ALIASES)
def test_a_checkpoint_computes_what_the_type_that_is_the_same_does(
    tmp_path: Path, name: str
) -> None:
    reference = save_alias(name, tmp_path)
    with torch.no_grad():
        expected = [greedy(reference, prompt) for prompt in PROMPTS]
    torch.testing.assert_close(
        served_tokens(tmp_path), torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=0
    )


def read(directory: Path, config: dict[str, Any]) -> Any:
    (directory / "config.json").write_text(json.dumps(config))
    return read_config(directory)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "minicpm", "num_experts": 8}, "num_experts.*a granite, as which 'minicpm'"),
        ({"model_type": "minicpm", "scale_depth": "x"}, "missing or no number"),
        ({"model_type": "minicpm", "dim_model_base": 0}, "missing or no number"),
        ({"model_type": "orion", "attention_bias": True}, "attention_bias = True of 'orion'"),
        ({"model_type": "mimo", "attention_bias": False}, "attention_bias = False of 'mimo'"),
        ({"model_type": "internlm", "rotary": {"type": "dynamic"}}, "rotary"),
        ({"model_type": "RefinedWebModel", "alibi": True}, "alibi = True"),
        ({"model_type": "xverse", "num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"model_type": ["aquila"]}, "knows no model_type"),
    ],
)
def test_what_another_field_would_change_is_refused(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(DovetailError, match=why):
        read(tmp_path, {**GATED, "architectures": ["X"], **config})


def test_fields_that_are_off_change_nothing(tmp_path: Path) -> None:
    config = read(tmp_path, {**GATED, "model_type": "aquila", "rotary": None, "num_experts": 0})
    assert config.model_type == "llama"
    assert config.architectures == ["LlamaForCausalLM"]


def test_each_type_is_tried() -> None:
    tried = {str(alias.config["model_type"]) for alias in ALIASES.values()}
    assert set(SAME) - {"RefinedWebModel"} <= tried
