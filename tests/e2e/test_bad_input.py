"""Any bad input gets an error that states the problem, and all other requests get the same tokens
as without it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from dovetail import LLM, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from dovetail.api.clock import VirtualClock, WallClock
from dovetail.config.limits import Limits
from dovetail.errors import (
    ConfigError,
    DovetailError,
    EngineDeadError,
    ModelLoadError,
    PluginError,
    RequestError,
    UnsupportedError,
)
from dovetail.front.component_values import ComponentValues
from dovetail.registry.registry import Registry
from tests.e2e.test_same_tokens import model_dir
from tests.registry.fakes import Site, components, scheduler
from tests.registry.site import site  # noqa: F401
from tests.small_model import small_demo
from tests.support import examples

torch.set_num_threads(1)

MAX_LEN = 64
HUGE = 10**5000  # more digits than Python likes to print

COMPANY = {
    "greedy": ("ROMEO:", SamplingParams(temperature=0, max_tokens=5)),
    "seeded": ([500, 12, 7], SamplingParams(temperature=0.9, seed=7, max_tokens=5, logprobs=1)),
    "samples": ("JULIET:\nO", SamplingParams(n=2, seed=3, max_tokens=4)),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_config(
        {
            "model": small_demo(),
            "max_model_len": MAX_LEN,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 24,
        }
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: LLMEngine) -> dict[str, list[list[int]]]:
    """The other requests' tokens when nothing else runs."""
    invite(engine)
    return tokens_of(drain(engine))


def invite(engine: LLMEngine) -> None:
    for request_id, (prompt, params) in COMPANY.items():
        engine.add_request(request_id, prompt, params)


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Run until nothing is left: the last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def tokens_of(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {
        request_id: [list(sample.token_ids) for sample in outputs[request_id].outputs]
        for request_id in COMPANY
    }


@contextmanager
def in_company(
    engine: LLMEngine, alone: dict[str, list[list[int]]]
) -> Iterator[dict[str, RequestOutput]]:
    """Run other requests at the same time, which end with the same tokens as alone. Yields the
    outputs of all, filled at the end."""
    invite(engine)
    engine.step()
    engine.step()
    outputs: dict[str, RequestOutput] = {}
    try:
        yield outputs
    finally:  # a failure here fails no other test
        outputs |= drain(engine)
    assert tokens_of(outputs) == alone
    assert engine.core.dead is None
    assert engine.get_num_unfinished_requests() == 0
    assert engine.stats().pages.held == 0
    engine.core.kv.check_integrity()


def require_refused(engine: LLMEngine, said: str, **fields: Any) -> None:
    """Add a request that is wrong in `fields`: nothing of it stays in the engine."""
    before = engine.get_num_unfinished_requests()
    try:
        with pytest.raises(RequestError, match=said):
            engine.add_request(**{"request_id": "bad", "prompt": "a", **fields})
        assert engine.get_num_unfinished_requests() == before
    finally:
        engine.abort_request("bad")


def test_refused_requests_do_not_affect_others(engine: LLMEngine, alone: Any) -> None:
    with in_company(engine, alone):
        for prompt, said in PROMPTS:
            require_refused(engine, said, prompt=prompt)
        for params, said in UNKNOWN:
            require_refused(engine, said, params=SamplingParams(**params))
        for fields, said in FIELDS:
            require_refused(engine, said, **fields)
        require_refused(engine, "request_id 'greedy' is in use", request_id="greedy")


# Prompts

PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([], "empty"),
    (np.array([], np.int64), "empty"),
    ("ROMEO: " * 40, f"max_model_len {MAX_LEN} at most {MAX_LEN - 1}"),
    ([1] * MAX_LEN, f"{MAX_LEN} tokens; with max_model_len"),
    ([5, 1024], "token id 1024 is out of the vocabulary: allowed are 0 to 1023"),
    ([5, -1], "token id -1 is out of the vocabulary"),
    ([2**31], "out of the vocabulary"),
    ([HUGE], "a value of type int is out of the vocabulary"),
    ([1.0], "integers, got 1.0"),
    ([True], "integers, got True"),
    (["a"], "integers, got 'a'"),
    ([None], "integers, got None"),
    ([[1, 2]], r"integers, got \[1, 2\]"),
    (np.array([1.0]), "integers, got 1.0"),
    (np.array([[1, 2]]), r"integers, got \[1, 2\]"),
    (np.array(5), "text or a list of token ids"),
    (np.array([True]), "integers, got True"),
    (torch.tensor([0.5]), "integers, got 0.5"),
    (None, "text or a list of token ids, got None"),
    (5, "text or a list of token ids, got 5"),
    (b"ROMEO:", "text or a list of token ids, got b'ROMEO:'"),
    (bytearray(b"ROMEO:"), "text or a list of token ids, got bytearray"),
    (memoryview(b"ROMEO:"), "text or a list of token ids, got <memory"),
    ({"prompt_token_ids": bytearray(b"ROMEO:")}, "text or a list of token ids, got bytearray"),
    (range(10**12), f"1000000000000 tokens; with max_model_len {MAX_LEN}"),
    ({3, 4}, "text or a list of token ids"),
    (object(), "text or a list of token ids"),
    ({}, '"prompt": …'),
    ({"text": "a"}, r"got the keys \['text'\]"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "got the keys"),
    ({"prompt": [1]}, '"prompt" must be text'),
    ({"prompt_token_ids": "a"}, '"prompt_token_ids" must be a list of token ids'),
    ({"prompt": None}, r"got the keys \[\]"),
    ("half a \ud83d pair", "surrogate"),
]


