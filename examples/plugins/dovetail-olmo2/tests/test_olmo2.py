"""OLMo 2 against transformers, from the files of a checkpoint to the tokens of an engine; and the
configs that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dovetail import LLM, SamplingParams
from dovetail.api.component import NoOptions
from dovetail.api.model import ModelContext
from dovetail.nn.model_files import read_config
from transformers import AutoModelForCausalLM, Olmo2Config

from dovetail_olmo2.model import Olmo2

PUBLISHED = {  # OLMo-2-0425-1B
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0",
    "use_cache": True,
    "vocab_size": 100352,
}


def random_checkpoint(folder: Path) -> Any:
    """A tiny model with random weights in `folder`, as transformers saves it; returns transformers'
    own model of it."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 128}
    config = Olmo2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():  # norms too: one that was left out must show
        parameter.data.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2, generator=generator)
    model.save_pretrained(folder)
    return model


def test_an_engine_generates_the_tokens_that_transformers_does(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path)
    prompts = [torch.randint(97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (1, 5, 40, 70)]
    # so the long prompts are computed in chunks, beside other requests
    with LLM(str(tmp_path), dtype="float32", max_num_batched_tokens=32) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=False)[0, len(prompt) :].tolist()
        assert list(output.outputs[0].token_ids) == expected


def reasons_against(folder: Path, **fields: Any) -> str:
    """The reasons against the published config.json with these fields changed."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED | fields))
    return "; ".join(Olmo2(NoOptions(), ModelContext()).reasons_against(read_config(folder)))


def test_the_config_of_a_published_checkpoint_is_served(tmp_path: Path) -> None:
    assert reasons_against(tmp_path) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("clip_qkv", 8.0),  # the first OLMo has it
        ("head_dim", 64),
        ("hidden_act", "gelu"),
        ("hidden_size", 2040),  # 127.5 for each head
        ("max_position_embeddings", 0),
        ("model_type", "llama"),
        ("num_attention_heads", 2048),  # of size 1, which can't be rotated
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", -1),
        ("quantization_config", {"quant_method": "awq", "bits": 4}),
        ("rope_theta", None),
    ],
)
def test_a_config_that_would_give_other_numbers_is_refused_naming_the_field(tmp_path: Path, field: str, value: object) -> None:
    assert field in reasons_against(tmp_path, **{field: value})


def test_a_rope_that_is_not_implemented_is_refused(tmp_path: Path) -> None:
    assert "rope_type 'dynamic'" in reasons_against(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
