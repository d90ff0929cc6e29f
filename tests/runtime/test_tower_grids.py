"""Attention of towers that take a grid: each sequence attends to itself only, and kernels compute
what their twins do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dovetail_executors.runtime import tower_grids
from dovetail_executors.runtime.tower_grids import attended, rotated
from tests.kernels import DEVICE, DTYPES, assert_close, runs_kernels, take_kernels


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (5, 3, 20), (3, 16, 72)])
def test_the_kernel_turns_pairs_as_the_twin_does(
    tokens: int, heads: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    # of one of q, k and v that lie beside each other
    x = torch.randn(tokens, 3, heads, size, dtype=dtype, device=DEVICE)[:, 1]
    cos, sin = torch.randn(2, tokens, size, device=DEVICE)
    expected = rotated(x.double().cpu(), cos.cpu(), sin.cpu())
    take_kernels(monkeypatch, tower_grids)
    turned = rotated(x, cos, sin)
    assert turned.is_contiguous()
    assert turned.dtype == dtype
    assert_close(turned.cpu(), expected.double())


@pytest.mark.parametrize("starts", [(0, 7), (0, 1, 2, 7), (0, 3, 6)], ids=str)
def test_each_sequence_attends_to_itself_only(starts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q = torch.randn(starts[-1], 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, starts[-1], 2, 8, dtype=torch.float64)
    longest = max(end - start for start, end in pairwise(starts))
    values = attended(q, k, v, torch.tensor(starts, dtype=torch.int32), longest, 0.3)
    for start, end in pairwise(starts):
        of_two = q[start:end].unflatten(1, (2, 2))  # heads that share K and V
        scores = 0.3 * torch.einsum("qhgd,khd->hgqk", of_two, k[start:end])
        expected = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v[start:end]).flatten(1, 2)
        torch.testing.assert_close(values[start:end], expected)
