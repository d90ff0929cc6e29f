"""Rules, penalties and log-probabilities on the device alone: with `Capture.FULL` a sampler draws
what it does without, and the kernels change logits as their twins do, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import Capture, RowSampling, SampledTokens
from dovetail.errors import UnsupportedError
from dovetail.nn import logprobs
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail_samplers import default, device_changes, table
from dovetail_samplers.default import CAPTURED_LOGPROBS
from tests.kernels import DEVICE, DTYPES, ON_GPU, runs_kernels, take_kernels
from tests.rounding import assert_rounded
from tests.samplers.helpers import Ready, Row, plain, ready, with_drafts
from tests.support import examples

pytest.importorskip("triton")

from dovetail_samplers import changes_kernels

some = examples(quick=200 if ON_GPU else 8, full=3000 if ON_GPU else 400)
few = examples(quick=60 if ON_GPU else 2, full=600 if ON_GPU else 100)
penalty = st.sampled_from([0.5, 1.0, 1.05, 1.3, 2.0])
share = st.sampled_from([-1.1, 0.0, 0.1, 1.5])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks so short that rows have several."""
    take_kernels(monkeypatch, default, table, logprobs)
    monkeypatch.setattr(changes_kernels, "CHUNK", 4)
    monkeypatch.setattr(changes_kernels, "TILE", 16)


