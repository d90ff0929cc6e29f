"""Models through transformers compute what transformers computes, or are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail import LLMEngine, SamplingParams
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail_models.transformers_layers import KINDS
from tests.models.model_types import (
    EXACT,
    PAGE,
    PROMPTS,
    architectures,
    by_architecture,
    causal_served,
    greedy,
    rows_of,
    served_embeddings,
    served_tokens,
    verdict,
)
from tests.models.tiny_configs import random_model, tiny

README = PAGE.parents[1] / "README.md"
ROWS = rows_of(PAGE.read_text(encoding="utf-8"))
# types whose module code hides state or masks
MISLEADING = ("inkling_text", "lfm2")
SOME = ("phimoe", "internlm3", "gemma4", "lfm3", "mamba", "bloom", "bart", "diffllama")


@pytest.mark.slow("makes a model and serves it")
@pytest.mark.parametrize("model_type", SOME)
def test_the_table_of_types_is_true(model_type: str) -> None:
    assert verdict(model_type) == ROWS[model_type]


@pytest.mark.full
@pytest.mark.parametrize("model_type", sorted(set(ROWS) - set(SOME)))
def test_the_whole_table_of_types_is_true(model_type: str) -> None:
    assert verdict(model_type) == ROWS[model_type]


def test_no_type_gives_wrong_tokens() -> None:
    assert not [name for name, row in ROWS.items() if "WRONG" in row]


def test_the_readme_counts_the_types_of_the_table() -> None:
    served, causal = causal_served(ROWS)
    said = f"{served} of transformers' {causal} types of causal language models"
    assert said in README.read_text(encoding="utf-8")


@pytest.mark.slow("imports the configurations of all types")
def test_the_page_and_the_readme_say_how_architectures_of_vllm_are_served() -> None:
    assert architectures(ROWS) in PAGE.read_text(encoding="utf-8")
    found = by_architecture(ROWS)
    served = sum(not one.startswith("refused") for one in found.values())
    said = f"{served} of {len(found)} text architectures in vLLM's list"
    assert said in README.read_text(encoding="utf-8")


def test_no_whole_checkpoint_is_refused_as_if_its_files_were_broken() -> None:
    assert not [name for name, row in ROWS.items() if "the checkpoint " in row]


def test_types_that_mislead_are_refused() -> None:
    assert not [name for name in MISLEADING if ROWS[name] == EXACT]


@pytest.mark.slow("makes several engines")
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
        ("falcon", {"multi_query": False, "parallel_attn": False}),
        ("gpt_neo", {"window_size": 5}),
        ("gptj", {"rotary_dim": 16, "tie_word_embeddings": True}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    ],
)
def test_other_shapes_of_a_type_are_exact(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    config = tiny(model_type)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    reference = random_model(config)
    reference.save_pretrained(tmp_path)
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    torch.testing.assert_close(
        served_tokens(tmp_path), torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=0
    )


def test_alibi_that_is_rounded_key_by_key_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "falcon", alibi=True)
    with pytest.raises(UnsupportedError, match="rounded to bfloat16"):
        load(tmp_path)


def test_alibi_with_an_8_bit_cache_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bloom")
    with pytest.raises(UnsupportedError, match="hold positions"):
        load(tmp_path, kv_cache_dtype="fp8", max_model_len=64)


def saved(directory: Path, model_type: str = "mixtral", **changes: Any) -> Path:
    config = tiny(model_type)
    for key, value in changes.items():
        setattr(config, key, value)
    random_model(config).save_pretrained(directory)
    return directory


def load(directory: Path, **keys: Any) -> LLMEngine:
    return LLMEngine.from_config(
        {
            "model": str(directory),
            "dtype": "float32",
            "executor": {"name": "local", "num_pages": 64},
            **keys,
        }
    )


def test_a_native_model_is_preferred_and_another_can_be_forced(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    with (
        load(tmp_path) as native,
        load(tmp_path, model={"path": str(tmp_path), "component": "transformers"}) as forced,
    ):
        assert type(native.config.model.component) is not type(forced.config.model.component)


@pytest.mark.parametrize(("model_type", "kind"), [("phi3", "longrope"), ("smollm3", "dynamic")])
def test_a_rope_whose_frequencies_depend_on_other_requests_is_refused_beyond_its_switch(
    tmp_path: Path, model_type: str, kind: str
) -> None:
    factors = (
        {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0}
        if kind == "longrope"
        else {"factor": 2.0}
    )
    switch = {"original_max_position_embeddings": 64}
    saved(
        tmp_path,
        model_type,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **switch, **factors},
        **(switch if kind == "longrope" else {}),
    )
    with pytest.raises(UnsupportedError, match="set max_model_len to 64 or less"):
        load(tmp_path)
    with load(tmp_path, max_model_len=64):
        pass


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "h.1.ln_1.weight" not in name},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelLoadError, match=r"lacks transformer.h.1.ln_1.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["extra.weight", "transformer.h.0.attn.gate.weight", "mtp.layers.0.weight"]
)
def test_a_tensor_that_the_model_does_not_know_is_refused_unless_a_text_model_leaves_it_out(
    tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "gpt2")
    tensors = {**load_file(tmp_path / "model.safetensors"), name: torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if name.startswith("mtp."):
        load(tmp_path).close()
        return
    with pytest.raises(ModelLoadError, match=f"holds {name}, which the model doesn't know"):
        load(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelLoadError, match="not a whole safetensors file"):
        load(tmp_path)


@pytest.mark.slow("makes several models")
def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    states = []
    for _ in range(2):
        with load(tmp_path, load_format="dummy", seed=3) as engine:
            engine.add_request(
                "r", {"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0, detokenize=False)
            )
            while engine.has_unfinished_requests():
                outputs = engine.step()
            states.append(list(outputs[-1].outputs[0].token_ids))
    assert states[0] == states[1]


def test_a_model_without_linear_layers_of_ours_is_not_quantized(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    with pytest.raises(UnsupportedError, match="no linear layer that fp8"):
        load(tmp_path, quantization="fp8")


def test_experts_are_quantized_while_they_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(saved(tmp_path), quantization="fp8").close()
    assert "aren't quantized" not in caplog.text


def test_experts_that_are_not_quantized_with_the_rest_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KINDS, "MixtralExperts")  # as of a class that isn't known
    load(saved(tmp_path), quantization="fp8").close()
    assert re.search(
        r"MixtralExperts aren't quantized through transformers: \d+ % of the model's parameters "
        r"stay in float32",
        caplog.text,
    )


def test_quantized_experts_that_are_not_replaced_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as if the file were broken: the checkpoint is whole."""
    from safetensors.torch import load_file, save_file

    monkeypatch.delitem(KINDS, "MixtralExperts")
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [
        name
        for name in tensors
        if re.search(r"self_attn\.\w_proj\.weight|experts\.\d+\.w\d\.weight", name)
    ]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError,
        match=r"experts\.0\.w1.* are quantized, and through transformers only layers that "
        r"Dovetail replaces can be",
    ):
        load(tmp_path)


