"""The messages between front ends and the engine: what goes in comes out."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.executor import HostLogprobs
from dovetail.config.limits import Limits
from dovetail.end_reason import EndReason
from dovetail.errors import RequestError
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake import Intake
from dovetail.front.intake_facts import IntakeFacts
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail_server.engine import Load
from dovetail_server.frames import (
    Add,
    Extra,
    Finished,
    First,
    PackedLogprobs,
    StepFrame,
    add_of,
    decode_to_engine,
    decode_to_front_end,
    encode,
    pack_numbers,
    pack_tokens,
    request_of,
    unpack_numbers,
    unpack_tokens,
)
from dovetail_server.links import encoded
from tests.server.serving import demo_tokenizer
from tests.support import examples

OF_REQUEST = (  # what both ends compare
    "request_id",
    "sampling",
    "max_tokens",
    "fields",
    "rule",
    "extra",
)


def intake() -> Intake:
    facts = IntakeFacts(
        Limits(),
        100,
        1000,
        GenerationDefaults(),
        "local",
        "default",
        extra_args=frozenset({"mirostat"}),
    )
    return Intake(facts, demo_tokenizer, random.Random(1))


PARAMS: list[dict[str, Any]] = [
    {},
    {"stop": ["a", "\n"], "bad_words": ["x"], "n": 3},
    {
        "logit_bias": {3: -1.5, 7: 100},
        "stop_token_ids": [3],
        "allowed_token_ids": [3, 7],
        "seed": 2**64 - 1,
    },
    {
        "extra_args": {"mirostat": {"tau": [1, 2.5, None]}},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "detokenize": False,
        "seed": -(2**63),
    },
    {
        "max_tokens": None,
        "min_tokens": 99,
        "temperature": 0,
        "top_k": -1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    },
]


@pytest.mark.parametrize("fields", PARAMS)
def test_a_request_is_the_same_at_the_other_end(fields: dict[str, Any]) -> None:
    params = SamplingParams(output_kind="delta", **fields)
    given = RequestFields(1.5, -3, "client", 9.0, "salt", 12, 8.0, 0.25)
    extra = {"d": {"x": [1]}}
    sent = intake().check("name", [1, 2, 999], params, given, extra).request
    message = decode_to_engine(encode(add_of(7, sent, -8)))
    assert isinstance(message, Add)
    assert (message.number, message.owner, message.confirms) == (7, -8, True)
    received = request_of(message)
    assert received.prompt_ids.dtype == sent.prompt_ids.dtype
    assert received.prompt_ids.tolist() == [1, 2, 999]
    rest = {name: getattr(sent, name) for name in OF_REQUEST}
    assert {name: getattr(received, name) for name in OF_REQUEST} == rest


def test_policies_see_the_same_parameters_at_the_other_end() -> None:
    for fields in PARAMS:
        sent = intake().check("name", [1], SamplingParams(**fields), RequestFields()).request
        seen = request_of(add_of(1, sent)).params
        for name in (
            "n",
            "stop_token_ids",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "max_drafts",
        ):
            assert getattr(seen, name) == getattr(sent.params, name)
        assert seen.temperature == sent.sampling.temperature


# Fields of `SamplingParams` that the engine's process has as part of something else, or not at all:
# what concerns text, and what is resolved where a request enters.
IN_SAMPLING = {"logit_bias", "bad_words", "ignore_eos"}
IN_THE_FRONT_END = {
    "detokenize",
    "include_stop_str_in_output",
    "output_kind",
    "skip_special_tokens",
    "stop",
    "structured",  # `CheckedRequest.rule`
    "truncate_prompt_tokens",
}


def test_each_sampling_parameter_reaches_the_engine_or_is_known_to_stay() -> None:
    """A new parameter that the loop or a policy reads must be sent: see `frames.request_of`."""
    changed = {
        "n": 2,
        "seed": 1,
        "top_k": 2,
        "top_p": 0.5,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop_token_ids": (3,),
        "allowed_token_ids": (1, 2),
        "logprobs": 1,
        "prompt_logprobs": 1,
        "extra_args": {"mirostat": 1},
        "logits_processors": {"dovetail-llm/samplers:x": {}},
        "max_drafts": 1,
    }
    usual = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        if field.name in IN_SAMPLING | IN_THE_FRONT_END:
            continue
        value = changed.get(field.name, 1.5 if field.name.endswith("penalty") else 0.25)
        given = changed_unchecked(usual, **{field.name: value})
        sent = intake().check("name", [1], usual, RequestFields()).request
        sampling = sent.sampling
        if hasattr(sampling, field.name):
            sampling = dataclasses.replace(sampling, **{field.name: value})
        max_tokens = given.max_tokens or 0
        sent = dataclasses.replace(sent, sampling=sampling, params=given, max_tokens=max_tokens)
        received = decode_to_engine(encode(add_of(1, sent)))
        assert isinstance(received, Add)
        assert getattr(request_of(received).params, field.name) == value, field.name


def test_what_no_message_can_hold_is_a_wrong_request() -> None:
    for value in (object(), 2**70, {object(): 1}):
        extra = {"d": {"x": value}}
        entered = intake().check("name", [1], SamplingParams(), RequestFields(), extra)
        with pytest.raises(RequestError, match="plain values"):
            encoded(add_of(1, entered.request))


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))))
@examples(quick=30, full=500)
def test_a_frame_is_the_same_at_the_other_end(pairs: list[tuple[int, int]]) -> None:
    numbers, tokens = [number for number, _ in pairs], [token for _, token in pairs]
    ends = (
        Finished(3, EndReason.STOP, "</s>", 0),
        Finished(4, EndReason.KV_CAPACITY, 17, 1),
        Finished(5, EndReason.LENGTH, None, 0),
    )
    first = (First(3, 16, 0.5, 0.75), First(4, 0, None, None))
    sent = StepFrame(
        9, 1.5, pack_numbers(numbers), pack_tokens(tokens), Load(1, 2, 3, 4, 5, (2, 1)), first, ends
    )
    frame = decode_to_front_end(encode(sent))
    assert frame == sent
    assert isinstance(frame, StepFrame)
    assert (unpack_numbers(frame.numbers), unpack_tokens(frame.token_ids)) == (numbers, tokens)


def test_log_probabilities_are_the_same_at_the_other_end() -> None:
    hosts = HostLogprobs(
        np.arange(12).reshape(4, 3),
        np.linspace(-1, 0, 12, dtype=np.float32).reshape(4, 3),
        np.arange(4),
    )
    sent = Extra(
        PackedLogprobs.of(hosts, pack_numbers([5, 6]), [3, 1]), ((8, PackedLogprobs.of(hosts)),)
    )
    frame = decode_to_front_end(encode(StepFrame(0, 0.0, b"", b"", Load(), extra=sent)))
    assert isinstance(frame, StepFrame)
    assert frame.extra is not None
    assert frame.extra.logprobs is not None
    rows, prompt = frame.extra.logprobs.hosts(), frame.extra.prompt_logprobs[0][1].hosts()
    assert rows.token_ids.tolist() == hosts.token_ids[[3, 1]].tolist()
    assert rows.ranks.tolist() == [3, 1]
    assert prompt.logprobs.tolist() == hosts.logprobs.tolist()
