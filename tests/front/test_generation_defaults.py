"""A model's generation defaults apply unless the request overrides them, and every value is set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.api.sampler import RowSampling
from dovetail.errors import ModelLoadError
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.sampling import resolve_sampling
from dovetail.request.sampling_params import SamplingParams


def model(directory: Path, generation: object = None, config: object = None) -> Path:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(
                content if isinstance(content, str) else json.dumps(content)
            )
    return directory


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())])
def test_eos_is_one_id_or_several_or_none(
    tmp_path: Path, eos: object, ids: tuple[int, ...]
) -> None:
    assert GenerationDefaults.read(model(tmp_path, {"eos_token_id": eos})).eos_token_ids == ids


def test_generation_config_has_the_word_on_eos(tmp_path: Path) -> None:
    assert GenerationDefaults.read(
        model(tmp_path, {"eos_token_id": [1, 2]}, {"eos_token_id": 3})
    ).eos_token_ids == (1, 2)


def test_config_says_eos_where_generation_config_is_silent(tmp_path: Path) -> None:
    assert GenerationDefaults.read(
        model(tmp_path, {"temperature": 0.5}, {"eos_token_id": 3})
    ).eos_token_ids == (3,)


def test_a_model_without_files_has_no_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.read(tmp_path) == GenerationDefaults()


def test_sampling_values_are_read(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    defaults = GenerationDefaults.read(
        model(tmp_path, {**values, "do_sample": False, "max_length": 20})
    )
    assert {name: getattr(defaults, name) for name in values} == values


def test_without_sampling_the_generation_config_is_not_read(tmp_path: Path) -> None:
    directory = model(tmp_path, {"temperature": 0.6, "eos_token_id": 1}, {"eos_token_id": 2})
    assert GenerationDefaults.read(directory, sampling=False) == GenerationDefaults((2,))


@pytest.mark.parametrize(
    "nonsense",
    [
        "{",
        "[1]",
        {"temperature": "hot"},
        {"top_p": 7},
        {"eos_token_id": "end"},
        {"eos_token_id": [None]},
        "[" * 100_000,
        '{"a": ' + "[" * 900 + "]" * 900 + "}",
        '{"top_k": ' + "9" * 5000 + "}",
    ],
)
def test_nonsense_is_refused_naming_the_file(tmp_path: Path, nonsense: object) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        GenerationDefaults.read(model(tmp_path, nonsense))


def test_nonsense_in_config_is_laid_to_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"/config\.json"):
        GenerationDefaults.read(model(tmp_path, config={"eos_token_id": "end"}))


def test_neutral_values_by_default() -> None:
    assert resolve_sampling(SamplingParams(), GenerationDefaults(), seed=5) == RowSampling(seed=5)


DEFAULTS = GenerationDefaults(
    (1, 2), temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.1
)


def test_the_models_values_hold_unless_the_request_says_otherwise() -> None:
    ours = resolve_sampling(SamplingParams(), DEFAULTS, seed=0)
    assert (ours.temperature, ours.top_k, ours.top_p, ours.min_p, ours.repetition_penalty) == (
        0.6,
        20,
        0.9,
        0.1,
        1.1,
    )
    asked = SamplingParams(temperature=0, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    theirs = resolve_sampling(asked, DEFAULTS, seed=0)
    assert (
        theirs.temperature,
        theirs.top_k,
        theirs.top_p,
        theirs.min_p,
        theirs.repetition_penalty,
    ) == (0.0, 0, 1.0, 0.0, 1.0)


def test_stop_ids_are_the_requests_and_the_models() -> None:
    assert resolve_sampling(
        SamplingParams(stop_token_ids=[9, 1]), DEFAULTS, seed=0
    ).stop_token_ids == (9, 1, 2)
    assert resolve_sampling(
        SamplingParams(stop_token_ids=[9], ignore_eos=True), DEFAULTS, seed=0
    ).stop_token_ids == (9,)


def test_the_rest_is_carried_over() -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 1},
        allowed_token_ids=[3, 4],
        min_tokens=2,
        logprobs=1,
        prompt_logprobs=2,
        max_tokens=9,
    )
    assert resolve_sampling(
        params, GenerationDefaults(), seed=2**63, bad_words=((5, 6),)
    ) == RowSampling(
        seed=2**63,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, 1.0),),
        allowed_token_ids=(3, 4),
        bad_words=((5, 6),),
        min_tokens=2,
        logprobs=1,
        prompt_logprobs=2,
    )