@pytest.mark.parametrize(
    ("prompt", "said"),
    PROMPTS,
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_prompt_is_refused(engine: LLMEngine, prompt: Any, said: str) -> None:
    require_refused(engine, said, prompt=prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([500, 12, 7]),
        np.array([500, 12, 7], np.uint16),
        torch.tensor([500, 12, 7]),
        (500, np.int32(12), 7),
        {"prompt_token_ids": [500, 12, 7]},
    ],
)
def test_integers_of_any_kind_are_token_ids(engine: LLMEngine, alone: Any, prompt: Any) -> None:
    engine.add_request("seeded", prompt, COMPANY["seeded"][1])
    assert list(drain(engine)["seeded"].outputs[0].token_ids) == alone["seeded"][0]


# Sampling parameters

MOST = 2**63 - 1

ALLOWED = {
    "n": f"an integer >= 1 and <= {MOST}",
    "temperature": "a finite number >= 0 or None",
    "top_k": f"an integer >= -1 and <= {MOST} or None",
    "top_p": "a finite number > 0 and <= 1 or None",
    "min_p": "a finite number >= 0 and <= 1 or None",
    "seed": f"an integer >= -{2**63} and <= {2**64 - 1} or None",
    "max_tokens": f"an integer >= 1 and <= {MOST} or None",
    "min_tokens": f"an integer >= 0 and <= {MOST}",
    "stop": "a list of non-empty strings",
    "stop_token_ids": "a list of token ids >= 0",
    "include_stop_str_in_output": "true or false",
    "ignore_eos": "true or false",
    "deterministic": "true or false",
    "repetition_penalty": "a finite number >= 0.01 and <= 100 or None",
    "presence_penalty": "a finite number >= -2 and <= 2",
    "frequency_penalty": "a finite number >= -2 and <= 2",
    "logit_bias": "map token ids",
    "allowed_token_ids": "a list of token ids >= 0",
    "bad_words": "a list of non-empty strings",
    "logprobs": f"an integer >= 0 and <= {MOST} or None",
    "prompt_logprobs": f"an integer >= 0 and <= {MOST} or None",
    "skip_special_tokens": "true or false",
    "detokenize": "true or false",
    "output_kind": "one of cumulative, delta, final",
    "extra_args": "map names to values",
    "logits_processors": "map names of the engine's",
    "truncate_prompt_tokens": f"an integer >= -1 and <= {MOST} or None",
    "structured": "",
    "max_drafts": f"an integer >= 0 and <= {MOST} or None",
}

NEVER_RIGHT: list[Any] = [
    -3,
    math.nan,
    math.inf,
    HUGE,
    -HUGE,
    1j,
    b"x",
    bytearray(b"x"),
    memoryview(b"x"),
    object(),
    [1.5],
    [[1]],
    [""],
    ["\ud800"],
    {"1": 1},
    {1: math.nan},
    {1: 101},
    {-1: 1},
]
EXCEPTIONS = {"seed": [-3], "extra_args": [{"1": 1}], "stop": [{"1": 1}], "bad_words": [{"1": 1}]}


@pytest.mark.parametrize("name", ALLOWED)
def test_nonsense_is_refused_with_the_name_and_the_allowed_range(name: str) -> None:
    for value in NEVER_RIGHT:
        if not any(value is fine or value == fine for fine in EXCEPTIONS.get(name, [])):
            with pytest.raises(RequestError, match=f"^{name}") as caught:
                SamplingParams(**{name: value})
            assert ALLOWED[name] in str(caught.value) or name == "logit_bias"


def test_every_parameter_is_tried() -> None:
    assert set(ALLOWED) == set(SamplingParams.__dataclass_fields__)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([10**400, np.float32(2), np.int8(1)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@examples(quick=300, full=20_000)
@given(name=st.sampled_from(sorted(ALLOWED)), value=anything)
def test_anything_at_all_is_either_taken_or_refused_by_name(name: str, value: Any) -> None:
    said = name
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        said = str(error)
    assert said.startswith(name)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_tokens": 17}, r"min_tokens must be at most max_tokens \(16\), got 17"),
        ({"stop": "x", "detokenize": False}, "stop strings need text"),
        ({"allowed_token_ids": []}, "at least one token id"),
        ({"stop": ""}, "non-empty"),
        ({"truncate_prompt_tokens": 0}, "1 or more, -1 or None, got 0"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**fields)


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    (
        {"stop_token_ids": [1024]},
        "stop_token_ids: token id 1024 is out of the vocabulary: allowed are 0 to 1023",
    ),
    (
        {"allowed_token_ids": [1, HUGE]},
        "allowed_token_ids: token id a value of type int is out of the vocabulary",
    ),
    ({"logit_bias": {4096: 1.0}}, "logit_bias: token id 4096"),
    (
        {"extra_args": {"beam_width": 4}},
        "extra_args: 'beam_width' means nothing to sampler default; it understands: none",
    ),
]


@pytest.mark.parametrize(("fields", "said"), UNKNOWN)
def test_what_this_model_and_these_components_do_not_know_is_refused(
    engine: LLMEngine, fields: dict[str, Any], said: str
) -> None:
    require_refused(engine, said, params=SamplingParams(**fields))


def test_parameters_must_be_sampling_params(engine: LLMEngine) -> None:
    require_refused(
        engine,
        "params must be SamplingParams or PoolingParams, got dict",
        params={"temperature": 0},
    )


EXTREME: list[dict[str, Any]] = [
    {"temperature": 1e308},
    {"temperature": 5e-324},
    {"top_p": 5e-324},
    {"top_k": MOST},
    {"min_p": 1.0},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"max_tokens": MOST},
    {"max_tokens": None, "min_tokens": MOST},
    {"max_tokens": MOST, "min_tokens": MOST - 1},
    {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
    {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2},
    {"logit_bias": dict.fromkeys(range(1024), -100)},
    {"allowed_token_ids": [3]},
    {
        "allowed_token_ids": [3],
        "stop_token_ids": [3],
        "min_tokens": 5,
    },  # all that is allowed is kept out
    {"allowed_token_ids": [0], "min_tokens": 5},  # EOS alone
    {"allowed_token_ids": [3], "bad_words": ["$"]},
    {"stop_token_ids": list(range(1024)), "min_tokens": 3},
    {"bad_words": [chr(code) for code in range(32, 127)]},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"n": 20, "logprobs": 0, "prompt_logprobs": 0},
    {"stop": ["x" * 4096, "\n" * 4096]},
    {"extra_args": {}, "truncate_prompt_tokens": MOST},
]


