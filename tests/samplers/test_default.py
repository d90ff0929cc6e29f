"""The sampler as a whole: a row's token is its own, whatever shares its batch; seeds; logprobs; types."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import RowSampling
from dovetail_samplers import default, filters, order, penalties
from dovetail_samplers.filters import FEW
from tests.samplers.helpers import Row, ready, sample, tokens
from tests.support import examples

VOCAB = 4 * FEW  # enough for every path

SORTS = [
    RowSampling(temperature=0.0),
    RowSampling(),
    RowSampling(temperature=0.6),
    RowSampling(top_k=1),
    RowSampling(top_k=5),
    RowSampling(temperature=1.5, top_k=700, top_p=0.9),
    RowSampling(top_p=0.9),
    RowSampling(temperature=3.0, top_p=0.99, min_p=0.001),
    RowSampling(min_p=0.05),
    RowSampling(temperature=0.0, repetition_penalty=1.3),
    RowSampling(frequency_penalty=0.7, presence_penalty=-0.2),
    RowSampling(top_k=20, logit_bias=((3, 4.0),), bad_words=((1, 2), (5,))),
    RowSampling(allowed_token_ids=(4, 8, 15, 16, 23, 42), top_p=0.8),
    RowSampling(min_tokens=3, stop_token_ids=(0, 1), logprobs=2),
]


@st.composite
def any_rows(draw: st.DrawFn) -> Row:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(size=VOCAB).astype(np.float32) * draw(st.sampled_from([0.5, 4.0]))
    sampling = replace(draw(st.sampled_from(SORTS)), seed=draw(st.integers(-(2**63), 2**64 - 1)))
    prompt, output = (tuple(generator.integers(0, VOCAB, draw(st.integers(low, 5))).tolist()) for low in (1, 0))
    return Row(logits.tolist(), sampling, prompt, output)


@examples(quick=60, full=1000)
@given(st.lists(any_rows(), min_size=1, max_size=12), st.randoms(use_true_random=False), st.sampled_from([1, 3000, 2**17]))
def test_a_row_gets_the_token_that_it_gets_alone(rows: list[Row], random: Random, chunk: int) -> None:
    places = random.sample(range(40), len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "CPU_CHUNK", chunk)
        together = tokens(rows, places)
    assert together == [token for row in rows for token in tokens([row])]


@examples(quick=40, full=500)
@given(st.lists(any_rows(), min_size=1, max_size=6))
def test_the_ways_of_the_cpu_and_of_a_device_agree(rows: list[Row]) -> None:
    """What is cut short on the CPU, where a result may be looked at, and what is done elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (default, filters, order, penalties):
            patch.setattr(module, "on_cpu", lambda tensor: False)
        as_on_a_device = tokens(rows)
    assert as_on_a_device == tokens(rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_tokens() -> None:
    generator = np.random.default_rng(0)
    rows = [
        Row((generator.normal(size=VOCAB) * 3).tolist(), replace(sampling, seed=seed), (1, 5, 1), (2, 3, 1, 2))
        for seed in range(20)
        for sampling in SORTS
    ]
    ours, theirs = sample(rows), sample(rows, device="cuda")
    assert theirs.token_ids.device.type == "cuda"
    assert theirs.token_ids.tolist() == ours.token_ids.tolist()
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    torch.testing.assert_close(theirs.logprobs.logprobs.cpu(), ours.logprobs.logprobs)


def test_a_preempted_row_goes_on_with_the_same_tokens() -> None:
    """It comes back in another row, its output as part of the history that is rebuilt: no state but history and seed."""
    logits = np.random.default_rng(0).normal(size=64).tolist()
    sampling = RowSampling(seed=11, frequency_penalty=0.5)

    def run(interrupted_after: int) -> list[int]:
        output: tuple[int, ...] = ()
        for step in range(12):
            place = 0 if step < interrupted_after else 5
            output += tuple(tokens([Row(logits, sampling, (1, 2), output)], [place]))
        return list(output)

    assert run(12) == run(4)
    assert len(set(run(12))) > 4


def test_rows_that_are_reused_forget_the_request_before() -> None:
    r = ready([Row([0.0, 1.0, 2.0], RowSampling(temperature=0.0, bad_words=((2,),), logprobs=1))])
    assert r.sample().token_ids.tolist() == [1]
    r.sampler.update([0], [(0, RowSampling(temperature=0.0))])
    again = replace(r, logits=torch.tensor([[0.0, 1.0, 2.0]])).sample()
    assert again.token_ids.tolist() == [2]
    assert again.logprobs is None


def test_seeds_and_positions_make_different_tokens() -> None:
    flat = [0.0] * 1000
    by_seed = tokens([Row(flat, RowSampling(seed=s)) for s in range(50)])
    by_position = [tokens([Row(flat, RowSampling(seed=1), output=(0,) * n)])[0] for n in range(50)]
    assert len(set(by_seed)) > 40
    assert len(set(by_position)) > 40


def test_the_prompts_length_does_not_change_a_seeds_noise() -> None:
    flat = [0.0] * 1000
    assert len({tokens([Row(flat, RowSampling(seed=3), prompt=(1,) * n)])[0] for n in range(1, 6)}) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e30, 1e300])
