"""How far two computations of the same numbers may differ by rounding: bounds for tests that
compare kernels, batch shapes, ranks or another library.

Which order a processor's kernels add in, and where they fuse, is theirs, so results differ from one
to the next. A computation of n roundings is off by at most n·u of the sizes of its numbers, u = eps
/ 2, and since roundings are nearly independent, almost surely by no more than a few sqrt(n)·u
(Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM Journal on
Scientific Computing 41, 2019). Two such results differ by up to twice that.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dovetail_models

DEMO = Path(dovetail_models.__file__).parent / "demo"
# their lambda: a result is off by more than that times sqrt(n)·u with a probability below
# 2·exp(-lambda²/2)
SURE = 4.0


def allowed(roundings: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """Return how far two results may differ, each of `roundings` roundings in a row of numbers up
    to `size`."""
    return SURE * math.sqrt(roundings) * torch.finfo(dtype).eps * size


def assert_rounded(
    ours: Any, theirs: Any, roundings: int, dtype: torch.dtype | None = None
) -> None:
    """Check that arrays, tensors or lists are equal but for rounding in `dtype`, by default that of
    `ours`, or else float32."""
    if dtype is None:
        dtype = ours.dtype if isinstance(ours, torch.Tensor) else torch.float32
    mine, others = _doubles(ours), _doubles(theirs)
    np.testing.assert_allclose(mine, others, rtol=0, atol=allowed(roundings, _size(others), dtype))


def rounded(expected: Any, roundings: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a number or a list of numbers that equals those that differ by rounding in `dtype`,
    and is compared with `==`."""
    return pytest.approx(expected, rel=0, abs=allowed(roundings, _size(_doubles(expected)), dtype))


def roundings_of(config: Any, length: int) -> int:
    """Return the roundings on a logit's way through a decoder or encoder: the sums of its layers,
    of attention over `length` tokens, and of the softmax over its vocabulary."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = 4 * config.hidden_size + inner + length
    return config.num_hidden_layers * layer + config.hidden_size + config.vocab_size


@cache
def roundings_of_demo() -> int:
    """Return those of the bundled model, after a few hundred tokens."""
    return roundings_of(SimpleNamespace(**json.loads((DEMO / "config.json").read_text())), 256)


def _size(numbers: NDArray[np.float64]) -> float:
    """Return the largest absolute value of finite numbers, at least 1."""
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=1.0))


def _doubles(values: Any) -> NDArray[np.float64]:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)
