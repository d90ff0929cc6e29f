"""Images of traces: reading, drawing and recording them; what they cost in a simulation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import PrivateAttr

from dovetail.errors import ConfigError
from dovetail_lab.records import RunResult
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import Arrival, ReplicaLoad, Router
from dovetail_lab.simulate import replay
from dovetail_lab.token_ids import prompt_ids
from dovetail_lab.traces import Span, Trace, TraceError, TraceImage, TraceRequest, load_trace
from dovetail_lab.workloads import WorkloadOptions, load_workload
from tests.lab.runs import engine, request, run, trace
from tests.lab.trace_files import lines, written
from tests.support import examples

ITEM_S = 0.5
ROW_S = 0.01
COSTS = {"image_s": ITEM_S, "image_row_s": ROW_S}
FREE = {"image_s": 0.0, "image_row_s": 0.0}
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
CAT = TraceImage(2, 20, "cat")
DOG = TraceImage(2, 20, "dog")


def seen(index: int, at: float, *images: TraceImage, **fields: Any) -> TraceRequest:
    return request(index, at, **{"prompt": 40, "output": 3, **fields}, images=images)


def with_costs(*requests: TraceRequest, **config: Any) -> RunResult:
    return run(requests, **{"executor": COSTS, **config})


def without_images(requests: list[TraceRequest]) -> list[TraceRequest]:
    return [
        request(i, r.arrival_time, r.prompt_tokens, r.output_tokens) for i, r in enumerate(requests)
    ]


def first_token_s(result: RunResult) -> list[float]:
    return [record.token_times_s[0] - record.arrival_s for record in result]


def encoded(result: RunResult) -> str:
    [note] = [note for note in result.notes if note.startswith("images encoded")]
    return note


# -- traces --


def test_a_row_says_where_its_images_are(tmp_path: Path) -> None:
    images = [
        {"start": 3, "rows": 100, "digest": "cat"},
        {"start": 103, "rows": 497, "digest": 7},
    ]
    [plain, other] = load_trace(written(tmp_path, lines(GOOD, {**GOOD, "images": images})))
    assert plain.images == ()
    assert other.images == (TraceImage(3, 100, "cat"), TraceImage(103, 497, "7"))


def image(**fields: Any) -> dict[str, Any]:
    return {"start": 3, "rows": 100, "digest": "cat", **fields}


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("cat", "expected a list of images, got 'cat'"),
        ([5], "expected start, rows and digest of each, got 5"),
        (
            [{"start": 3, "rows": 5}],
            "expected start, rows and digest of each, got {'start': 3, 'rows': 5}",
        ),
        (
            [image(pixels=9)],
            "expected start, rows and digest of each, got {'start': 3, 'rows': 100,",
        ),
        ([image(rows=0)], "expected a whole number of at least 1, got 0"),
        ([image(rows=True)], "expected a whole number of at least 1, got True"),
        ([image(start=-1)], "expected a whole number of at least 0, got -1"),
        ([image(start=10**30)], "expected a whole number from 0 to 16,777,216, got 1000"),
        ([image(digest=None)], "expected a text or a whole number as digest, got None"),
        ([image(digest=True)], "expected a text or a whole number as digest, got True"),
        ([image(digest="\ud83d")], "expected a digest that is text, got '\\ud83d'"),
        ([image(rows=598)], "an image ends at 601, after the 600 prompt tokens"),
        ([image(), image()], "expected images in order, one starts at 3 < 103"),
    ],
)
def test_bad_images_are_named_with_their_line(images: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(written(tmp_path, lines(GOOD, {**GOOD, "images": images})))
    said = str(caught.value).replace(f"{tmp_path}/", "")
    assert said.startswith(f"trace:2: column images: {message}")


def test_a_picture_has_tokens_of_its_own_wherever_it_is() -> None:
    vocab_size = 1000
    bare = prompt_ids(seen(0, 0.0), vocab_size)
    one = prompt_ids(seen(0, 0.0, CAT), vocab_size)
    moved = prompt_ids(seen(1, 0.0, CAT._replace(start=11)), vocab_size)
    other = prompt_ids(seen(0, 0.0, DOG), vocab_size)
    larger = prompt_ids(seen(0, 0.0, CAT._replace(rows=21)), vocab_size)
    assert (one[:2] == bare[:2]).all()
    assert (one[22:] == bare[22:]).all()
    assert (one[2:22] == moved[11:31]).all()
    for differing in (bare, other, larger):
        assert (one[2:22] != differing[2:22]).any()


# -- workloads --

SPEC = "arrivals=poisson(2) requests=200 prompt=uniform(5, 30) output=uniform(1, 20)"


def drawn(text: str, seed: int = 0) -> Trace:
    return load_workload(text, WorkloadOptions(seed=seed))


@given(st.sampled_from(["", "turns=uniform(1, 4)", "system=9 turns=3"]), st.integers(0, 99))
@examples(10, 100)
def test_images_come_on_top_of_a_workload(more: str, seed: int) -> None:
    plain = drawn(f"{SPEC} {more}", seed)
    images = drawn(f"{SPEC} {more} image_share=0.4 image_rows=uniform(10, 90)", seed)
    assert images == drawn(f"{SPEC} {more} image_share=0.4 image_rows=uniform(10, 90)", seed)
    for one, other in zip(plain, images, strict=True):
        assert (one.id, one.arrival_time, one.output_tokens) == (
            other.id,
            other.arrival_time,
            other.output_tokens,
        )
        rows = sum(image.rows for image in other.images)
        assert other.prompt_tokens == one.prompt_tokens + rows
        before = 0
        for image in other.images:
            assert before <= image.start
            assert 10 <= image.rows <= 90
            before = image.stop
        assert before <= other.prompt_tokens


def test_the_share_of_requests_with_images_is_that_of_the_spec() -> None:
    assert not any(request.images for request in drawn(SPEC))
    assert all(request.images for request in drawn(f"{SPEC} image_share=1"))
    some = sum(bool(request.images) for request in drawn(f"{SPEC} image_share=0.25"))
    assert 30 < some < 70


def test_pictures_are_drawn_from_so_many_and_differ_between_streams() -> None:
    few = drawn(f"a: {SPEC} image_share=1 pictures=4; b: {SPEC} image_share=1 pictures=4")
    many = drawn(f"{SPEC} image_share=1")
    assert len({image.stream for request in few for image in request.images}) == 8
    assert len({image.stream for request in many for image in request.images}) == 200


def test_the_images_of_a_chat_come_again_in_its_next_turns() -> None:
    turns = drawn("arrivals=at_once requests=1 prompt=9 output=5 turns=4 image_share=0.6", seed=1)
    images = [request.images for request in turns]
    assert 1 < len(images[-1]) < 4
    for before, after in pairwise(images):
        assert after[: len(before)] == before
    ids = [prompt_ids(request, 1000) for request in turns]
    for short, long in pairwise(ids):
        assert (long[: len(short)] == short).all()


@pytest.mark.parametrize("key", ["image_share=2", "image_rows=uniform(9, 3)", "pictures=0"])
def test_a_wrong_key_of_images_is_named(key: str) -> None:
    with pytest.raises(TraceError, match=key.partition("=")[0]):
        drawn(f"{SPEC} image_share=1 {key}" if key != "image_share=2" else f"{SPEC} {key}")


# -- simulation --


def test_a_step_takes_longer_by_its_images_and_their_rows() -> None:
    two = (CAT, TraceImage(25, 7, "bird"))
    bare, one, both = (with_costs(seen(0, 0.0, *images)) for images in ((), (CAT,), two))
    delays = [
        np.subtract(r.requests[0].token_times_s, bare.requests[0].token_times_s)
        for r in (one, both)
    ]
    np.testing.assert_allclose(delays[0], ITEM_S + 20 * ROW_S)
    np.testing.assert_allclose(delays[1], 2 * ITEM_S + 27 * ROW_S)
    assert encoded(both) == "images encoded: 2, with 27 rows, in 1.270 s of steps"
    assert not [note for note in bare.notes if "images" in note]


def test_images_take_by_default_as_long_as_measured() -> None:
    picture = TraceImage(0, 1024, "cat")
    config = {"max_model_len": 2048, "max_num_batched_tokens": 2048}
    one, bare = (
        run([request(0, 0.0, 1030, 1, images=images)], **config) for images in ((picture,), ())
    )
    assert first_token_s(one)[0] - first_token_s(bare)[0] == pytest.approx(0.033)


def test_a_profile_says_what_images_cost_and_a_factor_multiplies_it() -> None:
    profile = {**engine()["executor"], "step_time": {**profile_of_linear(), **COSTS}}
    once = run([seen(0, 0.0, CAT)], executor=profile)
    twice = run([seen(0, 0.0, CAT)], executor={**profile, "step_time_factor": 2})
    np.testing.assert_allclose(first_token_s(twice), np.multiply(2, first_token_s(once)))
    assert first_token_s(once) == first_token_s(with_costs(seen(0, 0.0, CAT)))


def profile_of_linear() -> dict[str, Any]:
    return {"name": "made", "step_time": engine()["executor"]["step_time"]}


def test_the_same_picture_is_paid_for_once() -> None:
    """Without reuse of K and V: what is kept are its rows."""
    again = with_costs(seen(0, 0.0, CAT), seen(1, 60.0, CAT._replace(start=5)), seen(2, 120.0, DOG))
    bare = with_costs(seen(0, 0.0), seen(1, 60.0), seen(2, 120.0))
    cost = ITEM_S + 20 * ROW_S
    np.testing.assert_allclose(
        np.subtract(first_token_s(again), first_token_s(bare)), [cost, 0, cost], atol=1e-12
    )
    assert encoded(again).startswith("images encoded: 2, with 40 rows")


def test_a_picture_that_had_to_make_room_is_paid_for_again() -> None:
    requests = [seen(index, 60.0 * index, one) for index, one in enumerate((CAT, DOG, CAT))]
    assert encoded(with_costs(*requests)).startswith("images encoded: 2,")
    assert encoded(with_costs(*requests, media={"cache_rows": 30})).startswith("images encoded: 3,")


def test_a_step_encodes_no_more_rows_than_the_engine_allows() -> None:
    requests = [seen(0, 0.0, CAT, prompt=25), seen(1, 0.0, DOG, prompt=25)]
    together = with_costs(*requests, media={"step_rows": 40})
    apart = with_costs(*requests, media={"step_rows": 39})
    assert len({record.token_times_s[0] for record in together}) == 1
    assert len({record.token_times_s[0] for record in apart}) == 2
    assert encoded(together) == encoded(apart)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests = []
    at = 0.0
    for index in range(draw(st.integers(1, 8))):
        at += draw(st.sampled_from([0.0, 0.01, 0.2, 2.0]))
        images: list[TraceImage] = []
        place = draw(st.integers(0, 5))
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.integers(1, 4))
            images.append(TraceImage(place, 6 * kind, str(kind)))
            place = images[-1].stop + draw(st.integers(0, 9))
        prompt = place + draw(st.integers(1, 20))
        requests.append(request(index, at, prompt, draw(st.integers(1, 9)), images=tuple(images)))
    return requests


POLICIES = ["fcfs", "sarathi", "vtc", "priority"]


@given(traces(), st.sampled_from(POLICIES))
@examples(15, 300)
def test_images_that_cost_nothing_change_nothing(requests: list[TraceRequest], policy: str) -> None:
    config = {"scheduler": policy, "executor": FREE}
    with_them = run(requests, **config)
    bare = run(without_images(requests), **config)
    for one, other in zip(with_them, bare, strict=True):
        np.testing.assert_array_equal(one.token_times_s, other.token_times_s)


@given(traces(), st.sampled_from(POLICIES))
@examples(15, 300)
def test_requests_far_apart_are_later_by_what_their_images_cost(
    requests: list[TraceRequest], policy: str
) -> None:
    apart = [
        request(i, 100.0 * i, r.prompt_tokens, r.output_tokens, images=r.images)
        for i, r in enumerate(requests)
    ]
    bare = run(without_images(apart), scheduler=policy, executor=COSTS)
    result = run(apart, scheduler=policy, executor=COSTS)
    known: set[int] = set()
    for record, other, one in zip(result, bare, apart, strict=True):
        new = {image.stream: image.rows for image in one.images if image.stream not in known}
        known |= set(new)
        cost = ITEM_S * len(new) + ROW_S * sum(new.values())
        np.testing.assert_allclose(
            record.token_times_s[-1] - other.token_times_s[-1], cost, atol=1e-9
        )


@given(traces(), st.sampled_from(POLICIES), st.booleans())
@examples(8, 100)
def test_the_same_trace_gives_the_same_decisions(
    requests: list[TraceRequest], policy: str, overlap: bool
) -> None:
    config = {
        "scheduler": policy,
        "executor": COSTS,
        "overlap": overlap,
        "media": {"cache_rows": 24, "step_rows": 24},
        "kv_cache": "prefix",
    }
    one, other = run(requests, **config), run(requests, **config)
    for column in ("time_s", "device_s", "prefill_tokens", "cached_tokens", "running"):
        np.testing.assert_array_equal(
            getattr(one.timeline, column), getattr(other.timeline, column)
        )
    assert one.notes == other.notes
    assert all(record.completed for record in one)


def test_the_prefix_cache_finds_the_same_picture_and_no_other() -> None:
    requests = [seen(i, 60.0 * i, one) for i, one in enumerate((CAT, CAT, DOG))]
    alike = [replace(one, spans=(Span(9, 0, 40),)) for one in requests]
    result = run(alike, kv_cache="prefix")
    assert [record.cached_tokens for record in result] == [0, 36, 0]


# -- refusals --


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"media": {"cache_rows": 19}},
            "an image has 20 rows, and at most 19 fit (media.cache_rows)",
        ),
        ({"media": {"images": False}}, "this engine takes no images"),
        (
            {"limits": {"max_images": 1}},
            "images of a prompt must be at most 1 (limits.max_images), got 2",
        ),
    ],
)
def test_a_request_is_refused_alone(config: dict[str, Any], why: str) -> None:
    refused, served = run([seen(0, 0.0, CAT, TraceImage(30, 3, "x")), seen(1, 0.0)], **config)
    assert (refused.finish_reason, refused.stop_reason) == ("rejected", why)
    assert served.completed


def test_images_can_only_be_simulated() -> None:
    with pytest.raises(ConfigError, match="requests with images can only be simulated"):
        replay({"model": "demo"}, trace(seen(0, 0.0, CAT)))


# -- recording --


@given(requests=traces())
@examples(10, 100)
def test_a_recorded_run_is_a_trace_that_runs_the_same(
    requests: list[TraceRequest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "trace.jsonl"
    result = run(requests, executor=COSTS, observers=[{"name": "trace", "path": str(path)}])
    again = load_trace(path)
    assert sorted(map(kept, again)) == sorted(map(kept, requests))
    pictures = {(picture.digest, picture.rows) for one in again for picture in one.images}
    assert len(pictures) == len({picture.stream for one in requests for picture in one.images})
    assert ends(run(again, executor=COSTS)) == pytest.approx(ends(result))


def kept(one: TraceRequest) -> tuple[Any, ...]:
    """What a recording keeps of a request besides its arrival and its text."""
    places = [(picture.start, picture.rows) for picture in one.images]
    return one.prompt_tokens, one.output_tokens, places


def ends(result: RunResult) -> list[float]:
    """When answers end, after the first arrival."""
    first = min(record.arrival_s for record in result)
    return sorted(float(record.token_times_s[-1]) - first for record in result)


def test_a_recording_holds_no_text_and_shares_what_the_prompts_share(tmp_path: Path) -> None:
    requests = [
        seen(i, 60.0 * i, picture, prompt=600, spans=(Span(9, 0, 600),))
        for i, picture in enumerate((CAT, CAT, DOG))
    ]
    path = tmp_path / "trace.jsonl"
    run(
        requests,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        observers=[{"name": "trace", "path": str(path)}],
    )
    first, second, other = map(json.loads, path.read_text().splitlines())
    assert set(first) == {"timestamp", "input_length", "output_length", "hash_ids", "images"}
    assert first["hash_ids"] == second["hash_ids"]
    assert first["hash_ids"][0] != other["hash_ids"][0]
    assert first["hash_ids"][1] == other["hash_ids"][1]
    assert second["timestamp"] == 60_000


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observer trace: path: .*can't be written"):
        run([seen(0, 0.0)], observers=[{"name": "trace", "path": str(tmp_path)}])


# -- replicas --


class First(Router):
    """Sends all to the first replica, and notes what its cache holds of each."""

    sees_cache: ClassVar[bool] = True
    _cached: list[int] = PrivateAttr(default_factory=list)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        self._cached.append(replicas[0].cached_tokens)
        return 0

    @property
    def cached(self) -> list[int]:
        return self._cached


def test_a_router_sees_which_pictures_a_replica_holds() -> None:
    requests = [seen(i, 60.0 * i, one) for i, one in enumerate((CAT, CAT, DOG))]
    alike = [replace(one, spans=(Span(9, 0, 40),)) for one in requests]
    router = First()
    config = engine(kv_cache="prefix", executor=COSTS)
    result = replay_replicas(config, trace(*alike), 2, router)
    assert router.cached == [record.cached_tokens for record in result] == [0, 36, 0]
    assert encoded(result).startswith("images encoded: 2, with 40 rows")
