"""Requests with images in an engine: their greedy tokens are those of transformers' whole model,
whatever happens to a request. The full profile tries 60 random cases of each type."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors

from dovetail import LLM, LoRARequest, RequestOutput, SamplingParams
from dovetail.errors import DovetailError, RequestError
from dovetail.request.media import MediaItem
from dovetail_attention.sdpa import TorchAttention
from dovetail_executors.runtime.towers import Tower
from tests.adapters import config_of, weights_of
from tests.e2e.reference import TIE
from tests.media.checkpoints import checkpoint, picture, placeholder, reference, written
from tests.media.oracle import Prompt, tensors_of_all
from tests.support import FULL

SERVED = (
    "aya_vision",
    "exaone4_5",
    "gemma3",
    "gemma4",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "granite_vision",
    "idefics3",
    "internvl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "pixtral",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
pytestmark = pytest.mark.usefixtures("shared_image_processes")
NEW = 6
CASES = 60 if FULL else 1
SIZES = ((28, 28), (33, 50), (91, 17), (40, 64))
CHUNKS = {"gemma4": 80}  # a picture is computed whole
SETTINGS: list[dict[str, Any]] = [
    {},
    {"kv_cache.reuse": False, "max_num_seqs": 2},
    {"media.cache_rows": 200, "media.step_rows": 1},
    {"speculation": {"drafter": "ngram", "max_drafts": 3}},
]


def a_prompt(name: str, draw: random.Random) -> dict[str, Any]:
    """Text with images before, between and after it."""
    pieces = []
    images: list[Image.Image] = []
    for _ in range(draw.choice([1, 1, 2, 4])):
        pieces.append("".join(draw.choices("abc ", k=draw.randint(0, 9))))
        if draw.random() < 0.8:
            pieces.append(written(name))
            images.append(picture(*draw.choice(SIZES), seed=draw.randint(0, 2)))
    pieces.append(draw.choice(["?", ""]) if images else "?")
    prompt: dict[str, Any] = {"prompt": "".join(pieces)}
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def check(
    directory: Path, output: RequestOutput, images: Sequence[Image.Image], typed: int = 0
) -> None:
    """Compare the first sample's tokens; all others have to be the same. `typed`: the first
    placeholders, which are text."""
    tokens = list(output.outputs[0].token_ids)
    assert len(tokens) == NEW
    assert all([*sample.token_ids] == tokens for sample in output.outputs)
    assert output.prompt_token_ids is not None
    tensors = tensors_of_all(directory, images)
    logits = Prompt(directory, output.prompt_token_ids, tensors, typed).logits(*tokens)
    for token, scores in zip(tokens, logits[-NEW - 1 : -1], strict=True):
        best = int(scores.argmax())
        if token != best:
            assert scores[best] - scores[token] <= TIE
            return


def engine(directory: Path, **settings: Any) -> LLM:
    torch.set_num_threads(1)
    small = {
        "generation_config": "none",
        "max_model_len": 700,
        "block_size": 8,
        "kv_cache_memory": "32MiB",
    }
    return LLM(str(directory), **{"dtype": "float32", **small, **settings})


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_greedy_tokens_are_those_of_transformers(name: str, case: int) -> None:
    draw = random.Random(f"{name} {case}")
    directory = checkpoint(name)
    chunks = {"max_num_batched_tokens": CHUNKS.get(name, 16), "max_num_seqs": 4}
    prompts = [a_prompt(name, draw) for _ in range(draw.randint(1, 4))]
    prompts.append(prompts[0])
    settings = draw.choice([*SETTINGS, chunks])
    n = draw.choice([1, 1, 3])
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, n=n)
    with engine(directory, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        outputs += llm.generate(prompts, params, use_tqdm=False)  # from the prefix cache
    checked = set()
    for prompt, output in zip([*prompts, *prompts], outputs, strict=True):
        tokens = tuple(tuple(sample.token_ids) for sample in output.outputs)
        if (id(prompt), tokens) not in checked:
            check(directory, output, prompt.get("multi_modal_data", {}).get("image", []))
            checked.add((id(prompt), tokens))


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_a_placeholder_that_is_typed_is_text(name: str) -> None:
    directory = checkpoint(name)
    image = picture(33, 50)
    typed = f"typed {written(name)} or {placeholder(name)} here"
    parts = [
        {"type": "text", "text": typed},
        {"type": "image", "image": image},
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with engine(directory) as llm:
        [output] = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    check(directory, output, [image], typed.count(placeholder(name)))


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_preempted_requests_compute_the_same_pictures_again(name: str) -> None:
    directory = checkpoint(name)
    images = {letter: picture(40, 64, seed) for seed, letter in enumerate("abcd")}
    text = f" {written(name)} b {written(name)} c"
    prompts: list[dict[str, Any]] = [
        {"prompt": one + other + text, "multi_modal_data": {"image": [images[one], images[other]]}}
        for one in images
        for other in images
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    settings: dict[str, Any] = {"executor.num_pages": 24, "max_model_len": 64}
    if name == "gemma4":
        settings = {"executor.num_pages": 80, "max_model_len": 256, "max_num_batched_tokens": 80}
    with engine(directory, kv_cache_memory=None, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(directory, output, prompt["multi_modal_data"]["image"])


@pytest.mark.parametrize(("name", "cached"), [("gemma3", 48), ("gemma4", 96)])
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_a_hit_may_end_within_a_picture(name: str, cached: int) -> None:
    """The rest of it is computed, and attends to its first tokens as well."""
    directory = checkpoint(name)
    images = [picture(40, 64, seed) for seed in (0, 0, 1)]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    found = []
    with engine(directory) as llm:
        for image, end in zip(images, "xyz", strict=True):
            text = "b" * 43 + written(name) + end * 3
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            check(directory, output, [image])
            found.append(output.num_cached_tokens)
    assert found[:2] == [0, cached]
    assert found[2] <= 40


@pytest.mark.slow("makes an engine")
def test_attention_in_one_direction_serves_the_text_of_a_model_that_needs_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only_one = replace(TorchAttention.capabilities, both_ways=False)
    monkeypatch.setattr(TorchAttention, "capabilities", only_one)
    directory = checkpoint("gemma3")
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompt: Any = {"prompt": written("gemma3"), "multi_modal_data": {"image": picture(9, 9)}}
    with engine(directory) as llm:
        [output] = llm.generate(["hello"], params, use_tqdm=False)
        with pytest.raises(RequestError, match="image"):
            llm.generate(prompt, params, use_tqdm=False)
    check(directory, output, [])
    assert "only text: attention backend dovetail:torch can't attend in both" in caplog.text


@pytest.mark.slow("makes an engine")
def test_a_picture_that_is_computed_whole_fits_a_step() -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    prompt: Any = {"prompt": written("gemma4"), "multi_modal_data": {"image": picture(9, 9)}}
    with (
        engine(checkpoint("gemma4"), max_num_batched_tokens=63) as llm,
        pytest.raises(RequestError, match=r"64 of its tokens .*, and at most 63 fit"),
    ):
        llm.generate(prompt, params, use_tqdm=False)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llava", "mistral3", "qwen3_vl"])
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_a_picture_is_found_in_the_prefix_cache_and_another_is_not(name: str) -> None:
    """Another one hits the text before it."""
    directory = checkpoint(name)
    images = [picture(40, 30, seed) for seed in (0, 0, 1, 0)]
    text = "b" * 40 + written(name) + "c" * 40
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    cached = []
    with engine(directory) as llm:
        for image in images:
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": image}}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            check(directory, output, [image])
            cached.append(output.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] == cached[3] >= len(text) - len(written(name))
    assert 0 < cached[2] <= 40


@pytest.mark.parametrize("name", ["llava", "mistral3"])
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_language_models_of_transformers_read_rows(name: str) -> None:
    directory = checkpoint(name)
    images = [picture(40, 64), picture(33, 50, seed=2)]
    text = f"a {written(name)} b {written(name)} c"
    prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    component = {"model.component": "transformers"}
    with engine(directory, max_num_batched_tokens=16, **component) as llm:
        [output] = llm.generate(prompt, params, use_tqdm=False)
    check(directory, output, images)


@pytest.mark.parametrize(("name", "lacks"), [("qwen2_vl", "axes"), ("qwen3_vl", "levels")])
@pytest.mark.slow("makes an engine")
def test_language_models_that_cannot_read_an_encoders_rows_serve_text(
    name: str, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    component = {"model.component": "transformers"}
    with caplog.at_level(logging.WARNING, "dovetail"), engine(checkpoint(name), **component) as llm:
        assert llm.engine.capacity.media is None
        assert llm.generate("abc", use_tqdm=False)[0].outputs[0].token_ids
    assert f"only text: Transformers doesn't read them (ModelCapabilities.{lacks})" in caplog.text


@pytest.mark.parametrize("name", ["llava", "mistral3", "qwen3_vl", "smolvlm"])
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_log_probabilities_of_prompts_are_those_of_transformers_without_placeholders(
    name: str,
) -> None:
    directory = checkpoint(name)
    images = [picture(33, 50), picture(40, 64, seed=2)]
    text = f"{written(name)} ab {written(name)} c"
    prompt: Any = {"prompt": text, "multi_modal_data": {"image": images}}
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, prompt_logprobs=2)
    with engine(directory, max_num_batched_tokens=16) as llm:
        [output] = llm.generate(prompt, params, use_tqdm=False)
    check(directory, output, images)
    ids = output.prompt_token_ids
    assert ids is not None
    assert output.prompt_logprobs is not None
    tensors = tensors_of_all(directory, images)
    expected = Prompt(directory, ids, tensors).logits().log_softmax(-1)
    placeholder = reference(directory).config.image_token_id
    assert len(output.prompt_logprobs) == len(ids)
    for place, found in enumerate(output.prompt_logprobs):
        if not place or ids[place] == placeholder:
            assert found is None
            continue
        assert found is not None
        scores = expected[place - 1]
        best = scores.topk(2).indices.tolist()
        assert found.keys() == {ids[place], *best}
        for token, one in found.items():
            assert one.logprob == pytest.approx(float(scores[token]), abs=1e-4)
        spelled = llm.engine.tokenizer.decode([ids[place]])
        assert found[ids[place]].decoded_token == spelled


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llava", marks=pytest.mark.full),
        pytest.param("qwen3_vl", marks=pytest.mark.full),
        pytest.param("gemma3", marks=pytest.mark.full),
        "gemma4",
        "qwen3_5",
    ],
)
@pytest.mark.slow("starts two ranks")
def test_two_ranks_write_the_same_tokens(name: str) -> None:
    directory = checkpoint(name)
    images = [picture(40, 64), picture(33, 50, seed=2)]
    text = f"a {written(name)} b {written(name)} c"
    prompts: list[dict[str, Any]] = [
        {"prompt": text, "multi_modal_data": {"image": images}},
        {"prompt": "hello"},
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    ranks = {"name": "tensor", "size": 2, "device": "cpu"}
    with engine(directory, executor=ranks, max_num_batched_tokens=CHUNKS.get(name, 16)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, own in zip(outputs, [images, []], strict=True):
        check(directory, output, own)


@pytest.mark.parametrize(
    "name",
    [
        "llava",
        pytest.param("gemma3", marks=pytest.mark.full),
        pytest.param("gemma4", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_an_adapter_changes_the_language_model_alone(name: str, tmp_path: Path) -> None:
    directory = checkpoint(name)
    image = picture(33, 50)
    prompt = {"prompt": f"a {written(name)} b", "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with engine(directory, adapters={"slots": 1, "max_rank": 4}) as llm:
        capacity = llm.engine.capacity.adapters
        assert capacity is not None
        names = {
            module.replace("model.", "model.language_model.", 1): sizes
            for module, sizes in capacity.modules.items()
        }
        weights = {key: 0.1 * value for key, value in weights_of(names).items()}
        (tmp_path / "adapter_config.json").write_text(
            json.dumps(config_of(target_modules="all-linear"))
        )
        save_file(weights, tmp_path / "adapter_model.safetensors")
        request = LoRARequest("own", 1, str(tmp_path))
        [plain, adapted] = llm.generate(
            [prompt, prompt], params, use_tqdm=False, lora_request=[None, request]
        )
    check(directory, plain, [image])
    merged = Path(shutil.copytree(directory, tmp_path / "merged"))
    tensors = load_file(merged / "model.safetensors")
    for module in names:
        a, b = (weights[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        stored = next(
            key
            for key in tensors
            if key.endswith(module.removeprefix("model.language_model.") + ".weight")
            and "vision" not in key
        )
        tensors[stored] = tensors[stored] + 2 * torch.from_numpy(b @ a)
    save_tensors(tensors, merged / "model.safetensors", {"format": "pt"})
    check(merged, adapted, [image])
    assert list(plain.outputs[0].token_ids) != list(adapted.outputs[0].token_ids)


@pytest.mark.slow("makes an engine, and transformers' whole model")
def test_an_image_that_cannot_be_encoded_fails_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint("llava")
    bad = picture(33, 50, seed=1)
    good = picture(33, 50, seed=2)
    encode = Tower.encode
    digests: list[bytes] = []

    def fails_first(tower: Tower, item: MediaItem) -> torch.Tensor:
        digests.append(item.digest)
        if item.digest == digests[0]:
            raise DovetailError("the encoder has no idea")
        return encode(tower, item)

    monkeypatch.setattr(Tower, "encode", fails_first)
    text = f"a {written('llava')} b"
    prompts = [{"prompt": text, "multi_modal_data": {"image": image}} for image in (bad, good, bad)]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with engine(directory, **{"media.cache_rows": 40}) as llm:
        outputs = llm.generate([*prompts, {"prompt": "hello"}], params, use_tqdm=False)
        again = llm.generate(prompts[1:2], params, use_tqdm=False)
    failed = [output.outputs[0].finish_reason for output in outputs]
    assert failed == ["error", "length", "error", "length"]
    check(directory, outputs[1], [good])
    check(directory, outputs[3], [])
    check(directory, again[0], [good])