def test_extreme_temperatures_are_no_trouble(temperature: float) -> None:
    (token,) = tokens([Row([0.0, 5.0, -np.inf, 4.0], RowSampling(temperature=temperature, seed=5))])
    assert token == 1 if temperature < 1 else token in (0, 1, 3)


@pytest.mark.parametrize("sampling", [RowSampling(top_k=1), RowSampling(top_p=1e-9), RowSampling(temperature=1e-30)])
def test_what_leaves_one_token_is_greedy(sampling: RowSampling) -> None:
    rows = [Row(np.random.default_rng(s).permutation(300).astype(float).tolist(), replace(sampling, seed=s)) for s in range(30)]
    assert tokens(rows) == [int(np.argmax(row.logits)) for row in rows]


@pytest.mark.parametrize("sampling", [RowSampling(temperature=0.0), RowSampling(top_k=1), RowSampling(top_p=0.01)])
def test_ties_go_to_the_lowest_id(sampling: RowSampling) -> None:
    assert tokens([Row([0.0, 7.0, 3.0, 7.0, 7.0], sampling)]) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_float_type_are_sampled_as_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(len(SORTS), VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = [Row(row.float().tolist(), replace(s, seed=i), (1,), (2, 3)) for i, (row, s) in enumerate(zip(logits, SORTS, strict=True))]
    assert sample(rows, dtype=dtype).token_ids.tolist() == tokens(rows)


def test_logprobs_are_of_the_raw_distribution() -> None:
    rows = [Row(np.random.default_rng(i).normal(size=VOCAB).tolist(), replace(s, logprobs=i % 4), (1,), (2, 3)) for i, s in enumerate(SORTS)]
    result = sample(rows)
    exact = torch.log_softmax(torch.tensor([row.logits for row in rows], dtype=torch.float64), dim=-1)
    assert result.logprobs is not None
    assert result.logprobs.token_ids.shape == (len(rows), 1 + 3)
    assert result.logprobs.token_ids[:, 0].tolist() == result.token_ids.tolist()
    torch.testing.assert_close(result.logprobs.logprobs.double(), exact.gather(1, result.logprobs.token_ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.logprobs.logprobs[:, 1:].double(), exact.topk(3).values, rtol=0, atol=1e-5)
    own = exact.gather(1, result.token_ids[:, None])
    assert result.logprobs.ranks.tolist() == (1 + (exact > own).sum(-1)).tolist()


def test_logprobs_do_not_change_the_tokens() -> None:
    rows = [Row(np.random.default_rng(i).normal(size=VOCAB).tolist(), replace(s, logprobs=None), (1,), (2,)) for i, s in enumerate(SORTS)]
    assert tokens(rows) == tokens([replace(row, sampling=replace(row.sampling, logprobs=5)) for row in rows])


def test_an_empty_batch_gives_nothing() -> None:
    r = ready([Row([0.0, 1.0], RowSampling())])
    assert replace(r, logits=r.logits[:0], rows=r.rows[:0], host_rows=r.host_rows[:0]).sample().token_ids.shape == (0,)


def test_the_plugin_declares_it_without_importing_torch() -> None:
    import subprocess
    import sys

    code = "import sys, dovetail_samplers as s; print([c.name for c in s.dovetail_components()], 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["['default']", "False"]
