"""Drawing on the device alone: with `Capture.TOKENS` a sampler draws what it does without, and the
fused kernels those of their twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.component import NoOptions
from dovetail.api.sampler import Capture, RowHistory, RowSampling, Sampler, SamplerContext
from dovetail_samplers.default import DefaultSampler
from dovetail_samplers.noise import exponentials, id_hashes, noise_bits, seed_state, stream_keys
from dovetail_samplers.table import DeviceRows, Parameters, draw_plain
from tests.kernels import DEVICE, DTYPES, ON_GPU, runs_kernels
from tests.samplers.helpers import Ready, Row, plain, ready, with_drafts
from tests.support import FULL, examples

pytest.importorskip("triton")

import triton
import triton.language as tl

from dovetail_samplers import fused
from dovetail_samplers.fused import SIZES, Sizes

# so that short rows have several of each
SMALL = Sizes(tile=64, rows=2, programs=1, group=8, chunk=64)
FILTERS = [
    RowSampling(temperature=0.0),
    RowSampling(),
    RowSampling(temperature=0.3),
    RowSampling(top_k=1),
    RowSampling(top_k=3),
    RowSampling(top_k=50, top_p=0.9),
    RowSampling(temperature=0.6, top_k=20, top_p=0.95),
    RowSampling(top_p=0.5),
    RowSampling(temperature=2.0, top_p=0.999),
    RowSampling(min_p=0.1),
    RowSampling(temperature=1.5, top_p=0.9, min_p=0.02),
    RowSampling(top_k=30, min_p=0.05),
    RowSampling(top_k=40, top_p=0.8, min_p=0.01),
    RowSampling(temperature=0.9, top_p=1e-6),
]

# In the interpreter, which takes a second a row, the quick profile keeps one of each branch.
A_FEW_FILTERS = FILTERS if ON_GPU or FULL else [FILTERS[0], FILTERS[4], FILTERS[7], FILTERS[12]]
KEEPING_A_FEW: list[dict[str, float]] = [
    {"top_k": 4},
    {"top_p": 0.3},
    {"top_k": 7, "top_p": 0.6},
    {"min_p": 0.9},
    {"top_p": 0.7, "min_p": 0.88},
]
WITH_TIES = (
    KEEPING_A_FEW if ON_GPU or FULL else [filters for filters in KEEPING_A_FEW if len(filters) == 1]
)
WITHOUT_TIES = (
    KEEPING_A_FEW if ON_GPU or FULL else [filters for filters in KEEPING_A_FEW if len(filters) == 2]
)

few = examples(quick=100 if ON_GPU else 2, full=1000 if ON_GPU else 100)
some = examples(quick=200 if ON_GPU else 8, full=3000 if ON_GPU else 200)


@st.composite
def filtered_rows(draw: st.DrawFn, max_vocab: int = 150) -> list[Row]:
    """Rows of one vocabulary; some logits with ties, some with tokens that are ruled out."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocab = draw(st.integers(1, max_vocab))
    rows = []
    for sampling in draw(st.lists(st.sampled_from(FILTERS), min_size=1, max_size=4)):
        logits = generator.normal(size=vocab) * draw(st.sampled_from([0.0, 0.1, 3.0, 10.0]))
        if draw(st.booleans()):
            logits = np.round(logits * 2) / 2
        if draw(st.booleans()):
            logits[generator.random(vocab) < 0.3] = -np.inf
        sampling = replace(sampling, seed=draw(st.integers(-(2**63), 2**64 - 1)))
        rows.append(
            Row(
                logits.tolist(),
                sampling,
                (0,) * draw(st.integers(1, 3)),
                (1,) * draw(st.integers(0, 3)),
            )
        )
    return rows


def fused_draw(r: Ready, sizes: Sizes = SMALL) -> list[int]:
    device_rows, history = r.sampler._device_rows, r.sampler.context.history
    return fused.draw(
        r.logits, r.lines, device_rows.records, history, device_rows.hashes, sizes
    ).tolist()


