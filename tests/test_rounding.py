"""The bounds of `tests.rounding` hold what other orders of a sum give, and nothing larger."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.rounding import allowed, assert_rounded, rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("terms", [2, 64, 500])
def test_sums_in_any_order_are_within_the_bound(dtype: torch.dtype, terms: int) -> None:
    torch.manual_seed(terms)
    numbers = torch.randn(20, terms).to(dtype)
    sums = [torch.zeros(20, dtype=dtype) for _ in range(2)]
    for column, other in zip(range(terms), torch.randperm(terms).tolist(), strict=True):
        sums[0] = sums[0] + numbers[:, column]
        sums[1] = sums[1] + numbers[:, other]
    largest = float(
        torch.stack([numbers.double().cumsum(1).abs().max(), numbers.abs().max().double()]).max()
    )
    differences = (sums[0].double() - sums[1].double()).abs()
    assert float(differences.max()) <= allowed(terms, max(1.0, largest), dtype)


def test_an_error_that_no_rounding_makes_is_seen() -> None:
    exact = torch.linspace(-3, 3, 50)
    with pytest.raises(AssertionError):
        assert_rounded(exact + 1e-3, exact, 1000)
    assert [1.0, -np.inf] == rounded([1.0 + 1e-6, -np.inf], 100)
    assert rounded([1.0, 2.001], 1000) != [1.0, 2.0]
