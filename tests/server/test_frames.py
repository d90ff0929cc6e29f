"""The messages between front ends and the engine: what goes in comes out."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
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
from dovetail.request.media import MediaItem
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail_server.engine import Load, TierStats
from dovetail_server.frames import (
    Abort,
    Add,
    Extra,
    Finished,
    First,
    PackedLogprobs,
    StepFrame,
    ToEngine,
    add_of,
    decode_to_engine,
    decode_to_front_end,
    encode,
    message_of,
    pack_numbers,
    pack_tokens,
    parts_of,
    request_of,
    unpack_numbers,
    unpack_tokens,
)
from dovetail_server.links import ZmqLine, ZmqPost, encoded
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
        "deterministic": True,
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


SIZES = (1, 1000, 2**16 - 1, 2**16, 3_000_000)  # bytes of tensors


def item_of(seed: int, *sizes: int) -> MediaItem:
    """Return an image with a tensor of each size, of different dtypes."""
    drawn = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        f"uint8 {size}": drawn.integers(0, 256, (1, size), np.uint8) for size in sizes
    }
    tensors["pixel_values"] = drawn.standard_normal((3, 70, 90)).astype(np.float32)
    tensors["transposed"] = tensors["pixel_values"].transpose(2, 0, 1)
    tensors["image_grid_thw"] = np.array([[1, 4, 6]])
    tensors["nothing"] = np.zeros((0, 4), np.float16)
    tensors["a number"] = np.array(7, np.int32)
    return MediaItem(
        kind="image",
        digest=drawn.bytes(32),
        runs=((3, 20), (30, 4)),
        tensors=tensors,
        grid=(1, 4, 6),
        whole=bool(seed % 2),
    )


def with_images(*items: MediaItem) -> Add:
    sent = intake().check("name", [1, 2], SamplingParams(), RequestFields()).request
    return add_of(4, dataclasses.replace(sent, media=items))


def check_same(received: Any, items: tuple[MediaItem, ...]) -> None:
    assert isinstance(received, Add)
    request = request_of(received)
    assert len(request.media) == len(items)
    for item, sent in zip(request.media, items, strict=True):
        for name in ("kind", "digest", "runs", "grid", "whole"):
            assert getattr(item, name) == getattr(sent, name), name
        assert list(item.tensors) == list(sent.tensors)
        for name, array in sent.tensors.items():
            other = item.tensors[name]
            assert (other.dtype, other.shape) == (array.dtype, array.shape), name
            assert other.flags.aligned, name
            assert np.array_equal(other, array), name


def test_images_are_the_same_at_the_other_end() -> None:
    items = (item_of(1, *SIZES), item_of(2))
    body, *parts = parts_of(with_images(*items))
    check_same(message_of(body, parts), items)


def test_large_tensors_are_sent_as_they_are() -> None:
    item = item_of(1, 3_000_000)
    body, *parts = parts_of(with_images(item))
    assert len(body) < 2**17
    assert np.shares_memory(np.frombuffer(parts[0], np.uint8), item.tensors["uint8 3000000"])
    received = message_of(body, parts)
    assert isinstance(received, Add)
    arrays = request_of(received).media[0].tensors.values()
    assert any(np.shares_memory(array, np.frombuffer(parts[0], np.uint8)) for array in arrays)


def test_a_message_with_other_parts_is_refused() -> None:
    body, *parts = parts_of(with_images(item_of(1, 3_000_000)))
    for wrong in (parts[:-1], [*parts, b"more"]):
        with pytest.raises(msgspec.MsgspecError, match="parts"):
            message_of(body, wrong)
    with pytest.raises(msgspec.MsgspecError, match="parts"):
        message_of(encode(Abort([3])), parts)


def test_images_reach_the_host_between_other_messages(tmp_path: Path) -> None:
    """A message in parts is one message: those before and after it stay whole."""
    post = ZmqPost(f"ipc://{tmp_path}/engine")
    line = ZmqLine(f"ipc://{tmp_path}/engine", b"front end")
    items = (item_of(3, 3_000_000), item_of(4, 70_000))
    sent: list[ToEngine] = [Abort([1]), with_images(*items), Abort([2]), with_images(items[0])]

    def send() -> None:
        for message in sent:
            line.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    received: list[ToEngine] = []
    while len(received) < len(sent):
        post.wait(5.0)
        for name, message in post.take():
            assert name == b"front end"
            received.append(message)
    sender.join()
    line.close()
    post.close()
    assert received[0] == sent[0]
    assert received[2] == sent[2]
    check_same(received[1], items)
    check_same(received[3], items[:1])


def test_what_an_engine_counts_of_its_tiers_reaches_a_front_end() -> None:
    counted = TierStats(host_limit=9)
    counted.missed["slower"] += 1
    counted.load_s["disk"] += 0.5
    frame = decode_to_front_end(encode(StepFrame(0, 0.0, b"", b"", Load(tiers=counted))))
    assert isinstance(frame, StepFrame)
    assert frame.load.tiers == counted


def test_the_host_waits_in_a_program_with_thousands_of_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    try:
        with ExitStack() as files:
            for _ in range(1100):
                files.enter_context(open(os.devnull))
            post = ZmqPost(f"ipc://{tmp_path}/post")
            files.callback(post.close)
            post.wait(0.0)
            post.wake()
            post.wait(60.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