def plain_draws(r: Ready) -> list[set[int]]:
    """The twin's tokens in float64, with top-p and min-p as they are and moved by what rounding may
    move them."""
    device_rows, history = r.sampler._device_rows, r.sampler.context.history
    of = device_rows.parameters(r.lines.rows)
    tokens = []
    for moved in (-1e-5, 0.0, 1e-5):
        near = Parameters(
            of.temperature, of.top_k, of.top_p * (1 + moved), of.min_p * (1 + moved), of.seed_states
        )
        tokens.append(draw_plain(r.logits, r.lines, near, history, device_rows.hashes).tolist())
    return [set(choices) for choices in zip(*tokens, strict=True)]


def assert_drawn_like_the_twin(r: Ready, sizes: Sizes = SMALL) -> None:
    ours, theirs = fused_draw(r, sizes), plain_draws(r)
    assert all(token in choices for token, choices in zip(ours, theirs, strict=True)), (
        f"{ours} is not among {theirs}"
    )


# ---- the kernels


@runs_kernels
@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**31 - 1))
@some
def test_the_noise_is_the_same_to_the_bit(seed: int, position: int) -> None:
    state, hashes = torch.tensor([seed_state(seed)]), id_hashes(64)
    bits = torch.empty(64, dtype=torch.int32, device=DEVICE)
    put_noise_bits[(1,)](
        state.to(DEVICE),
        torch.tensor([position], dtype=torch.int32, device=DEVICE),
        hashes.to(DEVICE),
        bits,
        N=64,
    )
    assert (
        bits.tolist()
        == noise_bits(stream_keys(state, torch.tensor([position])), hashes)[0].tolist()
    )


@triton.jit
def put_noise_bits(state, position, hashes, out, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, N)
    first, second = fused.stream_keys(tl.load(state), tl.load(position))
    tl.store(out + i, fused.noise_bits(first, second, tl.load(hashes + i)))


@runs_kernels
def test_exponentials_are_the_twins_over_ln_2_and_small_ones_keep_their_precision() -> None:
    hashes = id_hashes(2**17)
    keys = stream_keys(torch.tensor([seed_state(3)]), torch.tensor([5]))
    twin = exponentials(keys, hashes)[0].double() / np.log(2)
    ours = torch.empty(len(hashes), device=DEVICE)
    put_exponentials[(1,)](keys.to(DEVICE), hashes.to(DEVICE), ours, N=len(hashes))
    error = (ours.cpu().double() / twin - 1).abs()
    assert twin.min() < 1e-4
    assert error[twin < 1.4].max() < 2e-6
    assert error.max() < 1e-3, "where 1 - u is small, the last bit of u makes a difference"


