"""Every key of `generation_config.json` does what transformers makes of it, does nothing for a
stated reason, or is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dovetail import LLM, SamplingParams
from dovetail.api.file_keys import NoEffect, Refused, Used
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.front.generation_config import GENERATION_CONFIG, GenerationDefaults
from tests.models.pooling_checkpoints import save

PROMPT = [5, 17, 20, 31, 8]
REFUSED = {  # a value of each that isn't neutral
    "begin_suppress_tokens": [4],
    "constraints": [{}],
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "exponential_decay_length_penalty": [2, 1.1],
    "force_words_ids": [[4]],
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "guidance_scale": 1.5,
    "max_time": 1.0,
    "min_length": 9,
    "no_repeat_ngram_size": 2,
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "sequence_bias": [[[4], 2.0]],
    "stop_strings": ["x"],
    "token_healing": True,
    "top_h": 0.4,
    "typical_p": 0.9,
    "watermarking_config": {"bias": 2.0},
}


def written(directory: Path, **content: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_each_key_of_transformers_is_in_the_table() -> None:
    missing = [key for key in vars(GenerationConfig()) if GENERATION_CONFIG.rule(key) is None]
    assert not missing, f"what do these do in a model's generation_config.json? {missing}"


def test_each_refused_key_is_refused_by_name_and_fine_with_transformers_default(
    tmp_path: Path,
) -> None:
    assert REFUSED.keys() == {
        key for key, rule in GENERATION_CONFIG.keys.items() if isinstance(rule, Refused)
    }
    defaults = GenerationConfig._get_default_generation_params()  # noqa: SLF001
    for key, value in REFUSED.items():
        with pytest.raises(
            UnsupportedError,
            match=rf"generation_config.json: {key} = .* is not implemented.*generation_config: "
            rf"none",
        ):
            GenerationDefaults.read(written(tmp_path, **{key: value}))
        assert (
            GenerationDefaults.read(written(tmp_path, **{key: defaults.get(key)}))
            == GenerationDefaults()
        )


def test_all_refused_keys_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"num_beams(.*)no_repeat_ngram_size"):
        GenerationDefaults.read(written(tmp_path, num_beams=4, no_repeat_ngram_size=3))


@pytest.mark.parametrize(
    "key", [key for key, rule in GENERATION_CONFIG.keys.items() if isinstance(rule, NoEffect)]
)
def test_a_key_without_effect_changes_no_default(key: str, tmp_path: Path) -> None:
    for value in (True, 7, "text", [1], {"a": 1}):
        assert GenerationDefaults.read(written(tmp_path, **{key: value})) == GenerationDefaults()


def test_an_unknown_key_is_logged_since_transformers_ignores_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dovetail"):
        assert (
            GenerationDefaults.read(written(tmp_path, chat_format="chatml", top_k=None))
            == GenerationDefaults()
        )
    assert "generation_config.json: unknown keys, without effect: 'chat_format'" in caplog.text


@pytest.mark.parametrize(
    "nonsense",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"min_new_tokens": -1},
        {"min_new_tokens": "2"},
        {"suppress_tokens": 3},
        {"suppress_tokens": [-1]},
        {"bad_words_ids": [3]},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": {"a": 1}},
        {"bad_words_ids": [["a"]]},
        {"suppress_tokens": list(range(5000))},
        {"top_k": "many"},
    ],
)
def test_nonsense_is_refused_naming_the_key(nonsense: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DovetailError, match=rf"generation_config.json: .*{next(iter(nonsense))}"):
        GenerationDefaults.read(written(tmp_path, **nonsense))


USED: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 3},
    {"suppress_tokens": "first"},
    {"bad_words_ids": "first and second"},
    {"repetition_penalty": 1.7},
    {"eos_token_id": "third"},
    {"eos_token_id": "third", "min_new_tokens": 6},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    return directory, save(directory, "LlamaForCausalLM", bos_token_id=None, eos_token_id=None)


@pytest.mark.parametrize("keys", USED, ids=str)
def test_answers_are_those_of_transformers_generate(keys: dict[str, Any], model: Any) -> None:
    """Greedy, of at most 8 tokens if the file sets no limit. The values are made of the first
    tokens without any."""
    directory, theirs = model

    def generated(**values: Any) -> list[int]:
        config = GenerationConfig(pad_token_id=0, **{"max_new_tokens": 8, **values})
        ids = torch.tensor([PROMPT])
        found: list[int] = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )[0, len(PROMPT) :].tolist()
        return found

    plain = generated()
    of_words = {"first": [plain[0]], "first and second": [plain[:2]], "third": plain[2]}
    values = {
        key: of_words.get(value, value) if isinstance(value, str) else value
        for key, value in keys.items()
    }
    expected = generated(**values)
    written(directory, **values)
    limit = None if "max_new_tokens" in values else 8
    with LLM(str(directory), num_kvcache_blocks=20, max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=limit, detokenize=False)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected


def test_each_used_key_is_compared_with_transformers() -> None:
    sampled = {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
    }  # `resolve_sampling` takes them as they are: test_generation_defaults.py
    used = {key for key, rule in GENERATION_CONFIG.keys.items() if isinstance(rule, Used)}
    assert used == sampled | {key for keys in USED for key in keys}


def test_a_request_overrides_the_lengths_of_the_file(model: Any) -> None:
    directory, _ = model
    written(directory, max_new_tokens=3, min_new_tokens=2, suppress_tokens=[1])
    with LLM(str(directory), num_kvcache_blocks=20, max_model_len=64) as llm:
        assert llm.get_default_sampling_params().max_tokens == 3
        for asked, given in ((None, 3), (5, 5), (1, 1)):
            [output] = llm.generate(
                [PROMPT], SamplingParams(max_tokens=asked, detokenize=False), use_tqdm=False
            )
            assert len(output.outputs[0].token_ids) == given
