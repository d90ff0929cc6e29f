"""Quantized experts of models that run through transformers compute what transformers computes with
the values of their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dovetail.errors import DovetailError
from tests.models.checkpoint_formats import FORMATS, Format, expected_tokens, save_in
from tests.models.model_types import served_tokens
from tests.models.test_transformers import load

pytestmark = pytest.mark.slow("makes an engine of a model through transformers in each case")

BY_NAME = {form.name: form for form in FORMATS}
BLOCKS = "FP8, a scale per block"
SOME = (
    BLOCKS,
    "compressed-tensors FP8, dynamic",
    "compressed-tensors W4A16",
    "compressed-tensors NVFP4",
    "compressed-tensors MXFP4",
    "GPTQ INT4",
    "AWQ",
    "bitsandbytes NF4",
)
MIXTURES = ("minimax_m2", "phimoe", "ernie4_5_moe", "hunyuan_v1_moe")


def compare(form: Format, model_type: str, directory: Path) -> None:
    reference = save_in(form, model_type, directory)
    torch.testing.assert_close(
        served_tokens(directory), expected_tokens(reference), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("name", SOME)
def test_experts_in_a_format_compute_what_their_values_do(tmp_path: Path, name: str) -> None:
    compare(BY_NAME[name], "mixtral", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(SOME)))
def test_experts_in_other_formats_compute_what_their_values_do(tmp_path: Path, name: str) -> None:
    compare(BY_NAME[name], "mixtral", tmp_path)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_whose_names_transformers_changes_are_read(
    tmp_path: Path, model_type: str
) -> None:
    compare(BY_NAME[BLOCKS], model_type, tmp_path)


def test_plain_experts_beside_quantized_layers_are_read(tmp_path: Path) -> None:
    """Here the config leaves the experts out, but their tensors are those of single experts."""
    form = BY_NAME["compressed-tensors W4A16"]
    reference = save_in(form, "mixtral", tmp_path, leave_out="experts")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*experts.*")
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(
        served_tokens(tmp_path), expected_tokens(reference), atol=1e-3, rtol=0
    )


def test_an_expert_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_in(BY_NAME[BLOCKS], "mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DovetailError, match=lost.replace(".", r"\.")):
        load(tmp_path)