@pytest.mark.parametrize("fields", EXTREME, ids=lambda fields: ",".join(fields))
def test_extreme_but_allowed_values_do_not_affect_others(
    engine: LLMEngine, alone: Any, fields: dict[str, Any]
) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request("extreme", "ROMEO:", SamplingParams(**{"max_tokens": 8, **fields}))
    assert {sample.finish_reason for sample in outputs["extreme"].outputs} <= {"length", "stop"}


def test_more_log_probabilities_than_tokens_in_the_vocabulary_are_refused() -> None:
    with LLM(model_dir(), limits={"max_logprobs": 1000}) as llm:
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(
                RequestError, match=f"{name} must be at most the vocabulary's 97 tokens, got 98"
            ):
                llm.generate([1], SamplingParams(detokenize=False, **{name: 98}))


def test_bad_words_without_tokens_are_refused(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelled = {"zzz": [], " zzz": [], "a": [1], " a": []}
    monkeypatch.setattr(
        engine.tokenizer,
        "encode_all",
        lambda texts, special_tokens=True: [spelled[text] for text in texts],
    )
    with pytest.raises(RequestError, match="bad_words: 'zzz' is no token"):
        engine.add_request("bad", "a", SamplingParams(bad_words=["a", "zzz"]))


def test_parameters_of_numpy_become_plain_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        stop_token_ids=[np.int32(4)],
        logit_bias={np.int64(1): np.float64(2)},
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, stop_token_ids=[4], logit_bias={1: 2.0}
    )


# The other fields of a request

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"request_id": ""}, "request_id must be a non-empty string"),
    ({"request_id": None}, "request_id must be a non-empty string, got None"),
    (
        {"arrival_time": math.nan},
        "arrival_time must be a finite number of seconds or None, got nan",
    ),
    ({"arrival_time": "now"}, "arrival_time must be a finite number"),
    ({"arrival_time": HUGE}, "arrival_time must be a finite number"),
    ({"deadline": math.inf}, "deadline must be a finite number of seconds or None, got inf"),
    (
        {"arrival_time": -1e308},
        r"arrival_time must be .* got -1e\+308: on the engine's clock \(engine.now\(\)\), from "
        r"-1e\+09 to 1e\+09",
    ),
    ({"arrival_time": 1e10}, "on the engine's clock"),  # it would wait for centuries
    ({"deadline": 1e10}, "deadline must be .* on the engine's clock"),
    ({"deadline": True}, "deadline must be a finite number"),
    ({"ttft_deadline": math.nan}, "ttft_deadline must be a finite number"),
    ({"tbt_s": 0}, "tbt_s must be a number of seconds above 0"),
    ({"tbt_s": math.inf}, "tbt_s must be a number of seconds above 0"),
    ({"priority": 1.5}, f"priority must be an integer from -{2**63} to {MOST}, got 1.5"),
    ({"priority": 10**400}, "priority must be an integer from"),
    ({"priority": -HUGE}, "priority must be an integer from"),
    ({"predicted_tokens": 2**63}, f"predicted_tokens must be an integer from 0 to {MOST} or None"),
    ({"predicted_tokens": -1}, "predicted_tokens must be an integer from 0"),
    ({"priority": True}, "priority must be an integer"),
    ({"client": 5}, "client must be a string or None, got 5"),
    ({"cache_salt": b"x"}, "cache_salt must be a string or None"),
    ({"extra": {"nobody": {}}}, "extra: 'nobody' reads nothing from requests"),
    ({"extra": 5}, "extra must map distributions"),
]


@pytest.mark.parametrize(
    ("fields", "said"),
    FIELDS,
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_rejected_by_name(
    engine: LLMEngine, fields: dict[str, Any], said: str
) -> None:
    require_refused(engine, said, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"arrival_time": -1e9},
        {"deadline": -1e9},
        {"deadline": 1e9},
        {"priority": -(2**63)},
        {"priority": np.int8(-1)},
        {"predicted_tokens": MOST},
        {"client": ""},
        {"cache_salt": "\ud800"},
        {"client": "\ud800"},
    ],
    ids=ascii,
)
def test_a_strange_field_does_not_affect_others(
    engine: LLMEngine, alone: Any, fields: dict[str, Any]
) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request("strange", "a", SamplingParams(max_tokens=2), **fields)
    assert outputs["strange"].finished


