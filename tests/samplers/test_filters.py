"""Which tokens remain, exactly: against the oracle, with ties, at the edges."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.sampler import RowSampling
from dovetail.testing.suites.sampler_oracle import distribution
from dovetail_samplers.filters import FEW, cut_top_k, cut_top_p, retained, retained_min_p
from tests.support import examples

VOCAB = st.integers(1, 40)


@st.composite
def logit_rows(draw: st.DrawFn) -> np.ndarray:
    """Logits with few values, so that ties are common; sixteenths, so that float32 and float64
    agree on which are equal."""
    size, spread = draw(VOCAB), draw(st.sampled_from([1, 8, 64, 400]))
    row = draw(st.lists(st.integers(-spread, spread), min_size=size, max_size=size))
    banned = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    return np.array([-np.inf if i in banned else value / 16 for i, value in enumerate(row)])


def scores_of(logits: np.ndarray) -> torch.Tensor:
    scores = torch.tensor(logits, dtype=torch.float32)[None]
    return scores - scores.amax(-1, keepdim=True)


def support(kept: torch.Tensor, scores: torch.Tensor) -> list[int]:
    return ((kept > 0) & (scores.exp() > 0))[0].nonzero()[:, 0].tolist()


def expected(logits: np.ndarray, sampling: RowSampling) -> list[int]:
    finite = distribution(np.where(np.isinf(logits), -1e9, logits).tolist(), sampling)
    return np.flatnonzero(finite).tolist()


def away_from_the_edge(logits: np.ndarray, top_k: int, top_p: float) -> bool:
    """Return True if no partial sum is so close to top_p that rounding decides."""
    weights = np.sort(np.exp(logits - logits.max()))[::-1][: top_k or None]
    return bool((np.abs(np.cumsum(weights) / weights.sum() - top_p) > 1e-5).all())


@examples(quick=120, full=3000)
@given(logit_rows(), st.integers(1, 45))
def test_top_k_keeps_k_ties_by_lowest_id(logits: np.ndarray, k: int) -> None:
    scores, k = scores_of(logits), min(k, len(logits))
    kept = retained(scores, cut_top_k(scores, torch.tensor([k]), torch.tensor([torch.inf]), k))
    assert support(kept, scores) == expected(logits, RowSampling(top_k=k))


@examples(quick=120, full=3000)
@given(logit_rows(), st.floats(0.01, 0.999))
def test_top_p_keeps_the_fewest_that_reach_p(logits: np.ndarray, p: float) -> None:
    if away_from_the_edge(logits, 0, p):
        scores = scores_of(logits)
        kept = retained(scores, cut_top_p(scores, scores.exp(), torch.tensor([p])))
        assert support(kept, scores) == expected(logits, RowSampling(top_p=p))


@examples(quick=120, full=3000)
@given(logit_rows(), st.integers(1, 45), st.integers(0, 5), st.floats(0.01, 0.999))
def test_top_p_counts_what_top_k_left(logits: np.ndarray, k: int, more: int, p: float) -> None:
    """`more`: another row of the batch has a larger top-k."""
    k, max_k = min(k, len(logits)), min(k + more, len(logits))
    if away_from_the_edge(logits, k, p):
        scores = scores_of(logits)
        kept = retained(scores, cut_top_k(scores, torch.tensor([k]), torch.tensor([p]), max_k))
        assert support(kept, scores) == expected(logits, RowSampling(top_k=k, top_p=p))


@examples(quick=120, full=3000)
@given(logit_rows(), st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, p: float) -> None:
    if (np.abs(np.exp(logits - logits.max()) / p - 1) > 1e-5).all():
        scores = scores_of(logits)
        assert support(retained_min_p(scores.exp(), torch.tensor([p])), scores) == expected(
            logits, RowSampling(min_p=p)
        )


def test_top_p_that_is_reached_exactly_takes_no_more() -> None:
    scores = scores_of(np.zeros(4))
    assert support(
        retained(scores, cut_top_p(scores, scores.exp(), torch.tensor([0.5]))), scores
    ) == [
        0,
        1,
    ]


def test_min_p_of_one_keeps_the_likeliest_and_its_equals() -> None:
    scores = scores_of(np.array([1.0, 3.0, 3.0, 2.0]))
    assert support(retained_min_p(scores.exp(), torch.tensor([1.0])), scores) == [1, 2]


@examples(quick=30, full=300)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0.3, 2.0, 8.0]), st.sampled_from([0.2, 0.9, 0.995])
)
def test_top_p_is_the_same_whether_it_sorts_few_or_all(seed: int, spread: float, p: float) -> None:
    """Two rows, so that a flat one makes the batch sort all, which the peaked one wouldn't."""
    logits = np.random.default_rng(seed).normal(size=3 * FEW).astype(np.float32)
    rows = [scores_of(logits * spread), scores_of(logits * 0)]
    both, top_p = torch.cat(rows), torch.tensor([p, p])
    together = retained(both, cut_top_p(both, both.exp(), top_p))
    alone = [retained(row, cut_top_p(row, row.exp(), top_p[:1])) for row in rows]
    assert torch.equal(together, torch.cat(alone))
    if away_from_the_edge(logits * spread, 0, p):
        assert support(alone[0], rows[0]) == expected(
            (logits * spread).astype(np.float64), RowSampling(top_p=p)
        )
