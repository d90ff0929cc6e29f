"""Towers compute the rows that transformers' whole models compute, of weights that are all there
and all used."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.pixtral import modeling_pixtral

from dovetail.errors import DovetailError, ModelLoadError
from dovetail.request.media import MediaItem
from dovetail_executors.runtime.towers import Tower, find_tower
from tests.media.checkpoints import NAMES, checkpoint, picture
from tests.media.oracle import rows_of, tensors_of

CPU = torch.device("cpu")
SIZES = ((28, 28), (33, 50), (91, 17), (40, 64))  # (width, height)


def tower_of(directory: Path, dtype: torch.dtype = torch.float32) -> Tower:
    plan = find_tower(directory)
    assert plan is not None
    return plan.build(dtype, CPU)


def item_of(tensors: Mapping[str, Any], rows: int) -> MediaItem:
    return MediaItem(kind="image", digest=b"", runs=((0, rows),), tensors=tensors)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole_model(name: str) -> None:
    directory = checkpoint(name)
    tower = tower_of(directory)
    for size in SIZES:
        tensors = tensors_of(directory, picture(*size))
        expected = rows_of(directory, tensors)
        rows = tower.encode(item_of(tensors, expected.shape[1]))
        assert rows.shape == expected.shape
        assert rows.shape[0] == tower.plan.levels
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["pixtral", "mistral3", "lighton_ocr"])
def test_pixtral_makes_no_mask_for_one_picture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(name)
    tensors = tensors_of(directory, picture(33, 50))
    count = rows_of(directory, tensors).shape[1]
    monkeypatch.delattr(modeling_pixtral, "generate_block_attention_mask")
    tower_of(directory).encode(item_of(tensors, count))


@pytest.mark.parametrize("size", [(3, 300), (300, 3), (1, 64), (2000, 10)])
@pytest.mark.slow("transformers' whole model")
def test_narrow_pictures_of_gemma_4_have_lines_of_any_length(size: tuple[int, int]) -> None:
    directory = checkpoint("gemma4")
    tensors = tensors_of(directory, picture(*size))
    expected = rows_of(directory, tensors)
    rows = tower_of(directory).encode(item_of(tensors, expected.shape[1]))
    assert 60 < rows.shape[1] <= 70
    assert torch.equal(rows, expected)


@pytest.fixture(params=NAMES)
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a type's checkpoint, to be changed."""
    return copy_of(request.param, tmp_path)


def copy_of(name: str, parent: Path) -> Path:
    return Path(shutil.copytree(checkpoint(name), parent / name))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return tensors