EXTREME_FIELDS: list[dict[str, Any]] = [
    {
        "priority": -(2**63),
        "deadline": -1e9,
        "predicted_tokens": 0,
        "ttft_deadline": 1e9,
        "tbt_s": 5e-324,
    },
    {
        "priority": MOST,
        "deadline": 1e9,
        "predicted_tokens": MOST,
        "ttft_deadline": -1e9,
        "tbt_s": 1e9,
    },
    {"arrival_time": -1e9},
    {"arrival_time": -1e9, "priority": MOST, "client": "\ud800"},
]


@pytest.mark.parametrize(
    "name",
    sorted(component.qualified_name for component in Registry.discover().components("scheduler")),
)
def test_every_policy_counts_with_the_most_extreme_fields(name: str) -> None:
    config = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "scheduler": name,
        "executor": {"name": "simulated", "num_pages": 20},
    }
    finished = set()
    with LLMEngine.from_config(config) as engine:
        for index, fields in enumerate(EXTREME_FIELDS * 2):
            engine.add_request(
                str(index), [5] * 20, SamplingParams(max_tokens=8, detokenize=False), **fields
            )
        finished = set(drain(engine))
    assert finished == set(map(str, range(len(EXTREME_FIELDS) * 2)))


def test_whoever_dates_a_request_back_comes_after_those_who_were_seen() -> None:
    config = {
        "max_model_len": 64,
        "max_num_seqs": 1,
        "executor": {"name": "simulated", "num_pages": 20},
    }
    params = SamplingParams(max_tokens=2, detokenize=False)
    with LLMEngine.from_config(config, clock=VirtualClock()) as engine:
        for index in range(3):
            engine.add_request(f"r{index}", [5] * 10, params)
        engine.step()
        assert engine.stats().arrived == 3
        engine.add_request("dated back", [5] * 10, params, arrival_time=-1e9)
        assert list(drain(engine)) == ["r0", "r1", "r2", "dated back"]


# Limits


@pytest.mark.slow("fills the queue")
def test_no_more_requests_wait_than_the_limit_says() -> None:
    """A list of any length is accepted, and doesn't reduce what others may add."""
    config = {"model": "demo", "max_model_len": 64, "limits": {"max_waiting": 3}}
    with LLM(**config) as llm:
        params = SamplingParams(max_tokens=2, n=2)
        for index in range(3):
            llm.engine.add_request(str(index), [5], SamplingParams(max_tokens=50, ignore_eos=True))
        assert len(llm.generate([[5]] * 5, params, use_tqdm=False)) == 5
        with llm.stream([[5]] * 5, params):
            llm.engine.abort_request("1")
            llm.engine.add_request("again", [5], params)
            with pytest.raises(
                RequestError,
                match=r"^unfinished requests must be at most 3 \(limits.max_waiting\), got 4$",
            ):
                llm.engine.add_request("more", [5], params)
        drain(llm.engine)
        llm.engine.add_request("more", [5], params)


def test_a_limit_of_none_takes_any_number() -> None:
    config = {
        "max_model_len": 64,
        "limits": {"max_waiting": None},
        "executor": {"name": "simulated", "num_pages": 20},
    }
    with LLMEngine.from_config(config) as engine:
        engine.add_request("a", [5], SamplingParams(detokenize=False))


ROOM = {
    "max_n": 2,
    "max_prompt_chars": 9,
    "max_stop_strings": 2,
    "max_stop_chars": 9,
    "max_stop_token_ids": 2,
    "max_bad_words": 2,
    "max_bad_word_chars": 9,
    "max_bad_word_tokens": 4,
    "max_logit_bias": 2,
    "max_allowed_token_ids": 2,
    "max_logprobs": 2,
    "max_name_chars": 9,
    "max_extra_size": 9,
    "max_grammar_chars": 9,
    "max_grammar_depth": 2,
}
SPARED = {
    "n": 2,
    "stop": ["ab", "cdefghi"],
    "stop_token_ids": [1, 2],
    "bad_words": ["a", "b"],
    "logit_bias": {1: 1, 2: 1},
} | {
    "allowed_token_ids": [1, 2],
    "logprobs": 2,
    "prompt_logprobs": 2,
}
TOO_FAR: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("max_n", {"n": 3}, {}),
    ("max_prompt_chars", {}, {"prompt": "ROMEO and J"}),
    ("max_prompt_chars", {"truncate_prompt_tokens": 1}, {"prompt": {"prompt": "ROMEO and J"}}),
    ("max_stop_strings", {"stop": ["a", "b", "c"]}, {}),
    ("max_stop_chars", {"stop": ["abcde", "fghij"]}, {}),
    ("max_stop_token_ids", {"stop_token_ids": [1, 2, 3]}, {}),
    ("max_bad_words", {"bad_words": ["a", "b", "c"]}, {}),
    ("max_bad_word_chars", {"bad_words": ["abcde", "fghij"]}, {}),
    ("max_bad_word_tokens", {"bad_words": ["zq", "qz"]}, {}),
    ("max_logit_bias", {"logit_bias": {1: 1, 2: 1, 3: 1}}, {}),
    ("max_allowed_token_ids", {"allowed_token_ids": [1, 2, 3]}, {}),
    ("max_logprobs", {"logprobs": 3}, {}),
    ("max_logprobs", {"prompt_logprobs": 3}, {}),
    ("max_name_chars", {}, {"request_id": "0123456789"}),
    ("max_name_chars", {}, {"client": "0123456789"}),
    ("max_name_chars", {}, {"cache_salt": "0123456789"}),
    ("max_name_chars", {}, {"lora_request": LoRARequest("0123456789", 1, "a")}),
    ("max_extra_size", {"extra_args": {"a": [["b"] * 5]}}, {}),
    ("max_extra_size", {}, {"extra": {"a": {"b": [0] * 9}}}),
    ("max_grammar_chars", {"structured": {"regex": "0123456789"}}, {}),
    ("max_grammar_depth", {"structured": {"regex": "(((a)))"}}, {}),
]