def test_a_class_of_the_checkpoints_own_code_is_refused_if_transformers_has_another(
    tmp_path: Path,
) -> None:
    saved(tmp_path, "mixtral")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "architectures": ["MyMixtralForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling.MyMixtralForCausalLM"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedError,
        match="MyMixtralForCausalLM is no class of transformers, and code in a checkpoint is never "
        "run",
    ):
        load(tmp_path)


def test_the_body_of_a_type_with_another_types_class_embeds(tmp_path: Path) -> None:
    reference = random_model(tiny("internlm3")).base_model
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        states = [reference(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in PROMPTS]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1)
    assert torch.allclose(served_embeddings(tmp_path), expected, atol=1e-4)


@pytest.mark.slow("makes several models")
def test_a_type_with_another_types_class_is_served_as_transformers_saves_it(tmp_path: Path) -> None:
    reference = random_model(tiny("internlm3"))
    reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    assert torch.allclose(
        served_tokens(tmp_path), torch.tensor(expected, dtype=torch.float64), atol=1e-3
    )


def test_experts_that_are_stored_in_8_bits_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert = next(name for name in tensors if ".experts." in name)
    save_file(
        {**tensors, f"{expert}_scale_inv": torch.ones(1)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ModelLoadError, match=r"holds .*experts.*weight_scale_inv, which the model doesn't know"
    ):
        load(tmp_path)


def test_config_without_max_length_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    config = json.loads((tmp_path / "config.json").read_text())
    config["n_positions"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError):
        load(tmp_path)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    from dovetail_models.transformers import head_of

    for model_type in (
        "gpt2",
        "opt",
        "gemma3_text",
        "granite",
        "cohere2",
    ):  # biases, soft caps and scales
        model = random_model(tiny(model_type))
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            assert torch.equal(
                head_of(model)(inputs_embeds=hidden, use_cache=False).logits,
                model(ids, use_cache=False).logits,
            )


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"attention_chunk_size": 8192}, "attention_chunk_size.*set max_model_len to 8192 or less"),
        ({"attention_chunk_size": 64}, None),
        (
            {"attention_window": 8192},
            "attention_window.*set max_model_len to 8192 or less",
        ),  # which a mask may have, unseen by the trace
        (
            {"index_topk_blocks": 128, "index_block_size": 128},
            "index_topk_blocks.*set max_model_len to 16384 or less",
        ),
    ],
)
def test_a_length_that_no_check_crosses_is_refused(
    tmp_path: Path, fields: dict[str, int], refused: str | None
) -> None:
    saved(tmp_path, "qwen2", max_position_embeddings=32768, **fields)
    model = {"path": str(tmp_path), "component": "transformers"}
    if refused is None:
        load(tmp_path, model=model, max_model_len=100).close()
        return
    with pytest.raises(UnsupportedError, match=refused):
        load(tmp_path, model=model, executor={"name": "local", "num_pages": 4096})
    load(tmp_path, model=model, max_model_len=100).close()


