"""Attention of towers that take a grid: each sequence attends to itself only, and kernels compute
what their twins do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from dovetail.nn.kernels.available import is_hopper
from dovetail_executors.runtime import tower_grids
from dovetail_executors.runtime.tower_grids import attended, has_kernel, rotated
from tests.kernels import DEVICE, DTYPES, ON_GPU, assert_close, runs_kernels, take_kernels

on_hopper = pytest.mark.skipif(
    ON_GPU and not is_hopper(DEVICE), reason="needs Hopper's tensor memory accelerator"
)


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


@runs_kernels
@on_hopper
@pytest.mark.parametrize("size", [16, 64, 72, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (2, 1)])
@pytest.mark.parametrize("starts", [(0, 64), (0, 300), (0, 1, 65, 230)], ids=str)
def test_the_kernel_attends_as_the_twin_does(
    starts: tuple[int, ...], heads: int, kv_heads: int, size: int
) -> None:
    from dovetail_executors.runtime import tower_kernels

    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    tokens = starts[-1]
    longest = max(end - start for start, end in pairwise(starts))
    # of one projection, as towers have them
    projected = torch.randn(tokens, heads + 2 * kv_heads, size, dtype=dtype, device=DEVICE)
    q, k, v = projected.split([heads, kv_heads, kv_heads], dim=1)
    places = torch.tensor(starts, dtype=torch.int32)
    values = tower_kernels.attended(q, k, v, places.to(DEVICE), longest, size**-0.5)
    q, k, v = (x.double().cpu() for x in (q, k, v))
    expected = attended(q, k, v, places, longest, size**-0.5)
    torch.testing.assert_close(values.double().cpu(), expected, rtol=0.02, atol=0.01)


@runs_kernels
@on_hopper
def test_a_kernel_that_computes_other_numbers_isnt_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dovetail_executors.runtime import tower_kernels

    right = tower_kernels.attended
    for name in ("is_hopper", "runs_kernels"):
        monkeypatch.setattr(tower_grids, name, lambda device: True)
    monkeypatch.setattr(
        tower_kernels, "attended", lambda *given: right(*given[:-1], 1.1 * given[-1])
    )
    assert not has_kernel(DEVICE, torch.float16, 3, 16, 3)
    assert "attention of image encoders" in caplog.text
    monkeypatch.setattr(tower_kernels, "attended", right)
    assert has_kernel(DEVICE, torch.float16, 1, 16, 1)


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