@triton.jit
def put_exponentials(keys, hashes, out, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    first, second = (
        tl.load(keys).to(tl.uint32, bitcast=True),
        tl.load(keys + 1).to(tl.uint32, bitcast=True),
    )
    for start in range(0, N, 1024):
        i = start + tl.arange(0, 1024)
        tl.store(out + i, fused.exponentials(first, second, tl.load(hashes + i)))


@runs_kernels
@given(rows=filtered_rows(), dtype=st.sampled_from(DTYPES))
@some
def test_any_mix_of_rows_is_drawn_like_the_twin_does(rows: list[Row], dtype: torch.dtype) -> None:
    assert_drawn_like_the_twin(ready(rows, dtype=dtype, device=str(DEVICE)))


@runs_kernels
@given(rows=filtered_rows())
@few
def test_how_the_work_is_cut_changes_nothing(rows: list[Row]) -> None:
    r = ready(rows, device=str(DEVICE))
    assert_drawn_like_the_twin(r, Sizes(tile=256, rows=3, programs=1, group=16, chunk=1024))
    assert_drawn_like_the_twin(r, Sizes(tile=32, group=32, chunk=32))


@runs_kernels
def test_ties_go_to_the_lowest_ids() -> None:
    """All are equal, so that top-k and top-p keep the first ones, whatever tile they lie in."""
    rows = [
        Row([1.5] * 90, replace(sampling, seed=seed))
        for sampling in A_FEW_FILTERS
        for seed in range(40 if ON_GPU else 1)
    ]
    assert_drawn_like_the_twin(ready(rows, device=str(DEVICE)))


@runs_kernels
@pytest.mark.parametrize(
    ("filters", "ties"),
    [*((filters, False) for filters in WITHOUT_TIES), *((filters, True) for filters in WITH_TIES)],
)
def test_of_a_few_likely_tokens_exactly_those_are_drawn_that_the_filters_keep(
    filters: dict[str, float], ties: bool
) -> None:
    """Nearly flat, so that over some seeds each token that is kept comes up, and so would one that
    shouldn't be."""
    logits = np.zeros(13) if ties else np.random.default_rng(3).permutation(13) / 100
    rows = [
        Row(logits.tolist(), RowSampling(seed=seed, **filters))
        for seed in range(60 if ON_GPU else 14)
    ]
    assert_drawn_like_the_twin(ready(rows, device=str(DEVICE)), Sizes(tile=8, group=2, chunk=16))


@runs_kernels
@pytest.mark.parametrize("at", [3, 100])
def test_an_infinite_logit_wins_wherever_it_is(at: int) -> None:
    logits = [float(token % 7) for token in range(150)]
    logits[at], logits[at + 1] = np.inf, -np.inf
    rows = [Row(logits, replace(sampling, seed=1)) for sampling in A_FEW_FILTERS]
    assert fused_draw(ready(rows, device=str(DEVICE))) == [at] * len(rows)


@runs_kernels
@pytest.mark.parametrize("temperature", [1e-45, 1e-3, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_extreme_temperatures_are_no_trouble(temperature: float, filters: dict[str, float]) -> None:
    logits = np.arange(70.0) % 37
    logits[::5] = -np.inf
    assert_drawn_like_the_twin(
        ready(
            [Row(logits.tolist(), RowSampling(temperature=temperature, seed=1, **filters))],
            device=str(DEVICE),
        )
    )


@runs_kernels
@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
def test_a_row_without_numbers_gets_a_valid_token_and_leaves_the_others_alone(value: float) -> None:
    good = np.random.default_rng(0).normal(size=70).tolist()
    rows = [
        Row([value] * 70 if spoiled else good, sampling)
        for sampling in FILTERS[1 :: 3 if ON_GPU or FULL else 10]
        for spoiled in (False, True)
    ]
    drawn = fused_draw(ready(rows, device=str(DEVICE)))
    assert all(0 <= token < 70 for token in drawn)
    assert drawn[::2] == fused_draw(ready(rows[::2], device=str(DEVICE)))
    if value == -np.inf:
        assert set(drawn[1::2]) == {0}


@runs_kernels
@given(rows=filtered_rows(), data=st.data())
@few
def test_a_line_after_drafts_is_drawn_as_a_row_that_has_them(
    rows: list[Row], data: st.DataObject
) -> None:
    drafts = [data.draw(st.lists(st.just(0), max_size=3)) for _ in rows]
    lines, places, own = with_drafts(rows, drafts)
    assert fused_draw(ready(lines, places, device=str(DEVICE))) == fused_draw(
        ready(own, device=str(DEVICE))
    )


@runs_kernels
def test_padding_reads_nothing_and_gets_a_valid_token() -> None:
    r = ready(
        [
            Row([0.0, 1.0, 2.0], RowSampling(temperature=0.0)),
            Row([9.0, 1.0, 2.0], RowSampling(top_k=2)),
        ],
        device=str(DEVICE),
    )
    padded = replace(
        r,
        logits=torch.cat((r.logits, r.logits * torch.nan)),
        lines=plain([0, 1, 2, 2], str(DEVICE)),
    )
    assert fused_draw(padded) == [*fused_draw(r), 0, 0]


@runs_kernels
def test_a_large_vocabulary_is_drawn_from_as_from_a_small_one() -> None:
    logits = np.random.default_rng(1).normal(size=5_003) * 2.0
    rows = [Row(logits.tolist(), replace(sampling, seed=7)) for sampling in A_FEW_FILTERS]
    assert_drawn_like_the_twin(ready(rows, device=str(DEVICE)), SIZES)


@runs_kernels
def test_logits_may_be_a_part_of_wider_rows() -> None:
    r = ready(
        [
            Row([0.0, 4.0, 2.0], RowSampling(temperature=0.0)),
            Row([0.0, 1.0, 2.0], RowSampling(temperature=0.0)),
        ],
        device=str(DEVICE),
    )
    wide = torch.full((2, 8), 9.0, device=DEVICE)
    wide[:, :3] = r.logits
    assert fused_draw(replace(r, logits=wide[:, :3])) == [1, 2]
    assert fused_draw(replace(r, logits=r.logits.t().contiguous().t())) == [1, 2]
    assert fused_draw(replace(r, logits=r.logits[:0], lines=plain([], str(DEVICE)))) == []


# ---- the sampler


@given(rows=filtered_rows())
@examples(quick=80, full=2000)
def test_what_is_captured_gives_the_tokens_that_are_sampled(rows: list[Row]) -> None:
    r = ready(rows)
    assert r.sampler.capture_for(r.host_rows) is Capture.TOKENS
    captured = r.captured(Capture.TOKENS).token_ids.tolist()
    sampled = replace(r, logits=r.logits.clone()).sample().token_ids.tolist()
    assert all(
        mine in choices and theirs in choices
        for mine, theirs, choices in zip(captured, sampled, plain_draws(r), strict=True)
    )


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 0},
        {"logit_bias": ((0, 1.0),)},
        {"bad_words": ((1,),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"allowed_token_ids": (1,)},
        {"min_tokens": 1, "stop_token_ids": (1,)},
    ],
)
def test_what_needs_more_than_temperature_and_filters_is_not_captured(
    more: dict[str, object],
) -> None:
    r = ready(
        [
            Row([0.0, 1.0], sampling)
            for sampling in (RowSampling(), RowSampling(top_k=1), replace(RowSampling(), **more))
        ]
    )
    assert r.sampler.capture_for(np.array([0, 1])) is Capture.TOKENS
    assert r.sampler.capture_for(np.array([0, 1, 2])) is not Capture.TOKENS


def padded(r: Ready, rows: Sequence[int]) -> list[int]:
    logits = r.logits[[min(row, len(r.logits) - 1) for row in rows]]
    return replace(r, logits=logits, lines=plain(rows)).captured(Capture.TOKENS).token_ids.tolist()


def testparameters_lie_where_they_lay_and_are_those_of_the_latest_request() -> None:
    r = ready(
        [
            Row([0.0, 1.0, 2.0], RowSampling(temperature=0.0)),
            Row([0.0, 1.0, 2.0], RowSampling(temperature=0.0)),
        ]
    )
    records = r.sampler._device_rows.records
    before = records.clone()
    r.update([0], [(0, RowSampling(seed=3)), (0, RowSampling(seed=5, top_p=0.5))])
    assert r.sampler._device_rows.records.data_ptr() == records.data_ptr()
    assert torch.equal(records[1:], before[1:])
    of = DeviceRows.parameters(r.sampler._device_rows, torch.tensor([0]))
    assert (of.temperature.item(), of.top_k.item(), of.top_p.item(), of.seed_states.item()) == (
        1.0,
        3,
        0.5,
        seed_state(5),
    )


def test_a_sampler_that_says_nothing_is_not_captured() -> None:
    class Plain(DefaultSampler):
        capture_for = Sampler.capture_for

    empty = torch.zeros(1, dtype=torch.int32)
    sampler = Plain(NoOptions(), SamplerContext("cpu", 4, RowHistory(empty[None], empty, empty)))
    assert sampler.capture_for(np.array([0])) is None