@pytest.fixture(scope="module")
def narrow() -> Iterator[LLMEngine]:
    with LLMEngine.from_config(
        {"model": small_demo(), "max_model_len": MAX_LEN, "limits": ROOM}
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    ("limit", "params", "fields"), TOO_FAR, ids=[limit for limit, _, _ in TOO_FAR]
)
def test_what_goes_beyond_a_limit_is_refused_with_its_name_and_value(
    narrow: LLMEngine, limit: str, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(
        RequestError, match=rf"at most {ROOM[limit]}\b.*\(limits.{limit}\)"
    ) as refused:
        narrow.add_request(
            **{"request_id": "bad", "prompt": "a", "params": SamplingParams(**params), **fields}
        )
    assert str(refused.value).startswith(
        next(iter(params | fields), "the prompt")
    ) or "the prompt" in str(refused.value)
    assert not narrow.has_unfinished_requests()


def test_what_goes_up_to_the_limits_is_taken(narrow: LLMEngine) -> None:
    params = SamplingParams(**SPARED, max_tokens=2)
    narrow.add_request("012345678", "ROMEO and", params, client="012345678", cache_salt="012345678")
    assert drain(narrow)["012345678"].finished


def test_every_limit_has_a_request_that_goes_too_far() -> None:
    of_chats = {
        "max_chat_chars",
        "max_template_chars",
        "max_template_s",
        "max_template_bytes",
    }  # see test_chat_limits
    of_prompts = {
        "max_inputs",
        "max_request_chars",
        "max_samples",
        "max_answer_bytes",
    }  # see tests/server: test_pooling.py, test_completions.py
    of_bodies = {"max_json_parts", "max_json_depth"}  # see tests/server/test_bodies.py
    of_images = {limit for limit in Limits.model_fields if "image" in limit}  # tests/front/media
    others = {"max_waiting", "max_grammar_s"} | of_prompts | of_bodies  # see tests/structured
    assert (
        set(ROOM)
        == set(Limits.model_fields) - of_chats - of_images - others
        == {limit for limit, _, _ in TOO_FAR}
    )


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: LLMEngine, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = MAX_LEN * engine.tokenizer.longest_token
    monkeypatch.setattr(
        engine.tokenizer, "encode_all", lambda *arguments: pytest.fail("it was tokenized")
    )
    with pytest.raises(
        RequestError,
        match=rf"{most + 1} characters: at most {most} are tokenized \(limits.max_prompt_chars\)",
    ):
        engine.add_request("bad", "a" * (most + 1))


def test_the_longest_text_of_as_many_tokens_as_the_model_takes_is_tokenized(
    engine: LLMEngine, alone: Any
) -> None:
    longest = max((engine.tokenizer.decode([token]) for token in range(1024)), key=len)
    with in_company(engine, alone) as outputs:
        engine.add_request(
            "long", longest * 40, SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
        )
    assert outputs["long"].prompt == longest * 40


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(1, [7]), (2, [12, 7]), (3, [500, 12, 7]), (9, [500, 12, 7]), (-1, [500, 12, 7])],
)
def test_a_prompt_is_truncated_to_its_last_tokens(
    engine: LLMEngine, alone: Any, keep: int, kept: list[int]
) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request(
            "short", [500, 12, 7], SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
        )
        engine.add_request(
            "text", "ROMEO: JULIET", SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
        )
        engine.add_request(
            "long", np.arange(1, 500), SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
        )
    assert list(outputs["short"].prompt_token_ids) == kept
    whole = engine.tokenizer.encode("ROMEO: JULIET")
    assert list(outputs["text"].prompt_token_ids) == (whole if keep < 0 else whole[-keep:])
    assert list(outputs["long"].prompt_token_ids) == list(range(500 - MAX_LEN + 1, 500))


def test_objects_given_to_components_are_copies_of_the_caller_s(engine: LLMEngine) -> None:
    class Told(BaseModel):
        levels: list[int]

    values = ComponentValues(engine.capacity, lambda: engine.tokenizer, {"somebody": Told})
    told = Told(levels=[1])
    checked: Any = values.extra({"somebody": told})["somebody"]
    told.levels.append(2)
    assert checked.levels == [1]


def test_a_sample_whose_id_is_taken_refuses_its_request_and_leaves_nothing(
    engine: LLMEngine, alone: Any
) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request("a#1", "a", SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="'a#1' is in the engine already"):
            engine.add_request("a", "a", SamplingParams(n=3))
    assert outputs["a#1"].finished
    assert "a" not in outputs


def test_aborting_an_unknown_id_is_ignored(engine: LLMEngine, alone: Any) -> None:
    with in_company(engine, alone):
        engine.abort_request("nobody")
        engine.abort_request(["nobody", "none"])


def test_an_aborted_request_is_never_heard_of_again_and_its_id_is_free(
    engine: LLMEngine, alone: Any
) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request("gone", "a", SamplingParams(n=3, max_tokens=30))
        engine.step()
        engine.abort_request("gone")
        engine.add_request("gone", "b", SamplingParams(max_tokens=2))
    assert outputs["gone"].prompt == "b"
    assert len(outputs["gone"].outputs) == 1