def test_skipped_tensors_are_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "gpt2")
    extra = {
        "mtp.a.weight": torch.zeros(3),
        "mtp.b.weight": torch.zeros(3),
        "visual.weight": torch.zeros(3),
    }
    save_file(
        {**load_file(tmp_path / "model.safetensors"), **extra},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with caplog.at_level("INFO", "dovetail"):
        load(tmp_path).close()
    assert (
        "3 tensors of other parts than the text model are skipped: mtp.*, visual.*" in caplog.text
    )


@pytest.mark.parametrize(("model_type", "kind"), [("phi3", "longrope"), ("smollm3", "dynamic")])
def test_requests_below_the_switch_of_a_rope_are_exact_beside_each_other(
    tmp_path: Path, model_type: str, kind: str
) -> None:
    factors = (
        {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8, "partial_rotary_factor": 1.0}
        if kind == "longrope"
        else {"factor": 2.0}
    )
    switch = {"original_max_position_embeddings": 64}
    saved(
        tmp_path,
        model_type,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **switch, **factors},
        **(switch if kind == "longrope" else {}),
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = [[5, 6, 7], list(range(3, 59))]  # the second ends at the switch
    with load(tmp_path, max_model_len=64) as engine:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0,
                max_tokens=8,
                ignore_eos=True,
                detokenize=False,
                allowed_token_ids=list(range(127)),
            )
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        got: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            got |= {
                output.request_id: list(output.outputs[0].token_ids) for output in engine.step()
            }
    assert [got["0"], got["1"]] == [
        [token for token, _ in greedy(reference, prompt)] for prompt in prompts
    ]