@st.composite
def any_rows(draw: st.DrawFn, most: int = 4) -> list[Row]:
    """Rows of one vocabulary, whose numbers aren't exact in float32."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocab = draw(st.sampled_from([1, 3, 12, 50]))
    token = st.integers(0, vocab - 1)
    tokens = st.lists(token, max_size=14)
    rows = []
    for _ in range(draw(st.integers(1, most))):
        sampling = RowSampling(
            temperature=draw(st.sampled_from([0.0, 0.8])),
            top_k=draw(st.sampled_from([0, 3])),
            seed=draw(st.integers(0, 99)),
            logit_bias=tuple(
                draw(
                    st.dictionaries(token, st.sampled_from([-100.0, -0.3, 0.7]), max_size=6)
                ).items()
            ),
            allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=6).map(tuple)),
            bad_words=tuple(
                tuple(word)
                for word in draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=6))
            ),
            min_tokens=draw(st.integers(0, 6)),
            stop_token_ids=tuple(draw(st.lists(token, max_size=6))),
            repetition_penalty=draw(penalty),
            presence_penalty=draw(share),
            frequency_penalty=draw(share),
            logprobs=draw(st.none() | st.integers(0, CAPTURED_LOGPROBS)),
        )
        logits = generator.normal(size=vocab) * 5
        if draw(st.booleans()):
            logits[generator.random(vocab) < draw(st.sampled_from([0.3, 0.9, 1.0]))] = draw(
                st.sampled_from([-np.inf, np.nan, 0.0, -0.0])
            )
        rows.append(
            Row(
                logits.tolist(),
                draw(st.sampled_from([sampling, RowSampling()])),
                (0, *draw(tokens)),
                tuple(draw(tokens)),
            )
        )
    return rows


def twin_of(r: Ready) -> torch.Tensor:
    """The logits as plain torch changes them."""
    changed = r.logits.to(torch.float32, copy=True)
    r.sampler._change_logits(changed, r.lines, r.host_rows, r.sampler._table.needs[r.host_rows])
    return changed


def changed(r: Ready) -> torch.Tensor:
    assert r.sampler._changes is not None
    return r.sampler._changes.change(r.logits, r.lines)


def bits(logits: torch.Tensor) -> object:
    """NaN like any other, and 0 like -0."""
    return torch.where(logits.isnan(), torch.nan, logits.float() + 0.0).view(torch.int32).tolist()


@runs_kernels
@given(rows=any_rows(), dtype=st.sampled_from(DTYPES))
@some
def test_logits_are_changed_as_the_twin_does_to_the_bit(
    rows: list[Row], dtype: torch.dtype
) -> None:
    r = ready(rows, dtype=dtype, device=str(DEVICE))
    before = r.logits.clone()
    ours = bits(changed(r))
    assert bits(r.logits) == bits(before), "raw logits are still wanted"
    assert ours == bits(twin_of(r))


@runs_kernels
@given(rows=any_rows(), places=st.permutations(range(6)), dtype=st.sampled_from(DTYPES))
@few
def test_what_is_captured_in_full_is_what_is_sampled(
    rows: list[Row], places: list[int], dtype: torch.dtype
) -> None:
    r = ready(rows, places[: len(rows)], dtype=dtype, device=str(DEVICE))
    assert r.sampler.capture_for(r.host_rows) is not None
    assert_same(r, r.captured(Capture.FULL), r.sample())


def assert_same(r: Ready, captured: SampledTokens, sampled: SampledTokens) -> None:
    """The same tokens, and of each row as many log-probabilities as it asked for."""
    assert captured.token_ids.tolist() == sampled.token_ids.tolist()
    asked = (
        r.sampler._table.logprobs[r.host_rows],
        r.sampler._table.needs[r.host_rows] & default.Needs.LOGPROBS,
    )
    for place, (k, asks) in enumerate(zip(*asked, strict=True)):
        if asks:
            assert captured.logprobs is not None
            assert sampled.logprobs is not None
            ours, theirs = captured.logprobs, sampled.logprobs
            assert (
                ours.token_ids[place, : 1 + k].tolist() == theirs.token_ids[place, : 1 + k].tolist()
            )
            assert bits(ours.logprobs[place, : 1 + k]) == bits(theirs.logprobs[place, : 1 + k])
            assert ours.ranks[place] == theirs.ranks[place]


@runs_kernels
@given(rows=any_rows(), most=st.integers(1, 4), dtype=st.sampled_from(DTYPES))
@few
def test_what_processors_change_is_drawn_and_other_rows_stay_to_the_bit(
    rows: list[Row], most: int, dtype: torch.dtype
) -> None:
    rows = [rows[0], *rows]
    r = ready(rows, dtype=dtype, device=str(DEVICE))
    seen, chosen, twin = (
        torch.zeros(r.logits.shape, device=DEVICE),
        len(rows[0].logits) - 1,
        bits(twin_of(r)),
    )
    assert r.sampler._changes is not None
    r.sampler._changes.most = most

    def process(logits: torch.Tensor, start: int) -> None:
        seen[start : start + len(logits)] = logits
        if start == 0:  # the first line can draw only one token
            logits[0] = -torch.inf
            logits[0, chosen] = 1.0

    plain, asks = (
        r.sample(),
        [index for index, row in enumerate(rows) if index and row.sampling.logprobs is not None],
    )
    for drawn in (
        r.captured(Capture.FULL, process),
        r.sample(process),
    ):
        assert bits(seen) == twin
        assert drawn.token_ids[0] == chosen
        assert drawn.token_ids[1:].tolist() == plain.token_ids[1:].tolist()
        if asks:
            assert drawn.logprobs is not None
            assert plain.logprobs is not None
            assert bits(drawn.logprobs.logprobs[asks, :1]) == bits(
                plain.logprobs.logprobs[asks, :1]
            )


@runs_kernels
@given(rows=any_rows(most=2), data=st.data())
@few
def test_a_line_after_drafts_is_changed_and_drawn_as_a_row_that_has_them(
    rows: list[Row], data: st.DataObject
) -> None:
    token = st.integers(0, len(rows[0].logits) - 1)
    lines, places, own = with_drafts(rows, [data.draw(st.lists(token, max_size=3)) for _ in rows])
    ours, theirs = ready(lines, places, device=str(DEVICE)), ready(own, device=str(DEVICE))
    assert bits(changed(ours)) == bits(twin_of(ours)) == bits(changed(theirs))
    assert_same(ours, ours.captured(Capture.FULL), theirs.sample())


@runs_kernels
@given(rows=any_rows(most=5), most=st.integers(1, 3))
@few
def test_how_many_rows_there_is_room_for_changes_nothing(rows: list[Row], most: int) -> None:
    r = ready(rows, device=str(DEVICE))
    expected = r.captured(Capture.FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_changes, "AT_ONCE", most * r.logits.shape[1])
        narrow = ready(rows, device=str(DEVICE))
    assert narrow.sampler._changes is not None
    assert narrow.sampler._changes.most == min(most, len(rows))
    assert_same(r, replace(r, sampler=narrow.sampler).captured(Capture.FULL), expected)


@runs_kernels
def test_log_probabilities_are_captured_without_their_kernel_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*asked: object) -> NoReturn:
        raise KernelUnavailable("unavailable")

    ways: list[dict[str, Any]] = [
        {"logprobs": 3, "presence_penalty": 1.0},
        {"logprobs": 0},
        {},
        {"logprobs": 20, "temperature": 0.0},
    ]
    r = ready(
        [
            Row(np.linspace(0, 3, 30).tolist(), RowSampling(seed=seed, **way), (3,), (29,))
            for seed, way in enumerate(ways)
        ],
        device=str(DEVICE),
    )
    expected = r.sample()
    monkeypatch.setattr("dovetail.nn.kernels.logprobs.top_logprobs", fail)
    captured = r.captured(Capture.FULL)
    assert captured.logprobs is not None
    assert expected.logprobs is not None
    assert captured.token_ids.tolist() == expected.token_ids.tolist()
    assert captured.logprobs.token_ids.tolist() == expected.logprobs.token_ids.tolist()
    assert captured.logprobs.ranks.tolist() == expected.logprobs.ranks.tolist()
    assert_rounded(captured.logprobs.logprobs, expected.logprobs.logprobs, 30 + 3)


@runs_kernels
def test_padding_changes_nothing() -> None:
    rows = [
        Row(
            [0.0, 1.0, 2.0], RowSampling(temperature=0.0, repetition_penalty=3.0, logprobs=1), (2,)
        ),
        Row([9.0, 1.0, 2.0], RowSampling(top_k=2)),
    ]
    r = ready(rows, device=str(DEVICE))
    logits, index = torch.cat((r.logits, r.logits * torch.nan)), plain([0, 1, 2, 2], str(DEVICE))
    padded = replace(r, logits=logits, lines=index).captured(Capture.FULL)
    assert padded.token_ids[2:].tolist() == [0, 0]
    assert_same(r, replace(padded, token_ids=padded.token_ids[:2]), r.sample())


@runs_kernels
def test_a_row_is_forgotten_with_its_request() -> None:
    rows = [
        Row(
            [0.0, 1.0, 2.0],
            RowSampling(temperature=0.0, allowed_token_ids=(0,), presence_penalty=1.0),
            (2,),
            (0,),
        )
    ]
    r = ready(rows, device=str(DEVICE))
    assert r.sample().token_ids.tolist() == [0]
    r.update([0], [(0, RowSampling(temperature=0.0))])
    assert changed(r).tolist() == r.logits.tolist()
    r.update([0], [(0, replace(rows[0].sampling, allowed_token_ids=(1,)))])
    assert changed(r).tolist() == [[-np.inf, 1.0, -np.inf]]


@runs_kernels
def test_a_token_that_was_seen_often_is_changed_once() -> None:
    """More often than a chunk is long, in prompt and output."""
    sampling = RowSampling(
        temperature=0.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    r = ready([Row([8.0, -1.0, 4.0], sampling, (0,) * 9 + (1,), (0,) * 11)], device=str(DEVICE))
    assert changed(r).tolist() == [[4.0 - 0.5 - 11 * 0.25, -2.0, 4.0]]


@runs_kernels
def test_long_bad_words_and_many_are_matched_at_their_ends() -> None:
    word = tuple(range(1, 10))
    sampling = RowSampling(
        temperature=0.0, bad_words=(word, (2, *word[1:]), (*word, 0), (0,), *(((3, 0),) * 20))
    )
    r = ready([Row([float(i) for i in range(10)], sampling, (0, 0), word[:-1])], device=str(DEVICE))
    assert changed(r).tolist() == [[-np.inf, *map(float, range(1, 9)), -np.inf]]


@pytest.mark.parametrize("asked", [CAPTURED_LOGPROBS, CAPTURED_LOGPROBS + 1])
@runs_kernels
def test_many_logprobs_are_not_captured(asked: int) -> None:
    rows = [Row([0.0] * 50, RowSampling(logprobs=k)) for k in (None, asked)]
    assert ready(rows, device=str(DEVICE)).sampler.capture_for(np.array([0, 1])) is (
        Capture.FULL if asked <= CAPTURED_LOGPROBS else None
    )


def test_without_kernels_nothing_is_captured_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "use_kernels", lambda *tensors: False)
    r = ready([Row([0.0, 1.0], RowSampling(repetition_penalty=2.0))])
    assert r.sampler.capture_for(r.host_rows) is None
    with pytest.raises(UnsupportedError, match="can't record FULL without Triton"):
        r.captured(Capture.FULL)
