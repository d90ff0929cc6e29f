"""Towers on a GPU compute the rows that transformers' whole models compute on a CPU."""

from __future__ import annotations

import pytest
import torch

from dovetail_executors.runtime.towers import find_tower
from tests.gpu.device import on_a_gpu
from tests.media.checkpoints import NAMES, checkpoint, picture
from tests.media.oracle import rows_of, tensors_of
from tests.media.test_towers import SIZES, item_of

pytestmark = on_a_gpu


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole_model(
    name: str, dtype: torch.dtype, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    directory = checkpoint(name)
    plan = find_tower(directory)
    assert plan is not None
    tower = plan.build(dtype, torch.device("cuda"))
    for size in SIZES:
        tensors = tensors_of(directory, picture(*size))
        expected = rows_of(directory, tensors)
        rows = tower.encode(item_of(tensors, expected.shape[1]))
        assert rows.dtype == dtype
        error = (rows.float().cpu() - expected).abs().max() / expected.abs().max()
        assert error < allowed