def test_more_tokens_than_there_is_room_for_are_clipped(engine: LLMEngine, alone: Any) -> None:
    with in_company(engine, alone) as outputs:
        engine.add_request(
            "long", [500, 12, 7], SamplingParams(max_tokens=10_000, min_tokens=9_000, temperature=0)
        )
    assert len(outputs["long"].outputs[0].token_ids) == MAX_LEN - 3
    assert outputs["long"].outputs[0].finish_reason == "length"


def test_a_request_of_the_future_is_slept_for() -> None:
    clock = VirtualClock()
    with LLMEngine.from_config({"model": str(model_dir())}, clock=clock) as engine:
        for request_id, arrival in (("late", 1e9), ("soon", 5.0), ("past", -5.0)):
            engine.add_request(
                request_id,
                [1],
                SamplingParams(max_tokens=2, detokenize=False),
                arrival_time=arrival,
            )
        first_seen: dict[str, float] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                first_seen.setdefault(output.request_id, clock.now())
    assert list(first_seen) == ["past", "soon", "late"]
    assert first_seen["late"] >= 1e9


def test_a_wall_clock_waits_for_any_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to sleep for as long as a float can say."""
    slept: list[float] = []
    monkeypatch.setattr("dovetail.api.clock.time.sleep", slept.append)
    monkeypatch.setattr("dovetail.api.clock.time.perf_counter", iter([0.0, 1e6, 2e300]).__next__)
    WallClock().wait_until(1e300)
    assert len(slept) == 2
    assert max(slept) < 2**33


# Configs

CONFIGS: list[tuple[dict[str, Any], type[DovetailError], str]] = [
    ({"modle": "demo"}, ConfigError, "modle: unknown key, did you mean model"),
    ({"scheduler": "fcsf"}, PluginError, "unknown scheduler 'fcsf', did you mean fcfs"),
    (
        {"scheduler": {"name": "priority", "agin_s": 1}},
        ConfigError,
        "scheduler.agin_s: unknown option, did you mean aging_s",
    ),
    ({"kv_cache": {"name": "prefix", "reuse": "perhaps"}}, ConfigError, "kv_cache.reuse"),
    ({"observers": ["log", "nope"]}, PluginError, "observers.1: unknown observer 'nope'"),
    ({"observers": [{"name": "log", "every_s": -1}]}, ConfigError, "every_s"),
    ({"executor": {"name": "local", "device": "abacus"}}, ConfigError, "'abacus' isn't a device"),
    ({"dtype": "int3"}, ConfigError, "dtype: expected 'auto', 'float32'"),
    ({"block_size": 0}, ConfigError, "block_size: expected auto or an integer of 1 or more"),
    pytest.param(
        {"block_size": 7, "attention": "triton"},
        UnsupportedError,
        "(?s)with block_size: 7:.*dovetail:triton",
        marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    ),
    (
        {"max_model_len": 2000},
        UnsupportedError,
        "max_model_len: 2000 tokens is more than this model's own length of 1024",
    ),
    ({"max_model_len": True}, ConfigError, "max_model_len"),
    ({"max_num_seqs": 0}, ConfigError, "max_num_seqs: expected greater than 0"),
    (
        {"max_num_seqs": 2**31 - 1},
        UnsupportedError,
        "executor dovetail:local can't start: .* lower max_num_seqs",
    ),
    ({"kv_cache_memory": 10**18}, UnsupportedError, "can't start: .* lower .*kv_cache_memory"),
    (
        {"kv_cache_memory": "1MiB"},
        ConfigError,
        "can't hold one sequence of max_model_len: 1024 tokens .* raise kv_cache_memory to",
    ),
    (
        {"executor": {"name": "local", "num_pages": 2}},
        ConfigError,
        "Lower max_model_len to 32 or less, or raise num_pages to 64",
    ),
    ({"tokenizer": "/no/such"}, ConfigError, "tokenizer: .*'/no/such' is not a directory"),
    (
        {"plugins": {"require": ["dovetail-nope>=1"]}},
        ConfigError,
        "dovetail-nope>=1: no plugin of that distribution is installed",
    ),
    ({"model": ""}, ConfigError, "model: expected"),
    ({"model": None}, ConfigError, "model: expected a model.s name, or a mapping"),
    (
        {"model": "/no such/place"},
        ConfigError,
        "is not a directory, nor can it be a hub id; bundled models: demo",
    ),
]


@pytest.mark.parametrize(
    ("config", "error", "said"),
    CONFIGS,
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else None,
)
def test_a_wrong_config_is_refused(
    config: dict[str, Any], error: type[DovetailError], said: str
) -> None:
    with pytest.raises(error, match=said):
        LLMEngine.from_config({"model": "demo", **config})


def test_a_package_that_a_library_lacks_is_reported_as_such_and_not_as_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'httpx2'")

    monkeypatch.setattr("dovetail_executors.runtime.worker.load_model", load_model)
    with pytest.raises(
        UnsupportedError,
        match=r"executor dovetail:local can't start: ModuleNotFoundError: No module named "
        r"'httpx2'$",
    ):
        LLMEngine.from_config({"model": "demo"})


def test_a_wrong_key_of_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("model: demo\nschedular: fcfs\n")
    with pytest.raises(
        ConfigError, match=r"engine.yaml:2: schedular: unknown key, did you mean scheduler\?"
    ):
        LLMEngine.from_config(tmp_path / "engine.yaml")


@pytest.mark.parametrize(
    "config",
    [
        {"scheduler": {"name": "vtc", "x": 1}},
        {"tokenizer": "/no/such"},
        {"kv_cache": {"name": "prefix", "x": 1}},
    ],
    ids=str,
)
def test_what_is_wrong_beside_the_model_is_reported_before_its_weights_are_read(
    config: dict[str, Any],
) -> None:
    read: list[str] = []
    with pytest.raises(ConfigError):
        LLMEngine.from_config(
            {"model": "demo", **config}, progress=lambda what, done, total: read.append(what)
        )
    assert not read


# Model directories


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")

    return rewrite


def _write(name: str, content: bytes | None) -> Callable[[Path], None]:
    return lambda directory: (
        (directory / name).unlink()
        if content is None
        else (directory / name).write_bytes(content) and None
    )


def _truncate(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])


DIRECTORIES: dict[str, tuple[Callable[[Path], None], type[DovetailError], str]] = {
    "no weights": (
        _write("model.safetensors", None),
        ModelLoadError,
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "truncated": (_truncate, ModelLoadError, "model.safetensors: not a whole safetensors file"),
    "no safetensors at all": (
        _write("model.safetensors", b"\xff" * 100),
        ModelLoadError,
        "model.safetensors: not a whole safetensors file",
    ),
    "a tensor is missing": (
        _tensors(lambda t: t.pop("model.norm.weight")),
        ModelLoadError,
        r"lacks 1 tensor \(model.norm.weight\)",
    ),
    "a tensor too many": (
        _tensors(lambda t: t.update(extra=torch.zeros(1))),
        ModelLoadError,
        r"holds 1 tensor \(extra\), which the model doesn't know",
    ),
    "a wrong shape": (
        _tensors(lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        ModelLoadError,
        r"tensor model.norm.weight: expected shape \[32\], found \[3\]",
    ),
    "no config": (_write("config.json", None), ModelLoadError, "config.json: no such file"),
    "a broken config": (_write("config.json", b"{"), ModelLoadError, "config.json: not valid JSON"),
    "an unknown architecture": (
        _config(architectures=["NopeForCausalLM"]),
        UnsupportedError,
        "NopeForCausalLM is no class of transformers, and code in a checkpoint is never run; for "
        "qwen3 it has Qwen3ForCausalLM",
    ),
    "no architecture": (_config(architectures=None), ModelLoadError, "no 'architectures'"),
    "a broken generation_config": (
        _write("generation_config.json", b"["),
        ModelLoadError,
        "generation_config.json",
    ),
    "a hot generation_config": (
        _write("generation_config.json", b'{"temperature": "hot"}'),
        ModelLoadError,
        "generation_config.json: temperature must be .* got 'hot'; remove the key, or set "
        "generation_config: none",
    ),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_a_wrong_model_directory_is_refused(tmp_path: Path, case: str) -> None:
    change, error, said = DIRECTORIES[case]
    directory = Path(shutil.copytree(model_dir(), tmp_path / "model"))
    change(directory)
    with pytest.raises(error, match=said):
        LLMEngine.from_config({"model": str(directory)})


def test_a_model_without_tokenizer_takes_and_gives_token_ids_alone() -> None:
    ids_only = SamplingParams(detokenize=False, max_tokens=3, logprobs=1)
    with LLM(model_dir()) as llm:
        for prompt, params in (
            ("text", ids_only),
            ([1, 2], SamplingParams()),
            ([1, 2], SamplingParams(detokenize=False, bad_words=["x"])),
        ):
            with pytest.raises(
                ModelLoadError,
                match=r"has no tokenizer .* name another with `tokenizer:`, or give token ids with "
                r"detokenize=False",
            ):
                llm.generate(prompt, params)  # type: ignore[arg-type]
        with pytest.raises(ModelLoadError, match="has no tokenizer"):
            llm.chat([{"role": "user", "content": "hello"}])
        [output] = llm.generate([1, 2], ids_only, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == ""


# Lists of prompts


@pytest.fixture(scope="module")
def llm(engine: LLMEngine) -> LLM:
    """Around the same engine."""
    llm = LLM.__new__(LLM)
    llm.engine, llm._requests = engine, 0
    return llm


@pytest.mark.parametrize(
    ("prompts", "params", "said"),
    [
        (None, None, "prompts must be text, token ids, or a list of these, got None"),
        (5, None, "prompts must be text"),
        (np.array(5), None, "text or a list of token ids"),
        (["a", ""], None, "empty"),
        ([[1], []], None, "empty"),
        ([1, "a"], None, "integers, got 'a'"),
        ([1, True], None, "integers, got True"),
        ([1, [2]], None, r"integers, got \[2\]"),
        ([True, 1], None, "got True"),
        (["a", 5], None, "got 5"),
        (b"a", None, "got b'a'"),
        (bytearray(b"a"), None, r"got bytearray\(b'a'\)"),
        pytest.param(memoryview(b"a"), None, "got <memory at", id="memoryview"),
        ([[1], bytearray(b"a")], None, r"got bytearray\(b'a'\)"),
        (["a", "b"], [SamplingParams()], "got 1 for 2 prompts"),
        (["a", "b"], [SamplingParams()] * 3, "got 3 for 2 prompts"),
        (["a"], [], "got 0 for 1 prompts"),
        (["a"], {"temperature": 1}, "sampling_params must be SamplingParams, or a list"),
        (["a", "b"], [SamplingParams(), None], "sampling_params must be SamplingParams, or a list"),
    ],
    ids=str,
)
def test_a_wrong_list_is_refused_before_anything_is_computed(
    llm: LLM, alone: Any, prompts: Any, params: Any, said: str
) -> None:
    steps = llm.engine.stats().steps
    with pytest.raises(RequestError, match=said):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.stats().steps == steps
    assert llm.engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    "messages", [None, "hello", 5, [[]], [5], [{"role": "user"}], [{"content": 1}, {}]], ids=str
)
def test_messages_that_are_none_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"messages|conversation"):
        llm.chat(messages, use_tqdm=False)


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "a" * (2 * MAX_LEN * llm.engine.tokenizer.longest_token)}
    ]
    with pytest.raises(
        RequestError,
        match=r"^the prompt's conversation has more than \d+ characters: .* "
        r"\(limits.max_prompt_chars\)",
    ):
        llm.chat(messages, use_tqdm=False)


def test_chat_without_a_template_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_templates", {})
    with pytest.raises(
        RequestError, match=r"no chat template: it completes text; use generate\(\)"
    ):
        llm.chat([{"role": "user", "content": "hello"}])


# Components that fail

BROKEN_POLICY = """
from dovetail.api import Scheduler