def store(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def is_vision(name: str) -> bool:
    text = ("lm_head", "language_model", "model.language_model", "model.text_model", "model.layers")
    return not name.startswith((*text, "model.embed_tokens", "model.norm"))


def test_each_vision_tensor_is_loaded_and_missing_and_unknown_ones_are_named(copied: Path) -> None:
    plan = find_tower(copied)
    assert plan is not None
    tensors = weights(copied)
    vision = {name: tensor for name, tensor in tensors.items() if is_vision(name)}
    stored_bytes = sum(tensor.nbytes for tensor in vision.values())
    assert plan.num_bytes(torch.float32) == stored_bytes
    assert plan.num_bytes(torch.bfloat16) == stored_bytes / 2
    missing = sorted(vision)[len(vision) // 2]
    unknown = missing.rpartition(".")[0] + ".surplus"
    tensors[unknown] = tensors.pop(missing)
    store(copied, tensors)
    with pytest.raises(ModelLoadError) as caught:
        find_tower(copied)
    assert unknown in str(caught.value)
    assert missing.removeprefix("model.") in str(caught.value)
    assert "images: false" in str(caught.value)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = copy_of("llava", tmp_path)
    tensors = weights(directory)
    name = "multi_modal_projector.linear_1.bias"
    tensors[name] = tensors[name][:-1].clone()
    store(directory, tensors)
    with pytest.raises(
        ModelLoadError, match=r"linear_1\.bias: expected shape \[64\], found \[63\]"
    ):
        tower_of(directory)


def test_sizes_of_a_config_cost_no_memory_before_they_are_compared(tmp_path: Path) -> None:
    directory = copy_of("llava", tmp_path)
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    change_config(directory, vision_config={**vision, "hidden_size": 2**36})
    with pytest.raises(ModelLoadError, match="68719476736"):
        find_tower(directory)


def renamed(name: str, kind: str) -> str:
    """Return how other checkpoints name a tensor of LLaVA's and Gemma 3's."""
    if kind == "nested" and name.startswith("vision_tower."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if kind == "new" and is_vision(name):
        return f"model.{name}"
    if kind == "new":
        return name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
    return name


@pytest.mark.parametrize("kind", ["nested", "new"])
@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3"])
def test_names_of_other_releases_give_the_same_rows(tmp_path: Path, name: str, kind: str) -> None:
    directory = copy_of(name, tmp_path)
    tensors = {renamed(name, kind): tensor for name, tensor in weights(directory).items()}
    tensors["model.vision_tower.embeddings.position_ids"] = torch.arange(17)[None]
    tensors["audio_tower.weight"] = torch.zeros(1)
    tensors["mtp.norm.weight"] = torch.zeros(1)
    assert tensors.keys() != weights(directory).keys()
    store(directory, tensors)
    inputs = tensors_of(directory, picture(40, 30))
    expected = rows_of(checkpoint(name), inputs)
    rows = tower_of(directory).encode(item_of(inputs, expected.shape[1]))
    assert torch.equal(rows, expected)


def test_rows_have_the_dtype_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    directory = checkpoint("qwen3_vl")
    tensors = tensors_of(directory, picture(33, 50))
    expected = rows_of(directory, tensors)
    item = item_of(tensors, expected.shape[1])
    rows = tower_of(directory, torch.bfloat16).encode(item)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), expected, rtol=0.1, atol=0.1)
    assert not caplog.records


def test_random_weights_need_no_file_and_follow_the_seed(copied: Path) -> None:
    tensors = tensors_of(copied, picture(33, 50))
    expected = rows_of(checkpoint(copied.name), tensors)
    (copied / "model.safetensors").unlink()
    plan = find_tower(copied, dummy=True)
    assert plan is not None
    item = item_of(tensors, expected.shape[1])
    one, same, other = (plan.build(torch.float32, CPU, seed).encode(item) for seed in (1, 1, 2))
    assert one.isfinite().all()
    assert one.std() > 0
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def without_vision(directory: Path) -> None:
    store(directory, {n: tensor for n, tensor in weights(directory).items() if not is_vision(n)})


def quantized(directory: Path) -> None:
    tensors = weights(directory)
    name = "model.visual.blocks.0.mlp.linear_fc1.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    store(directory, tensors)


def of_a_refused_type(directory: Path) -> None:
    change_config(directory, model_type="paligemma")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_vision, "no weights of the vision model"),
        (quantized, r"quantized \(model.visual.blocks.0.mlp.linear_fc1.weight\)"),
        (of_a_refused_type, "paligemma: it attends to the whole prompt"),
    ],
)
def test_a_checkpoint_whose_images_cant_be_served_has_no_tower_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, said: str
) -> None:
    directory = copy_of("qwen3_vl", tmp_path)
    change(directory)
    with caplog.at_level(logging.WARNING, "dovetail"):
        assert find_tower(directory) is None
    assert re.search(said, caplog.text)


def test_a_text_model_has_no_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = copy_of("qwen3_vl", tmp_path)
    change_config(directory, vision_config=None)
    assert find_tower(directory) is None
    assert not caplog.records


def test_an_item_of_other_tensors_or_rows_is_refused() -> None:
    directory = checkpoint("qwen2_vl")
    tower = tower_of(directory)
    tensors = tensors_of(directory, picture(32, 32))
    count = rows_of(directory, tensors).shape[1]
    with pytest.raises(DovetailError, match=f"{count + 1} rows"):
        tower.encode(item_of(tensors, count + 1))
    cut = {**tensors, "pixel_values": tensors["pixel_values"][:-1]}
    with pytest.raises(DovetailError, match="can't be encoded"):
        tower.encode(item_of(cut, count))
    tower.encode(item_of(tensors, count))


@pytest.mark.slow("prepares pictures of 4,096 x 4,096 pixels")
@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl", "gemma4"])
def test_the_largest_picture_has_no_more_rows_than_asked_for(name: str) -> None:
    tower = tower_of(checkpoint(name))
    rows = rows_of(checkpoint(name), tensors_of(checkpoint(name), picture(33, 50))).shape[1]
    assert rows <= tower.encode_largest(1000) <= 1000
    assert tower.encode_largest(0) == 0


def test_an_image_processor_that_cant_be_used_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("llava", tmp_path)
    (directory / "preprocessor_config.json").unlink()
    assert tower_of(directory).encode_largest(1000) == 0
    assert "image processor can't be used" in caplog.text
