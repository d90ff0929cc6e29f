"""The whole sampler: a row's token doesn't depend on other rows in the batch; seeds; logprobs;
types."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import Capture, RowSampling
from dovetail.testing.recording import nothing_asked
from dovetail.testing.suites import sampler_rows
from dovetail_samplers import default, filters, penalties, table
from dovetail_samplers.filters import FEW
from tests.rounding import assert_rounded
from tests.samplers.helpers import Ready, Row, ready, sample, tokens
from tests.support import examples

VOCAB = 4 * FEW  # enough for every path

SORTS = (*sampler_rows.SORTS, RowSampling(min_tokens=3, stop_token_ids=(0, 1), logprobs=2))


@st.composite
def any_rows(draw: st.DrawFn) -> Row:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(size=VOCAB).astype(np.float32) * draw(st.sampled_from([0.5, 4.0]))
    sampling = replace(draw(st.sampled_from(SORTS)), seed=draw(st.integers(-(2**63), 2**64 - 1)))
    prompt, output = (
        tuple(generator.integers(0, VOCAB, draw(st.integers(low, 5))).tolist()) for low in (1, 0)
    )
    return Row(logits.tolist(), sampling, prompt, output)


@examples(quick=60, full=1000)
@given(
    st.lists(any_rows(), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 3000, 2**17]),
)
def test_a_row_gets_the_token_that_it_gets_alone(
    rows: list[Row], random: Random, chunk: int
) -> None:
    places = random.sample(range(40), len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "CPU_CHUNK", chunk)
        patch.setattr(default, "AT_ONCE", chunk)
        together = tokens(rows, places)
    assert together == [token for row in rows for token in tokens([row])]


@examples(quick=40, full=500)
@given(st.lists(any_rows(), min_size=1, max_size=6))
def test_the_ways_of_the_cpu_and_of_a_device_agree(rows: list[Row]) -> None:
    """Shortcuts on the CPU, where results may be inspected, and the work on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (default, filters, penalties):
            patch.setattr(module, "on_cpu", lambda tensor: False)
        as_on_a_device = tokens(rows)
    assert as_on_a_device == tokens(rows)


@examples(quick=30, full=500)
@given(st.lists(any_rows(), min_size=2, max_size=4), st.data())
def test_rows_begin_again_with_the_same_parameters_or_others(
    rows: list[Row], data: st.DataObject
) -> None:
    """Each row samples by the parameters that it was last given, even if an update failed on its way
    to the device before."""
    r = ready(rows)
    logits = r.logits.clone()
    for _ in range(data.draw(st.integers(1, 4), label="updates")):
        owners = data.draw(st.lists(st.sampled_from(rows), min_size=len(rows), max_size=len(rows)))
        with_others = [
            replace(row, sampling=owner.sampling) for row, owner in zip(rows, owners, strict=True)
        ]
        places = list(range(len(rows)))
        if data.draw(st.booleans(), label="fails"):
            with pytest.MonkeyPatch.context() as patch, suppress(MemoryError):
                patch.setattr(table, "all_to_device", refuse)
                r.update(places, [(at, with_others[at].sampling) for at in places])
        if data.draw(st.booleans(), label="others"):
            rows = with_others
        r.update(places, [(at, rows[at].sampling) for at in places])
        r.logits.copy_(logits)
        assert both_ways(r) == both_ways(ready(rows))


def both_ways(r: Ready) -> list[list[int]]:
    """Return the tokens of what is launched, and of what is captured."""
    own = replace(r, logits=r.logits.clone())  # sampling may overwrite them
    results = own.sample(), r.captured(Capture.TOKENS)
    return [result.token_ids.tolist() for result in results]


def refuse(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    raise MemoryError


@examples(quick=40, full=500)
@given(st.lists(any_rows(), min_size=1, max_size=6))
def test_on_a_device_sampling_waits_for_nothing(rows: list[Row]) -> None:
    batch = ready(rows)
    with pytest.MonkeyPatch.context() as patch, nothing_asked():
        for module in (default, filters, penalties):
            patch.setattr(module, "on_cpu", lambda tensor: False)
        batch.sample()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_tokens() -> None:
    generator = np.random.default_rng(0)
    rows = [
        Row(
            (generator.normal(size=VOCAB) * 3).tolist(),
            replace(sampling, seed=seed),
            (1, 5, 1),
            (2, 3, 1, 2),
        )
        for seed in range(20)
        for sampling in SORTS
    ]
    ours, theirs = sample(rows), sample(rows, device="cuda")
    assert theirs.token_ids.device.type == "cuda"
    assert theirs.token_ids.tolist() == ours.token_ids.tolist()
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    assert_rounded(theirs.logprobs.logprobs, ours.logprobs.logprobs, VOCAB + 3)