class Broken(Scheduler):
    calls = 0

    def schedule(self, step):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("oh no")
        step.grant_each(step.running)
        for request in step.waiting:
            step.grant(request)
"""


def test_a_policy_that_raises_fails_every_request_and_ends_the_engine(site: Site) -> None:  # noqa: F811
    spec = 'kind="scheduler", name="broken", target="broken_policy:Broken"'
    site.install(
        "dovetail-broken",
        modules={"broken_plugin": components(spec), "broken_policy": BROKEN_POLICY},
    )
    with LLMEngine.from_config(
        {"model": str(model_dir()), "scheduler": "broken", "overlap": False}
    ) as engine:
        for request_id, n in (("a", 1), ("b", 3)):
            engine.add_request(
                request_id, [1, 2], SamplingParams(n=n, max_tokens=9, detokenize=False)
            )
        outputs = drain(engine)
        said = "scheduler dovetail-broken:broken raised in schedule(): ZeroDivisionError: oh no"
        assert {
            (s.finish_reason, s.stop_reason) for output in outputs.values() for s in output.outputs
        } == {("error", said)}
        assert [len(output.outputs) for output in outputs.values()] == [1, 3]
        for call in (
            engine.step,
            lambda: engine.add_request("c", [1], SamplingParams(detokenize=False)),
        ):
            with pytest.raises(EngineDeadError, match="dovetail-broken:broken raised") as caught:
                call()
            assert isinstance(caught.value.__cause__, DovetailError)
        engine.abort_request("a")
        engine.close()


def test_generate_says_why_the_engine_died(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(model_dir()) as llm:
        monkeypatch.setattr(llm.engine.core.executor.worker.runner.model, "logits", _boom)  # type: ignore[attr-defined]
        said = r"step 0 failed: RuntimeError: boom; requests in it: 0, 1$"
        with pytest.raises(EngineDeadError, match=said):
            llm.generate([[1], [2]], SamplingParams(detokenize=False), use_tqdm=False)
        with pytest.raises(EngineDeadError, match=said):
            llm.generate([[1]], SamplingParams(detokenize=False), use_tqdm=False)


def _boom(*_: Any) -> None:
    raise RuntimeError("boom")


def test_a_plugin_that_raises_on_import_is_named_when_it_is_asked_for(site: Site) -> None:  # noqa: F811
    site.install("dovetail-sick", modules={"sick_plugin": "raise RuntimeError('measles')"})
    with LLMEngine.from_config({"model": str(model_dir())}):
        pass  # whoever doesn't name it isn't troubled
    with pytest.raises(
        PluginError, match=r"(?s)unknown scheduler 'fair'.*dovetail-sick.*RuntimeError: measles"
    ):
        LLMEngine.from_config({"model": str(model_dir()), "scheduler": "fair"})


def test_a_component_that_raises_on_import_is_named(site: Site) -> None:  # noqa: F811
    spec = scheduler(package="late")
    site.install(
        "dovetail-late",
        modules={"late": components(spec), "late_policy": "raise SystemExit('late measles')"},
    )
    with pytest.raises(
        DovetailError,
        match=r"dovetail-late.*importing late_policy failed: SystemExit: late measles",
    ):
        LLMEngine.from_config({"model": str(model_dir()), "scheduler": "fair"})


POISON = 96  # a token whose embedding is not a number


@pytest.mark.slow("makes several engines or many tokens")
def test_a_request_whose_numbers_break_fails_alone_and_poisons_nothing(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model_dir(), tmp_path / "model"))
    _tensors(lambda t: t["model.embed_tokens.weight"][POISON].fill_(math.nan))(directory)
    greedy = SamplingParams(
        temperature=0,
        max_tokens=12,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=range(POISON),
    )
    healthy = [[i, i + 1, i + 2] * (1 + i % 7) for i in range(12)]
    with LLM(
        directory, block_size=4, max_num_seqs=4, executor={"name": "local", "num_pages": 24}
    ) as llm:
        expected = [
            list(output.outputs[0].token_ids)
            for output in llm.generate(healthy, greedy, use_tqdm=False)
        ]
        llm.engine.reset_prefix_cache()
        outputs = llm.generate(
            [[5, POISON, 6] * 5, *healthy, [POISON], *healthy], greedy, use_tqdm=False
        )
        broken, healed = (
            [outputs.pop(13), outputs.pop(0)],
            [list(output.outputs[0].token_ids) for output in outputs],
        )
        assert {(b.outputs[0].finish_reason, b.outputs[0].stop_reason) for b in broken} == {
            ("error", "the model's hidden state holds NaN")
        }
        assert healed == expected * 2
