"""Norms, activations and log-probabilities against their plainest definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from dovetail.nn.activation import silu_mul
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.norm import QKNorm, RMSNorm, rms_norm
from dovetail.nn.residual import Residual
from tests.models.oracle import context
from tests.rounding import assert_rounded
from tests.support import examples

seeds = st.integers(0, 2**31)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps) * weight.double()


@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 2, 32, 100]),
    magnitude=st.sampled_from([0.0, 1e-4, 1.0, 1e3]),
    eps=st.sampled_from([1e-6, 1e-2]),
    seed=seeds,
)
@examples(quick=100, full=1000)
def test_rms_norm_is_its_definition(
    rows: int, size: int, magnitude: float, eps: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, size) * magnitude, torch.randn(size)
    expected = plain_rms_norm(x, weight, eps)
    assert_rounded(rms_norm(x, weight, eps), expected, size + 4)
    wide = x.bfloat16()
    half = rms_norm(wide, weight.bfloat16(), eps)
    assert half.dtype == torch.bfloat16
    assert_rounded(half, plain_rms_norm(wide, weight.bfloat16(), eps), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_is_two_norms(dtype: torch.dtype) -> None:
    both = QKNorm(4, 2, 8, 1e-6, context())
    q, k = torch.randn(8), torch.randn(8)
    both.weight.load(q, "q")
    both.weight.load(k, "k")
    both, x = both.to(dtype), torch.randn(5, 6, 8).to(dtype)
    expected = torch.cat(
        (rms_norm(x[:, :4], q.to(dtype), 1e-6), rms_norm(x[:, 4:], k.to(dtype), 1e-6)), dim=1
    )
    assert_rounded(both(x), expected, 8 + 4)


def test_a_norm_layer_holds_its_weight_and_eps() -> None:
    layer, x = RMSNorm(8, 0.5, context()), torch.randn(2, 8)
    layer.weight.load(torch.arange(8.0))
    assert torch.equal(layer(x), rms_norm(x, torch.arange(8.0), 0.5))


def test_silu_mul_gates_by_the_first_half() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    assert_rounded(silu_mul(torch.cat((gate, up), dim=-1)), gate * torch.sigmoid(gate) * up, 4)


@given(
    rows=st.integers(1, 4),
    vocab=st.integers(1, 12),
    k=st.integers(0, 15),
    ties=st.booleans(),
    seed=seeds,
)
@examples(quick=150, full=2000)
def test_top_logprobs_are_those_of_a_sorted_softmax(
    rows: int, vocab: int, k: int, ties: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (
        rng.integers(-2, 3, (rows, vocab)).astype(np.float32)
        if ties
        else rng.normal(0, 5, (rows, vocab)).astype(np.float32)
    )
    ids = rng.integers(0, vocab, rows)
    top = top_logprobs(torch.from_numpy(logits), torch.from_numpy(ids), k)
    expected = log_softmax(logits.astype(np.float64), axis=1)
    own = expected[np.arange(rows), ids]
    best = -np.sort(-expected, axis=1)[:, :k]
    assert_rounded(top.logprobs, np.column_stack([own, best]), vocab + 3)
    assert_rounded(
        top.logprobs, np.take_along_axis(expected, top.token_ids.numpy(), axis=1), vocab + 3
    )
    assert top.token_ids[:, 0].tolist() == ids.tolist()
    assert (
        top.ranks.tolist() == (1 + (logits > logits[np.arange(rows), ids][:, None]).sum(1)).tolist()
    )
    assert all(len(set(row)) == min(k, vocab) for row in top.token_ids[:, 1:].tolist())


def test_half_precision_logits_are_softmaxed_in_float32_and_left_alone() -> None:
    logits = torch.randn(2, 50).bfloat16()
    kept = logits.clone()
    top = top_logprobs(logits, torch.tensor([3, 4]), 2)
    wide = top_logprobs(logits.float(), torch.tensor([3, 4]), 2)
    assert top.logprobs.dtype == torch.float32
    assert torch.equal(top.logprobs, wide.logprobs)
    assert torch.equal(logits, kept)


def test_a_residual_stream_has_all_that_was_added_to_it() -> None:
    x, parts, more = torch.randn(3, 8), torch.randn(2, 3, 8), torch.randn(1, 3, 8)
    stream, norm = Residual(x.clone()), RMSNorm(8, 1e-6, context())
    norm.weight.load(torch.randn(8))
    stream.add_parts(parts)
    stream.add_parts(more)
    assert_rounded(stream.normed(norm), norm(x + parts.sum(0) + more[0]), 8 + 8)
    assert_rounded(stream.summed(), x + parts.sum(0) + more[0], 4)
    stream.summed().add_(1.0)
    stream.add_parts(more)
    assert_rounded(stream.summed(), x + parts.sum(0) + 2 * more[0] + 1.0, 6)
    assert len(stream) == 3
